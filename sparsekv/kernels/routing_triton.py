"""The Triton kernels of `routing.py`; importing this module imports Triton.

Shapes: Q queries of B rows, Hq query heads, Hkv KV heads of G query heads, d the head dimension, M tokens, C buckets;
lists are those of the KV heads or, LISTS of each KV head, of the query heads: H of them. Scores are natural logarithms.
Where SEATED what is kept of a request lies by seat, and S seats stand in the place of B rows.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LAST: tl.constexpr = tl.constexpr(2**31 - 1)
"""The end of a run of slots that is none."""


@triton.jit
def sizes_of(table, at, bucket, num_buckets, mask, OFFSETS: tl.constexpr):
    """Sizes of buckets of row and head `at`, zero outside the mask: of counts, or of an index's offsets."""
    if OFFSETS:
        place = table + at * (num_buckets + 1) + bucket
        return tl.load(place + 1, mask=mask, other=0) - tl.load(place, mask=mask, other=0)
    else:
        return tl.load(table + at * num_buckets + bucket, mask=mask, other=0)


@triton.jit
def kept_row(seats, row, used, SEATED: tl.constexpr):
    """The row in which what is kept of a request lies: its seat, or its own."""
    if SEATED:
        return tl.load(seats + row, mask=used, other=0).to(tl.int64)
    else:
        return row


