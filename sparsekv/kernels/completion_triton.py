"""The Triton kernels of `completion.py`; importing this module imports Triton.

Shapes: Q queries of B rows, Hq query heads, Hkv KV heads, d the head dimension, N tokens, r features, w the width of a
map. Features are natural logarithms where they are called so. Structs are those of `types.py` and `launch.py`.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

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
def matrix(w, row, rows, column, columns):
    """`[row, column]` of a matrix of so many rows and columns, zeros outside."""
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    return tl.load(w + row[:, None] * columns + column[None, :], mask=inside, other=0.0)


@triton.jit
def asked_for(weight, AHEAD: tl.constexpr):
    """A matrix, which from here on may be waited for: loads ahead of this are under way together. Without it each piece
    goes to shared memory, and is waited for, before the next is asked for. AHEAD: of half precision on a device."""
    if AHEAD:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [weight], dtype=weight.dtype, is_pure=False, pack=2)
    else:
        return weight


@triton.jit
def product(x, weight):
    """`x W` in the precision of W, summed in float32."""
    return tl.dot(x.to(weight.dtype), weight, input_precision="ieee")


@triton.jit
def summed(parts, at, unit, width, slot, used, SLICES: tl.constexpr, AHEAD: tl.constexpr):
    """Hidden layers `[slot, unit]` from their parts, added in one order."""
    place = parts + (at + slot)[:, None] * SLICES * width + unit[None, :]
    inside = used[:, None] & (unit < width)[None, :]
    h = tl.load(place, mask=inside, other=0.0)
    for i in tl.static_range(1, SLICES):
        h += tl.load(place + i * width, mask=inside, other=0.0)
    if AHEAD:  # else every part by itself changes hands on its way to the product
        h = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [h], dtype=tl.float32, is_pure=False, pack=1)
    return h


@triton.jit
def block_kernel(
    q, maps, before, parts, step, count, heads_q, together, dim, width,
    BLOCKS: tl.constexpr, FIRST: tl.constexpr, ROWS: tl.constexpr, SLICES: tl.constexpr, SLICE: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr, AHEAD: tl.constexpr, APART: tl.constexpr, OVERLAP: tl.constexpr,
):
    """One block of the maps of queries, for `together` queries of one head and SLICE of the block's units: their part
    of the next hidden layer, which is the sum of the parts. All weights are asked for before any is used."""
    # grid: (blocks of queries · Hq, SLICES)
    # q       Heads [Q, Hq, d]               with RoPE
    # maps    `FeatureMapWeights` of the Hq query heads, of BLOCKS blocks, in the dtype of q
    # before  [Hq, Q, SLICES, w] fp32        parts of the layer before, unless FIRST, which makes the stem
    # parts   [Hq, Q, SLICES, w] fp32        written
    # APART: what is read was complete before the kernel ahead of this one began; it is waited for before the writing
    head = (tl.program_id(0) % heads_q).to(tl.int64)
    first = (tl.program_id(0) // heads_q).to(tl.int64) * together
    slot, place, unit = tl.arange(0, ROWS), tl.arange(0, DIM), tl.arange(0, WIDTH)
    own = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    used = first + slot < tl.minimum(first + together, count)
    if OVERLAP:
        gdc_launch_dependents()
    at = head * BLOCKS + step
    if BLOCKS > 0:
        inward = matrix(maps.w_a + at * width * width, unit, width, own, width)
        outward = matrix(maps.w_b + at * width * width, own, width, unit, width)
        bias = tl.load(maps.b_a + at * width + own, mask=own < width, other=0.0).to(tl.float32)
        alpha = tl.load(maps.alpha + at).to(tl.float32)
    if FIRST:
        stem = matrix(maps.w_in + head * dim * width, place, dim, unit, width)
        x = tl.load(q.base + (first + slot)[:, None] * q.row + head * q.head + place[None, :],
                    mask=used[:, None] & (place < dim)[None, :], other=0.0)
        if AHEAD:
            tl.debug_barrier()
        h = gelu(product(asked_for(x, AHEAD=AHEAD), asked_for(stem, AHEAD=AHEAD))
                 + tl.load(maps.b_in + head * width + unit, mask=unit < width, other=0.0).to(tl.float32)[None, :])
    else:
        if OVERLAP and not APART:
            gdc_wait()
        h = summed(before, head * count + first, unit, width, slot, used, SLICES=SLICES, AHEAD=AHEAD)
        if AHEAD:
            tl.debug_barrier()
    out = tl.where(tl.program_id(1) == 0, h, 0.0)
    if BLOCKS > 0:
        inner = gelu(product(h, asked_for(inward, AHEAD=AHEAD)) + bias[None, :])
        out += alpha * product(inner, asked_for(outward, AHEAD=AHEAD))
    if OVERLAP and APART:
        gdc_wait()
    tl.store(parts + ((head * count + first + slot)[:, None] * SLICES + tl.program_id(1)) * width + unit[None, :], out,
             mask=used[:, None] & (unit < width)[None, :])


@triton.jit
def kept_of(
    cache, centre, offset, kv, at, row, last, feature, features, place, column, dim, CENTRED: tl.constexpr,
):
    """What a query's sums need of a request: some columns of `S`, `z`, `m`, the mean key if CENTRED, and the offset.
    Nothing is read for row `last`."""
    used = row < last
    kept, inside = feature < tl.where(used, features, 0), place < tl.where(used, dim, 0)
    sums = tl.load(cache.s + (kv * features + feature)[:, None] * dim + column[None, :],
                   mask=kept[:, None] & (column < dim)[None, :], other=0.0)
    mass = tl.load(cache.z + kv * features + feature, mask=kept, other=0.0)
    shift = tl.load(cache.m + kv * features + feature, mask=kept, other=0.0)
    mean = tl.zeros_like(place).to(tl.float32)
    if CENTRED:
        mean = tl.load(centre + kv * dim + place, mask=inside, other=0.0).to(tl.float32)
    return sums, mass, shift, mean, tl.load(offset + at, mask=used, other=0.0)


@triton.jit
def write_cap(
    q, moments, offset, cap, kv, at, cache_row, offset_at, dim, rank, DIM: tl.constexpr, RANK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """`mass_cap` of one query and head; q is its place."""
    place, part = tl.arange(0, DIM), tl.arange(0, RANK)
    inside = place < dim
    query = tl.load(q + place, mask=inside, other=0.0).to(tl.float32)
    key = tl.load(moments.key + kv * dim + place, mask=inside, other=0.0)
    rest = tl.load(moments.rest + kv * dim + place, mask=inside, other=0.0)
    factors = tl.load(moments.factors + (kv * rank + part)[:, None] * dim + place[None, :],
                      mask=(part < rank)[:, None] & inside[None, :], other=0.0)
    limit, size = tl.load(moments.bound + cache_row), tl.load(moments.size + cache_row)
    moved = tl.load(offset + offset_at)
    along = tl.sum(factors * query[None, :], 1)
    variance = tl.sum(along * along, 0) + tl.sum(rest * query * query, 0)
    expected = tl.log(size) + tl.sum(query * key, 0) + variance / 2 + log_normal_cdf(limit - tl.sqrt(variance)) + moved
    if OVERLAP:
        gdc_wait()
    tl.store(cap + at, tl.where(limit == float("inf"), float("inf"), expected))


@triton.jit
def query_kernel(
    q, maps, parts, offset, cache, centre, moments, seats, found, count, heads_q, heads_kv, per_row, together, o_row,
    dim, width, features, rank,
    CENTRED: tl.constexpr, CAPPED: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, SLICES: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr, FEATURES: tl.constexpr, COLUMNS: tl.constexpr, SEATED: tl.constexpr,
    AHEAD: tl.constexpr, APART: tl.constexpr, OVERLAP: tl.constexpr,
):
    """`log φ_q + offset + m` of `together` queries of one head, at most ROWS, as largest value and features relative to
    it, and what they make of COLUMNS of the cache. Every program of a head makes all of its features; the first of them
    writes what is no column. With CAPPED the last ones cap the mass."""
    # grid: (blocks of queries · Hq, blocks of columns, and one more if CAPPED)
    # q        Heads [Q, Hq, d]            with RoPE
    # maps     `FeatureMapWeights` of the Hq query heads, in the dtype of q
    # parts    [Hq, Q, SLICES, w] fp32     as `block_kernel` writes them
    # offset   [Hq], or [Q, Hq] by stride o_row; added to log features; [B, Hq] if SEATED
    # cache    `PhiCache`: m, z [B, Hkv, r], s [B, Hkv, r, d], fp32
    # centre   [B, Hkv, d]                 if CENTRED: mean key times the softmax scale
    # moments  `ScoreMoments`              if CAPPED, fp32; rank = ρ
    # seats    [Q] int64                   if SEATED: the queries' rows of B, and per_row = 1
    # found.features         [Q, Hq, r]          written, the largest 1
    # found.log_scale, mass  [Q, Hq] fp32        written
    # found.numerator        [Q, Hq, d] fp32     written
    # found.cap              [Q, Hq] fp32        written if CAPPED: natural logarithm of a mass
    # APART: as in `block_kernel`
    head = (tl.program_id(0) % heads_q).to(tl.int64)
    first = (tl.program_id(0) // heads_q).to(tl.int64) * together
    last = tl.minimum(first + together, count)
    kv_head = head // (heads_q // heads_kv)
    if OVERLAP:
        gdc_launch_dependents()
    if CAPPED:
        if tl.program_id(1) == tl.num_programs(1) - 1:
            for row in range(first, last):
                cache_row = kept_row(seats, row // per_row, True, SEATED=SEATED)
                write_cap(q.base + row * q.row + head * q.head, moments, offset, found.cap,
                          cache_row * heads_kv + kv_head, row * heads_q + head, cache_row,
                          (cache_row if SEATED else row) * o_row + head, dim, rank, DIM=DIM, RANK=RANK, OVERLAP=OVERLAP)
            return
    slot, place, unit = tl.arange(0, ROWS), tl.arange(0, DIM), tl.arange(0, WIDTH)
    feature, column = tl.arange(0, FEATURES), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    kept, used = feature < features, first + slot < last
    # all that does not come from the kernel ahead is asked for first, and a query's sums before those of the query
    # ahead of it are used
    weight = matrix(maps.w_out + head * width * features, unit, width, feature, features)
    bias = tl.load(maps.b_out + head * features + feature, mask=kept, other=0.0).to(tl.float32)
    cache_row = kept_row(seats, first // per_row, True, SEATED=SEATED)
    sums, mass, shift, mean, moved = kept_of(
        cache, centre, offset, cache_row * heads_kv + kv_head, (cache_row if SEATED else first) * o_row + head, first,
        last, feature, features, place, column, dim, CENTRED=CENTRED)
    x = tl.load(q.base + (first + slot)[:, None] * q.row + head * q.head + place[None, :],
                mask=used[:, None] & (place < dim)[None, :], other=0.0)
    if OVERLAP and not APART:
        gdc_wait()
    h = summed(parts, head * count + first, unit, width, slot, used, SLICES=SLICES, AHEAD=AHEAD)
    if AHEAD:
        tl.debug_barrier()
    logs = product(h, asked_for(weight, AHEAD=AHEAD)) + bias[None, :]
    if OVERLAP and APART:
        gdc_wait()
    for row in range(first, last):
        row_after = kept_row(seats, (row + 1) // per_row, row + 1 < last, SEATED=SEATED)
        sums_after, mass_after, shift_after, mean_after, moved_after = kept_of(
            cache, centre, offset, row_after * heads_kv + kv_head,
            (row_after if SEATED else row + 1) * o_row + head, row + 1, last, feature, features, place, column, dim,
            CENTRED=CENTRED)
        mine = (slot == row - first)[:, None]
        log = tl.sum(tl.where(mine, logs, 0.0), 0) + moved
        log += 0.6931471805599453 * tl.where(shift == float("-inf"), 0.0, shift)  # of base 2
        if CENTRED:
            query = tl.sum(tl.where(mine, x.to(tl.float32), 0.0), 0)
            log += tl.where(feature >= features // 2, tl.sum(query * mean, 0), 0.0)
        log = tl.where(kept, log, float("-inf"))
        top = tl.max(log, 0)
        rounded = tl.exp(log - tl.where(top == float("-inf"), 0.0, top)).to(found.features.dtype.element_ty)
        exact = rounded.to(tl.float32)
        at = row * heads_q + head
        tl.store(found.numerator + at * dim + column, tl.sum(exact[:, None] * sums, 0), mask=column < dim)
        if tl.program_id(1) == 0:
            tl.store(found.features + at * features + feature, rounded, mask=kept)
            tl.store(found.log_scale + at, top)
            tl.store(found.mass + at, tl.sum(exact * mass, 0))
        sums, mass, shift, mean, moved = sums_after, mass_after, shift_after, mean_after, moved_after


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
