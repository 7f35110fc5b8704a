"""What a decoder layer does to the rows of a step between its products, in one launch where a model's own code takes
eight or ten: the norm by the root mean square, the rotation of queries and keys, and the gate of an MLP."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from sparsekv.kernels.launch import acc_dtype, dense_last, on_device, power_of_two

NORM_WARPS, ROTATE_WARPS, GATE_WARPS, GATED_AT_ONCE = 4, 1, 4, 512


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, shift: float = 0.0, rounds: bool = True) -> Tensor:
    """`x / √(mean x² + eps) · (shift + weight)` over the last dimension: x `[..., d]`, weight `[d]` -> as x. rounds: in
    x's precision before the weight multiplies it (Llama's), else after (Gemma's)."""
    return (launch_rms_norm if on_device(x) else rms_norm_reference)(x, weight, eps, shift=shift, rounds=rounds)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, *, shift: float = 0.0, rounds: bool = True) -> Tensor:
    """`rms_norm` in plain torch."""
    wide = x.to(acc_dtype(x))
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if rounds:
        normed = normed.to(x.dtype).to(wide.dtype)
    return (normed * (shift + weight.to(wide.dtype))).to(x.dtype)


def launch_rms_norm(x: Tensor, weight: Tensor, eps: float, *, shift: float = 0.0, rounds: bool = True) -> Tensor:
    """`rms_norm` through Triton, one program a row."""
    from sparsekv.kernels.between_triton import norm_kernel

    rows, dim = x.contiguous(), x.shape[-1]
    out = torch.empty_like(rows)
    if out.numel():
        norm_kernel[(rows.numel() // dim,)](rows, weight.contiguous(), out, dim, eps, shift, WIDTH=power_of_two(dim),
                                            ROUNDS=rounds, num_warps=NORM_WARPS)
    return out


def rotate_pair(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys of one token with RoPE, halves turned against each other: q `[B, Hq, 1, d]`, k `[B, Hkv, 1, d]`,
    cos, sin `[B or 1, 1, d]` -> as q and k. Every product and sum is rounded to their precision, as models do it."""
    return (launch_rotate_pair if on_device(q) else rotate_pair_reference)(q, k, cos, sin)


def rotate_pair_reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`rotate_pair` in plain torch."""
    half = q.shape[-1] // 2
    return tuple(x * cos[:, None] + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin[:, None]  # type: ignore[return-value]
                 for x in (q, k))


def launch_rotate_pair(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`rotate_pair` through Triton, one program a head."""
    from sparsekv.kernels.between_triton import rotate_kernel

    q, k, cos, sin = (dense_last(x) for x in (q, k, cos, sin))
    rows, heads_q, _, dim = q.shape
    out_q, out_k = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    rotate_kernel[(rows * (heads_q + k.shape[1]),)](
        q, k, cos, sin, out_q, out_k, heads_q, k.shape[1], *q.stride()[:2], *k.stride()[:2],
        cos.stride(0) if cos.shape[0] > 1 else 0, HALF=dim // 2, WIDTH=power_of_two(dim // 2), num_warps=ROTATE_WARPS)
    return out_q, out_k


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """`gate · σ(gate) · up`, both of one shape -> as gate. SiLU is rounded to their precision before the product, as
    models do it."""
    return (launch_silu_product if on_device(gate) else silu_product_reference)(gate, up)


def silu_product_reference(gate: Tensor, up: Tensor) -> Tensor:
    """`silu_product` in plain torch."""
    return functional.silu(gate) * up


def launch_silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """`silu_product` through Triton, a program for `GATED_AT_ONCE` numbers."""
    from sparsekv.kernels.between_triton import gate_kernel

    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    if out.numel():
        gate_kernel[(-(-out.numel() // GATED_AT_ONCE),)](gate, up, out, out.numel(), BLOCK=GATED_AT_ONCE,
                                                         num_warps=GATE_WARPS)
    return out
