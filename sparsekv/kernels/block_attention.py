"""Attention of a prompt by blocks: of each query head every block of queries reads a list of blocks of keys, and itself
causally.

Which blocks, antidiagonals say (XAttention §2.1): of `STRIDE` neighbouring queries and as many neighbouring keys, a
group each, the mean score of the pairs (i, STRIDE − 1 − i), in which each token occurs once. A softmax over all groups
of keys, the sum over a block: what a block of queries gives to a block of keys. Every query asks, since what a single
one needs is lost in a mean of many. The heads of a layer share their budget (this project's own).

Queries are whole blocks, the last of the tokens, and so are the tokens before them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparsekv.kernels.launch import NEG_INF, acc_dtype, as_tokens, dense_last, on_device, padded, shared_bytes

BLOCK, STRIDE = 128, 8
"""Tokens of a block, and neighbours of a group."""
EACH = BLOCK // STRIDE
"""Groups of a block."""
SHARE_BITS = 16
"""A share is a number of these bits, so that twins round alike."""
PROGRAMS = 528
"""Programs of `score_kernel` that are wanted."""
MASS, FLOOR, LIST = (128, 4), (4096, 8), (256, 4)
"""Blocks of keys at once of a program of `mass_kernel`, of `floor_kernel` (of all heads) and of `list_kernel`, and its
warps."""


class BlockLists(NamedTuple):
    """Blocks of keys of every query head and block of queries, `[B, Hq, n, K]` int32, ascending, and how many of them
    count, `[B, Hq, n]` int32, at least one; the last is the queries' own."""

    blocks: Tensor
    counts: Tensor


class Tiles(NamedTuple):
    """How `score_kernel` runs: rows and columns of a tile, channels at once, warps, tiles under way."""

    rows: int
    columns: int
    channels: int
    warps: int
    stages: int


SCORES = (Tiles(128, 256, 64, 8, 4), Tiles(128, 256, 64, 8, 3), Tiles(128, 128, 64, 8, 3), Tiles(64, 64, 64, 4, 2),
          Tiles(64, 64, 16, 4, 2))
"""Groups of queries by groups of keys, the first that fits the device."""


class Launch(NamedTuple):
    """How the kernel runs: queries times heads of a program, keys at once, warps, blocks of keys under way."""

    rows: int
    keys: int
    warps: int
    stages: int

    def bytes(self, row_bytes: int) -> int:
        """Shared memory for rows of so many bytes."""
        return row_bytes * (self.rows + 2 * self.stages * self.keys)


ATTENTION = (Launch(BLOCK, 128, 8, 2), Launch(BLOCK, 64, 8, 2), Launch(BLOCK, 32, 8, 2), Launch(BLOCK, 16, 8, 1))
"""Queries and keys of a program of `block_kernel`, the first that fits the device."""


def score_tiles(size: int, room: int) -> Tiles:
    """How scores run, of numbers of `size` bytes in `room` bytes of shared memory."""
    return next(t for t in SCORES if t.stages * (t.rows + t.columns) * t.channels * size <= room)


def attention_launch(row_bytes: int, room: int) -> Launch | None:
    """How attention runs, of keys of `row_bytes`; None where the queries have no room."""
    return next((how for how in ATTENTION if how.bytes(row_bytes) <= room), None)


def answer_for(q: Tensor) -> tuple[Tensor, Tensor, Launch | None]:
    """Make room for the answer to queries `[B, Hq, T, d]`, out as q and lse `[B, Hq, T]` float32, and say how attention
    runs; None where the queries have no room."""
    room = shared_bytes(q.device) if q.is_cuda else 1 << 30
    return (torch.empty_like(q, memory_format=torch.contiguous_format),
            torch.empty(q.shape[:3], dtype=torch.float32, device=q.device),
            attention_launch(padded(q.shape[3]) * q.element_size(), room))


def wanted_blocks(own: Tensor, share: int, least: int) -> Tensor:
    """Blocks that a block of queries after `own` others reads in the mean of the heads, the first and its own among
    them, at a share of 2^`SHARE_BITS`; where there are so many."""
    return ((own * share + (1 << SHARE_BITS - 1)) >> SHARE_BITS).clamp(min=least) + 2


def block_scores(q: Tensor, k: Tensor, *, scale: float) -> Tensor:
    """Log-sum-exps of the mean scores of antidiagonals over the groups of each block of keys, `[B, Hq, g, m]`, float32
    at least, of g groups of queries by m blocks: q `[B, Hq, T, d]`, k `[B, Hkv, N, d]`, with RoPE. A group sees groups
    up to its own; a block of which it sees none has -inf. Raises ValueError where T or N is not of whole blocks."""
    if q.shape[2] % BLOCK or k.shape[2] % BLOCK:
        raise ValueError(f"queries and keys are whole blocks of {BLOCK} tokens, found {q.shape[2]} and {k.shape[2]}")
    return (launch_block_scores if on_device(q) else block_scores_reference)(q, k, scale=scale)


