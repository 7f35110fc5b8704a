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
MOST_VOTES = 1 << 28
"""Bytes of the scores of chunks that a reader lists together."""


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

    def selects(self, view: LayerView) -> Tensor:
        """Return whether less is read than there is, `[rows]` bool, of a view whose regions are those of chunks."""

    def listed(self, view: LayerView, q: Tensor, firsts: Tensor) -> Tensor:
        """The mid tokens that chunks `[B, Hq, n·size, d]` read beside sink and window, `[B, n, K]`, padded with -1.
        view: the tokens before the last of them, with the regions of all; firsts `[n]`: their first tokens."""


def chunk_regions(starts: Tensor, total: int, firsts: Tensor, sink: int, window: int) -> Regions:
    """Regions of the tokens before chunks that begin at `firsts [n]`, of rows that begin at `starts [B]`: B·n rows
    which all end at `total`, each moved there by `total − first`."""
    moved = starts[:, None] + total - firsts
    return Regions.at_prefill_end(moved.flatten(), total, sink, window)


def prefill_chunks(view: LayerView, query: Tensor, reader: ReadsChunks) -> Tensor:
    """Attention of the last T tokens of a view, `reader.chunk` of them at a time: query `[B, Hq, T, d]` -> as query.

    A chunk attends to itself (causally), the sink and the window before it, and to what the reader lists of the tokens
    between; densely while that is all of them. The chunks begin at the first of the T tokens. With a reader that
    extrapolates keys and queries get the positions 0, 1, 2, … in the order of the tokens. Of `view.regions` only rows
    count. Raises SparseKVError for such a reader and a batch with padding.
    """
    batch, heads, count, _ = query.shape
    total = view.keys.shape[2]
    begin, starts = total - count, padding(view)
    every = torch.arange(begin, total, reader.chunk, device=query.device)

    def before(firsts: Tensor, end: int) -> LayerView:
        regions = chunk_regions(view.regions.starts, total, firsts, reader.sink, reader.window)
        return replace(view, keys=view.keys[:, :, :end], values=view.values[:, :, :end], regions=regions)

    selects = reader.selects(before(every, total)).view(batch, -1).any(0).tolist()
    first = min(total, begin + reader.chunk * (selects.index(True) if True in selects else len(selects)))
    out = torch.empty_like(query)
    if begin < first:
        out[:, :, :first - begin] = dense(view, query[:, :, :first - begin], first, starts)
    together = reader.chunk * max(1, MOST_VOTES // (4 * batch * heads * total))
    whole = total - (total - first) % reader.chunk
    for start in (*range(first, whole, together), *([whole] if whole < total else [])):
        end = min(start + together, whole) if start < whole else total
        firsts = torch.arange(start, end, reader.chunk, device=query.device)
        q = query[:, :, start - begin:end - begin]
        listed = reader.listed(before(firsts, start + (len(firsts) - 1) * reader.chunk), q, firsts)
        read = _contiguous if reader.extrapolate else _chunks
        out[:, :, start - begin:end - begin] = read(view, q, end, listed, starts, reader)
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


def _chunks(
    view: LayerView, q: Tensor, end: int, listed: Tensor, starts: Tensor | None, reader: ReadsChunks,
) -> Tensor:
    """Chunks `q [B, Hq, n·size, d]`, the last tokens before `end`, with their lists."""
    out, lse = chunk_attention(q, view.keys[:, :, :end], view.values[:, :, :end], listed,
                               size=q.shape[2] // listed.shape[1], scale=view.scale, sink=reader.sink,
                               window=reader.window, starts=starts)
    if view.sinks is not None:
        out = add_sinks(out.transpose(1, 2), lse.transpose(1, 2), view.sinks)[0].transpose(1, 2)
    return out


def _contiguous(
    view: LayerView, q: Tensor, end: int, listed: Tensor, starts: Tensor | None, reader: ReadsChunks,
) -> Tensor:
    """Attend from chunks `q [B, Hq, n·size, d]`, the last tokens before `end`, to the keys that each reads, which get
    the positions 0, 1, 2, … in their order (length extrapolation)."""
    size, rope = q.shape[2] // listed.shape[1], needed(view.rope)
    firsts, outs = range(end - q.shape[2], end, size), []
    anchors = chunk_anchors(len(q), firsts, reader.sink, reader.window, q.device, starts)
    lists = torch.cat([listed, anchors], dim=2).unbind(1)
    for first, part, tokens in zip(firsts, q.split(size, dim=2), lists, strict=True):
        columns = torch.arange(first, first + size, device=q.device)
        tokens = torch.where(tokens < 0, first, tokens).sort(dim=1).values
        used = torch.cat([tokens < first, columns >= view.regions.starts[:, None]], dim=1)
        index = tokens.clamp(max=first - 1)[:, None].expand(-1, view.num_kv_heads, -1)
        keys, values = (torch.cat([gather_rows(x[:, :, :first], index), x[:, :, first:first + size]], dim=2)
                        for x in (view.keys, view.values))
        new = torch.arange(keys.shape[2], device=q.device)
        keys = rope.turn(keys, torch.cat([index, columns.expand(*index.shape[:2], -1)], dim=2), new)
        outs.append(dense_attention(rope.turn(part, columns, new[-size:]), keys, values, scale=view.scale,
                                    key_mask=None if bool(used.all()) else used, sinks=view.sinks))
    return torch.cat(outs, dim=2)
