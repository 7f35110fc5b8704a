"""Sums over the attention of sampled queries, scores kept in registers: what capture's statistics are made of.

Triton only: the plain-torch twin is `capture/statistics.py`, whose results these must equal. Every program owns a block
of queries of one head and walks over the keys up to its last query.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

ROWS = 64
FEW_ROWS = 16
FEW_PROGRAMS = 512
BLOCK = 64
ABOVE_BLOCK = 32
EDGES = 8


def mass_summary(
    queries: Tensor, keys: Tensor, positions: Tensor, *, scale: float, sink_size: int, window_size: int,
) -> tuple[Tensor, ...]:
    """queries `[Hq, T, d]`, keys `[Hkv, N, d]` with RoPE, positions `[T]` -> `[Hq, T]` each: the largest score `top`;
    the sums of `exp(s − top)` over all visible keys, the sink and the mid region; `Σ_mid exp(s − top) (s − top)`; score
    and position (int64) of the best key outside the sink."""
    heads_q, count, dim = queries.shape
    queries, positions = queries.contiguous(), positions.to(torch.int32)
    out = torch.empty(7, heads_q, count, dtype=torch.float32, device=queries.device)
    best = torch.empty(heads_q, count, dtype=torch.int32, device=queries.device)
    summary, _ = kernels()
    rows = _rows(heads_q, count)
    summary[(-(-count // rows), heads_q)](
        queries, keys, positions, out, best, scale, count, sink_size, window_size, heads_q, keys.stride(0),
        keys.stride(1), GROUP=heads_q // keys.shape[0], ROWS=rows, DIM=dim, WIDTH=_padded(dim), BLOCK=BLOCK,
        num_warps=4, num_stages=2)
    return (*out[:6].unbind(0), best.long())


def mass_above(
    queries: Tensor, keys: Tensor, positions: Tensor, thresholds: Tensor, lse: Tensor, *, scale: float,
) -> tuple[Tensor, Tensor]:
    """Share of the attention, and number of keys, with scores of at least each threshold: thresholds `[Hq, T, 8]`,
    lse `[Hq, T]` -> `[Hq, T, 8]` twice, float32."""
    heads_q, count, dim = queries.shape
    queries, positions = queries.contiguous(), positions.to(torch.int32)
    mass = torch.empty(heads_q, count, EDGES, dtype=torch.float32, device=queries.device)
    number = torch.empty_like(mass)
    _, above = kernels()
    rows = _rows(heads_q, count)
    above[(-(-count // rows), heads_q)](
        queries, keys, positions, thresholds.contiguous(), lse.contiguous(), mass, number, scale, count,
        keys.stride(0), keys.stride(1), GROUP=heads_q // keys.shape[0], ROWS=rows, DIM=dim, WIDTH=_padded(dim),
        BLOCK=ABOVE_BLOCK, EDGES=EDGES, num_warps=8 if rows == ROWS else 4, num_stages=2)
    return mass, number


def _rows(heads: int, count: int) -> int:
    """Queries a program: fewer where there would be too few programs to fill the device."""
    return ROWS if heads * count >= FEW_PROGRAMS * ROWS else FEW_ROWS


def _padded(dim: int) -> int:
    return max(16, 1 << (dim - 1).bit_length())


@functools.cache
def kernels() -> tuple[Any, Any]:
    """The jitted kernels; importing Triton waits until they are wanted."""
    import triton
    import triton.language as tl

    @triton.jit
    def summary_kernel(
        q, k, positions, out, best, scale, count, sink, window, heads_q, k_head, k_token,
        GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ):
        head = tl.program_id(1).to(tl.int64)
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        width = tl.arange(0, WIDTH)
        column = tl.arange(0, BLOCK)
        place = tl.load(positions + row, mask=row < count, other=0)
        query = tl.load(q + (head * count + row)[:, None] * DIM + width[None, :],
                        mask=(row < count)[:, None] & (width < DIM)[None, :], other=0.0)
        key_base = k + (head // GROUP) * k_head
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        sinks = tl.zeros([ROWS], tl.float32)
        middle = tl.zeros([ROWS], tl.float32)
        energy = tl.zeros([ROWS], tl.float32)
        score_best = tl.full([ROWS], float("-inf"), tl.float32)
        at_best = tl.zeros([ROWS], tl.int32)
        last = tl.max(place, 0) + 1
        for at in range(0, last, BLOCK):
            token = at + column
            key = tl.load(key_base + token.to(tl.int64)[:, None] * k_token + width[None, :],
                          mask=(token < last)[:, None] & (width < DIM)[None, :], other=0.0)
            score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
            score = tl.where(token[None, :] <= place[:, None], score, float("-inf"))
            higher = tl.maximum(top, tl.max(score, 1))
            keep = tl.exp(top - higher)
            relative = tl.maximum(score - higher[:, None], -10000.0)
            weight = tl.exp(relative)
            energy = tl.where(middle > 0, keep * (energy + middle * (top - higher)), 0.0)
            total = total * keep + tl.sum(weight, 1)
            sinks = sinks * keep + tl.sum(tl.where(token[None, :] < sink, weight, 0.0), 1)
            inside = (token[None, :] >= sink) & (token[None, :] <= place[:, None] - window)
            weight = tl.where(inside, weight, 0.0)
            middle = middle * keep + tl.sum(weight, 1)
            energy += tl.sum(weight * relative, 1)
            outside = tl.where(token[None, :] >= sink, score, float("-inf"))
            here = tl.max(outside, 1)
            where = tl.min(tl.where(outside == here[:, None], token[None, :], 2147483647), 1)
            at_best = tl.where(here > score_best, where, at_best)
            score_best = tl.maximum(score_best, here)
            top = higher
        slot = head * count + row
        plane = heads_q.to(tl.int64) * count
        tl.store(out + slot, top, mask=row < count)
        tl.store(out + plane + slot, total, mask=row < count)
        tl.store(out + 2 * plane + slot, sinks, mask=row < count)
        tl.store(out + 3 * plane + slot, middle, mask=row < count)
        tl.store(out + 4 * plane + slot, energy, mask=row < count)
        tl.store(out + 5 * plane + slot, score_best, mask=row < count)
        tl.store(best + slot, at_best, mask=row < count)

    @triton.jit
    def above_kernel(
        q, k, positions, thresholds, lse, mass, number, scale, count, k_head, k_token,
        GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
        EDGES: tl.constexpr,
    ):
        head = tl.program_id(1).to(tl.int64)
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        width = tl.arange(0, WIDTH)
        column = tl.arange(0, BLOCK)
        place = tl.load(positions + row, mask=row < count, other=0)
        query = tl.load(q + (head * count + row)[:, None] * DIM + width[None, :],
                        mask=(row < count)[:, None] & (width < DIM)[None, :], other=0.0)
        slot = head * count + row
        norm = tl.load(lse + slot, mask=row < count, other=0.0)
        at_edge = thresholds + slot * EDGES
        # one accumulator an edge and element of the tile: nothing is summed across threads before the end
        t0 = tl.load(at_edge + 0, mask=row < count, other=0.0)[:, None]
        t1 = tl.load(at_edge + 1, mask=row < count, other=0.0)[:, None]
        t2 = tl.load(at_edge + 2, mask=row < count, other=0.0)[:, None]
        t3 = tl.load(at_edge + 3, mask=row < count, other=0.0)[:, None]
        t4 = tl.load(at_edge + 4, mask=row < count, other=0.0)[:, None]
        t5 = tl.load(at_edge + 5, mask=row < count, other=0.0)[:, None]
        t6 = tl.load(at_edge + 6, mask=row < count, other=0.0)[:, None]
        t7 = tl.load(at_edge + 7, mask=row < count, other=0.0)[:, None]
        m0 = tl.zeros([ROWS, BLOCK], tl.float32)
        n0 = tl.zeros([ROWS, BLOCK], tl.float32)
        m1 = tl.zeros([ROWS, BLOCK], tl.float32)
        n1 = tl.zeros([ROWS, BLOCK], tl.float32)
        m2 = tl.zeros([ROWS, BLOCK], tl.float32)
        n2 = tl.zeros([ROWS, BLOCK], tl.float32)
        m3 = tl.zeros([ROWS, BLOCK], tl.float32)
        n3 = tl.zeros([ROWS, BLOCK], tl.float32)
        m4 = tl.zeros([ROWS, BLOCK], tl.float32)
        n4 = tl.zeros([ROWS, BLOCK], tl.float32)
        m5 = tl.zeros([ROWS, BLOCK], tl.float32)
        n5 = tl.zeros([ROWS, BLOCK], tl.float32)
        m6 = tl.zeros([ROWS, BLOCK], tl.float32)
        n6 = tl.zeros([ROWS, BLOCK], tl.float32)
        m7 = tl.zeros([ROWS, BLOCK], tl.float32)
        n7 = tl.zeros([ROWS, BLOCK], tl.float32)
        key_base = k + (head // GROUP) * k_head
        last = tl.max(place, 0) + 1
        for at in range(0, last, BLOCK):
            token = at + column
            key = tl.load(key_base + token.to(tl.int64)[:, None] * k_token + width[None, :],
                          mask=(token < last)[:, None] & (width < DIM)[None, :], other=0.0)
            score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
            score = tl.where(token[None, :] <= place[:, None], score, float("-inf"))
            weight = tl.exp(score - norm[:, None])
            m0 += tl.where(score >= t0, weight, 0.0)
            n0 += tl.where(score >= t0, 1.0, 0.0)
            m1 += tl.where(score >= t1, weight, 0.0)
            n1 += tl.where(score >= t1, 1.0, 0.0)
            m2 += tl.where(score >= t2, weight, 0.0)
            n2 += tl.where(score >= t2, 1.0, 0.0)
            m3 += tl.where(score >= t3, weight, 0.0)
            n3 += tl.where(score >= t3, 1.0, 0.0)
            m4 += tl.where(score >= t4, weight, 0.0)
            n4 += tl.where(score >= t4, 1.0, 0.0)
            m5 += tl.where(score >= t5, weight, 0.0)
            n5 += tl.where(score >= t5, 1.0, 0.0)
            m6 += tl.where(score >= t6, weight, 0.0)
            n6 += tl.where(score >= t6, 1.0, 0.0)
            m7 += tl.where(score >= t7, weight, 0.0)
            n7 += tl.where(score >= t7, 1.0, 0.0)
        tl.store(mass + slot * EDGES + 0, tl.sum(m0, 1), mask=row < count)
        tl.store(number + slot * EDGES + 0, tl.sum(n0, 1), mask=row < count)
        tl.store(mass + slot * EDGES + 1, tl.sum(m1, 1), mask=row < count)
        tl.store(number + slot * EDGES + 1, tl.sum(n1, 1), mask=row < count)
        tl.store(mass + slot * EDGES + 2, tl.sum(m2, 1), mask=row < count)
        tl.store(number + slot * EDGES + 2, tl.sum(n2, 1), mask=row < count)
        tl.store(mass + slot * EDGES + 3, tl.sum(m3, 1), mask=row < count)
        tl.store(number + slot * EDGES + 3, tl.sum(n3, 1), mask=row < count)
        tl.store(mass + slot * EDGES + 4, tl.sum(m4, 1), mask=row < count)
        tl.store(number + slot * EDGES + 4, tl.sum(n4, 1), mask=row < count)
        tl.store(mass + slot * EDGES + 5, tl.sum(m5, 1), mask=row < count)
        tl.store(number + slot * EDGES + 5, tl.sum(n5, 1), mask=row < count)
        tl.store(mass + slot * EDGES + 6, tl.sum(m6, 1), mask=row < count)
        tl.store(number + slot * EDGES + 6, tl.sum(n6, 1), mask=row < count)
        tl.store(mass + slot * EDGES + 7, tl.sum(m7, 1), mask=row < count)
        tl.store(number + slot * EDGES + 7, tl.sum(n7, 1), mask=row < count)

    return summary_kernel, above_kernel
