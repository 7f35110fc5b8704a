"""The Triton kernels of `completion.py`; importing this module imports Triton.

Shapes: Q queries of B rows, Hq query heads, Hkv KV heads, d the head dimension, N tokens, r features, w the width of a
map. Features are natural logarithms where they are called so. Structs are those of `types.py` and `launch.py`.
"""

import triton
import triton.language as tl

from sparsekv.kernels.routing_triton import kept_row


@triton.jit
def gelu(x):
    """The tanh approximation."""
    return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def log_normal_cdf(x):
    """Logarithm of the standard normal distribution function, right to 1e-7 wherever float32 reaches: from a Chebyshev
    fit of `log erfc` (Press et al., Numerical Recipes, `erfcc`)."""
    z = tl.abs(x) * 0.7071067811865476
    t = 1.0 / (1.0 + 0.5 * z)
    fit = -0.82215223 + t * 0.17087277
    fit = -1.13520398 + t * (1.48851587 + t * fit)
    fit = -0.18628806 + t * (0.27886807 + t * fit)
    fit = 0.37409196 + t * (0.09678418 + t * fit)
    tail = tl.log(t) - z * z - 1.26551223 + t * (1.00002368 + t * fit) - 0.6931471805599453
    return tl.where(x < 0, tail, tl.log(1.0 - tl.exp(tail)))


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


@triton.jit(do_not_specialize=["count"])
def query_kernel(
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
    # a query's sums are loaded before those of the query ahead of it are used
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


@triton.jit
def factor_kernel(covariance, rows, rest, dim, rank, DIM: tl.constexpr, RANK: tl.constexpr):
    """Pivoted Cholesky steps of one covariance: a step reads one of its rows."""
    # grid: (matrices,)
    # covariance  [matrices, d, d] fp32   dim = d
    # rows        [matrices, ρ, d] fp32   written; rank = ρ
    # rest        [matrices, d] fp32      written: the variances that are left
    at = tl.program_id(0).to(tl.int64)
    place, part = tl.arange(0, DIM), tl.arange(0, RANK)
    inside = place < dim
    covariance += at * dim * dim
    left = tl.load(covariance + place * (dim + 1), mask=inside, other=0.0)
    least = 1e-6 * tl.max(left, 0)
    found = tl.zeros([RANK, DIM], tl.float32)
    for step in range(rank):
        size, pivot = tl.max(left, 0), tl.argmax(left, 0)
        row = tl.load(covariance + pivot * dim + place, mask=inside, other=0.0)
        here = tl.sum(tl.where((place == pivot)[None, :], found, 0.0), 1)
        row -= tl.sum(here[:, None] * found, 0)
        row = tl.where(size > least, row / tl.sqrt(tl.maximum(size, 1e-30)), 0.0)
        found = tl.where((part == step)[:, None], row[None, :], found)
        left = tl.maximum(left - row * row, 0.0)
    tl.store(rest + at * dim + place, left, mask=inside)
    tl.store(rows + (at * rank + part)[:, None] * dim + place[None, :], found,
             mask=(part < rank)[:, None] & inside[None, :])
