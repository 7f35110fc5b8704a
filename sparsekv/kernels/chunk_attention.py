"""Attention of a chunk of a prompt: to a list of tokens a KV head, all of them before the chunk, and to the chunk
itself, causally.

All queries of a chunk and of a group share a list. Where cuDNN's kernel is there and every place of the lists is a
token, the rows that are read are gathered and both parts go through it; else plain torch computes both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsekv.kernels.dense import add_attention, cudnn_attention, splits
from sparsekv.kernels.gather import anchor_indices, gather_rows
from sparsekv.kernels.launch import NEG_INF, acc_dtype, on_device

TWIN_QUERIES = 256
"""Queries that plain torch takes at once."""


def chunk_attention(
    q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, *, scale: float, sink: int, window: int,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend from a chunk of a prompt to itself, to what is always read before it and to a list (TokenSelect §5.2).

    Args:
        q: `[B, Hq, c, d]` with RoPE, of the last c of the tokens.
        k, v: `[B, Hkv, N, d]`.
        chosen: `[B, H, K]`, H = Hkv or 1, each token once; with `starts` it may be padded with -1.
        sink, window: the first tokens, and those before the chunk, that are always read [tokens].
        starts: `[B]`, the first real token of every row; None: all are real.

    Returns:
        out, as q, and lse `[B, Hq, c]`, float32 at least.
    """
    anchors = chunk_anchors(len(q), k.shape[2] - q.shape[2], sink, window, k.device, starts).to(chosen.dtype)
    tokens = torch.cat([chosen.expand(-1, k.shape[1], -1), anchors[:, None].expand(-1, k.shape[1], -1)], dim=2)
    if on_device(q) and starts is None and splits(q.dtype, q.shape[1], k.shape[1], q.shape[3], q.device):
        return gathered_attention(q, k, v, tokens, scale=scale)
    return chunk_attention_reference(q, k, v, tokens, scale=scale, starts=starts)


def chunk_anchors(
    batch: int, first: int, sink: int, window: int, device: torch.device, starts: Tensor | None = None,
) -> Tensor:
    """List sink and window before a chunk that begins at token `first`: `[B, sink + window]` int64, with starts padded
    with -1. Without them nothing waits for the device.
    """
    if starts is not None:
        return anchor_indices(starts, min(sink, first), starts.clamp(min=first - window),
                              torch.full_like(starts, first))
    places = torch.arange(sink + window, device=device)
    return torch.where(places < sink, places, places + first - window - sink).expand(batch, -1)


def chunk_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, tokens: Tensor, *, scale: float, starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`chunk_attention` in plain torch, some queries at a time, with lists of all that is read before the chunk, tokens
    `[B, Hkv, K]`."""
    batch, _, count, _ = q.shape
    heads_kv, listed, past = k.shape[1], tokens.shape[2], k.shape[2] - q.shape[2]
    acc, index = acc_dtype(q), tokens.clamp(min=0).long()
    keys, values = (torch.cat([gather_rows(x, index), x[:, :, past:]], dim=2).to(acc) for x in (k, v))
    place = torch.arange(count, device=q.device)
    real = torch.ones(batch, count, dtype=torch.bool, device=q.device)
    if starts is not None:
        real = place + past >= starts[:, None]
    used = torch.cat([tokens >= 0, real[:, None].expand(-1, heads_kv, -1)], dim=2)
    outs, lses = [], []
    for first in range(0, count, TWIN_QUERIES):
        rows = q[:, :, first:first + TWIN_QUERIES].to(acc).unflatten(1, (heads_kv, -1))
        seen = listed + first + rows.shape[3]
        scores = rows @ keys[:, :, None, :seen].mT * scale
        later = place[:first + rows.shape[3]] > place[first:first + rows.shape[3], None]
        hidden = torch.cat([later.new_zeros(len(later), listed), later], dim=1) | ~used[:, :, None, None, :seen]
        scores = scores.masked_fill(hidden, NEG_INF)
        lse = scores.logsumexp(-1)
        outs.append((scores.softmax(-1).nan_to_num(0.0) @ values[:, :, None, :seen]).flatten(1, 2).to(q.dtype))
        lses.append(lse.flatten(1, 2))
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def gathered_attention(q: Tensor, k: Tensor, v: Tensor, tokens: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """`chunk_attention_reference` without padding through cuDNN's kernel: the chunk itself, the rows of the lists, both
    merged."""
    past = k.shape[2] - q.shape[2]
    out, lse = cudnn_attention(q, k[:, :, past:], v[:, :, past:], scale, causal=True)
    if not tokens.shape[2]:
        return out, lse
    far, far_lse = cudnn_attention(q, gather_rows(k, tokens), gather_rows(v, tokens), scale, causal=False)
    return add_attention(out, lse, far, far_lse)
