"""A prompt read sparsely, a chunk at a time (TokenSelect §5.2)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sparsekv.core.layer import LayerView, needed
from sparsekv.core.regions import Regions
from sparsekv.core.selectors.base import ReadsPrompts
from sparsekv.kernels import anchor_indices, dense_attention, gather_rows


def prefill_chunks(view: LayerView, query: Tensor, selector: ReadsPrompts, window_size: int) -> Tensor:
    """Attention of the last T tokens of a view, `selector.chunk` of them at a time: query `[B, Hq, T, d]` -> as query.

    A chunk attends to itself (causally), the sink and the `window_size` tokens before it, and to what its mean query
    selects of the tokens between; densely while the budget is all of them. The chunks begin at the first of the T
    tokens. With a selector that extrapolates keys and queries get the positions 0, 1, 2, … in the order of the tokens.
    Of `view.regions` only rows and sink count. Raises SparseKVError for such a selector and a batch with padding.
    """
    total, count = view.keys.shape[2], query.shape[2]
    parts = []
    for first in range(total - count, total, selector.chunk):
        end = min(first + selector.chunk, total)
        at = first - (total - count)
        regions = Regions.at_prefill_end(view.regions.starts, first, view.regions.sink_size, window_size)
        past = replace(view, keys=view.keys[:, :, :first], values=view.values[:, :, :first], regions=regions)
        parts.append(_chunk(past, view, query[:, :, at:at + end - first], end, selector))
    return torch.cat(parts, dim=2)


def _chunk(past: LayerView, view: LayerView, q: Tensor, end: int, selector: ReadsPrompts) -> Tensor:
    """One chunk `q [B, Hq, c, d]`, the tokens before `end`, after those of `past`."""
    first, regions = past.keys.shape[2], past.regions
    columns = torch.arange(first, end, device=q.device)
    real = columns >= regions.starts[:, None]
    selector.prepare(past)
    if not bool((regions.mid_sizes > selector.budget).any()):
        mask = torch.arange(end, device=q.device) >= regions.starts[:, None]
        return dense_attention(q, view.keys[:, :, :end], view.values[:, :, :end], scale=view.scale,
                               key_mask=None if bool(mask.all()) else mask, sinks=view.sinks)
    pre = needed(view.rope).unrotate(q, columns) if selector.extrapolate else q
    listed = selector.choose(past, pre.mean(2, keepdim=True))[:, 0]
    lengths = torch.full_like(regions.starts, first)
    anchors = anchor_indices(regions.starts, regions.sinks, regions.tail_starts, lengths)
    tokens = torch.cat([listed, anchors], dim=1)
    tokens = torch.where(tokens < 0, first, tokens).sort(dim=1).values
    used = torch.cat([tokens < first, real], dim=1)
    index = tokens.clamp(max=first - 1)[:, None].expand(-1, view.num_kv_heads, -1)
    keys, values = (torch.cat([gather_rows(x[:, :, :first], index), x[:, :, first:end]], dim=2)
                    for x in (view.keys, view.values))
    if selector.extrapolate:
        rope, new = needed(view.rope), torch.arange(keys.shape[2], device=q.device)
        keys = rope.turn(keys, torch.cat([index, columns.expand(*index.shape[:2], -1)], dim=2), new)
        q = rope.turn(q, columns, new[-len(columns):])
    return dense_attention(q, keys, values, scale=view.scale, key_mask=None if bool(used.all()) else used,
                           sinks=view.sinks)
