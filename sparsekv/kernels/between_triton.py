"""The Triton kernels of `between.py`; importing this module imports Triton."""

import triton
import triton.language as tl


@triton.jit
def norm_kernel(
    x, weight, out, dim, eps, shift, WIDTH: tl.constexpr, ROUNDS: tl.constexpr,
):
    """The norm of one row."""
    # grid: (rows,)
    # x       [rows, d]     dense; dim = d
    # weight  [d]           dense, in any dtype; shift is added to it
    # out     [rows, d]     written, in the dtype of x
    row = tl.program_id(0).to(tl.int64) * dim
    width = tl.arange(0, WIDTH)
    inside = width < dim
    own = tl.load(x + row + width, mask=inside, other=0.0).to(tl.float32)
    normed = own * tl.rsqrt(tl.sum(own * own, 0) / dim + eps)
    if ROUNDS:
        normed = normed.to(out.dtype.element_ty).to(tl.float32)
    scale = shift + tl.load(weight + width, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + width, normed * scale, mask=inside)


@triton.jit
def rotate_kernel(
    q, k, cos, sin, out_q, out_k, heads_q, heads_k, q_row, q_head, k_row, k_head, t_row,
    HALF: tl.constexpr, WIDTH: tl.constexpr,
):
    """The rotation of one head of one row, queries' heads first."""
    # grid: (B·(Hq + Hkv),)
    # q, k          [B, H, 1, d]      strides q_row, q_head, k_row, k_head; HALF = d / 2
    # cos, sin      [B or 1, 1, d]    stride t_row, 0 where all rows share them
    # out_q, out_k  [B, H, 1, d]      dense, written
    heads = heads_q + heads_k
    row = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    if head < heads_q:
        source = q + row * q_row + head * q_head
        target = out_q + (row * heads_q + head) * 2 * HALF
    else:
        source = k + row * k_row + (head - heads_q) * k_head
        target = out_k + (row * heads_k + head - heads_q) * 2 * HALF
    place = tl.arange(0, WIDTH)
    inside = place < HALF
    first = tl.load(source + place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + place, mask=inside, other=0.0).to(tl.float32)
    kind = out_q.dtype.element_ty
    table = row * t_row + place
    low = (first * tl.load(cos + table, mask=inside, other=0.0).to(tl.float32)).to(kind).to(tl.float32)
    low_turned = (-second * tl.load(sin + table, mask=inside, other=0.0).to(tl.float32)).to(kind).to(tl.float32)
    high = (second * tl.load(cos + HALF + table, mask=inside, other=0.0).to(tl.float32)).to(kind).to(tl.float32)
    high_turned = (first * tl.load(sin + HALF + table, mask=inside, other=0.0).to(tl.float32)).to(kind).to(tl.float32)
    tl.store(target + place, low + low_turned, mask=inside)
    tl.store(target + HALF + place, high + high_turned, mask=inside)


@triton.jit
def silu(y, kind: tl.constexpr):
    """SiLU of a float32 number, rounded to `kind`, in float32."""
    return (y / (1 + tl.exp(-y))).to(kind).to(tl.float32)


@triton.jit
def gate_kernel(gate, up, out, count, BLOCK: tl.constexpr):
    """The gate of an MLP on a block of numbers."""
    # grid: (⌈count / BLOCK⌉,)
    # gate, up  [count]  dense
    # out       [count]  written, in the dtype of gate
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    y = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    y = silu(y, out.dtype.element_ty)
    tl.store(out + place, y * tl.load(up + place, mask=inside, other=0.0).to(tl.float32), mask=inside)
