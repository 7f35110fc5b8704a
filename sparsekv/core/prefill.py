"""A prompt read sparsely: by blocks (`SparsePrompts`), or a chunk at a time as a selector reads prompts (TokenSelect
§5.2)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from sparsekv.core.layer import LayerView, needed
from sparsekv.core.regions import Regions
from sparsekv.kernels import add_sinks, chunk_anchors, chunk_attention, dense_attention, gather_rows
from sparsekv.kernels.block_attention import BLOCK, EACH, block_attention, block_lists, block_scores, score_bytes
from sparsekv.util.config import check_ranges, option

MOST_BLOCKS, MOST_BYTES = 128, 1 << 30
"""Blocks of queries that are scored together at most, and bytes of their scores."""


@dataclass(frozen=True)
class SparsePrompts:
    """The options of sparse prompts: 128 queries of a head attend to themselves (causally), to the first 128 tokens and
    to the blocks of 128 tokens that sums over antidiagonals of the scores choose (`kernels/block_attention.py`, by
    XAttention §2.1). All heads of a layer share what they may choose.

    Raises SparseKVError for a number out of its range.
    """

    share: float = option(0.3, help="Tokens that a head's queries choose, as a share of those before them, in the mean "
                                    "of the heads.", min=0.0, max=1.0)
    least: int = option(4096, help="Tokens that a head's queries choose at least, in the mean of the heads [tokens].",
                        min=0)
    exact: int = option(512, help="Last tokens of a prompt, which read all tokens before them [tokens].", min=0)
    shortest: int = option(65_536, help="Prompts shorter than this are read densely: little is gained [tokens].",
                           min=0)

    def __post_init__(self) -> None:
        check_ranges(self, str)

    def read(self, view: LayerView, query: Tensor, *, after: int = 0) -> Tensor:
        """Attention of the last T tokens of a view: query `[B, Hq, T, d]` -> as query. after: tokens of the prompt that
        come after them. Its last `exact` tokens read everything, as do those outside whole blocks and all of a batch
        with padding. Of `view.regions` only the rows' starts count."""
        if (starts := padding(view)) is not None:
            return dense(view, query, view.keys.shape[2], starts)
        total, begin = view.keys.shape[2], view.keys.shape[2] - query.shape[2]
        first, border = self.sparse_part(total, query.shape[2], after)
        if first == border:
            return dense(view, query, total)
        out = torch.empty_like(query)
        if begin < first:
            out[:, :, :first - begin] = dense(view, query[:, :, :first - begin], first)
        each = MOST_BYTES // max(1, score_bytes(len(query), query.shape[1], border))
        for start in range(first, border, step := BLOCK * max(1, min(MOST_BLOCKS, each))):
            end = min(start + step, border)
            out[:, :, start - begin:end - begin] = self._blocks(view, query[:, :, start - begin:end - begin], end)
        if border < total:
            out[:, :, border - begin:] = dense(view, query[:, :, border - begin:], total)
        return out

    def sparse_part(self, total: int, count: int, after: int = 0) -> tuple[int, int]:
        """First and last + 1 of the tokens that read blocks, of the last `count` of `total` tokens with `after` more of
        the prompt behind them; the same number twice where none does."""
        begin = total - count
        first = min(begin + -begin % BLOCK, total)
        return first, max(first, min(total, total + after - self.exact) // BLOCK * BLOCK)

    @staticmethod
    def bytes_beside(heads: int, length: int) -> int:
        """Bytes of the scores of `heads` query heads at most, with their masses and the lists, while one prompt of
        `length` tokens is read."""
        scores = min(max(MOST_BYTES, score_bytes(1, heads, length)), MOST_BLOCKS * score_bytes(1, heads, length))
        return scores * (EACH + 2) // EACH

    def _blocks(self, view: LayerView, q: Tensor, end: int) -> Tensor:
        """Attend with whole blocks of queries, the last of them before token `end`."""
        keys, values = view.keys[:, :, :end], view.values[:, :, :end]
        lists = block_lists(block_scores(q, keys, scale=view.scale), self.share, -(-self.least // BLOCK))
        out, lse = block_attention(q, keys, values, lists, scale=view.scale)
        if view.sinks is None:
            return out
        return add_sinks(out.transpose(1, 2), lse.transpose(1, 2), view.sinks)[0].transpose(1, 2)


class ReadsChunks(Protocol):
    """A reader of prompts, `chunk` tokens at a time. sink, window: the first tokens, and those before a chunk, that it
    always reads. extrapolate: the keys that are read get contiguous positions (length extrapolation)."""

    @property
    def chunk(self) -> int: ...

    @property
    def sink(self) -> int: ...

    @property
    def window(self) -> int: ...

    @property
    def extrapolate(self) -> bool: ...

    def listed(self, past: LayerView, q: Tensor) -> Tensor | None:
        """The mid tokens that a chunk `[B, Hq, c, d]` reads beside sink and window, `[B, H, K]`, padded with -1 where
        rows have padding, H = Hkv or 1; None: it reads all. past: the tokens before the chunk."""


def prefill_chunks(view: LayerView, query: Tensor, reader: ReadsChunks) -> Tensor:
    """Attention of the last T tokens of a view, `reader.chunk` of them at a time: query `[B, Hq, T, d]` -> as query.

    A chunk attends to itself (causally), the sink and the window before it, and to what the reader lists of the tokens
    between; densely while that is all of them. The chunks begin at the first of the T tokens. With a reader that
    extrapolates keys and queries get the positions 0, 1, 2, … in the order of the tokens. Of `view.regions` only rows
    count. Raises SparseKVError for such a reader and a batch with padding.
    """
    total, count = view.keys.shape[2], query.shape[2]
    begin = total - count
    starts = padding(view)
    out = torch.empty_like(query)
    behind = begin  # tokens from `behind` to `at` are read densely, together
    for start in range(begin, total, reader.chunk):
        end = min(start + reader.chunk, total)
        make = Regions.of_equal_rows if starts is None else Regions.at_prefill_end
        past = replace(view, keys=view.keys[:, :, :start], values=view.values[:, :, :start],
                       regions=make(view.regions.starts, start, reader.sink, reader.window))
        q = query[:, :, start - begin:end - begin]
        listed = reader.listed(past, q)
        if listed is None:
            continue
        if behind < start:
            part = slice(behind - begin, start - begin)
            out[:, :, part] = dense(view, query[:, :, part], start, starts)
        read = _contiguous if reader.extrapolate else _chunk
        out[:, :, start - begin:end - begin] = read(past, view, q, end, listed, starts, reader)
        behind = end
    if behind < total:
        out[:, :, behind - begin:] = dense(view, query[:, :, behind - begin:], total, starts)
    return out


def padding(view: LayerView) -> Tensor | None:
    """Return where rows begin, `[B]`, if one has padding. Waits for the device, unless the regions are known to be
    equal."""
    return view.regions.starts if view.regions.spans[1] > 0 else None


def dense(view: LayerView, q: Tensor, end: int, starts: Tensor | None = None) -> Tensor:
    """Attend to all tokens before `end`, of which q are the last; rows begin at `starts`."""
    mask = None if starts is None else torch.arange(end, device=q.device) >= starts[:, None]
    return dense_attention(q, view.keys[:, :, :end], view.values[:, :, :end], scale=view.scale, key_mask=mask,
                           sinks=view.sinks)


def _chunk(
    past: LayerView, view: LayerView, q: Tensor, end: int, listed: Tensor, starts: Tensor | None, reader: ReadsChunks,
) -> Tensor:
    """A chunk `q [B, Hq, c, d]`, the tokens before `end`."""
    out, lse = chunk_attention(q, view.keys[:, :, :end], view.values[:, :, :end], listed, scale=view.scale,
                               sink=reader.sink, window=reader.window, starts=starts)
    if view.sinks is not None:
        out = add_sinks(out.transpose(1, 2), lse.transpose(1, 2), view.sinks)[0].transpose(1, 2)
    return out


def _contiguous(
    past: LayerView, view: LayerView, q: Tensor, end: int, listed: Tensor, starts: Tensor | None, reader: ReadsChunks,
) -> Tensor:
    """One chunk whose keys, in order, have the positions 0, 1, 2, … (length extrapolation)."""
    first, rope = past.keys.shape[2], needed(view.rope)
    columns = torch.arange(first, end, device=q.device)
    anchors = chunk_anchors(len(q), first, reader.sink, reader.window, q.device, starts)
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
