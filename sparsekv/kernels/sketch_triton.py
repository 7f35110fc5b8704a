"""The Triton kernels of `sketch.py`; importing this module imports Triton.

Shapes: Q queries of B rows, Hq query heads, Hkv KV heads of G query heads, d the head dimension, M tokens, C buckets,
K candidates (a multiple of 16 where they are listed), r channels and w bytes of a code.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sparsekv.kernels import histogram as layout
from sparsekv.kernels.routing_triton import bucket_runs, kept_row, tokens_of

BINS: tl.constexpr = tl.constexpr(layout.BINS)
FLOOR: tl.constexpr = tl.constexpr(layout.FLOOR)
SHIFT: tl.constexpr = tl.constexpr(layout.SHIFT)
LEAST: tl.constexpr = tl.constexpr(layout.LEAST)
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
DONE: tl.constexpr = tl.constexpr(layout.DONE)
CHOSEN: tl.constexpr = tl.constexpr(layout.CHOSEN)
THRESHOLD: tl.constexpr = tl.constexpr(layout.THRESHOLD)
TIES: tl.constexpr = tl.constexpr(layout.TIES)
TICKET: tl.constexpr = tl.constexpr(layout.TICKET)
HEADER: tl.constexpr = tl.constexpr(layout.HEADER)
PUBLISHED: tl.constexpr = tl.constexpr(layout.PUBLISHED)


@triton.jit
def channels(q, maps, channel, used, dim, RANK: tl.constexpr, DIM: tl.constexpr):
    """A query's products with some channels of the maps, float32."""
    width = tl.arange(0, DIM)
    weights = tl.load(maps + width[:, None] * RANK + channel[None, :], mask=(width < dim)[:, None] & used[None, :],
                      other=0.0)
    query = tl.load(q + width, mask=width < dim, other=0.0)
    return tl.sum(query.to(tl.float32)[:, None] * weights.to(tl.float32), 0)


@triton.jit(do_not_specialize=["lists", "listed"])
def prepare_kernel(
    run, q, maps, planes, steps, histogram, scale, lists, heads, per_row, num_buckets, listed, dim, m_row, h_row,
    GROUP: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr, RANK: tl.constexpr, BYTES: tl.constexpr,
    WIDTH: tl.constexpr, DIM: tl.constexpr, SEATED: tl.constexpr, OVERLAP: tl.constexpr,
):
    """The first `lists` programs: which tokens of every bucket are candidates of a query and head. Then one program a
    query and query head: the four planes of its side and their step; the first of a group clears its histogram."""
    # grid: (lists + Q·Hq,), lists = Q·Hkv
    # run        what `bucket_runs` reads and writes
    # q          [Q, Hq, d]                with RoPE
    # maps       [B or 1, Hkv, d, r]       `Sketch.queries`, RANK = r; stride m_row, 0 where all rows share them
    # planes     [Q, Hq, 4, w] int8        written; BYTES = w
    # steps      [Q, Hq] fp32              written: the unit of the planes' numbers
    # histogram  [Q, Hkv, h_row] int32     cleared
    if tl.program_id(0) < lists:
        bucket_runs(run, tl.program_id(0).to(tl.int64), heads, per_row, num_buckets, listed, LISTS=1, GROUP=GROUP,
                    ROWS=ROWS, PADDED=PADDED, LOGITS=True, SEATED=SEATED, OVERLAP=OVERLAP)
    else:
        query_planes(q, maps, run.seats, planes, steps, histogram, (tl.program_id(0) - lists).to(tl.int64), scale,
                     heads, per_row, dim, m_row, h_row, GROUP=GROUP, RANK=RANK, BYTES=BYTES, WIDTH=WIDTH, DIM=DIM,
                     SEATED=SEATED, OVERLAP=OVERLAP)


