"""The Triton kernels of `few_rows.py`; importing this module imports Triton."""

import triton
import triton.language as tl

from sparsekv.kernels.between_triton import silu


@triton.jit
def part_of(w0, w1, w2, b0, b1, b2, n0, n1, n2, rows, BLOCK_N: tl.constexpr, PARTS: tl.constexpr):
    """Of this program: its weight, its bias, their outputs, its first output, where they begin in what is written."""
    block = tl.program_id(0)
    w, b, n, begin = w0, b0, n0, 0
    if PARTS > 1:
        first, second = tl.cdiv(n0, BLOCK_N), tl.cdiv(n0, BLOCK_N) + tl.cdiv(n1, BLOCK_N)
        if block >= second:
            w, b, n, begin, block = w2, b2, n2, rows * (n0 + n1), block - second
        elif block >= first:
            w, b, n, begin, block = w1, b1, n1, rows * n0, block - first
    return w, b, n, block * BLOCK_N, begin


@triton.jit
def finish(y, up, target, inside, GATED: tl.constexpr):
    """Sums to memory, rounded where a model's own code rounds."""
    kind: tl.constexpr = target.dtype.element_ty
    if GATED:
        y = silu(y.to(kind).to(tl.float32), kind) * up.to(kind).to(tl.float32)
    tl.store(target, y, mask=inside)


@triton.jit
def sum_kernel(
    x, w0, w1, w2, b0, b1, b2, out, n0, n1, n2, dim, ROWS: tl.constexpr, PARTS: tl.constexpr, GATED: tl.constexpr,
    BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """Products of one or two rows, summed by every thread for itself, a block of weights ahead."""
    # grid: (Σ ⌈n / BLOCK_N⌉,)
    # x         [ROWS, K]    dense; dim = K, a multiple of 8
    # w0 .. w2  [n, K]       dense, PARTS of them, each with outputs n0 .. n2 of its own; GATED: w0 and w1, both of n0
    # b0 .. b2  [n]          BIAS: added to the products
    # out       Σ [ROWS, n]  written, one weight's after another's
    w, b, n, first, begin = part_of(w0, w1, w2, b0, b1, b2, n0, n1, n2, ROWS, BLOCK_N, PARTS)
    outputs, ks = first + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    inside = outputs < n
    places = tl.multiple_of(outputs.to(tl.int64)[:, None] * dim + ks[None, :], [1, 8])
    pointers, others = tl.multiple_of(w + places, [1, 16]), tl.multiple_of(w1 + places, [1, 16])
    mask = inside[:, None] & (ks < dim)[None, :]
    tile = tl.load(pointers, mask=mask, other=0.0, eviction_policy="evict_first")
    other = tile
    if GATED:
        other = tl.load(others, mask=mask, other=0.0, eviction_policy="evict_first")
    acc0 = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    acc1, up0, up1 = acc0, acc0, acc0
    for start in range(0, dim, BLOCK_K):
        at = start + ks
        ahead = inside[:, None] & (at + BLOCK_K < dim)[None, :]
        following = tl.load(pointers + (start + BLOCK_K), mask=ahead, other=0.0, eviction_policy="evict_first")
        other_following = following
        if GATED:
            other_following = tl.load(others + (start + BLOCK_K), mask=ahead, other=0.0, eviction_policy="evict_first")
        wide, own = tile.to(tl.float32), tl.load(x + at, mask=at < dim, other=0.0).to(tl.float32)
        acc0 += wide * own[None, :]
        if GATED:
            up0 += other.to(tl.float32) * own[None, :]
        if ROWS > 1:
            own = tl.load(x + dim + at, mask=at < dim, other=0.0).to(tl.float32)
            acc1 += wide * own[None, :]
            if GATED:
                up1 += other.to(tl.float32) * own[None, :]
        tile, other = following, other_following
    bias, bias_up = tl.zeros([BLOCK_N], tl.float32), tl.zeros([BLOCK_N], tl.float32)
    if BIAS:
        bias += tl.load(b + outputs, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            bias_up += tl.load(b1 + outputs, mask=inside, other=0.0).to(tl.float32)
    target = out + begin + outputs
    finish(tl.sum(acc0, 1) + bias, tl.sum(up0, 1) + bias_up, target, inside, GATED)
    if ROWS > 1:
        finish(tl.sum(acc1, 1) + bias, tl.sum(up1, 1) + bias_up, target + n, inside, GATED)


@triton.jit(do_not_specialize=["ROWS"])
def dot_kernel(
    x, w0, w1, w2, b0, b1, b2, out, n0, n1, n2, dim, ROWS, PARTS: tl.constexpr, GATED: tl.constexpr,
    BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """`sum_kernel` by matrix units, for up to 16 rows."""
    w, b, n, first, begin = part_of(w0, w1, w2, b0, b1, b2, n0, n1, n2, ROWS, BLOCK_N, PARTS)
    outputs, ks, row = first + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K), tl.arange(0, 16)
    inside, there = outputs < n, row < ROWS
    places = tl.multiple_of(outputs.to(tl.int64)[:, None] * dim + ks[None, :], [1, 8])
    pointers, others = tl.multiple_of(w + places, [1, 16]), tl.multiple_of(w1 + places, [1, 16])
    acc = tl.zeros([BLOCK_N, 16], tl.float32)
    up = acc
    for start in range(0, dim, BLOCK_K):
        within = start + ks < dim
        mask = inside[:, None] & within[None, :]
        tile = tl.load(pointers + start, mask=mask, other=0.0, eviction_policy="evict_first")
        own = tl.load(x + row[:, None] * dim + (start + ks)[None, :], mask=there[:, None] & within[None, :], other=0.0)
        acc = tl.dot(tile, tl.trans(own), acc)
        if GATED:
            other = tl.load(others + start, mask=mask, other=0.0, eviction_policy="evict_first")
            up = tl.dot(other, tl.trans(own), up)
    if BIAS:
        acc += tl.load(b + outputs, mask=inside, other=0.0).to(tl.float32)[:, None]
        if GATED:
            up += tl.load(b1 + outputs, mask=inside, other=0.0).to(tl.float32)[:, None]
    target = out + begin + row[None, :] * n + outputs[:, None]
    finish(acc, up, target, inside[:, None] & there[None, :], GATED)
