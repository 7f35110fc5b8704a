"""Rows of a cache: which tokens are anchors, where tokens lie in pages, and keys and values gathered row by row."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsekv.kernels.launch import power_of_two

HOST_BLOCK = 16


def gather_rows(x: Tensor, index: Tensor, *, pinned: bool = False) -> Tensor:
    """`x[b, h, index[q, h, :]]` with `b = q // T`: x `[B, H, N, d]` with any strides, index `[Q, H, K]` ≥ 0
    -> `[Q, H, K, d]`, in page-locked memory if `pinned`."""
    batch, heads, _, dim = x.shape
    sb, sh, sn, _ = x.stride()
    per_row = index.shape[0] // batch
    if x.stride(-1) != 1 or sb % dim or sh % dim or sn % dim or x.shape[2] == 0:
        rows = torch.arange(batch, device=x.device).repeat_interleave(per_row)
        return x[rows[:, None, None], torch.arange(heads, device=x.device)[:, None], index]
    last = (batch - 1) * sb + (heads - 1) * sh + (x.shape[2] - 1) * sn
    flat = x.as_strided((last // dim + 1, dim), (dim, 1), x.storage_offset())
    rows, columns = torch.arange(batch, device=x.device), torch.arange(heads, device=x.device)
    base = (rows[:, None] * (sb // dim) + columns * (sh // dim)).repeat_interleave(per_row, dim=0)
    place = index * (sn // dim) + base[:, :, None] if sn != dim else index + base[:, :, None]
    out = torch.empty(index.numel(), dim, dtype=x.dtype, pin_memory=True) if pinned else None
    return torch.index_select(flat, 0, place.reshape(-1), out=out).view(*index.shape, dim)


def anchor_indices(starts: Tensor, sink_size: int, tail_starts: Tensor, lengths: Tensor) -> Tensor:
    """Tokens of sink and local window of every query, `[Q, n]` int64 padded with -1; each token once."""
    longest = int((lengths - tail_starts).clamp(min=0).max()) if lengths.numel() else 0
    sink = starts[:, None] + torch.arange(sink_size, device=starts.device)
    sink = torch.where(sink < torch.minimum(tail_starts, lengths)[:, None], sink, -1)
    tail = tail_starts[:, None] + torch.arange(longest, device=starts.device)
    tail = torch.where(tail < lengths[:, None], tail, -1)
    return torch.cat([sink, tail], dim=1)


def slots_at(table: Tensor, places: Tensor, page: int) -> Tensor:
    """Slots of tokens by their places: table `[R, blocks]`, places `[R, n]` ≥ 0 -> `[R, n]` int64. Places past the
    table give those of its last block."""
    block = (places // page).clamp(max=table.shape[1] - 1)
    return table.gather(1, block).long() * page + places % page


def gather_from_host(source: Tensor, index: Tensor) -> Tensor:
    """`gather_rows` of a page-locked host tensor, read by the GPU itself over the bus: no CPU work, no synchronisation.

    source `[B, H, N, d]`, its last dimension contiguous; index `[Q, H, K]` on the device -> `[Q, H, K, d]` on the
    device. Where index is on the host too it is `gather_rows`.
    """
    return launch_gather(source, index) if index.is_cuda else gather_rows(source, index)


def launch_gather(source: Tensor, index: Tensor) -> Tensor:
    """`gather_from_host` through Triton."""
    from sparsekv.kernels.gather_triton import gather_kernel

    count, heads, width = index.shape
    dim = source.shape[-1]
    out = torch.empty(count, heads, width, dim, dtype=source.dtype, device=index.device)
    if out.numel():
        gather_kernel[(-(-width // HOST_BLOCK), count * heads)](
            source, index.contiguous(), out, width, heads, count // source.shape[0], *source.stride()[:3], DIM=dim,
            WIDTH=power_of_two(dim), BLOCK=HOST_BLOCK)
    return out
