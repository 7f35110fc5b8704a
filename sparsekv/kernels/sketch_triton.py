"""The Triton kernels of `sketch.py`; importing this module imports Triton."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sparsekv.kernels import sketch
from sparsekv.kernels.routing_triton import give, kept_row, tokens_of

GRADES: tl.constexpr = tl.constexpr(sketch.GRADES)
FLOOR: tl.constexpr = tl.constexpr(sketch.FLOOR)
SHIFT: tl.constexpr = tl.constexpr(sketch.SHIFT)
TOLD: tl.constexpr = tl.constexpr(sketch.TOLD)
ONE: tl.constexpr = tl.constexpr(sketch.ONE)
COUNTED: tl.constexpr = tl.constexpr(1 << 30)
"""Set in what a block of `best_kernel` tells the later ones."""


@triton.jit
def project(total, key, maps, channel, width, dim, RANK: tl.constexpr):
    """`total [BLOCK, WIDTH]` with the products of a part of a block of keys and the maps of some channels."""
    weights = tl.load(maps + width[:, None] * RANK + channel[None, :],
                      mask=(width < dim)[:, None] & (channel < RANK)[None, :], other=0.0)
    return tl.dot(key, weights.to(key.dtype), total, input_precision="ieee")


@triton.jit
def rounded(total, centre, channel, top, RANK: tl.constexpr):
    """Some channels of the codes of a block of keys, `[BLOCK, WIDTH]` int32, from their products with the maps."""
    middle = tl.load(centre + channel, mask=channel < RANK, other=0.0).to(tl.float32)
    return tl.minimum(tl.maximum(tl.floor(total - middle[None, :] + 0.5), -top), top).to(tl.int32)


@triton.jit
def encode_kernel(
    keys, maps, centre, codes, heads, length, dim, k_row, k_head, k_token, m_row, c_row,
    RANK: tl.constexpr, BYTES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr,
):
    """Codes of a block of keys; keys and maps pass through shared memory DEPTH of the head dimension at a time."""
    WHOLE: tl.constexpr = 2 * BYTES - RANK
    row = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keys += row * k_row + head * k_head
    maps += row * m_row + head * dim * RANK
    centre += row * c_row + head * RANK
    byte = tl.arange(0, WIDTH)
    first = tl.zeros([BLOCK, WIDTH], tl.float32)
    second = tl.zeros([BLOCK, WIDTH], tl.float32)
    for at in tl.range(0, dim, DEPTH, num_stages=1):
        width = at + tl.arange(0, DEPTH)
        key = tl.load(keys + token[:, None].to(tl.int64) * k_token + width[None, :],
                      mask=(token < length)[:, None] & (width < dim)[None, :], other=0.0)
        first = project(first, key, maps, byte, width, dim, RANK=RANK)
        if WHOLE < BYTES:
            second = project(second, key, maps, byte + RANK - BYTES, width, dim, RANK=RANK)
    found = rounded(first, centre, byte, tl.where(byte < WHOLE, 127.0, 7.0)[None, :], RANK=RANK)
    if WHOLE < BYTES:
        high = rounded(second, centre, byte + RANK - BYTES, 7.0, RANK=RANK)
        found = tl.where((byte < WHOLE)[None, :], found, found + 16 * high)
    place = codes + ((row * heads + head) * length + token[:, None]) * BYTES + byte[None, :]
    tl.store(place, found.to(tl.int8), mask=(token < length)[:, None] & (byte < BYTES)[None, :])


@triton.jit
def channels(q, maps, channel, used, dim, RANK: tl.constexpr, DIM: tl.constexpr):
    """A query's products with some channels of the maps, float32."""
    width = tl.arange(0, DIM)
    weights = tl.load(maps + width[:, None] * RANK + channel[None, :], mask=(width < dim)[:, None] & used[None, :],
                      other=0.0)
    query = tl.load(q + width, mask=width < dim, other=0.0)
    return tl.sum(query.to(tl.float32)[:, None] * weights.to(tl.float32), 0)


