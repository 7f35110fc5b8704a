"""The Triton kernels of `features.py`; importing this module imports Triton.

Shapes: B rows of a cache, Q queries, Hkv KV heads, d the head dimension, N tokens, u units and r features of the map of
keys. Structs are those of `types.py` and `launch.py`.
"""

import triton
import triton.language as tl


@triton.jit
def map_of_keys(
    maps, head, kv, dim, units, features, DIM: tl.constexpr, UNITS: tl.constexpr, FEATURES: tl.constexpr,
):
    """The map of keys of one KV head and request, `kv` among all of both: `[DIM, UNITS]`, `[UNITS]`,
    `[UNITS, FEATURES]` and `[FEATURES]`, of which those that are not there are -inf in the last."""
    place, unit, feature = tl.arange(0, DIM), tl.arange(0, UNITS), tl.arange(0, FEATURES)
    first = tl.load(maps.w_in + (head * dim + place)[:, None] * units + unit[None, :],
                    mask=(place < dim)[:, None] & (unit < units)[None, :], other=0.0)
    moved = tl.load(maps.bias + kv * units + unit, mask=unit < units, other=0.0)
    second = tl.load(maps.w_out + (head * units + unit)[:, None] * features + feature[None, :],
                     mask=(unit < units)[:, None] & (feature < features)[None, :], other=0.0)
    last = tl.load(maps.b_out + head * features + feature, mask=feature < features, other=float("-inf"))
    return first, moved, second, last


@triton.jit
def log_features(key, w_in, bias, w_out, b_out):
    """Logarithms to the base 2 of the features of keys `[BLOCK, DIM]`: `[BLOCK, FEATURES]`. The products begin with
    their biases, `[BLOCK, UNITS]` and `[BLOCK, FEATURES]`. What is summed and what is taken out again come from here
    alone, because in another order of sums a feature may round the other way."""
    hidden = tl.maximum(tl.dot(key.to(w_in.dtype), w_in, bias, input_precision="ieee"), 0.0)
    return tl.dot(hidden.to(w_out.dtype), w_out, b_out, input_precision="ieee")


@triton.jit
def no_tokens(FEATURES: tl.constexpr, DIM: tl.constexpr):
    """`(m, z, S)` of so many features over no tokens."""
    return (tl.full([FEATURES], float("-inf"), tl.float32), tl.zeros([FEATURES], tl.float32),
            tl.zeros([FEATURES, DIM], tl.float32))


@triton.jit
def put(cache, at, top, mass, sums, dim, kept, DIM: tl.constexpr):
    """Write `(m, z, S)` of the features at places `at`, those that are kept."""
    width = tl.arange(0, DIM)
    tl.store(cache.m + at, top, mask=kept)
    tl.store(cache.z + at, mass, mask=kept)
    tl.store(cache.s + at[:, None] * dim + width[None, :], sums, mask=kept[:, None] & (width < dim)[None, :])


@triton.jit
def every_row(bias, BLOCK: tl.constexpr):
    """A bias `[N]` in each of BLOCK rows."""
    return tl.broadcast_to(bias[None, :], [BLOCK, bias.shape[0]])


