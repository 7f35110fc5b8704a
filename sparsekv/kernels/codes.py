"""Codes of keys: a few bytes a key, from which scores with it are estimated (docs/concepts.md).

A code is `round(k·keys − centre)`, small integers in `r` channels; a query's side is `q·queries`, and the sum of their
products is the score `q·k` up to a number that is the query's alone.

A code of `w` bytes has `r` channels, `w ≤ r ≤ 2w`: its first `2w − r` bytes hold one channel each, in 8 bits, the
others two each, in 4 bits: byte j is the sum of channel j and 16 times channel `j + r − w`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsekv.kernels.launch import acc_dtype, dense_last, on_device, padded

ENCODE_KEYS, ENCODE_DEPTH, ENCODE_WARPS = 64, 64, 4
"""Keys that a program encodes, and how much of the head dimension it holds at once."""
TWIN_KEYS = 8192
"""Keys that the twins take at once."""


class Sketch(NamedTuple):
    """The sketch of keys and queries of a KV head: keys and queries `[..., Hkv, d, r]`, centre `[..., Hkv, r]`; the
    leading dimension is the batch where every row has its own."""

    keys: Tensor
    centre: Tensor
    queries: Tensor

    @property
    def rank(self) -> int:
        """r."""
        return self.keys.shape[-1]


def largest(rank: int, width: int, device: Any = None) -> Tensor:
    """The largest code of every channel, `[r]`; the smallest is its opposite."""
    return torch.where(torch.arange(rank, device=device) < 2 * width - rank, 127, 7)


def encode_keys(keys: Tensor, sketch: Sketch, width: int) -> Tensor:
    """Make the codes of keys `[B, Hkv, N, d]` with RoPE: `[B, Hkv, N, w]` int8, w = width [bytes]."""
    return launch_encode_keys(keys, sketch, width) if on_device(keys) else encode_keys_reference(keys, sketch, width)


def encode_keys_reference(keys: Tensor, sketch: Sketch, width: int) -> Tensor:
    """`encode_keys` in plain torch, some keys at a time."""
    acc, rank = acc_dtype(keys), sketch.rank
    maps, centre = sketch.keys.to(acc), sketch.centre.to(acc)[..., None, :]
    top, whole = largest(rank, width, keys.device), 2 * width - rank
    parts = []
    for part in keys.split(TWIN_KEYS, dim=2):
        codes = (part.to(acc) @ maps - centre + 0.5).floor_().clamp_(-top, top).to(torch.int8)
        alone, low, high = codes.split([whole, width - whole, width - whole], dim=-1)
        parts.append(torch.cat([alone, low + 16 * high], dim=-1))
    return torch.cat(parts, dim=2)


def decode_codes(codes: Tensor, rank: int) -> Tensor:
    """Unpack codes `[..., w]` to their numbers `[..., r]` int8, r = rank."""
    width = codes.shape[-1]
    alone, pairs = codes.split([2 * width - rank, rank - width], dim=-1)
    return torch.cat([alone, lower_channels(pairs), (pairs + 8) >> 4], dim=-1)


def lower_channels(pairs: Tensor) -> Tensor:
    """The lower channels of bytes of two, int8."""
    return ((pairs & 15) ^ 8) - 8


def launch_encode_keys(keys: Tensor, sketch: Sketch, width: int) -> Tensor:
    """`encode_keys` through Triton."""
    from sparsekv.kernels.codes_triton import encode_kernel

    keys, maps, centre = dense_last(keys), sketch.keys.contiguous(), sketch.centre.contiguous()
    batch, heads, length, dim = keys.shape
    codes = torch.empty(batch, heads, length, width, dtype=torch.int8, device=keys.device)
    if codes.numel():
        encode_kernel[(batch * heads, -(-length // ENCODE_KEYS))](
            keys, maps, centre, codes, heads, length, dim, *keys.stride()[:3], row_stride(maps, 4),
            row_stride(centre, 3), RANK=sketch.rank, BYTES=width, WIDTH=padded(width), BLOCK=ENCODE_KEYS,
            DEPTH=min(padded(dim), ENCODE_DEPTH), num_warps=ENCODE_WARPS)
    return codes


def row_stride(x: Tensor, dims: int) -> int:
    """The stride of the batch, 0 where all rows share one."""
    return x.stride(0) if x.dim() == dims and x.shape[0] > 1 else 0
