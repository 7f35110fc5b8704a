"""A prompt read sparsely, a chunk at a time: by one list a KV head for all of a chunk's queries (this project's own),
or as a selector reads prompts (TokenSelect §5.2)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsekv.core.estimators.phi import PhiEstimator
from sparsekv.core.layer import LayerView, needed
from sparsekv.core.regions import Regions
from sparsekv.core.selectors.base import ReadsPrompts
from sparsekv.foundation.config import check_ranges, option
from sparsekv.kernels import (
    add_sinks,
    anchor_indices,
    chunk_attention,
    chunk_tokens,
    dense_attention,
    gather_rows,
    representatives,
)


@dataclass(frozen=True)
class SparsePrompts:
    """How a prompt is read sparsely. Every chunk attends to itself (causally), to the sink, to the window before it,
    and to the tokens between that means of its queries choose, one list for each KV head (`kernels.chunk_tokens`).

    Its fields are numbers of tokens, the share aside. Raises SparseKVError for one out of its range.
    """

    share: float = option(0.1, help="Tokens that a chunk's queries choose, a share of those before the chunk.", min=0.0,
                          max=1.0)
    least: int = option(4096, help="Tokens that a chunk's queries choose at least [tokens].", min=0)
    chunk: int = option(2048, help="Queries that share a list [tokens].", min=1)
    sink: int = option(16, help="First tokens that every chunk reads [tokens].", min=0)
    window: int = option(512, help="Tokens before a chunk that it reads [tokens].", min=0)
    exact: int = option(512, help="Last tokens of a prompt, which read all tokens before them [tokens].", min=0)

    extrapolate = False
    takes_padding = False

    def __post_init__(self) -> None:
        check_ranges(self)

    def count(self, past: int) -> int:
        """Tokens that a chunk after `past` tokens chooses: at least what is asked for, and one of eight sizes between
        two powers of two, since kernels are planned anew for every size."""
        asked = max(self.least, math.ceil(self.share * past))
        step = max(1, (1 << max(asked, 1).bit_length() - 1) // 8)
        return -(-asked // step) * step

    def listed(self, past: LayerView, q: Tensor) -> Tensor | None:
        first = past.keys.shape[2]
        low, high = min(self.sink, first), max(first - self.window, 0)
        count = self.count(first)
        if count >= high - low:
            return None
        asking = representatives(q, past.num_kv_heads)
        return chunk_tokens(asking, past.keys, low, high, count, scale=past.scale)


def prefill_chunks(
    view: LayerView, query: Tensor, reader: ReadsPrompts, estimator: PhiEstimator | None = None, *, ends: bool = True,
) -> Tensor:
    """Attention of the last T tokens of a view, `reader.chunk` of them at a time: query `[B, Hq, T, d]` -> as query.

    A chunk attends to itself (causally), the sink and the window before it, and to what the reader lists of the tokens
    between; densely while that is all of them. estimator: stands for what is not read, under the same normalisation.
    The chunks begin at the first of the T tokens. ends: the prompt ends with them, so that the last `reader.exact` are
    read densely. With a reader that extrapolates keys and queries get the positions 0, 1, 2, … in the order of the
    tokens. Of `view.regions` only rows count. Raises SparseKVError for such a reader and a batch with padding.
    """
    total, count = view.keys.shape[2], query.shape[2]
    padded = bool((view.regions.starts > 0).any())
    if padded and not reader.takes_padding:
        return _dense(view, query, total, padded)
    out, old = torch.empty_like(query), None
    for first, end, sparse in _spans(total - count, total, reader.chunk, reader.exact if ends else 0):
        rows = slice(first - (total - count), end - (total - count))
        regions = (Regions.at_prefill_end if padded else Regions.of_equal_rows)(
            view.regions.starts, first, reader.sink, reader.window)
        past = replace(view, keys=view.keys[:, :, :first], values=view.values[:, :, :first], regions=regions)
        listed = reader.listed(past, query[:, :, rows]) if sparse else None
        if listed is None:
            out[:, :, rows] = _dense(view, query[:, :, rows], end, padded)
        elif reader.extrapolate:
            out[:, :, rows] = _contiguous(past, view, query[:, :, rows], end, listed, padded)
        else:
            if estimator is not None:
                if old is None:
                    estimator.build(past)
                else:
                    estimator.extend(past, old)
                estimator.reads(past, listed.shape[2] / first)
                old = regions
            out[:, :, rows] = _chunk(past, view, query[:, :, rows], end, listed, padded, estimator)
    return out


def _spans(first: int, last: int, chunk: int, exact: int) -> Iterator[tuple[int, int, bool]]:
    """Where chunks begin and end, and whether they are read sparsely: all but the last `exact` tokens."""
    border = max(first, last - exact)
    for at in range(first, border, chunk):
        yield at, min(at + chunk, border), True
    if border < last:
        yield border, last, False


def _dense(view: LayerView, q: Tensor, end: int, padded: bool) -> Tensor:
    """All tokens before `end`, of which q are the last."""
    mask = torch.arange(end, device=q.device) >= view.regions.starts[:, None] if padded else None
    return dense_attention(q, view.keys[:, :, :end], view.values[:, :, :end], scale=view.scale, key_mask=mask,
                           sinks=view.sinks)


def _chunk(
    past: LayerView, view: LayerView, q: Tensor, end: int, listed: Tensor, padded: bool, estimator: PhiEstimator | None,
) -> Tensor:
    """One chunk `q [B, Hq, c, d]`, the tokens before `end`, after those of `past`."""
    anchors = _anchors(past, padded).to(listed.dtype)
    tokens = torch.cat([listed, anchors[:, None].expand(-1, listed.shape[1], -1)], dim=2)
    out, lse = chunk_attention(q, view.keys[:, :, :end], view.values[:, :, :end], tokens, scale=view.scale,
                               starts=view.regions.starts if padded else None)
    if estimator is not None:
        out, lse = estimator.complete_chunk(past, q, listed, out, lse)
    if view.sinks is not None:
        out = add_sinks(out.transpose(1, 2), lse.transpose(1, 2), view.sinks)[0].transpose(1, 2)
    return out


def _anchors(past: LayerView, padded: bool) -> Tensor:
    """Sink and window before a chunk, `[B, n]`, of rows with padding filled up with -1."""
    regions = past.regions
    if not padded:  # without a wait for the device
        first, _, last, _ = regions.edges
        places = torch.arange(past.keys.shape[2] - last + first, device=regions.starts.device)
        return torch.where(places < first, places, places - first + last).expand(len(regions.starts), -1)
    return anchor_indices(regions.starts, regions.sinks, regions.tail_starts,
                          torch.full_like(regions.starts, past.keys.shape[2]))


def _contiguous(
    past: LayerView, view: LayerView, q: Tensor, end: int, listed: Tensor, padded: bool,
) -> Tensor:
    """One chunk whose keys, in order, have the positions 0, 1, 2, … (length extrapolation)."""
    first, rope = past.keys.shape[2], needed(view.rope)
    columns = torch.arange(first, end, device=q.device)
    tokens = torch.cat([listed[:, 0], _anchors(past, padded)], dim=1)
    tokens = torch.where(tokens < 0, first, tokens).sort(dim=1).values
    used = torch.cat([tokens < first, columns >= past.regions.starts[:, None]], dim=1)
    index = tokens.clamp(max=first - 1)[:, None].expand(-1, view.num_kv_heads, -1)
    keys, values = (torch.cat([gather_rows(x[:, :, :first], index), x[:, :, first:end]], dim=2)
                    for x in (view.keys, view.values))
    new = torch.arange(keys.shape[2], device=q.device)
    keys = rope.turn(keys, torch.cat([index, columns.expand(*index.shape[:2], -1)], dim=2), new)
    return dense_attention(rope.turn(q, columns, new[-len(columns):]), keys, values, scale=view.scale,
                           key_mask=None if bool(used.all()) else used, sinks=view.sinks)
