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
WEIGHT_ONE: tl.constexpr = tl.constexpr(layout.WEIGHT_ONE)
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


@triton.jit
def prepare_kernel(
    run, q, maps, planes, steps, histogram, scale, lists, heads, per_row, num_buckets, listed, dim, m_row, h_row,
    GROUP: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr, RANK: tl.constexpr, BYTES: tl.constexpr,
    WIDTH: tl.constexpr, DIM: tl.constexpr, SEATED: tl.constexpr, OVERLAP: tl.constexpr,
):
    """The first `lists` programs: which tokens of every bucket are candidates of a query and head. Then one program a
    query and query head: the four planes of its side and their step; the first of a group clears its histogram."""
    # grid: (lists + Q·Hq,), lists = Q·Hkv or 0
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
    # a byte of two channels is 16 times the upper one and the lower one
    high = channels(own, maps, byte + RANK - BYTES, (byte >= WHOLE) & (byte < BYTES), dim, RANK=RANK, DIM=DIM) * scale
    bytewise = tl.where(byte < WHOLE, low, high / 16)
    lower = tl.where(byte < WHOLE, 0.0, (low - high / 16) / 16)
    step = tl.max(tl.maximum(tl.abs(bytewise), tl.abs(lower)), 0) / 32512
    step = tl.where(step > 0, step, 1.0)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    tl.store(steps + at, step)
    place = planes + at * 4 * BYTES + byte
    for plane in tl.static_range(2):
        number = tl.floor((bytewise if plane == 0 else lower) / step + 0.5).to(tl.int32)
        upper = (number + 128) >> 8
        tl.store(place + 2 * plane * BYTES, upper.to(tl.int8), mask=byte < BYTES)
        tl.store(place + (2 * plane + 1) * BYTES, (number - 256 * upper).to(tl.int8), mask=byte < BYTES)
    if at % GROUP == 0:
        for start in range(0, h_row, BINS):
            each = start + tl.arange(0, BINS)
            tl.store(histogram + at // GROUP * h_row + each, tl.zeros([BINS], tl.int32), mask=each < h_row)


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
    planes, steps, codes, order, runs, counts, first, last, tokens, weights, tops, masses, heads, per_row, count,
    c_row, c_head, o_row, o_head,
    LISTED: tl.constexpr, PADDED: tl.constexpr, RANK: tl.constexpr, BYTES: tl.constexpr, ALIGNED: tl.constexpr,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The scores of BLOCK candidates for the group's heads, as weights that are WEIGHT_ONE for the block's largest and
    -1 where there is no candidate; that largest score, and the sum of the weights over WEIGHT_ONE. LISTED: candidates
    are those of the runs, and are written down; blocks behind the last stay as they are. Else all tokens between first
    and last are."""
    # grid: (Q·Hkv, blocks of candidates)
    # planes, steps  [Q, Hq, 4, w] int8, [Q, Hq] fp32   `Prepared`
    # codes          [B, Hkv, M, w] int8                strides c_row, c_head; ALIGNED divides all places
    # order          [B, Hkv, M] int32                  tokens by bucket; strides o_row, o_head
    # runs, counts   [Q, Hkv, 2, C] and [Q, Hkv] int32  see `bucket_runs`
    # first, last    [Q] int32                          tokens
    # tokens         [Q, Hkv, K] int32                  written if LISTED; count = K
    # weights        [Q, Hkv, K, G] fp16                written
    # tops, masses   [Q, Hkv, blocks, G] fp32           written: natural logarithm; sum over WEIGHT_ONE
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
    plane = planes + ((at * GROUP + column // 2)[None, :] * 4 + (column % 2)[None, :]) * BYTES + byte[:, None]
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
             tl.where(used[:, None], weight * WEIGHT_ONE, -1.0).to(tl.float16),
             mask=(place < count)[:, None] & (group < GROUP)[None, :])


@triton.jit
def histogram_kernel(
    weights, tops, masses, counts, budget, seats, bins, histogram, heads, count, parts, width, h_row,
    GROUP: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
    LISTED: tl.constexpr, SEATED: tl.constexpr, OVERLAP: tl.constexpr,
):
    """The bins of BLOCKS blocks of `score_kernel`, from the softmax of every head over all candidates, summed over the
    group; and how many candidates are in each bin above 1, the number of candidates in the place of bin 0. The last
    program of a list to count finds the threshold."""
    # grid: (Q·Hkv, parts / BLOCKS)
    # weights       [Q, Hkv, K, G] fp16       as `score_kernel` writes them; count = K
    # tops, masses  [Q, Hkv, parts, G] fp32   the same
    # counts        [Q, Hkv] int32            candidates, if LISTED
    # budget        [Q] or by seat, int64     tokens
    # seats         [Q] int64                 if SEATED
    # bins          [Q, Hkv, K] uint8         written
    # histogram     [Q, Hkv, h_row] int32     zeros before; bins and header are written
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
    factor = tl.exp(own - top[None, :]) / (tl.where(mass > 0, mass, 1.0) * WEIGHT_ONE)[None, :]
    share = tl.sum(tl.maximum(weight, 0.0) * factor[:, None, :], 2)
    used = tl.max(weight, 2) >= 0
    upper = tl.minimum(tl.maximum((share.to(tl.int32, bitcast=True) >> SHIFT) - FLOOR, 0) + 1, BINS - 1)
    own_bin = tl.where(used, upper, 0)
    tl.store(bins + at * count + place, own_bin.to(tl.uint8), mask=place < count)
    histogram += at * h_row
    header = histogram + BINS
    # counted here first: additions to one number would wait for each other
    every = tl.arange(0, BINS)
    flat = tl.reshape(own_bin, [BLOCKS * BLOCK])
    many = tl.where(every > 0, tl.histogram(flat, BINS, mask=flat > 1), tl.sum((flat > 0).to(tl.int32), 0))
    tl.atomic_add(histogram + every, many, mask=many > 0, sem="relaxed")
    tl.debug_barrier()
    if tl.atomic_add(header + DONE, 1, sem="acq_rel") == tl.cdiv(there, BLOCKS * BLOCK) - 1:
        allowed = tl.load(budget + kept_row(seats, at // heads, True, SEATED=SEATED))
        many = tl.load(histogram + every)
        wanted = tl.minimum(tl.minimum(allowed, width), tl.sum(tl.where(every == 0, many, 0), 0)).to(tl.int32)
        many = tl.where(every > 1, many, 0)
        total = tl.sum(many, 0)
        higher = total - tl.cumsum(many, 0)
        here = (higher < wanted) & (higher + many >= wanted)
        threshold = tl.max(tl.where(here, every, 1), 0)
        tl.store(header + CHOSEN, wanted)
        tl.store(header + THRESHOLD, tl.where(wanted > 0, threshold, BINS))
        tl.store(header + TIES, wanted - tl.where(threshold > 1, tl.sum(tl.where(here, higher, 0), 0), total))


@triton.jit
def select_kernel(
    bins, tokens, histogram, counts, out, count, width, h_row,
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
    # out        [Q, Hkv, width] int32      written
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
    tl.store(out + at * width + slot, token, mask=chosen)
    tl.store(out + at * width + place, -1, mask=(place >= wanted) & (place < width))
