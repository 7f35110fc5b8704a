"""Products of a few rows, alone and with what stands beside them in a decoder layer; timed by step_parts.py."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def part_of(w0, w1, w2, n0, n1, n2, BLOCK_N: tl.constexpr, PARTS: tl.constexpr):
    """Of this program: its matrix, that matrix's outputs, its first output, where the matrix's outputs begin."""
    block = tl.program_id(0)
    w, n, begin = w0, n0, 0
    if PARTS > 1:
        first, second = tl.cdiv(n0, BLOCK_N), tl.cdiv(n0, BLOCK_N) + tl.cdiv(n1, BLOCK_N)
        if block >= second:
            w, n, begin, block = w2, n2, n0 + n1, block - second
        elif block >= first:
            w, n, begin, block = w1, n1, n0, block - first
    return w, n, block * BLOCK_N, begin


@triton.jit
def finish(y, up, source, target, inside, GATED: tl.constexpr, ADDED: tl.constexpr):
    """One row's sums `[BLOCK_N]` to memory, rounded where a model's own code rounds."""
    kind: tl.constexpr = target.dtype.element_ty
    y = y.to(kind).to(tl.float32)
    if GATED:
        y = (y / (1 + tl.exp(-y))).to(kind).to(tl.float32) * up.to(kind).to(tl.float32)
    if ADDED:
        y += tl.load(source, mask=inside, other=0.0).to(tl.float32)
    tl.store(target, y, mask=inside)


@triton.jit
def sum_kernel(
    x, norm, w0, w1, w2, residual, out, n0, n1, n2, dim, eps, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PARTS: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, ADDED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Products summed by every thread for itself, a block of weights ahead."""
    # grid: (sum over the matrices of ⌈outputs / BLOCK_N⌉,); GATED: of w0 alone, w1 has its shape
    # x         [ROWS, dim]     ROWS 1, 2 or 4; NORM: its norm with weight norm [dim] is taken first
    # w0 .. w2  [n, dim]        PARTS of them side by side; GATED: SiLU(w0 x) · (w1 x)
    # residual  [ROWS, n]       ADDED to the product
    # out       [ROWS, n0 + n1 + n2]
    w, n, first, begin = part_of(w0, w1, w2, n0, n1, n2, BLOCK_N, PARTS)
    width = n0 + n1 + n2
    outputs, ks = first + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    inside = outputs < n
    places = tl.multiple_of(outputs.to(tl.int64)[:, None] * dim + ks[None, :], [1, 8])
    pointers = tl.multiple_of(w + places, [1, 16])
    mask = inside[:, None] & (ks < dim)[None, :]
    tile = tl.load(pointers, mask=mask, other=0.0, eviction_policy="evict_first")
    other = tile
    if GATED:
        others = tl.multiple_of(w1 + places, [1, 16])
        other = tl.load(others, mask=mask, other=0.0, eviction_policy="evict_first")
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    acc0 = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    acc1, acc2, acc3, up0, up1, up2, up3 = acc0, acc0, acc0, acc0, acc0, acc0, acc0
    square0 = tl.zeros([BLOCK_K], tl.float32)
    square1, square2, square3 = square0, square0, square0
    for start in range(0, dim, BLOCK_K):
        at = start + ks
        ahead = inside[:, None] & (at + BLOCK_K < dim)[None, :]
        following = tl.load(pointers + (start + BLOCK_K), mask=ahead, other=0.0, eviction_policy="evict_first")
        other_following = following
        if GATED:
            other_following = tl.load(others + (start + BLOCK_K), mask=ahead, other=0.0, eviction_policy="evict_first")
        within = at < dim
        scale = tl.full([BLOCK_K], 1.0, tl.float32)
        if NORM:
            scale = tl.load(norm + at, mask=within, other=0.0).to(tl.float32)
        wide = tile.to(tl.float32)
        own = tl.load(x + at, mask=within, other=0.0).to(tl.float32)
        if NORM:
            square0 += own * own
            own *= scale
        acc0 += wide * own[None, :]
        if GATED:
            up0 += other.to(tl.float32) * own[None, :]
        if ROWS > 1:
            own = tl.load(x + dim + at, mask=within, other=0.0).to(tl.float32)
            if NORM:
                square1 += own * own
                own *= scale
            acc1 += wide * own[None, :]
            if GATED:
                up1 += other.to(tl.float32) * own[None, :]
        if ROWS > 2:
            own = tl.load(x + 2 * dim + at, mask=within, other=0.0).to(tl.float32)
            if NORM:
                square2 += own * own
                own *= scale
            acc2 += wide * own[None, :]
            if GATED:
                up2 += other.to(tl.float32) * own[None, :]
            own = tl.load(x + 3 * dim + at, mask=within, other=0.0).to(tl.float32)
            if NORM:
                square3 += own * own
                own *= scale
            acc3 += wide * own[None, :]
            if GATED:
                up3 += other.to(tl.float32) * own[None, :]
        tile, other = following, other_following
    source, target = residual + begin + outputs, out + begin + outputs
    factor = 1.0
    if NORM:
        factor = tl.rsqrt(tl.sum(square0, 0) / dim + eps)
    finish(tl.sum(acc0, 1) * factor, tl.sum(up0, 1) * factor, source, target, inside, GATED, ADDED)
    if ROWS > 1:
        if NORM:
            factor = tl.rsqrt(tl.sum(square1, 0) / dim + eps)
        finish(tl.sum(acc1, 1) * factor, tl.sum(up1, 1) * factor, source + width, target + width, inside, GATED, ADDED)
    if ROWS > 2:
        if NORM:
            factor = tl.rsqrt(tl.sum(square2, 0) / dim + eps)
        finish(tl.sum(acc2, 1) * factor, tl.sum(up2, 1) * factor, source + 2 * width, target + 2 * width, inside, GATED,
               ADDED)
        if NORM:
            factor = tl.rsqrt(tl.sum(square3, 0) / dim + eps)
        finish(tl.sum(acc3, 1) * factor, tl.sum(up3, 1) * factor, source + 3 * width, target + 3 * width, inside, GATED,
               ADDED)


