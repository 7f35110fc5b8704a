"""The query's side of a completed step in one launch, one program a head: what `query_tune.py` compares with."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsekv.kernels import CompletionQuery, FeatureMapWeights, PhiCache, PhiState, ScoreMoments
from sparsekv.kernels.completion import QueryOutputs
from sparsekv.kernels.completion_triton import gelu, log_normal_cdf
from sparsekv.kernels.launch import as_heads, dense_last, padded, power_of_two, seats_or
from sparsekv.kernels.routing_triton import kept_row

PROGRAMS, ROWS, WARPS = 128, 16, 8


@triton.jit
def layer(x, w, b, num_in, num_out, INSIDE: tl.constexpr, OUTSIDE: tl.constexpr, BIAS: tl.constexpr):
    """`x W + b` of one map: x `[ROWS, INSIDE]`, padded with zeros past `num_in`."""
    rows, columns = tl.arange(0, INSIDE), tl.arange(0, OUTSIDE)
    weight = tl.load(w + rows[:, None] * num_out + columns[None, :],
                     mask=(rows < num_in)[:, None] & (columns < num_out)[None, :], other=0.0)
    y = tl.dot(x.to(weight.dtype), weight, input_precision="ieee")
    if BIAS:
        y += tl.load(b + columns, mask=columns < num_out, other=0.0).to(tl.float32)[None, :]
    return y


@triton.jit
def cached_sums(s, kv, feature, place, features, dim, counted):
    """The first `counted` rows of `S` of one KV head, `[FEATURES, DIM]`."""
    return tl.load(s + (kv * features + feature)[:, None] * dim + place[None, :],
                   mask=(feature < counted)[:, None] & (place < dim)[None, :], other=0.0)


@triton.jit
def whole_kernel(
    q, maps, offset, cache, centre, moments, seats, found, count, heads_q, heads_kv, per_row, together, o_row, dim,
    width, features, rank,
    CENTRED: tl.constexpr, CAPPED: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr, FEATURES: tl.constexpr, SEATED: tl.constexpr,
):
    """`log φ_q + offset + m` of `together` queries of one head, at most ROWS, as largest value and features relative to
    it, and what they make of the cache. The weights are read once for all of them."""
    # grid: (blocks of queries · Hq,)
    # q        Heads [Q, Hq, d]            with RoPE
    # maps     `FeatureMapWeights` of the Hq query heads, of BLOCKS blocks, in the dtype of q
    # offset   [Hq], or [Q, Hq] by stride o_row; added to log features; [B, Hq] if SEATED
    # cache    `PhiCache`: m, z [B, Hkv, r], s [B, Hkv, r, d], fp32
    # centre   [B, Hkv, d]                 if CENTRED: mean key times the softmax scale
    # moments  `ScoreMoments`              if CAPPED, fp32; rank = ρ
    # seats    [Q] int64                   if SEATED: the queries' rows of B, and per_row = 1
    # found.features         [Q, Hq, r]          written, the largest 1
    # found.log_scale, mass  [Q, Hq] fp32        written
    # found.numerator        [Q, Hq, d] fp32     written
    # found.cap              [Q, Hq] fp32        written if CAPPED: natural logarithm of a mass
    head = (tl.program_id(0) % heads_q).to(tl.int64)
    first = (tl.program_id(0) // heads_q).to(tl.int64) * together
    last = tl.minimum(first + together, count)
    slot, place, feature = tl.arange(0, ROWS), tl.arange(0, DIM), tl.arange(0, FEATURES)
    kept, inside = feature < features, place < dim
    x = tl.load(q.base + (first + slot)[:, None] * q.row + head * q.head + place[None, :],
                mask=(first + slot < last)[:, None] & inside[None, :], other=0.0)
    kv_head = head // (heads_q // heads_kv)
    # a query's sums are asked for before those of the query ahead of it are used
    cache_row = kept_row(seats, first // per_row, True, SEATED=SEATED)
    sums = cached_sums(cache.s, cache_row * heads_kv + kv_head, feature, place, features, dim, features)
    h = gelu(layer(x, maps.w_in + head * dim * width, maps.b_in + head * width, dim, width, INSIDE=DIM, OUTSIDE=WIDTH,
                   BIAS=True))
    for step in tl.static_range(BLOCKS):
        at = head * BLOCKS + step
        inner = gelu(layer(h, maps.w_a + at * width * width, maps.b_a + at * width, width, width, INSIDE=WIDTH,
                           OUTSIDE=WIDTH, BIAS=True))
        h += tl.load(maps.alpha + at).to(tl.float32) * layer(inner, maps.w_b + at * width * width, maps.b_a, width,
                                                             width, INSIDE=WIDTH, OUTSIDE=WIDTH, BIAS=False)
    logs = layer(h, maps.w_out + head * width * features, maps.b_out + head * features, width, features, INSIDE=WIDTH,
                 OUTSIDE=FEATURES, BIAS=True)
    for row in range(first, last):
        kv = cache_row * heads_kv + kv_head
        row_after = kept_row(seats, (row + 1) // per_row, row + 1 < last, SEATED=SEATED)
        after = cached_sums(cache.s, row_after * heads_kv + kv_head, feature, place, features, dim,
                            tl.where(row + 1 < last, features, 0))
        mine = (slot == row - first)[:, None]
        query = tl.sum(tl.where(mine, x.to(tl.float32), 0.0), 0)
        shift = tl.load(cache.m + kv * features + feature, mask=kept, other=0.0)
        mass = tl.load(cache.z + kv * features + feature, mask=kept, other=0.0)
        moved = tl.load(offset + (cache_row if SEATED else row) * o_row + head)
        log = tl.sum(tl.where(mine, logs, 0.0), 0) + moved
        log += 0.6931471805599453 * tl.where(shift == float("-inf"), 0.0, shift)  # of base 2
        if CENTRED:
            mean = tl.load(centre + kv * dim + place, mask=inside, other=0.0).to(tl.float32)
            log += tl.where(feature >= features // 2, tl.sum(query * mean, 0), 0.0)
        log = tl.where(kept, log, float("-inf"))
        top = tl.max(log, 0)
        rounded = tl.exp(log - tl.where(top == float("-inf"), 0.0, top)).to(found.features.dtype.element_ty)
        exact = rounded.to(tl.float32)
        at = row * heads_q + head
        tl.store(found.features + at * features + feature, rounded, mask=kept)
        tl.store(found.log_scale + at, top)
        tl.store(found.mass + at, tl.sum(exact * mass, 0))
        tl.store(found.numerator + at * dim + place, tl.sum(exact[:, None] * sums, 0), mask=inside)
        if CAPPED:
            score = tl.sum(query * tl.load(moments.key + kv * dim + place, mask=inside, other=0.0), 0)
            part = tl.arange(0, RANK)
            along = tl.sum(tl.load(moments.factors + (kv * rank + part)[:, None] * dim + place[None, :],
                                   mask=(part < rank)[:, None] & inside[None, :], other=0.0) * query[None, :], 1)
            across = tl.load(moments.rest + kv * dim + place, mask=inside, other=0.0) * query * query
            variance = tl.sum(along * along, 0) + tl.sum(across, 0)
            limit = tl.load(moments.bound + cache_row)
            expected = (tl.log(tl.load(moments.size + cache_row)) + score + variance / 2
                        + log_normal_cdf(limit - tl.sqrt(variance)))
            tl.store(found.cap + at, tl.where(limit == float("inf"), float("inf"), expected + moved))
        sums, cache_row = after, row_after


def launch_whole(
    q: Tensor, maps: FeatureMapWeights, offset: Tensor, state: PhiState, seats: Tensor | None = None,
) -> CompletionQuery:
    """`phi_query` through Triton, all layers of a head's map in one program."""
    q, offset = dense_last(q), offset.contiguous()
    count, heads_q, dim = q.shape
    width, features = maps.w_out.shape[-2:]

    def fresh(*shape: int) -> Tensor:
        return torch.empty(count, heads_q, *shape, dtype=torch.float32, device=q.device)

    found = torch.empty(count, heads_q, features, dtype=q.dtype, device=q.device)
    log_scale, mass, numerator = fresh(), fresh(), fresh(dim)
    cap = None if state.moments is None else fresh()
    moments = ScoreMoments(*((mass,) * 5 if state.moments is None else (x.contiguous() for x in state.moments)))
    rank = 1 if state.moments is None else state.moments.factors.shape[2]
    together = min(ROWS, max(1, -(-count * heads_q // PROGRAMS)))
    outputs = QueryOutputs(found, log_scale, mass, numerator, mass if cap is None else cap)
    whole_kernel[(-(-count // together) * heads_q,)](
        as_heads(q), FeatureMapWeights(*(w.contiguous() for w in maps)), offset,
        PhiCache(*(x.contiguous() for x in state[:3])), state.m if state.centre is None else state.centre.contiguous(),
        moments, seats_or(seats, mass), outputs, count, heads_q, state.m.shape[1],
        1 if seats is not None else count // state.m.shape[0], together,
        heads_q if offset.dim() == 2 else 0, dim, width, features, rank,
        CENTRED=state.centre is not None, CAPPED=cap is not None, RANK=power_of_two(rank), ROWS=ROWS,
        BLOCKS=maps.alpha.shape[-1], DIM=padded(dim), WIDTH=padded(width), FEATURES=padded(features),
        SEATED=seats is not None, num_warps=WARPS)
    return CompletionQuery(found, log_scale, mass, numerator, cap, seats=seats)
