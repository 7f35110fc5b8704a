"""Rows of a page-locked host tensor, read by the GPU itself over the bus: no CPU work, no synchronisation."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor


@functools.cache
def _kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit
    def gather_host_rows(source, index, out, count, heads, stride_b, stride_h, stride_n,
                         DIM: tl.constexpr, BLOCK: tl.constexpr):
        pair = tl.program_id(1).to(tl.int64)
        place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = place < count
        row = tl.load(index + pair * count + place, mask=inside, other=0).to(tl.int64)
        channel = tl.arange(0, DIM)
        start = (pair // heads) * stride_b + (pair % heads) * stride_h + row * stride_n
        values = tl.load(source + start[:, None] + channel, mask=inside[:, None], other=0.0)  # [BLOCK, DIM]
        tl.store(out + (pair * count + place)[:, None] * DIM + channel, values, mask=inside[:, None])

    return gather_host_rows


def gather_from_host(source: Tensor, index: Tensor, block: int = 16) -> Tensor:
    """`source[b, h, index[b, h, :]]`: source `[B, Hkv, N, d]` page-locked on the host, d a power of two, index
    `[B, Hkv, K]` on the device -> `[B, Hkv, K, d]` on the device."""
    batch, heads, count = index.shape
    dim = source.shape[-1]
    out = torch.empty(batch, heads, count, dim, dtype=source.dtype, device=index.device)
    if count:
        grid = ((count + block - 1) // block, batch * heads)
        _kernel()[grid](source, index.contiguous(), out, count, heads, *source.stride()[:3], DIM=dim, BLOCK=block)
    return out
