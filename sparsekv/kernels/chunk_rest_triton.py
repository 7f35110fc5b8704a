"""The Triton kernel of `chunk_rest.py`; importing this module imports Triton.

Shapes: B rows of a cache, Hq query heads, Hkv KV heads, c queries of a chunk, d the head dimension, r features, w the
width of a map. Structs are those of `types.py` and `launch.py`.
"""

import triton
import triton.language as tl

from sparsekv.kernels.completion_triton import gelu, log_normal_cdf


@triton.jit
def weights_at(w, row, column, rows, columns):
    """Part of a matrix `[rows, columns]`."""
    return tl.load(w + row[:, None] * columns + column[None, :],
                   mask=(row < rows)[:, None] & (column < columns)[None, :], other=0.0)


@triton.jit
def numbers_at(b, place, count):
    """Part of a vector, in float32."""
    return tl.load(b + place, mask=place < count, other=0.0).to(tl.float32)


@triton.jit
def logs_kernel(
    q, maps, logs, heads_q, batch, count, dim, width, features,
    BLOCKS: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """Log features of ROWS queries of one head but for `b_out`. A block's hidden units are made and used INNER at a
    time, so that no matrix `[w, w]` is held whole."""
    # grid: (blocks of queries, B·Hq)
    # q     Tokens [B, Hq, c, d]   with RoPE
    # maps  `FeatureMapWeights` of the Hq query heads, of BLOCKS blocks, in the dtype of q
    # logs  [Hq, B, c, r] fp32     written
    row = (tl.program_id(1) // heads_q).to(tl.int64)
    head = (tl.program_id(1) % heads_q).to(tl.int64)
    slot = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    place, unit, feature = tl.arange(0, DIM), tl.arange(0, WIDTH), tl.arange(0, FEATURES)
    there = slot < count
    x = tl.load(q.base + row * q.row + head * q.head + slot[:, None] * q.token + place[None, :],
                mask=there[:, None] & (place < dim)[None, :], other=0.0)
    stem = weights_at(maps.w_in + head * dim * width, place, unit, dim, width)
    h = gelu(tl.dot(x, stem, input_precision="ieee") + numbers_at(maps.b_in + head * width, unit, width)[None, :])
    for step in tl.static_range(BLOCKS):
        at = head * BLOCKS + step
        alpha = tl.load(maps.alpha + at).to(tl.float32)
        seen = h.to(x.dtype)
        for begin in range(0, width, INNER):
            part = begin + tl.arange(0, INNER)
            down = weights_at(maps.w_a + at * width * width, unit, part, width, width)
            inner = gelu(tl.dot(seen, down, input_precision="ieee")
                         + numbers_at(maps.b_a + at * width, part, width)[None, :])
            up = weights_at(maps.w_b + at * width * width, part, unit, width, width)
            h = tl.dot((inner * alpha).to(x.dtype), up, h, input_precision="ieee")
    out = weights_at(maps.w_out + head * width * features, unit, feature, width, features)
    log = tl.dot(h.to(x.dtype), out, input_precision="ieee")
    tl.store(logs + ((head * batch + row) * count + slot)[:, None] * features + feature[None, :], log,
             mask=there[:, None] & (feature < features)[None, :])


@triton.jit
def rest_kernel(
    q, logs, b_out, offset, cache, centre, moments, o, lse, heads_q, heads_kv, o_row, batch, per_centre,
    per_key, count, rank, features,
    CENTRED: tl.constexpr, CAPPED: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, FEATURES: tl.constexpr,
):
    """What the features of ROWS queries of one head make of the sums, merged with their attention."""
    # grid: (B·Hq, blocks of queries)
    # q, o     Tokens [B, Hq, c, d]      q with RoPE; o is read and written
    # logs     [Hq, B, c, r] fp32        log features but for b_out, offset, shift and centre
    # b_out    [Hq, r]                   of the maps
    # offset   [Hq], or [B, Hq] by stride o_row
    # cache    `PhiCache`: m, z [B, Hkv, r], fp32; s [B, Hkv, r, d], over z and in the dtype of q
    # centre   [., Hkv, d]               if CENTRED: mean key times the softmax scale, of per_centre rows each
    # moments  `ScoreMoments`            if CAPPED, fp32; rank = ρ; size and bound [B], the others of per_key rows each
    # lse      [B, Hq, c] fp32           read and written: natural logarithm
    row = (tl.program_id(0) // heads_q).to(tl.int64)
    head = (tl.program_id(0) % heads_q).to(tl.int64)
    kv_head = head // (heads_q // heads_kv)
    kv = row * heads_kv + kv_head
    slot = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    place, feature = tl.arange(0, WIDTH), tl.arange(0, FEATURES)
    there, inside, kept = slot < count, place < DIM, feature < features
    mask = there[:, None] & inside[None, :]
    moved = tl.load(offset + row * o_row + head)
    along = tl.zeros([ROWS], tl.float32)
    limit, expected = float("inf"), tl.zeros([ROWS], tl.float32)
    if CENTRED or CAPPED:
        query = tl.load(q.base + row * q.row + head * q.head + slot[:, None] * q.token + place[None, :], mask=mask,
                        other=0.0)
    if CENTRED:
        mean = tl.load(centre + (row // per_centre * heads_kv + kv_head) * DIM + place, mask=inside, other=0.0)
        along = tl.sum(query.to(tl.float32) * mean.to(tl.float32)[None, :], 1)
    if CAPPED:
        described = row // per_key * heads_kv + kv_head
        key = tl.load(moments.key + described * DIM + place, mask=inside, other=0.0)
        part = tl.arange(0, RANK)
        factors = tl.load(moments.factors + (described * rank + part)[None, :] * DIM + place[:, None],
                          mask=(part < rank)[None, :] & inside[:, None], other=0.0)
        # as two numbers of the queries' precision each
        high = factors.to(query.dtype)
        alike = tl.dot(query, high, input_precision="ieee")
        alike += tl.dot(query, (factors - high.to(tl.float32)).to(query.dtype), input_precision="ieee")
        across = tl.load(moments.rest + described * DIM + place, mask=inside, other=0.0)
        wide = query.to(tl.float32)
        variance = tl.sum(alike * alike, 1) + tl.sum(wide * wide * across[None, :], 1)
        limit = tl.load(moments.bound + row)
        expected = (tl.log(tl.load(moments.size + row)) + tl.sum(wide * key[None, :], 1) + variance / 2
                    + log_normal_cdf(limit - tl.sqrt(variance)) + moved)
    shift = tl.load(cache.m + kv * features + feature, mask=kept, other=0.0)
    # shifts are of base 2
    added = moved + 0.6931471805599453 * tl.where(shift == float("-inf"), 0.0, shift)
    added += tl.load(b_out + head * features + feature, mask=kept, other=0.0).to(tl.float32)
    log = tl.load(logs + ((head * batch + row) * count + slot)[:, None] * features + feature[None, :],
                  mask=there[:, None] & kept[None, :], other=0.0) + added[None, :]
    if CENTRED:
        log += tl.where((feature >= features // 2)[None, :], along[:, None], 0.0)
    each = tl.load(cache.z + kv * features + feature, mask=kept, other=0.0)
    log = tl.where((each > 0)[None, :], log, float("-inf"))
    top = tl.max(log, 1)
    top = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp(log - top[:, None]) * each[None, :]
    mass = tl.sum(weight, 1)
    more = tl.where(mass > 0, tl.log(tl.where(mass > 0, mass, 1.0)) + top, float("-inf"))
    if CAPPED:
        more = tl.minimum(more, tl.where(limit == float("inf"), float("inf"), expected))
    found = tl.load(lse + (row * heads_q + head) * count + slot, mask=there, other=0.0)
    higher = tl.maximum(found, more)
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    part_found, part_more = tl.exp(found - safe), tl.exp(more - safe)
    total = part_found + part_more
    total = tl.where(total > 0, total, 1.0)
    share = (weight * (part_more / total / tl.where(mass > 0, mass, 1.0))[:, None]).to(cache.s.dtype.element_ty)
    part_found /= total
    # some columns at once: all of them may be more than shared memory holds
    for begin in tl.static_range(0, WIDTH, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        means = tl.load(cache.s + (kv * features + feature)[:, None] * DIM + column[None, :],
                        mask=kept[:, None] & (column < DIM)[None, :], other=0.0)
        at = o.base + row * o.row + head * o.head + slot[:, None] * o.token + column[None, :]
        mask = there[:, None] & (column < DIM)[None, :]
        out = tl.load(at, mask=mask, other=0.0).to(tl.float32) * part_found[:, None]
        out += tl.dot(share, means, input_precision="ieee")
        tl.store(at, out.to(o.base.dtype.element_ty), mask=mask)
    tl.store(lse + (row * heads_q + head) * count + slot, tl.log(total) + higher, mask=there)