@triton.jit(do_not_specialize=["rows"])
def dot_kernel(
    x, norm, w0, w1, w2, residual, out, n0, n1, n2, dim, eps, rows, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, ADDED: tl.constexpr, OVERLAP: tl.constexpr,
):
    """`sum_kernel` by matrix units, for up to 16 rows."""
    w, n, first, begin = part_of(w0, w1, w2, n0, n1, n2, BLOCK_N, PARTS)
    width = n0 + n1 + n2
    outputs, ks, row = first + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K), tl.arange(0, 16)
    inside = outputs < n
    places = tl.multiple_of(outputs.to(tl.int64)[:, None] * dim + ks[None, :], [1, 8])
    pointers, others = tl.multiple_of(w + places, [1, 16]), tl.multiple_of(w1 + places, [1, 16])
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    acc = tl.zeros([BLOCK_N, 16], tl.float32)
    up = acc
    square = tl.zeros([16], tl.float32)
    for start in range(0, dim, BLOCK_K):
        within = start + ks < dim
        mask = inside[:, None] & within[None, :]
        tile = tl.load(pointers + start, mask=mask, other=0.0, eviction_policy="evict_first")
        own = tl.load(x + row[:, None] * dim + (start + ks)[None, :], mask=(row < rows)[:, None] & within[None, :],
                      other=0.0)
        if NORM:
            scale = tl.load(norm + start + ks, mask=within, other=0.0).to(tl.float32)
            wide = own.to(tl.float32)
            square += tl.sum(wide * wide, 1)
            own = (wide * scale[None, :]).to(own.dtype)
        acc = tl.dot(tile, tl.trans(own), acc)
        if GATED:
            other = tl.load(others + start, mask=mask, other=0.0, eviction_policy="evict_first")
            up = tl.dot(other, tl.trans(own), up)
    if NORM:
        factor = tl.rsqrt(square / dim + eps)
        acc, up = acc * factor[None, :], up * factor[None, :]
    at = row[None, :] * width + (begin + outputs)[:, None]
    finish(acc, up, residual + at, out + at, inside[:, None] & (row < rows)[None, :], GATED, ADDED)


@triton.jit
def add_norm_kernel(x, y, weight, total, out, dim, eps, WIDTH: tl.constexpr, OVERLAP: tl.constexpr):
    """The sum of two rows, and its norm."""
    # grid: (rows,); all [rows, dim], weight [dim]; total: x + y, written
    row = tl.program_id(0).to(tl.int64) * dim
    width = tl.arange(0, WIDTH)
    inside = width < dim
    scale = tl.load(weight + width, mask=inside, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    kind: tl.constexpr = out.dtype.element_ty
    both = tl.load(x + row + width, mask=inside, other=0.0).to(tl.float32)
    both = (both + tl.load(y + row + width, mask=inside, other=0.0).to(tl.float32)).to(kind)
    tl.store(total + row + width, both, mask=inside)
    both = both.to(tl.float32)
    normed = (both * tl.rsqrt(tl.sum(both * both, 0) / dim + eps)).to(kind).to(tl.float32)
    tl.store(out + row + width, normed * scale, mask=inside)


@triton.jit
def gate_kernel(gate, up, out, count, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """SiLU(gate) · up of `count` numbers."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    y = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    finish(y, tl.load(up + place, mask=inside, other=0.0), out + place, out + place, inside, True, False)
