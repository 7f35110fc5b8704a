"""Rows of a cache: which tokens are anchors, where tokens lie in pages, and keys and values gathered row by row."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsekv.kernels.launch import power_of_two

FETCHED = 16
"""Rows that a program of `fetch_rows` copies."""


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """Gather rows of a cache, `x[b, h, index[q, h, :]]` with `b = q // T`.

    Args:
        x: `[B, H, N, d]`, any strides.
        index: `[Q, H, K]`, ≥ 0.

    Returns:
        `[Q, H, K, d]`.
    """
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
    return flat.index_select(0, place.reshape(-1)).view(*index.shape, dim)


def anchor_indices(starts: Tensor, sink_size: int, tail_starts: Tensor, lengths: Tensor) -> Tensor:
    """List sink and local window of every query: `[Q, n]` int64 padded with -1, each token once."""
    longest = int((lengths - tail_starts).clamp(min=0).max()) if lengths.numel() else 0
    sink = starts[:, None] + torch.arange(sink_size, device=starts.device)
    sink = torch.where(sink < torch.minimum(tail_starts, lengths)[:, None], sink, -1)
    tail = tail_starts[:, None] + torch.arange(longest, device=starts.device)
    tail = torch.where(tail < lengths[:, None], tail, -1)
    return torch.cat([sink, tail], dim=1)


def slots_at(table: Tensor, places: Tensor, page: int) -> Tensor:
    """Find the slots of tokens: table `[R, blocks]`, their positions `[R, n]` ≥ 0 -> `[R, n]` int64. Positions past the
    table give slots of its last block.
    """
    block = (places // page).clamp(max=table.shape[1] - 1)
    return table.gather(1, block).long() * page + places % page


def fetch_rows(source: Tensor, index: Tensor, out: Tensor) -> Tensor:
    """Copy listed tokens of a cache to the first slots of another. No work of the CPU, no wait.

    Args:
        source: `[B, Hkv, N, d]` in memory of the device, or page-locked in the host's, which the device then reads by
            itself over the bus; the last dimension contiguous.
        index: `[Q, H, K]` on the device, H a multiple of Hkv, -1 = none.
        out: `[B, Hkv, slots ≥ Q / B · H / Hkv · K, d]` on the device, written: the lists of a row and KV head end to
            end, query by query, with zeros where a list has no token.

    Returns:
        The slots, `[Q, H, K]` int32, -1 = none.
    """
    return (launch_fetch if index.is_cuda else fetch_rows_reference)(source, index, out)


def fetch_rows_reference(source: Tensor, index: Tensor, out: Tensor) -> Tensor:
    """`fetch_rows` in plain torch."""
    (batch, heads_kv), (count, heads, width) = source.shape[:2], index.shape
    lists = index.reshape(batch, count // batch, heads_kv, heads // heads_kv, width).transpose(1, 2)
    listed = lists.flatten(2)
    if source.shape[2]:
        rows = gather_rows(source, listed.clamp(min=0).long()).to(out.device)
        out[:, :, :listed.shape[2]] = rows.masked_fill(listed[..., None] < 0, 0)
    places = torch.arange(listed.shape[2], dtype=torch.int32, device=index.device).view(lists.shape[2:])
    return torch.where(lists >= 0, places, -1).transpose(1, 2).reshape(index.shape)


def launch_fetch(source: Tensor, index: Tensor, out: Tensor) -> Tensor:
    """`fetch_rows` through Triton."""
    from sparsekv.kernels.gather_triton import fetch_kernel

    (batch, heads_kv), (count, heads, width) = source.shape[:2], index.shape
    dim = source.shape[-1]
    places = torch.empty(index.shape, dtype=torch.int32, device=index.device)
    if places.numel():
        fetch_kernel[(-(-width // FETCHED), count * heads)](
            source, index.contiguous(), out, places, width, heads, count // batch, *source.stride()[:3],
            *out.stride()[:3], LISTS=heads // heads_kv, DIM=dim, WIDTH=power_of_two(dim), BLOCK=FETCHED)
    return places