@triton.jit
def whole_numbers(low, high, pairs):
    """What bytes are multiplied by, and the lower channels of those that are pairs, in whole numbers of 16 bits, and
    their unit; from the sides of the lower and of the upper channels `[WIDTH, ...]`. A byte of two channels is 16 times
    the upper one and the lower one."""
    bytewise = tl.where(pairs, high / 16, low)
    lower = tl.where(pairs, (low - high / 16) / 16, 0.0)
    step = tl.max(tl.maximum(tl.abs(bytewise), tl.abs(lower)), 0) / 32512
    step = tl.where(step > 0, step, 1.0)
    return tl.floor(bytewise / step + 0.5).to(tl.int32), tl.floor(lower / step + 0.5).to(tl.int32), step


@triton.jit
def bytes_of(number):
    """256 times the first and the second are the number, int8 both."""
    upper = (number + 128) >> 8
    return upper.to(tl.int8), (number - 256 * upper).to(tl.int8)


@triton.jit
def clear(histogram, h_row):
    """A list's histogram."""
    for start in range(0, h_row, BINS):
        each = start + tl.arange(0, BINS)
        tl.store(histogram + each, tl.zeros([BINS], tl.int32), mask=each < h_row)


@triton.jit
def query_planes(
    q, maps, seats, planes, steps, histogram, at, scale, heads, per_row, dim, m_row, h_row,
    GROUP: tl.constexpr, RANK: tl.constexpr, BYTES: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr,
    SEATED: tl.constexpr, OVERLAP: tl.constexpr,
):
    """`prepare_kernel` for one query and query head."""
    WHOLE: tl.constexpr = 2 * BYTES - RANK
    row, head = at // (heads * GROUP), at % (heads * GROUP)
    own = q.base + row * q.row + head * q.head
    maps += kept_row(seats, row // per_row, True, SEATED=SEATED) * m_row + head // GROUP * dim * RANK
    byte = tl.arange(0, WIDTH)
    low = channels(own, maps, byte, byte < BYTES, dim, RANK=RANK, DIM=DIM) * scale
    high = channels(own, maps, byte + RANK - BYTES, (byte >= WHOLE) & (byte < BYTES), dim, RANK=RANK, DIM=DIM) * scale
    bytewise, lower, step = whole_numbers(low, high, byte >= WHOLE)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    tl.store(steps + at, step)
    place = planes + at * 4 * BYTES + byte
    for pair in tl.static_range(2):
        first, second = bytes_of(bytewise if pair == 0 else lower)
        tl.store(place + 2 * pair * BYTES, first, mask=byte < BYTES)
        tl.store(place + (2 * pair + 1) * BYTES, second, mask=byte < BYTES)
    if at % GROUP == 0:
        clear(histogram + at // GROUP * h_row, h_row)


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
def scores_of(
    held, planes, lower_planes, step, PAIRS: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Scores of a block of codes `[BLOCK, WIDTH]` for a group's heads, logarithms to the base 2, `[BLOCK, HEADS]`. Both
    planes of a head are columns side by side, `[WIDTH, 2·HEADS]`: their products end in the same thread."""
    sums = tl.dot(held, planes, out_dtype=tl.int32)
    if PAIRS:
        sums = tl.dot(lower_of(held, PACKED=PACKED), lower_planes, sums, out_dtype=tl.int32)
    upper, lower = tl.split(tl.reshape(sums, [BLOCK, HEADS, 2]))
    return tl.maximum((256 * upper + lower).to(tl.float32) * (step * LOG2E)[None, :], LEAST)


@triton.jit(do_not_specialize=["o_row", "o_head"])
def score_kernel(
    planes, steps, codes, order, runs, counts, tokens, scores, tops, masses, heads, per_row, count, c_row, c_head,
    o_row, o_head,
    PADDED: tl.constexpr, RANK: tl.constexpr, BYTES: tl.constexpr, ALIGNED: tl.constexpr, WIDTH: tl.constexpr,
    GROUP: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr, OVERLAP: tl.constexpr,
):
    """The scores of BLOCK candidates of the runs for the group's heads, the largest of a head, and the sum of the
    powers of what they are less than it; the candidates are written down. Blocks behind the last stay as they are."""
    # grid: (Q·Hkv, blocks of candidates)
    # planes, steps  [Q, Hq, 4, w] int8, [Q, Hq] fp32   `Prepared`
    # codes          [B, Hkv, M, w] int8                strides c_row, c_head; ALIGNED divides all places
    # order          [B, Hkv, M] int32                  tokens by bucket; strides o_row, o_head
    # runs, counts   [Q, Hkv, 2, C] and [Q, Hkv] int32  see `bucket_runs`
    # tokens         [Q, Hkv, K] int32                  written; count = K
    # scores         [Q, Hkv, G, K] fp16                written: logarithms to the base 2, -inf = no candidate
    # tops, masses   [Q, Hkv, G, blocks] fp32           written: logarithm to the base 2; sum over the power of that
    WHOLE: tl.constexpr = 2 * BYTES - RANK
    at = tl.program_id(0).to(tl.int64)
    row, head = at // heads, at % heads
    cache_row = row // per_row
    byte, group = tl.arange(0, WIDTH), tl.arange(0, HEADS)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    there = tl.load(counts + at)
    if tl.program_id(1) * BLOCK >= there:
        return
    used = place < there
    token = tokens_of(order + cache_row * o_row + head * o_head, runs + at * 2 * PADDED, tl.program_id(1) * BLOCK, used,
                      BLOCK=BLOCK, PADDED=PADDED)
    tl.store(tokens + at * count + place, token, mask=place < count)
    # codes lie one behind the other: as many bytes are loaded at once as divide all places
    own = codes + tl.multiple_of(cache_row * c_row + head * c_head, ALIGNED)
    held = tl.load(own + token[:, None].to(tl.int64) * BYTES + byte[None, :],
                   mask=used[:, None] & (byte < BYTES)[None, :], other=0)
    column = tl.arange(0, 2 * HEADS)
    plane = planes + ((at * GROUP + column // 2)[None, :] * 4 + (column % 2)[None, :]) * BYTES + byte[:, None]
    inside = (column // 2 < GROUP)[None, :] & (byte < BYTES)[:, None]
    step = tl.load(steps + at * GROUP + group, mask=group < GROUP, other=1.0)
    first = tl.load(plane, mask=inside, other=0)
    second = first
    if WHOLE < BYTES:
        second = tl.load(plane + 2 * BYTES, mask=inside, other=0)
    total = scores_of(held, first, second, step, PAIRS=WHOLE < BYTES, BLOCK=BLOCK, HEADS=HEADS, PACKED=PACKED)
    total = tl.where(used[:, None], total, float("-inf"))
    top = tl.max(total, 0)
    part = (at * GROUP + group) * tl.num_programs(1) + tl.program_id(1)
    tl.store(tops + part, top, mask=group < GROUP)
    tl.store(masses + part, tl.sum(tl.exp2(total - top[None, :]), 0), mask=group < GROUP)
    tl.store(scores + (at * GROUP + group)[None, :] * count + place[:, None], total.to(tl.float16),
             mask=(place < count)[:, None] & (group < GROUP)[None, :])


@triton.jit
def side_of(side, query, maps, channel, used, width, dim, RANK: tl.constexpr):
    """`side [WIDTH, columns]` with the products of some channels of the maps and a part of the queries."""
    weights = tl.load(maps + width[None, :] * RANK + channel[:, None], mask=used[:, None] & (width < dim)[None, :],
                      other=0.0)
    return tl.dot(weights.to(tl.float32), query, side, input_precision="tf32")


@triton.jit(do_not_specialize=["asking", "length"])
def score_all_kernel(
    q, maps, codes, first, last, scores, tops, masses, histogram, scale, heads, per_row, asking, length, count, size,
    dim, c_row, c_head, m_row, h_row,
    RANK: tl.constexpr, BYTES: tl.constexpr, ALIGNED: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
    GROUP: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, PACKED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The scores of the tokens of one slice for the group's heads, the largest of a head, and the sum of the powers of
    what they are less than it. Every program makes the planes of its queries' sides by itself; the first of a list
    clears its histogram."""
    # grid: (Q·Hkv, slices of `size` tokens, a multiple of BLOCK)
    # q             Heads [Q, Hq, d]      with RoPE
    # maps          [B or 1, Hkv, d, r]   `Sketch.queries`, RANK = r; stride m_row, 0 where all rows share them, and
    #                                     `asking` queries do
    # codes         [B, Hkv, M, w] int8   of `per_row` queries; strides c_row, c_head; ALIGNED divides all places
    # first, last   [Q] int64             candidates are the tokens between; length = M
    # scores        [Q, Hkv, G, K] fp16   written: logarithms to the base 2, -inf = no candidate; count = K
    # tops, masses  [Q, Hkv, G, slices]   written, fp32: logarithm to the base 2; sum over the power of that
    # histogram     [Q, Hkv, h_row] int32 cleared
    WHOLE: tl.constexpr = 2 * BYTES - RANK
    at = tl.program_id(0).to(tl.int64)
    row, head = at // heads, at % heads
    byte, group = tl.arange(0, WIDTH), tl.arange(0, HEADS)
    maps += row // asking * m_row + head * dim * RANK
    column = tl.arange(0, 2 * HEADS)
    own_q = q.base + row * q.row + (head * GROUP + column // 2)[None, :] * q.head
    low = tl.zeros([WIDTH, 2 * HEADS], tl.float32)
    high = tl.zeros([WIDTH, 2 * HEADS], tl.float32)
    for at_dim in tl.range(0, dim, DEPTH, num_stages=1):
        width = at_dim + tl.arange(0, DEPTH)
        query = tl.load(own_q + width[:, None], mask=(column // 2 < GROUP)[None, :] & (width < dim)[:, None],
                        other=0.0).to(tl.float32)
        low = side_of(low, query, maps, byte, byte < BYTES, width, dim, RANK=RANK)
        if WHOLE < BYTES:
            high = side_of(high, query, maps, byte + RANK - BYTES, (byte >= WHOLE) & (byte < BYTES), width, dim,
                           RANK=RANK)
    bytewise, lower, step = whole_numbers(low * scale, high * scale, (byte >= WHOLE)[:, None])
    even = (column % 2 == 0)[None, :]
    first_byte, second_byte = bytes_of(bytewise)
    planes = tl.where(even, first_byte, second_byte)
    first_byte, second_byte = bytes_of(lower)
    lower_planes = tl.where(even, first_byte, second_byte)
    step = tl.max(tl.reshape(step, [HEADS, 2]), 1)
    if tl.program_id(1) == 0:
        clear(histogram + at * h_row, h_row)
    start, end = tl.load(first + row).to(tl.int32), tl.load(last + row).to(tl.int32)
    own = codes + tl.multiple_of(row // per_row * c_row + head * c_head, ALIGNED)
    # every thread has its own: one sum for all only at the end
    top = tl.full([BLOCK, HEADS], LEAST, tl.float32)
    mass = tl.zeros([BLOCK, HEADS], tl.float32)
    begin = tl.program_id(1) * size
    for block in tl.range(begin, tl.minimum(begin + size, count), BLOCK, num_stages=STAGES):
        place = block + tl.arange(0, BLOCK)
        held = tl.load(own + place[:, None].to(tl.int64) * BYTES + byte[None, :],
                       mask=(place < length)[:, None] & (byte < BYTES)[None, :], other=0)
        total = scores_of(held, planes, lower_planes, step, PAIRS=WHOLE < BYTES, BLOCK=BLOCK, HEADS=HEADS,
                          PACKED=PACKED)
        total = tl.where(((place >= start) & (place < end))[:, None], total, float("-inf"))
        higher = tl.maximum(top, total)
        mass = mass * tl.exp2(top - higher) + tl.exp2(total - higher)
        top = higher
        tl.store(scores + (at * GROUP + group)[None, :] * count + place[:, None], total.to(tl.float16),
                 mask=(place < count)[:, None] & (group < GROUP)[None, :])
    if OVERLAP:
        gdc_launch_dependents()
    highest = tl.max(top, 0)
    part = (at * GROUP + group) * tl.num_programs(1) + tl.program_id(1)
    tl.store(tops + part, highest, mask=group < GROUP)
    tl.store(masses + part, tl.sum(mass * tl.exp2(top - highest[None, :]), 0), mask=group < GROUP)


@triton.jit
def publish_counts(histogram, many, allowed, width, programs):
    """Add how many candidates of a program are in each bin above 1, the number of candidates in the place of bin 0, to
    the histogram of its list; the last of its `programs` finds the threshold down to which `allowed` of them, at most
    `width`, are chosen."""
    header = histogram + BINS
    every = tl.arange(0, BINS)
    tl.atomic_add(histogram + every, many, mask=many > 0, sem="relaxed")
    tl.debug_barrier()
    if tl.atomic_add(header + DONE, 1, sem="acq_rel") == programs - 1:
        all_of = tl.load(histogram + every)
        wanted = tl.minimum(tl.minimum(allowed, width), tl.sum(tl.where(every == 0, all_of, 0), 0)).to(tl.int32)
        all_of = tl.where(every > 1, all_of, 0)
        total = tl.sum(all_of, 0)
        higher = total - tl.cumsum(all_of, 0)
        here = (higher < wanted) & (higher + all_of >= wanted)
        threshold = tl.max(tl.where(here, every, 1), 0)
        tl.store(header + CHOSEN, wanted)
        tl.store(header + THRESHOLD, tl.where(wanted > 0, threshold, BINS))
        tl.store(header + TIES, wanted - tl.where(threshold > 1, tl.sum(tl.where(here, higher, 0), 0), total))


@triton.jit(do_not_specialize=["parts", "width"])
def histogram_kernel(
    scores, tops, masses, counts, budget, seats, bins, histogram, heads, count, parts, width, h_row,
    GROUP: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr, SCORED: tl.constexpr, BLOCK: tl.constexpr,
    LISTED: tl.constexpr, SEATED: tl.constexpr, OVERLAP: tl.constexpr,
):
    """The bins of BLOCK candidates, from the softmax of every head over all candidates, summed over the group; and how
    many candidates are in each bin above 1, the number of candidates in the place of bin 0. The last program of a list
    to count finds the threshold."""
    # grid: (Q·Hkv, blocks of candidates)
    # scores        [Q, Hkv, G, K] fp16       as `score_kernel` or `score_all_kernel` writes them; count = K
    # tops, masses  [Q, Hkv, G, parts] fp32   the same; of SCORED candidates each, if LISTED
    # counts        [Q, Hkv] int32            candidates, if LISTED
    # budget        [Q] or by seat, int64     tokens
    # seats         [Q] int64                 if SEATED
    # bins          [Q, Hkv, K] uint8         written
    # histogram     [Q, Hkv, h_row] int32     zeros before; bins and header are written
    at = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, HEADS)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    there, written = count, parts
    if LISTED:
        there = tl.load(counts + at)
        written = tl.cdiv(there, SCORED)
        if tl.program_id(1) * BLOCK >= there:
            return
    score = tl.load(scores + (at * GROUP + group)[:, None] * count + place[None, :],
                    mask=(group < GROUP)[:, None] & (place < there)[None, :], other=float("-inf")).to(tl.float32)
    tops += (at * GROUP + group)[:, None] * parts
    masses += (at * GROUP + group)[:, None] * parts
    highest = tl.full([HEADS, PARTS], LEAST, tl.float32)
    sums = tl.zeros([HEADS, PARTS], tl.float32)
    for start in range(0, written, PARTS):
        part = start + tl.arange(0, PARTS)
        inside = (group < GROUP)[:, None] & (part < written)[None, :]
        each = tl.load(tops + part[None, :], mask=inside, other=LEAST)
        mass = tl.load(masses + part[None, :], mask=inside, other=0.0)
        higher = tl.maximum(highest, each)
        sums = sums * tl.exp2(highest - higher) + mass * tl.exp2(each - higher)
        highest = higher
    top = tl.max(highest, 1)
    mass = tl.sum(sums * tl.exp2(highest - top[:, None]), 1)
    whole = tl.where(mass > 0, top + tl.log2(tl.where(mass > 0, mass, 1.0)), 0.0)
    share = tl.sum(tl.exp2(score - whole[:, None]), 0)
    upper = tl.minimum(tl.maximum((share.to(tl.int32, bitcast=True) >> SHIFT) - FLOOR, 0) + 1, BINS - 1)
    own_bin = tl.where(tl.max(score, 0) > float("-inf"), upper, 0)
    tl.store(bins + at * count + place, own_bin.to(tl.uint8), mask=place < count)
    # counted here first: additions to one number would wait for each other
    every = tl.arange(0, BINS)
    many = tl.where(every > 0, tl.histogram(own_bin, BINS, mask=own_bin > 1), tl.sum((own_bin > 0).to(tl.int32), 0))
    allowed = tl.load(budget + kept_row(seats, at // heads, True, SEATED=SEATED))
    publish_counts(histogram + at * h_row, many, allowed, width, tl.cdiv(there, BLOCK))


@triton.jit(do_not_specialize=["width"])
def select_kernel(
    bins, tokens, histogram, counts, out, count, width, out_head, h_row,
    LISTED: tl.constexpr, BLOCK: tl.constexpr, LOOK_BACK: tl.constexpr, OVERLAP: tl.constexpr,
):
    """The chosen tokens of BLOCK candidates in their places, and -1 in the places behind the last. A block's first
    place is what the blocks ahead of it choose: each publishes its numbers, and reads those of the others as they
    come."""
    # grid: (Q·Hkv, blocks)
    # bins       [Q, Hkv, K] uint8          count = K
    # tokens     [Q, Hkv, K] int32          if LISTED; else candidate i is token i
    # histogram  [Q, Hkv, h_row] int32      header of `histogram_kernel`; ticket and block numbers zeros before
    # counts     [Q, Hkv] int32             candidates, if LISTED
    # out        [Q, Hkv, width] int32      written; stride out_head from list to list
    at = tl.program_id(0).to(tl.int64)
    header = histogram + at * h_row + BINS
    # CUDA promises no order of programs: a program takes the next block, so that whoever has one ahead runs already.
    # The zero that it starts from was written two launches ago, and lies there since before the one ahead went on
    block = tl.atomic_add(header + TICKET, 1, sem="relaxed")
    place = block * BLOCK + tl.arange(0, BLOCK)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    listed = count
    if LISTED:
        listed = tl.load(counts + at)
    wanted, threshold, ties = tl.load(header + CHOSEN), tl.load(header + THRESHOLD), tl.load(header + TIES)
    own = tl.load(bins + at * count + place, mask=place < listed, other=0).to(tl.int32)
    above, equal = (own > threshold).to(tl.int32), ((own == threshold) & (own > 0)).to(tl.int32)
    # two numbers in one: a reader sees both or none
    both = tl.sum(above * 32768 + equal, 0)
    published = header + HEADER
    tl.atomic_xchg(published + block, both | PUBLISHED, sem="relaxed")
    above_ahead, equal_ahead = 0, 0
    for start in range(0, block, LOOK_BACK):
        ahead = start + tl.arange(0, LOOK_BACK)
        each = tl.load(published + ahead, mask=ahead < block, other=PUBLISHED, volatile=True)
        while tl.min(each, 0) == 0:
            each = tl.load(published + ahead, mask=ahead < block, other=PUBLISHED, volatile=True)
        above_ahead += tl.sum((each & (PUBLISHED - 1)) >> 15, 0)
        equal_ahead += tl.sum(each & 32767, 0)
    chosen = (own > threshold) | ((equal > 0) & (equal_ahead + tl.cumsum(equal, 0) <= ties))
    slot = above_ahead + tl.minimum(equal_ahead, ties) + tl.cumsum(chosen.to(tl.int32), 0) - 1
    if LISTED:
        token = tl.load(tokens + at * count + place, mask=chosen, other=-1)
    else:
        token = place
    tl.store(out + at * out_head + slot, token, mask=chosen)
    tl.store(out + at * out_head + place, -1, mask=(place >= wanted) & (place < width))
