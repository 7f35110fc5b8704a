"""The Triton kernel of `bucket_query.py`; importing this module imports Triton.

Shapes: Q queries of B rows, Hq query heads in groups of GROUP a KV head, d the head dimension, C buckets.
"""

import triton
import triton.language as tl

from sparsekv.kernels.routing_triton import kept_row


@triton.jit
def scores_of(query, means, at, number, scale, counts, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Scores `[ROWS, BLOCK]` of the buckets from `at` on, -inf for empty ones, and their counts `[BLOCK]`."""
    bucket, width = at + tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    known = bucket < number
    mean = tl.load(means + bucket[:, None] * DIM + width[None, :], mask=known[:, None] & (width < DIM)[None, :],
                   other=0.0)
    count = tl.load(counts + bucket, mask=known, other=0.0)
    score = tl.dot(query, tl.trans(mean.to(query.dtype)), input_precision="ieee") * scale
    return tl.where((count > 0)[None, :], score, float("-inf")), count


@triton.jit
def bucket_query_kernel(
    q, means, counts, sums, seats, features, log_scale, mass, numerator, scale, heads, number, per_row,
    GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr, SEATED: tl.constexpr,
):
    """Weights of the buckets for the queries of a group, relative to the largest, and their weighted sums."""
    # grid: (Q·Hkv, blocks of columns)
    # q                Heads [Q, Hq, d]          with RoPE; DIM = d
    # means            [B, Hkv, C, d]            number = C
    # counts           [B, Hkv, C] fp32
    # sums             [B, Hkv, C, d] fp32       of the values
    # seats            [Q] int64                 if SEATED: the queries' rows of B, and per_row = 1
    # features         [Q, Hq, C]                written by the first column block, the largest 1
    # log_scale, mass  [Q, Hq] fp32              the same
    # numerator        [Q, Hq, d] fp32           written
    row = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    cache_row = kept_row(seats, row if SEATED else row // per_row, True, SEATED=SEATED)
    group, width = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    kept, inside = group < GROUP, column < DIM
    query = tl.load(q.base + row * q.row + (head * GROUP + group)[:, None] * q.head + width[None, :],
                    mask=kept[:, None] & (width < DIM)[None, :], other=0.0)
    kv = cache_row * heads + head
    means += kv * number * DIM
    counts += kv * number
    sums += kv * number * DIM
    top = tl.full([ROWS], float("-inf"), tl.float32)
    for at in range(0, number, BLOCK):
        score, count = scores_of(query, means, at, number, scale, counts, DIM=DIM, WIDTH=WIDTH, BLOCK=BLOCK)
        top = tl.maximum(top, tl.max(score, 1))
    safe = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, COLUMNS], tl.float32)
    at_head = row * heads * GROUP + head * GROUP + group
    for at in range(0, number, BLOCK):
        score, count = scores_of(query, means, at, number, scale, counts, DIM=DIM, WIDTH=WIDTH, BLOCK=BLOCK)
        rounded = tl.exp(score - safe[:, None]).to(features.dtype.element_ty)
        bucket = at + tl.arange(0, BLOCK)
        if tl.program_id(1) == 0:
            tl.store(features + at_head[:, None] * number + bucket[None, :], rounded,
                     mask=kept[:, None] & (bucket < number)[None, :])
        exact = rounded.to(tl.float32)
        total += tl.sum(exact * count[None, :], 1)
        part = tl.load(sums + bucket[:, None] * DIM + column[None, :],
                       mask=(bucket < number)[:, None] & inside[None, :], other=0.0)
        out += tl.dot(exact, part, input_precision="ieee")
    tl.store(numerator + at_head[:, None] * DIM + column[None, :], out, mask=kept[:, None] & inside[None, :])
    if tl.program_id(1) == 0:
        tl.store(log_scale + at_head, top, mask=kept)
        tl.store(mass + at_head, total, mask=kept)
