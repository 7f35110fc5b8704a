"""Rows of a cache: which tokens are anchors, where tokens lie in pages, and keys and values gathered row by row."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparsekv.kernels.launch import power_of_two

FETCHED = 16
"""Rows that a program of `fetch_rows` copies."""
CLAIMED = 256
"""Tokens whose slots a program of `fetch_rows` claims."""
HASH, HIT, TOKEN = 0x9E3779B1, 1 << 31, (1 << 31) - 1
"""The multiplier of the hash of a token, and the bits of a claim."""


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


class HotRows(NamedTuple):
    """The rows that the first S slots of a cache hold of earlier calls of `fetch_rows`, which keeps it. A token has two
    slots that it may lie in, one by its number and one by a hash of it.

    held `[B, Hkv, S]` int64: the last call that asked for a slot's row, `· 2³² + ` its token; -1 = none. claims
    `[B, Hkv, S]` int64: `call · 2³² + hit · 2³¹ + token`, the largest that any token of the last call claimed it by.
    clock `[1]` int64: calls so far.
    """

    held: Tensor
    claims: Tensor
    clock: Tensor

    @classmethod
    def empty(cls, rows: int, heads: int, slots: int, device: torch.device) -> HotRows:
        """Make one that holds nothing yet."""
        held = torch.full((rows, heads, slots), -1, dtype=torch.long, device=device)
        return cls(held, held.clone(), torch.zeros(1, dtype=torch.long, device=device))

    def emptied(self) -> HotRows:
        """Make another of as many slots that holds nothing."""
        rows, heads, slots = self.held.shape
        return self.empty(rows, heads, slots, self.held.device)


def fetch_rows(
    source: Tensor, index: Tensor, out: Tensor, hot: HotRows | None = None, counts: Tensor | None = None,
) -> Tensor:
    """Copy listed tokens of a cache to slots of another. No work of the CPU, no wait.

    Without `hot` they go to the first slots: the lists of a row and KV head end to end, query by query, with zeros
    where a list has no token. With it they stay in its S slots where they lie there; one that does not takes one of its
    two, the one that was asked for longer ago, unless a token that lies there is listed now or one of a larger number
    wants it too; and else a slot behind the S, as without `hot`.

    Args:
        source: `[B, Hkv, N, d]` in memory of the device, or page-locked in the host's, which the device then reads by
            itself over the bus; the last dimension contiguous.
        index: `[Q, H, K]` on the device, H a multiple of Hkv, -1 = none.
        out: `[B, Hkv, slots ≥ S + Q / B · H / Hkv · K, d]` on the device, written.
        hot: the rows that lie in `out`, written.
        counts: `[2]` int64: tokens listed and rows copied so far, added to.

    Returns:
        The slots, `[Q, H, K]` int32, -1 = none.
    """
    return (launch_fetch if index.is_cuda else fetch_rows_reference)(source, index, out, hot, counts)


def fetch_rows_reference(
    source: Tensor, index: Tensor, out: Tensor, hot: HotRows | None = None, counts: Tensor | None = None,
) -> Tensor:
    """`fetch_rows` in plain torch."""
    (batch, heads_kv), (count, heads, width) = source.shape[:2], index.shape
    lists = index.reshape(batch, count // batch, heads_kv, heads // heads_kv, width).transpose(1, 2)
    wanted = lists.flatten(2).long()
    listed, places = wanted >= 0, torch.arange(wanted.shape[2], device=index.device).expand_as(wanted)
    if hot is not None:
        places, kept = _seat(wanted, places, hot)
        wanted = torch.where(kept, -1, wanted)
    if counts is not None:
        counts += torch.stack([listed.sum(), (wanted >= 0).sum()])
    if source.shape[2] and wanted.numel():
        rows = gather_rows(source, wanted.clamp(min=0)).to(out.device)
        at = places[..., None].expand(rows.shape)
        other = out.gather(2, at) if hot is not None else torch.zeros_like(rows)
        out.scatter_(2, at, torch.where(wanted[..., None] >= 0, rows, other))
    slots = torch.where(listed, places, -1).int().view(lists.shape)
    return slots.transpose(1, 2).reshape(index.shape)


def _seat(wanted: Tensor, places: Tensor, hot: HotRows) -> tuple[Tensor, Tensor]:
    """Slots of listed tokens `[B, Hkv, n]`, places among the S or behind them, and which of them lay there."""
    slots, now = hot.held.shape[2], hot.clock << 32
    token = wanted.clamp(min=0)
    first, second = token % slots, ((token * HASH & 0xFFFFFFFF) >> 7) % slots
    there = [hot.held.gather(2, slot) for slot in (first, second)]
    lies = [(x >= 0) & (x & TOKEN == token) for x in there]
    slot = torch.where(lies[0] | (~lies[1] & (there[0] <= there[1])), first, second)
    claim = torch.where(wanted >= 0, now + ((lies[0] | lies[1]).long() << 31) + token, -1)
    hot.claims.scatter_reduce_(2, slot, claim, "amax")
    best = hot.claims.gather(2, slot)
    won = (wanted >= 0) & (best & TOKEN == token)
    hot.held.scatter_reduce_(2, slot, torch.where(won, now + token, -1), "amax")
    hot.clock.add_(1)
    return torch.where(won, slot, slots + places), won & (best & HIT != 0)


def launch_fetch(
    source: Tensor, index: Tensor, out: Tensor, hot: HotRows | None = None, counts: Tensor | None = None,
) -> Tensor:
    """`fetch_rows` through Triton."""
    from sparsekv.kernels.gather_triton import claim_kernel, fetch_kernel

    (batch, heads_kv), (count, heads, width) = source.shape[:2], index.shape
    dim, index = source.shape[-1], index.contiguous()
    places = torch.empty(index.shape, dtype=torch.int32, device=index.device)
    if not places.numel():
        return places
    table = (index, index, index, 0) if hot is None else (*hot, hot.held.shape[2])
    given = width, heads, count // batch, heads_kv
    if hot is not None:
        claim_kernel[(-(-width // CLAIMED), count * heads)](
            index, *table, *given, LISTS=heads // heads_kv, BLOCK=CLAIMED)
    fetch_kernel[(-(-width // FETCHED), count * heads)](
        source, index, out, places, *table, index if counts is None else counts, *given, *source.stride()[:3],
        *out.stride()[:3], LISTS=heads // heads_kv, DIM=dim, WIDTH=power_of_two(dim), BLOCK=FETCHED,
        HOT=hot is not None, COUNTS=counts is not None)
    return places
