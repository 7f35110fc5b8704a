"""The Triton kernels of `sketch.py`; importing this module imports Triton."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sparsekv.kernels import sketch
from sparsekv.kernels.routing_triton import token_of_slot

GRADES: tl.constexpr = tl.constexpr(sketch.GRADES)
FLOOR: tl.constexpr = tl.constexpr(sketch.FLOOR)


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
def query_kernel(
    q, maps, side, tallies, scale, heads_q, group, per_row, dim, q_row, q_head, m_row,
    RANK: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, OVERLAP: tl.constexpr,
):
    """What codes are multiplied by, of one query and head; the first head of a group sets its tally to zero."""
    if OVERLAP:
        gdc_launch_dependents()
    row = (tl.program_id(0) // heads_q).to(tl.int64)
    head = (tl.program_id(0) % heads_q).to(tl.int64)
    width, channel = tl.arange(0, DIM), tl.arange(0, WIDTH)
    maps += row // per_row * m_row + head // group * dim * RANK
    weights = tl.load(maps + width[:, None] * RANK + channel[None, :],
                      mask=(width < dim)[:, None] & (channel < RANK)[None, :], other=0.0)
    query = tl.load(q + row * q_row + head * q_head + width, mask=width < dim, other=0.0)
    total = tl.sum(query.to(tl.float32)[:, None] * weights.to(tl.float32), 0) * scale
    tl.store(side + (row * heads_q + head) * RANK + channel, total, mask=channel < RANK)
    if head % group == 0:
        grade = tl.arange(0, GRADES)
        tl.store(tallies + (row * heads_q + head) // group * GRADES + grade, tl.zeros([GRADES], tl.int32))


@triton.jit
def score_kernel(
    side, codes, order, offsets, ends, first, last, tokens, logits, tops, masses, heads, per_row, count, num_buckets,
    c_row, c_head, c_token, o_row, o_head,
    LISTED: tl.constexpr, STEPS: tl.constexpr, RANK: tl.constexpr, BYTES: tl.constexpr, WIDTH: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):
    """Products of the group's query sides with the codes of a block of candidates, the largest and the mass of each;
    -inf where there is no candidate. LISTED: candidates are what the buckets give, and are written down."""
    WHOLE: tl.constexpr = 2 * BYTES - RANK
    at = tl.program_id(0).to(tl.int64)
    row, head = at // heads, at % heads
    cache_row = row // per_row
    group, byte = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    if LISTED:
        token = token_of_slot(order + cache_row * o_row + head * o_head,
                              offsets + (cache_row * heads + head) * (num_buckets + 1), ends + at * num_buckets, place,
                              num_buckets, count, STEPS=STEPS)
        used = token >= 0
        tl.store(tokens + at * count + place, token, mask=place < count)
    else:
        token = place
        used = (place < count) & (place >= tl.load(first + row)) & (place < tl.load(last + row))
    from_side = side + (at * GROUP + group[:, None]) * RANK + byte[None, :]
    inside = (group < GROUP)[:, None] & (byte < BYTES)[None, :]
    held = tl.load(codes + cache_row * c_row + head * c_head + token[None, :].to(tl.int64) * c_token
                   + byte[:, None], mask=used[None, :] & (byte < BYTES)[:, None], other=0).to(tl.int32)
    query = tl.load(from_side, mask=inside, other=0.0)
    if WHOLE < BYTES:
        high = tl.load(from_side + RANK - BYTES, mask=inside & (byte >= WHOLE)[None, :], other=0.0)
        low = tl.where((byte < WHOLE)[:, None], held, (held << 28) >> 28)
        total = tl.dot(query, low.to(tl.float32), input_precision="tf32")
        total += tl.dot(high, ((held + 8) >> 4).to(tl.float32), input_precision="tf32")
    else:
        total = tl.dot(query, held.to(tl.float32), input_precision="tf32")
    total = tl.where(used[None, :], total, float("-inf"))
    top = tl.max(total, 1)
    mass = tl.sum(tl.exp(total - tl.where(top == float("-inf"), 0.0, top)[:, None]), 1)
    head_q = at * GROUP + group
    parts = tl.num_programs(1)
    tl.store(tops + head_q * parts + tl.program_id(1), top, mask=group < GROUP)
    tl.store(masses + head_q * parts + tl.program_id(1), mass, mask=group < GROUP)
    tl.store(logits + head_q[:, None] * count + place[None, :], total,
             mask=(group < GROUP)[:, None] & (place < count)[None, :])


@triton.jit
def grade_kernel(
    logits, tops, masses, grades, tallies, count, parts,
    GROUP: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):
    """The grades of a block of candidates from the softmax of every head over all, summed over the group; and how many
    have each grade above 1, the number of candidates in the place of grade 0."""
    at = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, ROWS)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    head_q = at * GROUP + group
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    each = tl.full([ROWS, PARTS], float("-inf"), tl.float32)
    for start in range(0, parts, PARTS):
        part = start + tl.arange(0, PARTS)
        there = (group < GROUP)[:, None] & (part < parts)[None, :]
        each = tl.maximum(each, tl.load(tops + head_q[:, None] * parts + part[None, :], mask=there,
                                        other=float("-inf")))
    top = tl.max(each, 1)
    top = tl.where(top == float("-inf"), 0.0, top)
    sums = tl.zeros([ROWS, PARTS], tl.float32)
    for start in range(0, parts, PARTS):
        part = start + tl.arange(0, PARTS)
        there = (group < GROUP)[:, None] & (part < parts)[None, :]
        each = tl.load(tops + head_q[:, None] * parts + part[None, :], mask=there, other=float("-inf"))
        weight = tl.load(masses + head_q[:, None] * parts + part[None, :], mask=there, other=0.0)
        sums += weight * tl.exp(each - top[:, None])
    mass = tl.sum(sums, 1)
    inside = (group < GROUP)[:, None] & (place < count)[None, :]
    value = tl.load(logits + head_q[:, None] * count + place[None, :], mask=inside, other=float("-inf"))
    share = tl.sum(tl.exp(value - top[:, None]) / tl.where(mass > 0, mass, 1.0)[:, None], 0)
    used = tl.max(value, 0) > float("-inf")
    upper = tl.minimum(tl.maximum((share.to(tl.int32, bitcast=True) >> 16) - FLOOR, 0) + 1, GRADES - 1)
    grade = tl.where(used, upper, 0)
    tl.store(grades + at * count + place, grade.to(tl.int16), mask=place < count)
    tl.atomic_add(tallies + at * GRADES + grade, 1, mask=grade > 1, sem="relaxed")
    tl.atomic_add(tallies + at * GRADES, tl.sum(used.to(tl.int32), 0), sem="relaxed")


@triton.jit
def best_kernel(
    grades, tokens, tallies, budget, out, heads, count, width,
    LISTED: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr, OVERLAP: tl.constexpr,
):
    """The chosen tokens of a block of candidates in their places, and -1 in the places behind the last: the lowest
    grade that is chosen from the tally, and how many are chosen ahead of the block."""
    at = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * BLOCK
    place = begin + tl.arange(0, BLOCK)
    grades += at * count
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    digit = tl.arange(0, GRADES)
    size = tl.load(tallies + at * GRADES + digit)
    there = tl.sum(tl.where(digit == 0, size, 0), 0)
    wanted = tl.minimum(tl.minimum(tl.load(budget + at // heads), width), there).to(tl.int32)
    size = tl.where(digit > 1, size, 0)
    total = tl.sum(size, 0)
    above = total - tl.cumsum(size, 0)
    here = (above < wanted) & (above + size >= wanted)
    least = tl.max(tl.where(here, digit, 1), 0)
    missing = wanted - tl.where(least > 1, tl.sum(tl.where(digit == least, above, 0), 0), total)
    least = tl.where(wanted > 0, least, GRADES)
    larger, same = tl.zeros([AHEAD], tl.int32), tl.zeros([AHEAD], tl.int32)
    for start in range(0, tl.minimum(begin, count), AHEAD):
        ahead = start + tl.arange(0, AHEAD)
        known = tl.load(grades + ahead, mask=ahead < tl.minimum(begin, count), other=0).to(tl.int32)
        larger += (known > least).to(tl.int32)
        same += (known == least).to(tl.int32)
    before, alike = tl.sum(larger, 0), tl.sum(same, 0)
    grade = tl.load(grades + place, mask=place < count, other=0).to(tl.int32)
    equals = (grade == least).to(tl.int32)
    chosen = (grade > least) | ((equals > 0) & (alike + tl.cumsum(equals, 0) <= missing))
    slot = before + tl.minimum(alike, missing) + tl.cumsum(chosen.to(tl.int32), 0) - 1
    if LISTED:
        token = tl.load(tokens + at * count + place, mask=chosen, other=-1)
    else:
        token = place
    tl.store(out + at * width + slot, token, mask=chosen)
    tl.store(out + at * width + place, -1, mask=(place >= wanted) & (place < width))