@triton.jit(do_not_specialize=["heads", "length"])
def sums_kernel(
    k, v, maps, firsts, lasts, cache, heads, length, dim, units, features,
    BLOCK: tl.constexpr, DIM: tl.constexpr, UNITS: tl.constexpr, FEATURES: tl.constexpr,
):
    """`(m, z, S)` of one slice of a row's keys. The shift rises in powers of two as the blocks go by, by which what was
    summed is multiplied without rounding."""
    # grid: (B·Hkv, slices)
    # k, v           Tokens [B, Hkv, N, d]         keys with RoPE
    # maps           `KeyFeatures`, its shift not taken off
    # firsts, lasts  [B] int64                     the tokens that count
    # cache.m, z     [B, Hkv, slices, r] fp32      written, a slice's own
    # cache.s        [B, Hkv, slices, r, d] fp32   written, the same
    row = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    feature, width = tl.arange(0, FEATURES), tl.arange(0, DIM)
    wide = (width < dim)[None, :]
    first = tl.maximum(tl.load(firsts + row), 0).to(tl.int32)
    last = tl.minimum(tl.load(lasts + row), length).to(tl.int32)
    per_split = tl.cdiv(tl.maximum(last - first, 0), tl.num_programs(1))
    first += tl.program_id(1) * per_split
    last = tl.minimum(first + per_split, last)
    stem, bias, second, outward = map_of_keys(maps, head, row * heads + head, dim, units, features, DIM=DIM,
                                              UNITS=UNITS, FEATURES=FEATURES)
    keys = k.base + row * k.row + head * k.head
    values = v.base + row * v.row + head * v.head
    top, mass, sums = no_tokens(FEATURES, DIM)
    for at in range(first, last, BLOCK):
        token = at + tl.arange(0, BLOCK)
        valid = token < last
        place = token.to(tl.int64)[:, None]
        key = tl.load(keys + place * k.token + width[None, :], mask=valid[:, None] & wide, other=0.0)
        value = tl.load(values + place * v.token + width[None, :], mask=valid[:, None] & wide, other=0.0)
        log = log_features(key, stem, every_row(bias, BLOCK), second, every_row(outward, BLOCK))
        log = tl.where(valid[:, None], log, float("-inf"))
        higher = tl.maximum(top, tl.ceil(tl.max(log, 0)))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        keep = tl.exp2(top - safe)
        rounded = tl.exp2(log - safe[None, :]).to(stem.dtype)
        mass = mass * keep + tl.sum(rounded.to(tl.float32), 0)
        sums = sums * keep[:, None] + tl.dot(tl.trans(rounded), value.to(stem.dtype), input_precision="ieee")
        top = higher
    at = (row * heads + head) * tl.num_programs(1) + tl.program_id(1)
    put(cache, at * features + feature, top, mass, sums, dim, feature < features, DIM=DIM)


@triton.jit(do_not_specialize=["splits"])
def join_kernel(parts, found, splits, dim, features, BLOCK: tl.constexpr, DIM: tl.constexpr):
    """BLOCK features of one head over all slices of its tokens."""
    # grid: (B·Hkv, blocks of features)
    # parts  `PhiCache` [B, Hkv, slices, r(, d)]   splits = slices
    # found  `PhiCache` [B, Hkv, r(, d)]           written
    pair = tl.program_id(0).to(tl.int64)
    feature, width = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, DIM)
    kept = feature < features
    mask = kept[:, None] & (width < dim)[None, :]
    top, mass, sums = no_tokens(BLOCK, DIM)
    at = pair * splits * features + feature
    for _ in range(splits):
        m = tl.load(parts.m + at, mask=kept, other=float("-inf"))
        z = tl.load(parts.z + at, mask=kept, other=0.0)
        s = tl.load(parts.s + at[:, None] * dim + width[None, :], mask=mask, other=0.0)
        higher = tl.maximum(top, m)
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        keep, more = tl.exp2(top - safe), tl.exp2(m - safe)
        mass = mass * keep + z * more
        sums = sums * keep[:, None] + s * more[:, None]
        top = higher
        at += features
    put(found, pair * features + feature, top, mass, sums, dim, kept, DIM=DIM)


@triton.jit(do_not_specialize=["heads", "length", "per_row"])
def features_kernel(
    k, maps, out, heads, length, per_row, dim, units, features,
    BLOCK: tl.constexpr, DIM: tl.constexpr, UNITS: tl.constexpr, FEATURES: tl.constexpr,
):
    """The features of a block of keys, relative to the request's shift."""
    # grid: (Q·Hkv, blocks of keys)
    # k     Tokens [Q, Hkv, N, d]   keys with RoPE, per_row queries to a row of the cache
    # maps  `KeyFeatures`
    # out   [Q, Hkv, N, r]          written, in the dtype of the map
    row = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    kv = row // per_row * heads + head
    feature, width = tl.arange(0, FEATURES), tl.arange(0, DIM)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = (token < length)[:, None]
    stem, bias, second, outward = map_of_keys(maps, head, kv, dim, units, features, DIM=DIM, UNITS=UNITS,
                                              FEATURES=FEATURES)
    shift = tl.load(maps.shift + kv * features + feature, mask=feature < features, other=0.0)
    key = tl.load(k.base + row * k.row + head * k.head + token.to(tl.int64)[:, None] * k.token + width[None, :],
                  mask=valid & (width < dim)[None, :], other=0.0)
    log = log_features(key, stem, every_row(bias, BLOCK), second, every_row(outward, BLOCK))
    found = tl.exp2(log - tl.where(shift == float("-inf"), 0.0, shift)[None, :])
    place = ((row * heads + head) * length + token)[:, None] * features + feature[None, :]
    tl.store(out + place, found.to(stem.dtype), mask=valid & (feature < features)[None, :])
