"""The Triton kernels of `chunk_tokens.py`; importing this module imports Triton.

Shapes: B rows of a cache, n chunks of each, Hkv KV heads, R representatives of a head, d the head dimension, N tokens,
of which `width` from `first` on are candidates of the first chunk, and `step` more of each after it, cut into `parts`
slices.
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
def slice_of(at, width, step, heads, chunks):
    """Where the candidates of this program, those of its chunk in equal slices, begin and end."""
    whole = width + ((at // heads) % chunks).to(tl.int32) * step
    per_part = tl.cdiv(whole, tl.num_programs(1))
    begin = tl.program_id(1) * per_part
    return begin, tl.minimum(begin + per_part, whole)


@triton.jit
def masses_kernel(
    asking, k, tops, masses, scale, first, width, step, heads, chunks, number,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
):
    """The largest score of every representative over a slice of the keys, and the sum of `exp(score − largest)`."""
    # grid: (B·n·Hkv, parts)
    # asking        [B·n, Hkv, R, d]          dense
    # k             Tokens [B, Hkv, N, d]
    # tops, masses  [B·n, Hkv, parts, R] fp32  written: natural logarithm; mass
    at = tl.program_id(0).to(tl.int64)
    query = asking_rows(asking, at, number, ROWS=ROWS, DIM=DIM, WIDTH=WIDTH)
    begin, end = slice_of(at, width, step, heads, chunks)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    for start in range(begin, end, BLOCK):
        place = start + tl.arange(0, BLOCK)
        key = key_rows(k, at // heads // chunks, at % heads, first + place, place < end, DIM=DIM, WIDTH=WIDTH)
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
    asking, k, tops, masses, bins, histogram, scale, count, b_row, h_row, first, width, step, heads, chunks, number,
    SLICES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
):
    """The bins of a slice of the keys, from their sums of softmax over the representatives, and how many keys are in
    each bin. The last program of a head to count finds the threshold."""
    # grid: (B·n·Hkv, parts)
    # asking        [B·n, Hkv, R, d]            dense
    # k             Tokens [B, Hkv, N, d]
    # tops, masses  [B·n, Hkv, parts, R] fp32   of `masses_kernel`
    # bins          [B·n, Hkv, b_row] uint8     written where there are candidates; behind them zeros before
    # histogram     [B·n, Hkv, h_row] int32     zeros before; bins and header are written; `count` will be chosen
    at = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, ROWS)
    query = asking_rows(asking, at, number, ROWS=ROWS, DIM=DIM, WIDTH=WIDTH)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    parts = tl.num_programs(1)
    for start in range(0, parts, SLICES):
        part = start + tl.arange(0, SLICES)
        there = (part < parts)[:, None] & (row < number)[None, :]
        cell = (at * parts + part)[:, None] * number + row[None, :]
        tops_here = tl.load(tops + cell, mask=there, other=float("-inf")) * LOG2_E
        higher = tl.maximum(top, tl.max(tops_here, 0))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        mass = mass * tl.exp2(top - safe) + tl.sum(
            tl.load(masses + cell, mask=there, other=0.0) * tl.exp2(tops_here - safe[None, :]), 0)
        top = higher
    # a row that is none gives nothing
    whole = tl.where(row < number, top + tl.log2(tl.maximum(mass, 1e-30)), float("inf"))
    begin, end = slice_of(at, width, step, heads, chunks)
    many = tl.zeros([BINS], tl.int32)
    every = tl.arange(0, BINS)
    for start in range(begin, end, BLOCK):
        place = start + tl.arange(0, BLOCK)
        key = key_rows(k, at // heads // chunks, at % heads, first + place, place < end, DIM=DIM, WIDTH=WIDTH)
        score = tl.dot(key.to(query.dtype), tl.trans(query), input_precision="ieee") * (scale * LOG2_E)
        share = tl.sum(tl.exp2(score - whole[None, :]), 1)
        upper = tl.minimum(tl.maximum((share.to(tl.int32, bitcast=True) >> SHIFT) - FLOOR, 0) + 1, BINS - 1)
        own = tl.where(place < end, upper, 0)
        tl.store(bins + at * b_row + place, own.to(tl.uint8), mask=place < end)
        here = tl.sum((own > 0).to(tl.int32), 0)
        many += tl.where(every > 0, tl.histogram(own, BINS, mask=own > 1), here)
    publish_counts(histogram + at * h_row, many, count, count, tl.num_programs(1))
