"""Attention of chunks of a prompt: each to a list of tokens before it, which all its queries and heads share, and to
itself, causally.

On a GPU one kernel takes many chunks, and reads the listed rows where they lie.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsekv.kernels.block_attention import BLOCK, answer_for
from sparsekv.kernels.gather import anchor_indices, gather_rows
from sparsekv.kernels.launch import NEG_INF, acc_dtype, as_tokens, dense_last, on_device, padded

TWIN_QUERIES = 256
"""Queries that plain torch takes at once."""


def chunk_attention(
    q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, *, size: int, scale: float, sink: int, window: int,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend from chunks of a prompt, each to itself, to what is always read before it and to its list (TokenSelect
    §5.2).

    Args:
        q: `[B, Hq, n·size, d]` with RoPE, of the last of the tokens: n chunks.
        k, v: `[B, Hkv, N, d]`.
        chosen: `[B, n, K]`, mid tokens before every chunk, each once, padded with -1.
        size: of a chunk [tokens].
        sink, window: the first tokens, and those before a chunk, that are always read; without `starts` every chunk has
            so many before it [tokens].
        starts: `[B]`, the first real token of every row; None: all are real.

    Returns:
        out, as q, and lse `[B, Hq, n·size]`, float32 at least.
    """
    first = k.shape[2] - q.shape[2]
    anchors = chunk_anchors(len(q), range(first, k.shape[2], size), sink, window, k.device, starts)
    lists = torch.cat([chosen.to(torch.int32), anchors.to(torch.int32)], dim=2)
    if on_device(q) and starts is None:
        return launch_chunk_attention(q, k, v, lists, size=size, scale=scale)
    return chunk_attention_reference(q, k, v, lists, size=size, scale=scale, starts=starts)


def chunk_anchors(
    batch: int, firsts: range, sink: int, window: int, device: torch.device, starts: Tensor | None = None,
) -> Tensor:
    """List sink and window before chunks that begin at tokens `firsts [n]`: `[B, n, sink + window]` int64, with starts
    padded with -1. Without them nothing waits for the device.
    """
    if starts is not None:
        found = [anchor_indices(starts, min(sink, first), starts.clamp(min=first - window),
                                torch.full_like(starts, first)) for first in firsts]
        return torch.stack([torch.nn.functional.pad(x, (0, sink + window - x.shape[1]), value=-1) for x in found], 1)
    places = torch.arange(sink + window, device=device)
    begin = torch.arange(firsts.start, firsts.stop, firsts.step, device=device)[:, None]
    return torch.where(places < sink, places, places + begin - window - sink).expand(batch, -1, -1)


def chunk_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, lists: Tensor, *, size: int, scale: float, starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`chunk_attention` in plain torch, some queries at a time, with lists of all that is read before a chunk, lists
    `[B, n, K]`."""
    first = k.shape[2] - q.shape[2]
    found = [_one_chunk(q[:, :, at:at + size], k[:, :, :first + at + size], v[:, :, :first + at + size],
                        lists[:, at // size], scale, starts) for at in range(0, q.shape[2], size)]
    outs, lses = zip(*found, strict=True)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def _one_chunk(
    q: Tensor, k: Tensor, v: Tensor, tokens: Tensor, scale: float, starts: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The last of the tokens, with their list `[B, K]`."""
    batch, _, count, _ = q.shape
    heads_kv, listed, past = k.shape[1], tokens.shape[1], k.shape[2] - q.shape[2]
    acc, index = acc_dtype(q), tokens.clamp(min=0).long()[:, None].expand(-1, heads_kv, -1)
    keys, values = (torch.cat([gather_rows(x, index), x[:, :, past:]], dim=2).to(acc) for x in (k, v))
    place = torch.arange(count, device=q.device)
    real = torch.ones(batch, count, dtype=torch.bool, device=q.device)
    if starts is not None:
        real = place + past >= starts[:, None]
    used = torch.cat([tokens >= 0, real], dim=1)
    outs, lses = [], []
    for first in range(0, count, TWIN_QUERIES):
        rows = q[:, :, first:first + TWIN_QUERIES].to(acc).unflatten(1, (heads_kv, -1))
        seen = listed + first + rows.shape[3]
        scores = rows @ keys[:, :, None, :seen].mT * scale
        later = place[:first + rows.shape[3]] > place[first:first + rows.shape[3], None]
        hidden = torch.cat([later.new_zeros(len(later), listed), later], dim=1) | ~used[:, None, None, None, :seen]
        scores = scores.masked_fill(hidden, NEG_INF)
        lse = scores.logsumexp(-1)
        outs.append((scores.softmax(-1).nan_to_num(0.0) @ values[:, :, None, :seen]).flatten(1, 2).to(q.dtype))
        lses.append(lse.flatten(1, 2))
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def launch_chunk_attention(
    q: Tensor, k: Tensor, v: Tensor, lists: Tensor, *, size: int, scale: float,
) -> tuple[Tensor, Tensor]:
    """`chunk_attention_reference` without padding through Triton, a program a query head and block of a chunk's
    queries; its twin where they have no room."""
    from sparsekv.kernels.chunk_attention_triton import chunk_kernel

    q, k, v = (dense_last(x) for x in (q, k, v))
    batch, heads, count, dim = q.shape
    out, lse, how = answer_for(q)
    if out.numel():
        if how is None:
            return chunk_attention_reference(q, k, v, lists, size=size, scale=scale)
        chunk_kernel[(-(-size // BLOCK), batch * heads, -(-count // size))](
            as_tokens(q), as_tokens(k), as_tokens(v), lists.contiguous(), as_tokens(out), lse, scale, heads,
            heads // k.shape[1], size, k.shape[2] - count, count, lists.shape[2], DIM=dim, WIDTH=padded(dim),
            BLOCK=BLOCK, KEYS=how.keys, num_warps=how.warps, num_stages=how.stages)
    return out, lse
