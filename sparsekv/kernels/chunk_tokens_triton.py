"""The Triton kernels of `chunk_tokens.py`; importing this module imports Triton.

Shapes: B rows of a cache, Hkv KV heads, R representatives of a head, d the head dimension, N tokens, of which `width`
from `first` on are candidates, cut into `parts` slices of `per_part`.
"""

import triton
import triton.language as tl

from sparsekv.kernels import histogram as layout
from sparsekv.kernels.sketch_triton import publish_counts

BINS: tl.constexpr = tl.constexpr(layout.BINS)
FLOOR: tl.constexpr = tl.constexpr(layout.FLOOR)
SHIFT: tl.constexpr = tl.constexpr(layout.SHIFT)
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def asking_rows(asking, at, number, ROWS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """The representatives of a row and head, `[ROWS, WIDTH]`."""
    row, place = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    return tl.load(asking + (at * number + row)[:, None] * DIM + place[None, :],
                   mask=(row < number)[:, None] & (place < DIM)[None, :], other=0.0)


@triton.jit
def key_rows(k, row, head, token, valid, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Keys `[BLOCK, WIDTH]` of a row and head."""
    place = tl.arange(0, WIDTH)
    return tl.load(k.base + row * k.row + head * k.head + token.to(tl.int64)[:, None] * k.token + place[None, :],
                   mask=valid[:, None] & (place < DIM)[None, :], other=0.0)


@triton.jit
def masses_kernel(
    asking, k, tops, masses, scale, first, width, per_part, heads, number,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
):
    """The largest score of every representative over a slice of the keys, and the sum of `exp(score − largest)`."""
    # grid: (B·Hkv, parts)
    # asking        [B, Hkv, R, d]            dense
    # k             Tokens [B, Hkv, N, d]
    # tops, masses  [B, Hkv, parts, R] fp32   written: natural logarithm; mass
    at = tl.program_id(0).to(tl.int64)
    query = asking_rows(asking, at, number, ROWS=ROWS, DIM=DIM, WIDTH=WIDTH)
    begin = tl.program_id(1) * per_part
    end = tl.minimum(begin + per_part, width)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    for start in range(begin, end, BLOCK):
        place = start + tl.arange(0, BLOCK)
        key = key_rows(k, at // heads, at % heads, first + place, place < end, DIM=DIM, WIDTH=WIDTH)
        score = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee") * (scale * LOG2_E)
        score = tl.where((place < end)[None, :], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        mass = mass * tl.exp2(top - higher) + tl.sum(tl.exp2(score - higher[:, None]), 1)
        top = higher
    row = tl.arange(0, ROWS)
    out = (at * tl.num_programs(1) + tl.program_id(1)) * number + row
    tl.store(tops + out, top / LOG2_E, mask=row < number)
    tl.store(masses + out, mass, mask=row < number)


@triton.jit
def bins_kernel(
    asking, k, lse, bins, histogram, scale, count, h_row, first, width, per_part, heads, number,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
):
    """The bins of a slice of the keys, from their sums of softmax over the representatives, and how many keys are in
    each bin. The last program of a head to count finds the threshold."""
    # grid: (B·Hkv, parts)
    # asking     [B, Hkv, R, d]           dense
    # k          Tokens [B, Hkv, N, d]
    # lse        [B, Hkv, R] fp32         natural logarithm of a representative's mass over all candidates
    # bins       [B, Hkv, width] uint8    written
    # histogram  [B, Hkv, h_row] int32    zeros before; bins and header are written; `count` tokens will be chosen
    at = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, ROWS)
    query = asking_rows(asking, at, number, ROWS=ROWS, DIM=DIM, WIDTH=WIDTH)
    whole = tl.load(lse + at * number + row, mask=row < number, other=float("inf")) * LOG2_E
    begin = tl.program_id(1) * per_part
    end = tl.minimum(begin + per_part, width)
    many = tl.zeros([BINS], tl.int32)
    every = tl.arange(0, BINS)
    for start in range(begin, end, BLOCK):
        place = start + tl.arange(0, BLOCK)
        key = key_rows(k, at // heads, at % heads, first + place, place < end, DIM=DIM, WIDTH=WIDTH)
        score = tl.dot(key.to(query.dtype), tl.trans(query), input_precision="ieee") * (scale * LOG2_E)
        share = tl.sum(tl.exp2(score - whole[None, :]), 1)
        upper = tl.minimum(tl.maximum((share.to(tl.int32, bitcast=True) >> SHIFT) - FLOOR, 0) + 1, BINS - 1)
        own = tl.where(place < end, upper, 0)
        tl.store(bins + at * width + place, own.to(tl.uint8), mask=place < end)
        here = tl.sum((own > 0).to(tl.int32), 0)
        many += tl.where(every > 0, tl.histogram(own, BINS, mask=own > 1), here)
    publish_counts(histogram + at * h_row, many, count, count, tl.num_programs(1))