def score_bytes(batch: int, heads: int, length: int) -> int:
    """Bytes of the scores of as many queries as a block has by `length` keys."""
    return 4 * batch * heads * EACH * -(-length // BLOCK)


def block_scores_reference(q: Tensor, k: Tensor, *, scale: float) -> Tensor:
    """`block_scores` in plain torch, a block of queries at a time."""
    acc = acc_dtype(q)
    q, k = (x.to(acc).unflatten(2, (-1, STRIDE)) for x in (q, k))
    q, k = q.flip(3).flatten(3), k.flatten(3)
    rows, columns = q.shape[2], k.shape[2]
    column = torch.arange(columns, device=q.device)
    out = torch.empty(*q.shape[:3], columns // EACH, dtype=acc, device=q.device)
    for at in range(0, rows, EACH):
        scores = _products(q[:, :, at:at + EACH], k).mul_(scale / STRIDE)
        own = column[columns - rows + at:columns - rows + at + EACH]
        scores.masked_fill_(column > own[:, None], NEG_INF)
        out[:, :, at:at + EACH] = scores.unflatten(3, (-1, EACH)).logsumexp(-1)
    return out


def _products(q: Tensor, k: Tensor) -> Tensor:
    """`q [B, Hq, T, d] @ k [B, Hkv, N, d].mT` -> `[B, Hq, T, N]`, without a copy of k a query head."""
    return (q.unflatten(1, (k.shape[1], -1)).flatten(2, 3) @ k.mT).view(*q.shape[:3], k.shape[2])


def launch_block_scores(q: Tensor, k: Tensor, *, scale: float) -> Tensor:
    """`block_scores` through Triton, in one pass over the keys."""
    from sparsekv.kernels.block_attention_triton import score_kernel

    q, k = dense_last(q), dense_last(k)
    batch, heads, count, dim = q.shape
    groups, blocks = count // STRIDE, k.shape[2] // BLOCK
    out = torch.empty(batch, heads, groups, blocks, dtype=torch.float32, device=q.device)
    if out.numel():
        how = score_tiles(q.element_size(), shared_bytes(q.device) if q.is_cuda else 1 << 30)
        tiles, rows = -(-blocks * EACH // how.columns), -(-groups // how.rows)
        parts = max(1, min(tiles, -(-PROGRAMS // (batch * heads * rows))))
        score_kernel[(batch * heads, rows, parts)](
            as_tokens(q), as_tokens(k), out, scale, heads, heads // k.shape[1], groups, blocks, DIM=dim, STRIDE=STRIDE,
            EACH=EACH, ROWS=how.rows, COLUMNS=how.columns, CHANNELS=min(how.channels, padded(dim)),
            num_warps=how.warps, num_stages=how.stages)
    return out


def share_bits(share: float) -> int:
    """A share as a number of `SHARE_BITS`."""
    return round(share * (1 << SHARE_BITS))


def block_lists(scores: Tensor, share: float, least: int) -> BlockLists:
    """The blocks with the largest masses, of scores `[B, Hq, g, m]` of `block_scores`: a block of queries after n
    others takes `max(least, share · n)` of them a query head, of all heads together, beside the first block and its
    own. Of blocks of one mass all are taken if one is; those without any, or with NaN, are not."""
    make = launch_block_lists if on_device(scores) else block_lists_reference
    return make(scores, share_bits(share), least)


def block_lists_reference(scores: Tensor, share: int, least: int) -> BlockLists:
    """`block_lists` in plain torch, at a share of 2^`SHARE_BITS`."""
    heads, groups, blocks = scores.shape[1:]
    shares = (scores - scores.logsumexp(-1, keepdim=True)).exp()
    mass = shares.unflatten(2, (-1, EACH)).sum(3).nan_to_num(0.0)
    column = torch.arange(blocks, device=scores.device)
    own = torch.arange(blocks - groups // EACH, blocks, device=scores.device)
    mass = mass.masked_fill((column == 0) | (column == own[:, None]), torch.inf)
    mass = mass.masked_fill(column > own[:, None], -1.0)
    order = mass.transpose(1, 2).flatten(2).sort(dim=-1, descending=True).values
    last = (heads * wanted_blocks(own, share, least)).clamp(max=order.shape[2]) - 1
    floor = order.gather(2, last[None, :, None].expand(len(mass), -1, 1))[:, None]
    kept = (mass >= floor) & (mass > 0)
    places = kept.cumsum(-1, dtype=torch.int64) - 1
    lists = torch.zeros(*mass.shape[:3], blocks + 1, dtype=torch.int32, device=scores.device)
    lists.scatter_(-1, torch.where(kept, places, blocks), column.int().expand_as(kept))
    return BlockLists(lists[..., :blocks], kept.sum(-1, dtype=torch.int32))


def launch_block_lists(scores: Tensor, share: int, least: int) -> BlockLists:
    """`block_lists` through Triton, at a share of 2^`SHARE_BITS`: the masses, the least mass that is taken, the
    lists."""
    from sparsekv.kernels.block_attention_triton import floor_kernel, list_kernel, mass_kernel

    batch, heads, groups, blocks = scores.shape
    count, device = groups // EACH, scores.device
    mass = torch.empty(batch, count, heads, blocks, dtype=torch.float32, device=device)
    floor = torch.empty(batch, count, dtype=torch.int32, device=device)
    lists = BlockLists(torch.empty(batch, heads, count, blocks, dtype=torch.int32, device=device),
                       torch.empty(batch, heads, count, dtype=torch.int32, device=device))
    if lists.counts.numel():
        bits, past = mass.view(torch.int32), blocks - count
        mass_kernel[(count, batch * heads)](scores.contiguous(), mass, heads, past, blocks, EACH=EACH,
                                            COLUMNS=MASS[0], num_warps=MASS[1])
        floor_kernel[(count, batch)](bits, floor, heads, past, blocks, share, least, BITS=SHARE_BITS,
                                     COLUMNS=FLOOR[0], num_warps=FLOOR[1])
        list_kernel[(count, batch * heads)](bits, floor, *lists, heads, past, blocks, COLUMNS=LIST[0],
                                            num_warps=LIST[1])
    return lists


def block_attention(q: Tensor, k: Tensor, v: Tensor, lists: BlockLists, *, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of queries to their lists of blocks: q `[B, Hq, T, d]`, k, v `[B, Hkv, N, d]`, with RoPE -> out as q,
    lse `[B, Hq, T]`, float32 at least."""
    attend = launch_block_attention if on_device(q) else block_attention_reference
    return attend(q, k, v, lists, scale=scale)


def block_attention_reference(q: Tensor, k: Tensor, v: Tensor, lists: BlockLists, *,
                              scale: float) -> tuple[Tensor, Tensor]:
    """`block_attention` in plain torch, a block of queries at a time."""
    acc, heads = acc_dtype(q), k.shape[1]
    total, count, places = k.shape[2], q.shape[2], torch.arange(k.shape[2], device=q.device)
    there = torch.arange(lists.blocks.shape[3], device=q.device) < lists.counts[..., None]
    kept = torch.zeros(*lists.counts.shape, total // BLOCK + 1, dtype=torch.bool, device=q.device)
    kept.scatter_(-1, torch.where(there, lists.blocks, total // BLOCK).long(), True)
    k, v = k.to(acc), v.to(acc)
    outs, lses = [], []
    for i in range(count // BLOCK):
        end = total - count + (i + 1) * BLOCK
        mask = kept[:, :, i, :end // BLOCK].repeat_interleave(BLOCK, 2)[:, :, None]
        mask = mask & (places[:end] <= places[end - BLOCK:end, None])
        own = q[:, :, i * BLOCK:(i + 1) * BLOCK].to(acc)
        scores = _products(own, k[:, :, :end]).mul_(scale).masked_fill_(~mask, NEG_INF)
        lses.append(scores.logsumexp(-1))
        weights = scores.sub_(lses[-1][..., None]).exp_().unflatten(1, (heads, -1)).flatten(2, 3)
        outs.append((weights @ v[:, :, :end]).view(*own.shape[:3], -1).to(q.dtype))
    return torch.cat(outs, 2), torch.cat(lses, 2)


def launch_block_attention(q: Tensor, k: Tensor, v: Tensor, lists: BlockLists, *,
                           scale: float) -> tuple[Tensor, Tensor]:
    """`block_attention` through Triton, a program a query head and block of queries; its twin where it has no room."""
    from sparsekv.kernels.block_attention_triton import block_kernel

    q, k, v = (dense_last(x) for x in (q, k, v))
    batch, heads, count, dim = q.shape
    out, lse, how = answer_for(q)
    if out.numel():
        if how is None:
            return block_attention_reference(q, k, v, lists, scale=scale)
        blocks, counts = (x.contiguous() for x in lists)
        block_kernel[(count // BLOCK, batch * heads)](
            as_tokens(q), as_tokens(k), as_tokens(v), blocks, counts, as_tokens(out), lse, scale, heads,
            heads // k.shape[1], k.shape[2] - count, blocks.shape[3], DIM=dim, WIDTH=padded(dim), BLOCK=BLOCK,
            KEYS=how.keys, num_warps=how.warps, num_stages=how.stages)
    return out, lse