@triton.jit
def hidden_kernel(
    x, w, b, y, heads, count, x_row, x_head, num_in, num_out,
    FOLD: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """`relu(x W1 + b1)`; the rows of a product are FOLD queries times the group."""
    # grid: (Hkv · blocks of FOLD queries, blocks of hidden units)
    # x  [Q, Hq, d]            in the space of the model; strides x_row, x_head; num_in = d
    # w  [Hkv, d, hidden]      num_out = hidden
    # b  [Hkv, hidden]
    # y  [Q, Hq, hidden]       written
    model = (tl.program_id(0) % heads).to(tl.int64)
    r = tl.arange(0, ROWS)
    row = ((tl.program_id(0) // heads) * FOLD + r // GROUP).to(tl.int64)
    head = model * GROUP + r % GROUP
    used = (r < FOLD * GROUP) & (row < count)
    unit = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    depth = tl.arange(0, DEPTH)
    right = tl.load(w + (model * num_in + depth[:, None]) * num_out + unit[None, :],
                    mask=(depth < num_in)[:, None] & (unit < num_out)[None, :], other=0.0)
    left = tl.load(x + row[:, None] * x_row + head[:, None] * x_head + depth[None, :],
                   mask=used[:, None] & (depth < num_in)[None, :], other=0.0)
    bias = tl.load(b + model * num_out + unit, mask=unit < num_out, other=0.0)
    total = tl.dot(left.to(right.dtype), right, input_precision="ieee") + bias.to(tl.float32)[None, :]
    if OVERLAP:
        gdc_launch_dependents()
    place = (row * heads * GROUP + head)[:, None] * num_out + unit[None, :]
    tl.store(y + place, tl.maximum(total, 0.0).to(y.dtype.element_ty),
             mask=used[:, None] & (unit < num_out)[None, :])


@triton.jit
def score_kernel(
    y, w, b, table, seats, logits, heads, count, per_row, num_in, num_out,
    FOLD: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr,
    OFFSETS: tl.constexpr, SEATED: tl.constexpr, OVERLAP: tl.constexpr,
):
    """`y W2 + b2`, -inf for empty buckets."""
    # grid: (Hkv · blocks of FOLD queries, blocks of buckets)
    # y       [Q, Hq, hidden]                  num_in = hidden
    # w       [Hkv, hidden, C]                 num_out = C
    # b       [Hkv, C]
    # table   [B, Hkv, C] or, OFFSETS, [B, Hkv, C + 1] int32    tokens of a bucket, or where buckets begin
    # seats   [Q] int64                        if SEATED
    # logits  [Q, Hq, C] fp32                  written
    model = (tl.program_id(0) % heads).to(tl.int64)
    r = tl.arange(0, ROWS)
    row = ((tl.program_id(0) // heads) * FOLD + r // GROUP).to(tl.int64)
    head = model * GROUP + r % GROUP
    used = (r < FOLD * GROUP) & (row < count)
    unit = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = unit < num_out
    depth = tl.arange(0, DEPTH)
    from_y = y + (row * heads * GROUP + head)[:, None] * num_in + depth[None, :]
    weights = w + model * num_in * num_out + unit[None, :]
    bias = tl.load(b + model * num_out + unit, mask=inside, other=0.0).to(tl.float32)
    there = used[:, None] & inside[None, :]
    kept = kept_row(seats, row // per_row, used, SEATED=SEATED)
    size = sizes_of(table, (kept * heads + model)[:, None], unit[None, :], num_out, there, OFFSETS=OFFSETS)
    total = tl.zeros([ROWS, BLOCK], tl.float32) + bias[None, :]
    if OVERLAP:
        gdc_wait()
    for at in range(0, num_in, DEPTH):
        left = tl.load(from_y + at, mask=used[:, None] & (at + depth < num_in)[None, :], other=0.0)
        part = tl.load(weights + (at + depth)[:, None] * num_out,
                       mask=(at + depth < num_in)[:, None] & inside[None, :], other=0.0)
        total += tl.dot(left, part, input_precision="ieee")
    if OVERLAP:
        gdc_launch_dependents()
    tl.store(logits + (row * heads * GROUP + head)[:, None] * num_out + unit[None, :],
             tl.where(size > 0, total, float("-inf")), mask=there)


@triton.jit
def mean_kernel(
    q, means, steps, spreads, table, seats, logits, scale, heads, per_row, q_row, q_head, m_row, m_head, m_bucket, dim,
    num_buckets,
    FOLD: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    OFFSETS: tl.constexpr, SEATED: tl.constexpr, OVERLAP: tl.constexpr,
):
    """`mean_key_logits` for FOLD queries of one row of the cache."""
    # grid: (Hkv · B · blocks of FOLD queries, blocks of buckets)
    # q        [Q, Hq, d]          with RoPE; strides q_row, q_head
    # means    [B, Hkv, C, d] int8 `BucketMeans`; strides m_row, m_head, m_bucket
    # steps    [B, Hkv, C] fp32    the unit of means
    # spreads  [B, Hkv, C] fp32    half the variance of a bucket's keys in a direction
    # table    [B, Hkv, C] or, OFFSETS, [B, Hkv, C + 1] int32    tokens of a bucket, or where buckets begin
    # seats    [Q] int64           if SEATED
    # logits   [Q, Hq, C] fp32     written
    head = (tl.program_id(0) % heads).to(tl.int64)
    blocks = tl.cdiv(per_row, FOLD)
    cache_row = (tl.program_id(0) // heads // blocks).to(tl.int64)
    r = tl.arange(0, ROWS)
    query_of_row = (tl.program_id(0) // heads % blocks) * FOLD + r // GROUP
    used = (r < FOLD * GROUP) & (query_of_row < per_row)
    row = cache_row * per_row + query_of_row
    head_q = head * GROUP + r % GROUP
    bucket = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = bucket < num_buckets
    width = tl.arange(0, WIDTH)
    kept = kept_row(seats, cache_row, True, SEATED=SEATED)
    if SEATED:
        # nobody's seat: nothing reads the scores of a row without tokens
        edge = table + (kept * heads + head) * (num_buckets + 1)
        if tl.load(edge + num_buckets) == tl.load(edge):
            return
    mean = tl.load(means + kept * m_row + head * m_head + bucket[None, :].to(tl.int64) * m_bucket + width[:, None],
                   mask=inside[None, :] & (width < dim)[:, None], other=0.0)
    query = tl.load(q + row[:, None] * q_row + head_q[:, None] * q_head + width[None, :],
                    mask=used[:, None] & (width < dim)[None, :], other=0.0)
    size = sizes_of(table, kept * heads + head, bucket, num_buckets, inside, OFFSETS=OFFSETS)
    base = tl.where(size > 0, tl.log(tl.maximum(size, 1).to(tl.float32)), float("-inf"))
    step = tl.load(steps + (kept * heads + head) * num_buckets + bucket, mask=inside, other=0.0)
    spread = tl.load(spreads + (kept * heads + head) * num_buckets + bucket, mask=inside, other=0.0)
    scaled = query.to(tl.float32) * scale
    total = tl.dot(query, mean.to(query.dtype), input_precision="ieee") * (scale * step)[None, :] + base[None, :]
    total += tl.sum(scaled * scaled, 1)[:, None] * spread[None, :]
    if OVERLAP:
        gdc_launch_dependents()
    tl.store(logits + (row * heads * GROUP + head_q)[:, None] * num_buckets + bucket[None, :], total,
             mask=used[:, None] & inside[None, :])


@triton.jit
def probability(logits, at, bucket, usable, num_buckets, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Softmax over the usable buckets, summed over the group of query and KV head `at`."""
    group = tl.arange(0, ROWS)
    inside = (group < GROUP)[:, None] & usable[None, :]
    value = tl.load(logits + (at * GROUP + group)[:, None] * num_buckets + bucket[None, :], mask=inside,
                    other=float("-inf"))
    top = tl.max(value, 1)
    weight = tl.where(inside, tl.exp(value - tl.where(top == float("-inf"), 0.0, top)[:, None]), 0.0)
    mass = tl.sum(weight, 1)
    return tl.sum(weight / tl.where(mass > 0, mass, 1.0)[:, None], 0)


@triton.jit
def rank_kernel(
    logits, counts, chosen, heads, per_row, num_buckets, probes,
    GROUP: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr, KEPT: tl.constexpr, OVERLAP: tl.constexpr,
):
    """The most probable buckets: one program a query and KV head."""
    # grid: (Q·Hkv,)
    # logits  [Q, Hq, C] fp32
    # counts  [B, Hkv, C] int32       tokens of a bucket
    # chosen  [Q, Hkv, probes] int32  written, falling, padded with -1
    at = tl.program_id(0).to(tl.int64)
    bucket = tl.arange(0, PADDED)
    kv = at // heads // per_row * heads + at % heads
    usable = sizes_of(counts, kv, bucket, num_buckets, bucket < num_buckets, OFFSETS=False) > 0
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    score = probability(logits, at, bucket, usable, num_buckets, GROUP=GROUP, ROWS=ROWS)
    # a positive float orders as its bits do: the last bits of the score give way to the bucket's number, so that one
    # 32-bit key carries both (scores closer than 2^-13 of each other may swap at C = 1024)
    bits = (score + 1e-30).to(tl.int32, bitcast=True)
    key = tl.where(usable, (bits & -PADDED) | (PADDED - 1 - bucket), 0)
    if KEPT < PADDED:
        key = tl.topk(key, KEPT)
    else:
        key = tl.sort(key, descending=True)
    place = tl.arange(0, KEPT)
    best = tl.where(key >= PADDED, PADDED - 1 - (key & (PADDED - 1)), -1)
    tl.store(chosen + at * probes + place, best, mask=place < probes)


@triton.jit
def runs_kernel(
    run, heads, per_row, num_buckets, width,
    LISTS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr, LOGITS: tl.constexpr,
    SEATED: tl.constexpr, OVERLAP: tl.constexpr,
):
    """`bucket_runs`, one program a query and list."""
    # grid: (Q·H,)
    bucket_runs(run, tl.program_id(0).to(tl.int64), heads, per_row, num_buckets, width, LISTS=LISTS, GROUP=GROUP,
                ROWS=ROWS, PADDED=PADDED, LOGITS=LOGITS, SEATED=SEATED, OVERLAP=OVERLAP)


@triton.jit
def bucket_runs(
    run, at, heads, per_row, num_buckets, width,
    LISTS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr, LOGITS: tl.constexpr,
    SEATED: tl.constexpr, OVERLAP: tl.constexpr,
):
    """How many tokens of every bucket the budget takes, for query and list `at`, as runs of slots in the buckets'
    order: of each run the slot behind its last, LAST behind the last run, and what turns its slots into places of the
    index. Densities are compared as the upper halves of the bits of positive floats, plus one: zero is an empty
    bucket."""
    # run.scores   [Q, H, C] fp32           densities or, LOGITS, logits [Q, Hq, C]
    # run.offsets  [B, Hkv, C + 1] int32    where buckets begin in the index
    # run.budget   [Q] or by seat, int64    tokens; at most `width`
    # run.seats    [Q] int64                if SEATED
    # run.runs     [Q, H, 2, PADDED] int32  written: ends of runs; from slot to place
    # run.counts   [Q, H] int32             written: tokens
    row = at // heads
    kv = kept_row(run.seats, row // per_row, True, SEATED=SEATED) * (heads // LISTS) + at % heads // LISTS
    bucket = tl.arange(0, PADDED)
    inside = bucket < num_buckets
    begin = tl.load(run.offsets + kv * (num_buckets + 1) + bucket, mask=inside, other=0)
    size = sizes_of(run.offsets, kv, bucket, num_buckets, inside, OFFSETS=True)
    wanted = tl.minimum(tl.minimum(tl.load(run.budget + kept_row(run.seats, row, True, SEATED=SEATED)), width),
                        tl.sum(size, 0)).to(tl.int32)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    tl.store(run.counts + at, wanted)
    if LOGITS:
        score = probability(run.scores, at, bucket, size > 0, num_buckets, GROUP=GROUP, ROWS=ROWS)
        density = score / tl.maximum(size, 1).to(tl.float32)
    else:
        density = tl.load(run.scores + at * num_buckets + bucket, mask=size > 0, other=0.0)
    bits = tl.where(size > 0, (tl.maximum(density.to(tl.int32, bitcast=True), 0) >> 16) + 1, 0)
    # the largest density down to which there are as many tokens as wanted, two bits at a time (a sort takes longer)
    threshold, shift, digit = wanted * 0, wanted * 0 + 14, tl.arange(0, 4)
    for _ in range(8):
        higher = threshold | (digit << shift)
        reached = tl.sum(tl.where(bits[None, :] >= higher[:, None], size[None, :], 0), 1)
        threshold = tl.max(tl.where(reached >= wanted, higher, 0), 0)
        shift = tl.maximum(shift - 2, 0)
    above = tl.where(bits > threshold, size, 0)
    equal = tl.where(bits == threshold, size, 0)
    missing = wanted - tl.sum(above, 0) - (tl.cumsum(equal, 0) - equal)
    taken = above + tl.minimum(tl.maximum(missing, 0), equal)
    end = tl.cumsum(taken, 0)
    there = (taken > 0).to(tl.int32)
    number = tl.cumsum(there, 0) - 1
    ends = run.runs + at * 2 * PADDED
    tl.store(ends + number, end, mask=there > 0)
    tl.store(ends + PADDED + number, begin.to(tl.int32) + taken - end, mask=there > 0)
    tl.store(ends + bucket, LAST, mask=bucket >= tl.sum(there, 0))


@triton.jit
def tokens_of(order, runs, first, used, BLOCK: tl.constexpr, PADDED: tl.constexpr):
    """The tokens of BLOCK slots of one list from `first` on, int32, -1 where a slot is not used: of the first run that
    ends behind the slot, found by halves among the few that the slots lie in."""
    slot = first + tl.arange(0, BLOCK)
    ends = tl.load(runs + tl.arange(0, PADDED))
    # both numbers in one sum
    both = tl.sum((ends <= first).to(tl.int32) + 65536 * (ends < first + BLOCK).to(tl.int32), 0)
    low, more = both & 65535, (both >> 16) - (both & 65535)
    # the largest power of two that is no larger, from the exponent of a float
    half = tl.where(more > 0, 1 << tl.maximum((more.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127, 0), 0)
    run = tl.zeros_like(slot) + low
    while half > 0:
        end = tl.load(runs + run + half - 1, mask=run + half <= PADDED, other=LAST)
        run = tl.where(end <= slot, run + half, run)
        half //= 2
    shift = tl.load(runs + PADDED + run, mask=used, other=0)
    return tl.load(order + slot + shift, mask=used, other=-1).to(tl.int32)


@triton.jit
def fill_kernel(
    order, runs, counts, tokens, heads, per_row, width, o_row, o_head,
    LISTS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):
    """The tokens of BLOCK slots of one list."""
    # grid: (Q·H, blocks of slots)
    # order   [B, Hkv, M] int32           tokens by bucket; strides o_row, o_head
    # runs    [Q, H, 2, PADDED] int32     see `bucket_runs`
    # counts  [Q, H] int32                tokens of the list
    # tokens  [Q, H, width] int32         written, padded with -1
    at = tl.program_id(0).to(tl.int64)
    cache_row, head = at // heads // per_row, at % heads // LISTS
    slot = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    token = tokens_of(order + cache_row * o_row + head * o_head, runs + at * 2 * PADDED, tl.program_id(1) * BLOCK,
                      slot < tl.load(counts + at), BLOCK=BLOCK, PADDED=PADDED)
    tl.store(tokens + at * width + slot, token, mask=slot < width)
