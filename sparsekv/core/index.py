"""From buckets to tokens: the CSR of a layer's index read in order."""

from __future__ import annotations

import torch
from torch import Tensor


def bucket_tokens(order: Tensor, offsets: Tensor, buckets: Tensor) -> Tensor:
    """The tokens of the chosen buckets, `[Q, Hkv, K]` padded with -1 to the longest list.

    order `[B, Hkv, M]`, offsets `[B, Hkv, C + 1]`, buckets `[Q, Hkv, L]` with `Q = B·T` (-1 = none).
    """
    sizes, first = _sizes(offsets, buckets)
    total = sizes.sum(-1)
    return _read(order, sizes, first, int(total.max()) if total.numel() else 0)


def budget_tokens(order: Tensor, offsets: Tensor, buckets: Tensor, budget: Tensor, widest: int) -> Tensor:
    """The first `budget [B]` tokens, at most `widest`, of the chosen buckets in the order given: `[Q, Hkv, widest]`
    padded with -1."""
    sizes, first = _sizes(offsets, buckets)
    before = sizes.cumsum(-1) - sizes
    per_query = budget.repeat_interleave(buckets.shape[0] // budget.shape[0])[:, None, None]
    sizes = torch.minimum(sizes, (per_query - before).clamp(min=0))
    return _read(order, sizes, first, widest)


def bucket_counts(offsets: Tensor, buckets: Tensor) -> Tensor:
    """Tokens in the chosen buckets, `[Q, Hkv]` int64."""
    return _sizes(offsets, buckets)[0].sum(-1)


def _rows(table: Tensor, queries: Tensor) -> Tensor:
    """`[B, Hkv, n] -> [Q, Hkv, n]`; a view for B = 1."""
    batch, count = table.shape[0], queries.shape[0]
    if batch == count:
        return table
    return table.expand(count, -1, -1) if batch == 1 else table.repeat_interleave(count // batch, dim=0)


def _sizes(offsets: Tensor, buckets: Tensor) -> tuple[Tensor, Tensor]:
    chosen = buckets.clamp(min=0).long()
    rows = _rows(offsets, buckets)
    first = rows.gather(-1, chosen).long()
    sizes = torch.where(buckets >= 0, rows.gather(-1, chosen + 1).long() - first, 0)
    return sizes, first


def _read(order: Tensor, sizes: Tensor, first: Tensor, width: int) -> Tensor:
    """`sizes[..., l]` tokens from `first[..., l]` on for every bucket `l`, side by side, `width` in all."""
    rows = _rows(order, sizes)
    if width == 0 or sizes.shape[-1] == 0 or order.shape[-1] == 0:
        return torch.full((*sizes.shape[:2], width), -1, dtype=torch.long, device=order.device)
    ends = sizes.cumsum(-1)
    slots = torch.arange(width, device=order.device).expand(*ends.shape[:-1], width)
    which = torch.searchsorted(ends, slots.contiguous(), right=True).clamp(max=sizes.shape[-1] - 1)
    position = first.gather(-1, which) + slots - (ends - sizes).gather(-1, which)
    tokens = rows.gather(-1, position.clamp(0, order.shape[-1] - 1)).long()
    return torch.where(slots < ends[..., -1:], tokens, -1)
