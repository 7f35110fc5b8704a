"""A tensor times a number: a kernel of a few lines, by which the steps of CONTRIBUTING are tried."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsekv.kernels.launch import acc_dtype, on_device

SCALED_AT_ONCE, SCALE_WARPS = 512, 4


def scaled(x: Tensor, factor: float) -> Tensor:
    """`factor · x`: x `[...]` -> as x."""
    return (launch_scaled if on_device(x) else scaled_reference)(x, factor)


def scaled_reference(x: Tensor, factor: float) -> Tensor:
    """`scaled` in plain torch."""
    return (x.to(acc_dtype(x)) * factor).to(x.dtype)


def launch_scaled(x: Tensor, factor: float) -> Tensor:
    """`scaled` through Triton, a program for `SCALED_AT_ONCE` numbers."""
    from sparsekv.kernels.scaled_triton import scaled_kernel

    x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        scaled_kernel[(-(-out.numel() // SCALED_AT_ONCE),)](x, out, factor, out.numel(), BLOCK=SCALED_AT_ONCE,
                                                            num_warps=SCALE_WARPS)
    return out
