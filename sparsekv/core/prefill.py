"""A prompt read sparsely, a chunk at a time: by one list a KV head for all of a chunk's queries (this project's own),
or as a selector reads prompts (TokenSelect §5.2)."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsekv.core.estimators.phi import PhiEstimator, Prefixes
from sparsekv.core.layer import LayerView, needed
from sparsekv.core.regions import Regions
from sparsekv.core.selectors.base import ReadsPrompts
from sparsekv.foundation.config import check_ranges, option
from sparsekv.kernels import (
    add_sinks,
    chunk_anchors,
    chunk_attention,
    chunk_rows,
    chunk_tokens,
    chunks_of,
    dense_attention,
    gather_rows,
    representatives,
)

MOST_CHUNKS, MOST_BYTES = 8, 1 << 30
"""Chunks that are read together at most, and bytes of the keys and values that they choose."""


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
    shortest: int = option(65_536, help="Prompts shorter than this are read densely, which is then faster [tokens].",
                           min=0)

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

    def together(self, first: int, chunks: int, view: LayerView) -> int:
        n, count, (batch, heads, _, dim) = 1, self.count(first), view.keys.shape
        if count >= self._candidates(first):
            return 1
        each = (count + self.sink + self.window) * batch * heads * 2 * dim * view.keys.element_size()
        while n < min(chunks, MOST_CHUNKS) and (n + 1) * each <= MOST_BYTES and (
                self.count(first + n * self.chunk) == count):
            n += 1
        return n

    def _candidates(self, first: int) -> int:
        """Tokens that a chunk after `first` may choose."""
        return max(first - self.window, 0) - min(self.sink, max(first - self.window, 0))

    def listed(self, past: LayerView, q: Tensor) -> Tensor | None:
        first = past.keys.shape[2] - (len(q) // len(past.keys) - 1) * self.chunk
        count = self.count(first)
        if count >= self._candidates(first):
            return None
        asking = representatives(q, past.num_kv_heads)
        return chunk_tokens(asking, past.keys, self.sink, first - self.window, count, scale=past.scale,
                            step=self.chunk)


def prefill_chunks(
    view: LayerView, query: Tensor, reader: ReadsPrompts, estimator: PhiEstimator | None = None, *, ends: bool = True,
) -> Tensor:
    """Attention of the last T tokens of a view, `reader.chunk` of them at a time: query `[B, Hq, T, d]` -> as query.

    A chunk attends to itself (causally), the sink and the window before it, and to what the reader lists of the tokens
    between; densely while that is all of them. estimator: stands for what is not read, under the same normalisation.
    The chunks begin at the first of the T tokens; those that the reader takes together are rows of the same calls, and
    those read densely that stand side by side are one. ends: the prompt ends with them, so that the last `reader.exact`
    are read densely. With a reader that extrapolates keys and queries get the positions 0, 1, 2, … in the order of the
    tokens. Of `view.regions` only rows count. Raises SparseKVError for such a reader and a batch with padding.
    """
    total, count = view.keys.shape[2], query.shape[2]
    begin, batch = total - count, len(query)
    padded = bool((view.regions.starts > 0).any())
    if padded and not reader.takes_padding:
        return _dense(view, query, total, padded)
    make = Regions.at_prefill_end if padded else Regions.of_equal_rows
    regions = functools.partial(make, view.regions.starts, sink_size=reader.sink, window_size=reader.window)
    out, old = torch.empty_like(query), None
    border = max(begin, total - reader.exact) if ends else total
    at = behind = begin  # tokens from `behind` to `at` are read densely, together
    while at < border:
        whole = (border - at) // reader.chunk
        chunks = reader.together(at, whole, view) if whole > 1 and not padded else 1
        if estimator is not None and chunks > 1:
            chunks = estimator.together(old, regions(length=at), reader.chunk, chunks)
        end = min(at + chunks * reader.chunk, border)
        last = at + (chunks - 1) * reader.chunk
        past = replace(view, keys=view.keys[:, :, :last], values=view.values[:, :, :last], regions=regions(length=last))
        q = chunks_of(query[:, :, at - begin:end - begin], chunks)
        listed = reader.listed(past, q)
        if listed is not None:
            if behind < at:
                out[:, :, behind - begin:at - begin] = _dense(view, query[:, :, behind - begin:at - begin], at, padded)
            if reader.extrapolate:
                found = _contiguous(past, view, q, end, listed, padded, reader.sink, reader.window)
            else:
                prefixes = None
                if estimator is not None:
                    prefixes = estimator.prefixes(view, old, regions(length=at), past.regions, chunks, listed.shape[2])
                    old = past.regions
                found = _chunks(view, q, end, listed, padded, reader, estimator, prefixes)
            out[:, :, at - begin:end - begin].unflatten(2, (chunks, -1)).copy_(
                found.unflatten(0, (batch, chunks)).transpose(1, 2))
            behind = end
        at = end
    if behind < total:
        out[:, :, behind - begin:] = _dense(view, query[:, :, behind - begin:], total, padded)
    return out


def _dense(view: LayerView, q: Tensor, end: int, padded: bool) -> Tensor:
    """All tokens before `end`, of which q are the last."""
    mask = torch.arange(end, device=q.device) >= view.regions.starts[:, None] if padded else None
    return dense_attention(q, view.keys[:, :, :end], view.values[:, :, :end], scale=view.scale, key_mask=mask,
                           sinks=view.sinks)


def _chunks(
    view: LayerView, q: Tensor, end: int, listed: Tensor, padded: bool, reader: ReadsPrompts,
    estimator: PhiEstimator | None, prefixes: Prefixes | None,
) -> Tensor:
    """Chunks `q [B·n, Hq, c, d]`, those before token `end`."""
    keys, values = view.keys[:, :, :end], view.values[:, :, :end]
    read = chunk_attention(q, keys, values, listed, scale=view.scale, sink=reader.sink, window=reader.window,
                           starts=view.regions.starts if padded else None)
    out, lse = read.out, read.lse
    if estimator is not None and prefixes is not None:
        rows = read.rows or chunk_rows(keys, values, listed, q.shape[2], 0, 0)
        out, lse = estimator.complete_chunks(prefixes, q, rows, listed.shape[2], out, lse)
    if view.sinks is not None:
        out = add_sinks(out.transpose(1, 2), lse.transpose(1, 2), view.sinks)[0].transpose(1, 2)
    return out


def _contiguous(
    past: LayerView, view: LayerView, q: Tensor, end: int, listed: Tensor, padded: bool, sink: int, window: int,
) -> Tensor:
    """One chunk whose keys, in order, have the positions 0, 1, 2, … (length extrapolation)."""
    first, rope = past.keys.shape[2], needed(view.rope)
    columns = torch.arange(first, end, device=q.device)
    anchors = chunk_anchors(len(q), len(q), first, q.shape[2], sink, window, q.device,
                            past.regions.starts if padded else None)
    tokens = torch.cat([listed[:, 0], anchors], dim=1)
    tokens = torch.where(tokens < 0, first, tokens).sort(dim=1).values
    used = torch.cat([tokens < first, columns >= past.regions.starts[:, None]], dim=1)
    index = tokens.clamp(max=first - 1)[:, None].expand(-1, view.num_kv_heads, -1)
    keys, values = (torch.cat([gather_rows(x[:, :, :first], index), x[:, :, first:end]], dim=2)
                    for x in (view.keys, view.values))
    new = torch.arange(keys.shape[2], device=q.device)
    keys = rope.turn(keys, torch.cat([index, columns.expand(*index.shape[:2], -1)], dim=2), new)
    return dense_attention(rope.turn(q, columns, new[-len(columns):]), keys, values, scale=view.scale,
                           key_mask=None if bool(used.all()) else used, sinks=view.sinks)
