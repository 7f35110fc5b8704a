"""Attention of a chunk of a prompt: to a list of tokens a KV head, all of them before the chunk, and to the chunk
itself, causally.

All queries of a chunk and of a group share a list, so that a key is fetched once for hundreds of rows. Where cuDNN's
kernel is there and every place of the lists is a token, the rows that are read are gathered and both parts go through
it; else one Triton kernel takes rows by their number.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparsekv.kernels.dense import add_attention, cudnn_attention, splits
from sparsekv.kernels.gather import anchor_indices, gather_rows
from sparsekv.kernels.launch import (
    NEG_INF,
    acc_dtype,
    as_heads,
    as_tokens,
    dense_last,
    on_device,
    overlaps,
    padded,
    shared_bytes,
)

TWIN_QUERIES = 256
"""Queries that the twin takes at once."""


class Launch(NamedTuple):
    """How the kernel runs: queries times heads of a program, keys at once, warps, blocks of keys under way."""

    rows: int
    keys: int
    warps: int
    stages: int

    def bytes(self, row_bytes: int) -> int:
        """Shared memory for rows of so many bytes."""
        return row_bytes * (self.rows + 2 * self.stages * self.keys)


LAUNCHES = {True: Launch(128, 64, 8, 2), False: Launch(128, 32, 8, 4)}
"""From sm_90 on and before it."""


def chunk_attention(
    q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, *, scale: float, sink: int, window: int,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """q `[B, Hq, c, d]` are the queries of a chunk, the last of the tokens k, v `[B, Hkv, N, d]`, with RoPE. It reads
    itself, the first `sink` tokens, the last `window` before it, and those that are chosen between, `[B, H, K]`, H =
    Hkv or 1, each named once. starts `[B]`: a row's first real token, and lists may be padded with -1; without it all
    tokens are real and every place of a list is one.

    Returns out, as q, and lse `[B, Hq, c]`, float32 at least.
    """
    anchors = chunk_anchors(len(q), k.shape[2] - q.shape[2], sink, window, k.device, starts).to(chosen.dtype)
    tokens = torch.cat([chosen.expand(-1, k.shape[1], -1), anchors[:, None].expand(-1, k.shape[1], -1)], dim=2)
    if on_device(q) and starts is None and splits(q.dtype, q.shape[1], k.shape[1], q.shape[3], q.device):
        return gathered_attention(q, k, v, tokens, scale=scale)
    attend = launch_chunk_attention if on_device(q) else chunk_attention_reference
    return attend(q, k, v, tokens, scale=scale, starts=starts)


def chunk_anchors(
    batch: int, first: int, sink: int, window: int, device: torch.device, starts: Tensor | None = None,
) -> Tensor:
    """Sink and window before a chunk that begins at token `first`, `[B, sink + window]` int64; with starts filled up
    with -1. Without them both are there, and nothing waits for the device."""
    if starts is not None:
        return anchor_indices(starts, min(sink, first), starts.clamp(min=first - window),
                              torch.full_like(starts, first))
    places = torch.arange(sink + window, device=device)
    return torch.where(places < sink, places, places + first - window - sink).expand(batch, -1)


def chunk_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, tokens: Tensor, *, scale: float, starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`launch_chunk_attention` in plain torch, some queries at a time."""
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
    """`launch_chunk_attention` without padding through cuDNN's kernel: the chunk itself, the rows of the lists, both
    merged."""
    past = k.shape[2] - q.shape[2]
    out, lse = cudnn_attention(q, k[:, :, past:], v[:, :, past:], scale, causal=True)
    if not tokens.shape[2]:
        return out, lse
    far, far_lse = cudnn_attention(q, gather_rows(k, tokens), gather_rows(v, tokens), scale, causal=False)
    return add_attention(out, lse, far, far_lse)


def launch_chunk_attention(
    q: Tensor, k: Tensor, v: Tensor, tokens: Tensor, *, scale: float, starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`chunk_attention` through Triton, with lists of all that is read before the chunk, tokens `[B, Hkv, K]`."""
    from sparsekv.kernels.chunk_attention_triton import chunk_kernel

    q, k, v, tokens = (dense_last(x) for x in (q, k, v, tokens))
    batch, heads_q, count, dim = q.shape
    heads_kv, listed = k.shape[1], tokens.shape[2]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(batch, heads_q, count, dtype=torch.float32, device=q.device)
    if not out.numel():
        return out, lse
    group = heads_q // heads_kv
    room = shared_bytes(q.device) if q.is_cuda else 1 << 30
    how = fitting(LAUNCHES[overlaps(q.device)], padded(dim) * q.element_size(), room)
    chunk_kernel[(batch * heads_kv, -(-count * group // how.rows))](
        as_tokens(q), as_tokens(k), as_tokens(v), as_heads(tokens),
        tokens if starts is None else starts.contiguous(), as_tokens(out), lse, scale, heads_kv, count,
        k.shape[2] - count, listed, GROUP=group, DIM=dim, WIDTH=padded(dim), PADDED=starts is not None, ROWS=how.rows,
        KEYS=how.keys, num_warps=how.warps, num_stages=how.stages)
    return out, lse


def fitting(how: Launch, row_bytes: int, room: int) -> Launch:
    """The same for keys of `row_bytes` in `room` bytes of shared memory."""
    while how.stages > 2 and how.bytes(row_bytes) > room:
        how = how._replace(stages=how.stages - 1)
    while how.keys > 16 and how.bytes(row_bytes) > room:
        how = how._replace(rows=how.rows // 2, keys=how.keys // 2, warps=4)
    return how

