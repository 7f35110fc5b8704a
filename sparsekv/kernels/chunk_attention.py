"""Attention of chunks of a prompt: to a list of tokens a KV head, all of them before the chunk, and to the chunk
itself, causally.

All queries of a chunk and of a group share a list, so that a key is fetched once for hundreds of rows. Chunks that
stand one behind the other and read as many tokens each are rows of one call: B·n rows, those of a row of the cache
together. Where cuDNN's kernel is there and every place of the lists is a token, the rows that are read are gathered and
both parts go through it; else one Triton kernel takes rows by their number.
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
    power_of_two,
    shared_bytes,
)

GATHERED_AT_ONCE, GATHER_WARPS = 32, 4
"""Tokens of a program of `rows_kernel`, and its warps."""
TWIN_QUERIES = 256
"""Queries of a row of the cache that the twin takes at once."""


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


class Rows(NamedTuple):
    """Keys and values of what chunks read before themselves, `[B·n, Hkv, K + sink + window, d]`: the list, the sink,
    the window."""

    keys: Tensor
    values: Tensor


class ChunkAttention(NamedTuple):
    """out `[B·n, Hq, c, d]`, lse `[B·n, Hq, c]`, float32 at least; the rows that were gathered for it, if any were."""

    out: Tensor
    lse: Tensor
    rows: Rows | None


def chunk_attention(
    q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, *, scale: float, sink: int, window: int,
    starts: Tensor | None = None,
) -> ChunkAttention:
    """q `[B·n, Hq, c, d]` are the queries of n chunks, the last of the tokens k, v `[B, Hkv, N, d]`, with RoPE. A chunk
    reads itself, the first `sink` tokens, the last `window` before it, and those that are chosen between,
    `[B·n, H, K]`, H = Hkv or 1, each named once. starts `[B]`: a row's first real token, and lists may be padded with
    -1, of one chunk; without it all tokens are real and every place of a list is one."""
    chosen = chosen.expand(-1, k.shape[1], -1)
    if on_device(q) and starts is None and splits(q.dtype, q.shape[1], k.shape[1], q.shape[3], q.device):
        rows = chunk_rows(k, v, chosen, q.shape[2], sink, window)
        return ChunkAttention(*gathered_attention(q, k, v, rows, scale=scale), rows)
    first = k.shape[2] - len(q) // len(k) * q.shape[2]
    anchors = chunk_anchors(len(q), len(k), first, q.shape[2], sink, window, k.device, starts).to(chosen.dtype)
    tokens = torch.cat([chosen, anchors[:, None].expand(-1, k.shape[1], -1)], dim=2)
    attend = launch_chunk_attention if on_device(q) else chunk_attention_reference
    return ChunkAttention(*attend(q, k, v, tokens, scale=scale, starts=starts), None)


def chunks_of(x: Tensor, count: int) -> Tensor:
    """`[B, H, n·c, d]` as `[B·n, H, c, d]`, n = count: a view where there is one row, or one chunk."""
    return x if count == 1 else x.unflatten(2, (count, -1)).transpose(1, 2).flatten(0, 1)


def chunk_anchors(
    rows: int, batch: int, first: int, chunk: int, sink: int, window: int, device: torch.device,
    starts: Tensor | None = None,
) -> Tensor:
    """Sink and window before each of the chunks from token `first` on, `[B·n, sink + window]` int64, B·n = rows; with
    starts, of one chunk, filled up with -1. Without them both are there, and nothing waits for the device."""
    if starts is not None:
        return anchor_indices(starts, min(sink, first), starts.clamp(min=first - window),
                              torch.full_like(starts, first))
    places = torch.arange(sink + window, device=device)
    before = torch.arange(rows, device=device)[:, None] % (rows // batch) * chunk + first - window - sink
    return torch.where(places < sink, places, places + before)


def chunk_rows(k: Tensor, v: Tensor, chosen: Tensor, chunk: int, sink: int, window: int) -> Rows:
    """What chunks of so many tokens, the last of k and v, read before themselves, as in `chunk_attention` without
    padding."""
    gather = launch_rows if on_device(k) else chunk_rows_reference
    return gather(k, v, chosen.expand(-1, k.shape[1], -1), chunk, sink, window)


def chunk_rows_reference(k: Tensor, v: Tensor, chosen: Tensor, chunk: int, sink: int, window: int) -> Rows:
    """`chunk_rows` in plain torch."""
    first = k.shape[2] - len(chosen) // len(k) * chunk
    anchors = chunk_anchors(len(chosen), len(k), first, chunk, sink, window, k.device)
    index = torch.cat([chosen.long(), anchors[:, None].expand(-1, k.shape[1], -1)], dim=2)
    return Rows(gather_rows(k, index), gather_rows(v, index))


def launch_rows(k: Tensor, v: Tensor, chosen: Tensor, chunk: int, sink: int, window: int) -> Rows:
    """`chunk_rows` through Triton, in one launch."""
    from sparsekv.kernels.chunk_attention_triton import rows_kernel

    k, v, chosen = dense_last(k), dense_last(v), dense_last(chosen)
    rows, heads, listed = chosen.shape
    each, dim = rows // k.shape[0], k.shape[3]
    made = Rows(*(torch.empty(rows, heads, listed + sink + window, dim, dtype=x.dtype, device=x.device)
                  for x in (k, v)))
    if made.keys.numel():
        rows_kernel[(-(-made.keys.shape[2] // GATHERED_AT_ONCE), rows * heads)](
            as_tokens(k), as_tokens(v), as_heads(chosen), made.keys, made.values, heads, each,
            k.shape[2] - each * chunk, chunk, listed, sink, window, DIM=dim, WIDTH=power_of_two(dim),
            BLOCK=GATHERED_AT_ONCE, num_warps=GATHER_WARPS)
    return made


def chunk_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, tokens: Tensor, *, scale: float, starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`launch_chunk_attention` in plain torch, some queries at a time."""
    batch, _, count, _ = q.shape
    chunks, heads_kv, listed = batch // k.shape[0], k.shape[1], tokens.shape[2]
    acc, past = acc_dtype(q), k.shape[2] - batch // k.shape[0] * count
    index = tokens.clamp(min=0).long()
    keys, values = (torch.cat([gather_rows(x, index), chunks_of(x[:, :, past:], chunks)], dim=2).to(acc)
                    for x in (k, v))
    place = torch.arange(count, device=q.device)
    real = torch.ones(batch, count, dtype=torch.bool, device=q.device)
    if starts is not None:
        begins = torch.arange(batch, device=q.device)[:, None] % chunks * count + past
        real = place + begins >= starts.repeat_interleave(chunks)[:, None]
    used = torch.cat([tokens >= 0, real[:, None].expand(-1, heads_kv, -1)], dim=2)
    outs, lses = [], []
    block = max(1, TWIN_QUERIES // chunks)
    for first in range(0, count, block):
        rows = q[:, :, first:first + block].to(acc).unflatten(1, (heads_kv, -1))
        seen = listed + first + rows.shape[3]
        scores = rows @ keys[:, :, None, :seen].mT * scale
        later = place[:first + rows.shape[3]] > place[first:first + rows.shape[3], None]
        hidden = torch.cat([later.new_zeros(len(later), listed), later], dim=1) | ~used[:, :, None, None, :seen]
        scores = scores.masked_fill(hidden, NEG_INF)
        lse = scores.logsumexp(-1)
        outs.append((scores.softmax(-1).nan_to_num(0.0) @ values[:, :, None, :seen]).flatten(1, 2).to(q.dtype))
        lses.append(lse.flatten(1, 2))
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def gathered_attention(q: Tensor, k: Tensor, v: Tensor, rows: Rows, *, scale: float) -> tuple[Tensor, Tensor]:
    """`chunk_attention` through cuDNN's kernel: all chunks themselves in one call, their rows in one, both merged."""
    chunks = q.shape[0] // k.shape[0]
    past = k.shape[2] - chunks * q.shape[2]
    out, lse = cudnn_attention(
        q, chunks_of(k[:, :, past:], chunks), chunks_of(v[:, :, past:], chunks), scale, causal=True)
    if not rows.keys.shape[2]:
        return out, lse
    return add_attention(out, lse, *cudnn_attention(q, rows.keys, rows.values, scale, causal=False))


def launch_chunk_attention(
    q: Tensor, k: Tensor, v: Tensor, tokens: Tensor, *, scale: float, starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`chunk_attention` through Triton, with lists of all that is read before a chunk, tokens `[B·n, Hkv, K]`."""
    from sparsekv.kernels.chunk_attention_triton import chunk_kernel

    q, k, v, tokens = (dense_last(x) for x in (q, k, v, tokens))
    batch, heads_q, count, dim = q.shape
    heads_kv, listed = k.shape[1], tokens.shape[2]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(batch, heads_q, count, dtype=torch.float32, device=q.device)
    if not out.numel():
        return out, lse
    group, chunks = heads_q // heads_kv, batch // k.shape[0]
    room = shared_bytes(q.device) if q.is_cuda else 1 << 30
    how = fitting(LAUNCHES[overlaps(q.device)], padded(dim) * q.element_size(), room)
    chunk_kernel[(batch * heads_kv, -(-count * group // how.rows))](
        as_tokens(q), as_tokens(k), as_tokens(v), as_heads(tokens),
        tokens if starts is None else starts.contiguous(), as_tokens(out), lse, scale, heads_kv,
        chunks, count, k.shape[2] - chunks * count, listed, GROUP=group, DIM=dim, WIDTH=padded(dim),
        PADDED=starts is not None, ROWS=how.rows, KEYS=how.keys, num_warps=how.warps, num_stages=how.stages)
    return out, lse


def fitting(how: Launch, row_bytes: int, room: int) -> Launch:
    """The same for keys of `row_bytes` in `room` bytes of shared memory."""
    while how.stages > 2 and how.bytes(row_bytes) > room:
        how = how._replace(stages=how.stages - 1)
    while how.keys > 16 and how.bytes(row_bytes) > room:
        how = how._replace(rows=how.rows // 2, keys=how.keys // 2, warps=4)
    return how

