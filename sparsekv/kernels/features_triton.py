"""The Triton kernels of `features.py`; importing this module imports Triton."""

import triton
import triton.language as tl

from sparsekv.kernels.completion_triton import gelu, layer


@triton.jit
def map_kernel(
    k, w_in, b_in, w_a, b_a, w_b, alpha, w_out, b_out, centre, first, last, found, shifts, heads, length, column, k_row,
    k_head, k_token, dim, width, features, columns,
    CENTRED: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, FEATURES: tl.constexpr,
):
    """One map of BLOCK keys of a head into the columns from `column` on: features relative to the largest of the block,
    and its logarithm."""
    row = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    tile = tl.program_id(0)
    token = tile * BLOCK + tl.arange(0, BLOCK)
    counted = (token >= tl.load(first + row)) & (token < tl.load(last + row))
    place, feature = tl.arange(0, DIM), tl.arange(0, FEATURES)
    x = tl.load(k + row * k_row + head * k_head + token.to(tl.int64)[:, None] * k_token + place[None, :],
                mask=counted[:, None] & (place < dim)[None, :], other=0.0)
    if CENTRED:
        mean = tl.load(centre + (row * heads + head) * dim + place, mask=place < dim, other=0.0)
        x = (x.to(tl.float32) - mean[None, :]).to(x.dtype)
    h = gelu(layer(x, w_in + head * dim * width, b_in + head * width, dim, width, INSIDE=DIM, OUTSIDE=WIDTH, BIAS=True))
    inner = gelu(layer(h, w_a + head * width * width, b_a + head * width, width, width, INSIDE=WIDTH, OUTSIDE=WIDTH,
                       BIAS=True))
    h += tl.load(alpha + head).to(tl.float32) * layer(inner, w_b + head * width * width, b_a, width, width,
                                                      INSIDE=WIDTH, OUTSIDE=WIDTH, BIAS=False)
    logs = layer(h, w_out + head * width * features, b_out + head * features, width, features, INSIDE=WIDTH,
                 OUTSIDE=FEATURES, BIAS=True)
    logs = tl.where(counted[:, None], logs, float("-inf"))
    top = tl.max(logs, 0)
    there = feature < features
    tl.store(shifts + ((row * heads + head) * tl.num_programs(0) + tile) * columns + column + feature, top, mask=there)
    made = tl.exp(logs - tl.where(top == float("-inf"), 0.0, top)[None, :])
    at = ((row * heads + head) * length + token)[:, None] * columns + column + feature[None, :]
    tl.store(found + at, made.to(found.dtype.element_ty), mask=(token < length)[:, None] & there[None, :])


@triton.jit
def sum_kernel(
    features, v, shifts, m, z, s, heads, length, per_split, tiles, v_row, v_head, v_token, dim, width,
    BLOCK: tl.constexpr, DIM: tl.constexpr, FEATURES: tl.constexpr,
):
    """Features of one slice of the blocks brought to the shift `m` of all, where they are, and summed as rounded."""
    row = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    feature, place = tl.arange(0, FEATURES), tl.arange(0, DIM)
    kept, inside = feature < width, place < dim
    common = tl.load(m + (row * heads + head) * width + feature, mask=kept, other=0.0)
    common = tl.where(common == float("-inf"), 0.0, common)
    mass = tl.zeros([FEATURES], tl.float32)
    sums = tl.zeros([FEATURES, DIM], tl.float32)
    first = tl.program_id(1) * per_split
    for tile in range(first, tl.minimum(first + per_split, tiles)):
        token = tile * BLOCK + tl.arange(0, BLOCK)
        valid = token < length
        at = features + ((row * heads + head) * length + token)[:, None] * width + feature[None, :]
        mask = valid[:, None] & kept[None, :]
        made = tl.load(at, mask=mask, other=0.0)
        value = tl.load(v + row * v_row + head * v_head + token.to(tl.int64)[:, None] * v_token + place[None, :],
                        mask=valid[:, None] & inside[None, :], other=0.0)
        shift = tl.load(shifts + ((row * heads + head) * tiles + tile) * width + feature, mask=kept, other=0.0)
        made = (made.to(tl.float32) * tl.exp(shift - common)[None, :]).to(made.dtype)
        tl.store(at, made, mask=mask)
        mass += tl.sum(made.to(tl.float32), 0)
        sums += tl.dot(tl.trans(made), value.to(made.dtype), input_precision="ieee")
    at = (row * heads + head) * tl.num_programs(1) + tl.program_id(1)
    tl.store(z + at * width + feature, mass, mask=kept)
    tl.store(s + (at * width + feature)[:, None] * dim + place[None, :], sums, mask=kept[:, None] & inside[None, :])