@triton.jit
def ask_kernel(
    scores, offsets, budget, seats, runs, counts, q, maps, side, steps, tallies, scale, lists, heads, per_row,
    num_buckets, listed, dim, q_row, q_head, m_row, tally,
    GROUP: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr, RANK: tl.constexpr, BYTES: tl.constexpr,
    WIDTH: tl.constexpr, DIM: tl.constexpr, SEATED: tl.constexpr, OVERLAP: tl.constexpr,
):
    """The first `lists` programs: what the buckets give to the candidates of a query and head. Then one program a query
    and query head: the four planes of its side and their step; the first of a group sets its tally to zero."""
    if tl.program_id(0) < lists:
        give(scores, offsets, budget, seats, runs, counts, tl.program_id(0).to(tl.int64), heads, per_row, num_buckets,
             listed, LISTS=1, GROUP=GROUP, ROWS=ROWS, PADDED=PADDED, LOGITS=True, SEATED=SEATED,
             OVERLAP=OVERLAP)
    else:
        sides(q, maps, seats, side, steps, tallies, (tl.program_id(0) - lists).to(tl.int64), scale, heads, per_row, dim,
              q_row, q_head, m_row, tally, GROUP=GROUP, RANK=RANK, BYTES=BYTES, WIDTH=WIDTH, DIM=DIM, SEATED=SEATED,
              OVERLAP=OVERLAP)


@triton.jit
def sides(
    q, maps, seats, side, steps, tallies, at, scale, heads, per_row, dim, q_row, q_head, m_row, tally,
    GROUP: tl.constexpr, RANK: tl.constexpr, BYTES: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr,
    SEATED: tl.constexpr, OVERLAP: tl.constexpr,
):
    """`ask_kernel` for one query and query head."""
    WHOLE: tl.constexpr = 2 * BYTES - RANK
    row, head = at // (heads * GROUP), at % (heads * GROUP)
    q += row * q_row + head * q_head
    maps += kept_row(seats, row // per_row, True, SEATED=SEATED) * m_row + head // GROUP * dim * RANK
    byte = tl.arange(0, WIDTH)
    low = channels(q, maps, byte, byte < BYTES, dim, RANK=RANK, DIM=DIM) * scale
    # a byte of two channels is 16 times the upper one and the lower one
    high = channels(q, maps, byte + RANK - BYTES, (byte >= WHOLE) & (byte < BYTES), dim, RANK=RANK, DIM=DIM) * scale
    bytewise = tl.where(byte < WHOLE, low, high / 16)
    lower = tl.where(byte < WHOLE, 0.0, (low - high / 16) / 16)
    step = tl.max(tl.maximum(tl.abs(bytewise), tl.abs(lower)), 0) / 32512
    step = tl.where(step > 0, step, 1.0)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    tl.store(steps + at, step)
    place = side + at * 4 * BYTES + byte
    for plane in tl.static_range(2):
        number = tl.floor((bytewise if plane == 0 else lower) / step + 0.5).to(tl.int32)
        upper = (number + 128) >> 8
        tl.store(place + 2 * plane * BYTES, upper.to(tl.int8), mask=byte < BYTES)
        tl.store(place + (2 * plane + 1) * BYTES, (number - 256 * upper).to(tl.int8), mask=byte < BYTES)
    if at % GROUP == 0:
        for start in range(0, tally, GRADES):
            grade = start + tl.arange(0, GRADES)
            tl.store(tallies + at // GROUP * tally + grade, tl.zeros([GRADES], tl.int32), mask=grade < tally)


@triton.jit
def lower_of(held, PACKED: tl.constexpr):
    """16 times the lower channels of bytes of two, int8; PACKED four bytes at a time, which PTX does not do by
    itself."""
    if PACKED:
        return tl.inline_asm_elementwise("{shl.b32 $0, $1, 4; and.b32 $0, $0, 0xF0F0F0F0;}", "=r,r", [held],
                                         dtype=tl.int8, is_pure=True, pack=4)
    else:
        return (held << 4).to(tl.int8)


@triton.jit
def score_kernel(
    side, steps, codes, order, runs, counts, first, last, tokens, weights, tops, masses, heads, per_row, count,
    c_row, c_head, o_row, o_head,
    LISTED: tl.constexpr, PADDED: tl.constexpr, RANK: tl.constexpr, BYTES: tl.constexpr, ALIGNED: tl.constexpr,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The scores of a block of candidates for the group's heads, as weights that are ONE for the block's largest and -1
    where there is no candidate; that largest score, and the sum of the weights over ONE. LISTED: candidates are what
    the buckets give, and are written down; blocks behind the last stay as they are."""
    WHOLE: tl.constexpr = 2 * BYTES - RANK
    at = tl.program_id(0).to(tl.int64)
    row, head = at // heads, at % heads
    cache_row = row // per_row
    byte, group = tl.arange(0, WIDTH), tl.arange(0, HEADS)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    if LISTED:
        there = tl.load(counts + at)
        if tl.program_id(1) * BLOCK >= there:
            return
        used = place < there
        token = tokens_of(order + cache_row * o_row + head * o_head, runs + at * 2 * PADDED, tl.program_id(1) * BLOCK,
                          used, BLOCK=BLOCK, PADDED=PADDED)
        tl.store(tokens + at * count + place, token, mask=place < count)
    else:
        token = place
        used = (place < count) & (place >= tl.load(first + row)) & (place < tl.load(last + row))
    # codes lie one behind the other: as many bytes are loaded at once as divide all places
    own = codes + tl.multiple_of(cache_row * c_row + head * c_head, ALIGNED)
    held = tl.load(own + token[:, None].to(tl.int64) * BYTES + byte[None, :],
                   mask=used[:, None] & (byte < BYTES)[None, :], other=0)
    # both planes of a head are columns side by side: their products end in the same thread
    column = tl.arange(0, 2 * HEADS)
    plane = side + ((at * GROUP + column // 2)[None, :] * 4 + (column % 2)[None, :]) * BYTES + byte[:, None]
    inside = (column // 2 < GROUP)[None, :] & (byte < BYTES)[:, None]
    sums = tl.dot(held, tl.load(plane, mask=inside, other=0), out_dtype=tl.int32)
    if WHOLE < BYTES:
        sums = tl.dot(lower_of(held, PACKED=PACKED), tl.load(plane + 2 * BYTES, mask=inside, other=0), sums,
                      out_dtype=tl.int32)
    upper, lower = tl.split(tl.reshape(sums, [BLOCK, HEADS, 2]))
    step = tl.load(steps + at * GROUP + group, mask=group < GROUP, other=1.0)
    total = tl.where(used[:, None], (256 * upper + lower).to(tl.float32) * step[None, :], float("-inf"))
    top = tl.max(total, 0)
    weight = tl.exp(total - tl.where(top == float("-inf"), 0.0, top)[None, :])
    part = (at * tl.num_programs(1) + tl.program_id(1)) * GROUP + group
    tl.store(tops + part, top, mask=group < GROUP)
    tl.store(masses + part, tl.sum(weight, 0), mask=group < GROUP)
    tl.store(weights + (at * count + place)[:, None] * GROUP + group[None, :],
             tl.where(used[:, None], weight * ONE, -1.0).to(tl.float16),
             mask=(place < count)[:, None] & (group < GROUP)[None, :])


@triton.jit
def grade_kernel(
    weights, tops, masses, counts, budget, seats, grades, tallies, heads, count, parts, width, tally,
    GROUP: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
    LISTED: tl.constexpr, SEATED: tl.constexpr, OVERLAP: tl.constexpr,
):
    """The grades of some blocks of `score_kernel` from the softmax of every head over all candidates, summed over the
    group; and how many have each grade above 1, the number of candidates in the place of grade 0. The last program of a
    list to count tells how many are chosen, down to which grade, and how many of that grade."""
    at = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, HEADS)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    place = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    there = count
    if LISTED:
        there = tl.load(counts + at)
        if tl.program_id(1) * BLOCKS * BLOCK >= there:
            return
    weight = tl.load(weights + (at * count + place)[:, :, None] * GROUP + group[None, None, :],
                     mask=(place < there)[:, :, None] & (group < GROUP)[None, None, :], other=-1.0).to(tl.float32)
    written = tl.cdiv(there, BLOCK)
    tops += at * parts * GROUP + group
    masses += at * parts * GROUP + group
    highest = tl.full([PARTS, HEADS], float("-inf"), tl.float32)
    sums = tl.zeros([PARTS, HEADS], tl.float32)
    for start in range(0, written, PARTS):
        part = (start + tl.arange(0, PARTS))[:, None]
        inside = (part < written) & (group < GROUP)[None, :]
        each = tl.load(tops[None, :] + part * GROUP, mask=inside, other=float("-inf"))
        mass = tl.load(masses[None, :] + part * GROUP, mask=inside, other=0.0)
        higher = tl.maximum(highest, each)
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        sums = sums * tl.exp(highest - shift) + mass * tl.exp(each - shift)
        highest = higher
    top = tl.max(highest, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    mass = tl.sum(sums * tl.exp(highest - top[None, :]), 0)
    own = tl.load(tops[None, :] + block[:, None] * GROUP, mask=(block < written)[:, None] & (group < GROUP)[None, :],
                  other=float("-inf"))
    factor = tl.exp(own - top[None, :]) / (tl.where(mass > 0, mass, 1.0) * ONE)[None, :]
    share = tl.sum(tl.maximum(weight, 0.0) * factor[:, None, :], 2)
    used = tl.max(weight, 2) >= 0
    upper = tl.minimum(tl.maximum((share.to(tl.int32, bitcast=True) >> SHIFT) - FLOOR, 0) + 1, GRADES - 1)
    grade = tl.where(used, upper, 0)
    tl.store(grades + at * count + place, grade.to(tl.uint8), mask=place < count)
    tallies += at * tally
    # counted here first: additions to one number would wait for each other
    each = tl.arange(0, GRADES)
    flat = tl.reshape(grade, [BLOCKS * BLOCK])
    many = tl.where(each > 0, tl.histogram(flat, GRADES, mask=flat > 1), tl.sum((flat > 0).to(tl.int32), 0))
    tl.atomic_add(tallies + each, many, mask=many > 0, sem="relaxed")
    tl.debug_barrier()
    told = tallies + GRADES
    if tl.atomic_add(told, 1, sem="acq_rel") == tl.cdiv(there, BLOCKS * BLOCK) - 1:
        allowed = tl.load(budget + kept_row(seats, at // heads, True, SEATED=SEATED))
        size = tl.load(tallies + each)
        wanted = tl.minimum(tl.minimum(allowed, width), tl.sum(tl.where(each == 0, size, 0), 0)).to(tl.int32)
        size = tl.where(each > 1, size, 0)
        total = tl.sum(size, 0)
        higher = total - tl.cumsum(size, 0)
        here = (higher < wanted) & (higher + size >= wanted)
        least = tl.max(tl.where(here, each, 1), 0)
        tl.store(told + 1, wanted)
        tl.store(told + 2, tl.where(wanted > 0, least, GRADES))
        tl.store(told + 3, wanted - tl.where(least > 1, tl.sum(tl.where(here, higher, 0), 0), total))


@triton.jit
def best_kernel(
    grades, tokens, tallies, counts, out, count, width, tally,
    LISTED: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr, OVERLAP: tl.constexpr,
):
    """The chosen tokens of a block of candidates in their places, and -1 in the places behind the last: by what
    `grade_kernel` told, and by how many the blocks ahead, which start no later, say that they choose."""
    at, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = block * BLOCK + tl.arange(0, BLOCK)
    told = tallies + at * tally + GRADES
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    listed = count
    if LISTED:
        listed = tl.load(counts + at)
    wanted, least, missing = tl.load(told + 1), tl.load(told + 2), tl.load(told + 3)
    grade = tl.load(grades + at * count + place, mask=place < listed, other=0).to(tl.int32)
    larger, equals = (grade > least).to(tl.int32), ((grade == least) & (grade > 0)).to(tl.int32)
    both = tl.sum(larger * 32768 + equals, 0)
    said = told + TOLD
    tl.atomic_xchg(said + block, both | COUNTED, sem="relaxed")
    before, alike = 0, 0
    for start in range(0, block, AHEAD):
        ahead = start + tl.arange(0, AHEAD)
        each = tl.load(said + ahead, mask=ahead < block, other=COUNTED, volatile=True)
        while tl.min(each, 0) == 0:
            each = tl.load(said + ahead, mask=ahead < block, other=COUNTED, volatile=True)
        before += tl.sum((each & (COUNTED - 1)) >> 15, 0)
        alike += tl.sum(each & 32767, 0)
    chosen = (grade > least) | ((equals > 0) & (alike + tl.cumsum(equals, 0) <= missing))
    slot = before + tl.minimum(alike, missing) + tl.cumsum(chosen.to(tl.int32), 0) - 1
    if LISTED:
        token = tl.load(tokens + at * count + place, mask=chosen, other=-1)
    else:
        token = place
    tl.store(out + at * width + slot, token, mask=chosen)
    tl.store(out + at * width + place, -1, mask=(place >= wanted) & (place < width))
