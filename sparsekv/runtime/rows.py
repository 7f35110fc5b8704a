"""Exact attention over a list of tokens on the CPU: contiguous rows are gathered once and multiplied in batches.

The same function as `kernels.reference.attend_tokens` without copying the cache to float32 and without expanding it
over the queries; the CPU path of every selector. Its truth in the tests is the reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsekv.kernels.reference import anchor_indices

NEG_INF = float("-inf")


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """`x[b, h, index[q, h, :]]` with `b = q // T`: x `[B, H, N, d]` (last dimension contiguous), index `[Q, H, K]` ≥ 0
    -> `[Q, H, K, d]`."""
    batch, heads, _, dim = x.shape
    sb, sh, sn, _ = x.stride()
    if x.stride(-1) != 1 or sb % dim or sh % dim or sn % dim or x.shape[2] == 0:
        rows = torch.arange(batch, device=x.device).repeat_interleave(index.shape[0] // batch)
        return x[rows[:, None, None], torch.arange(heads, device=x.device)[:, None], index]
    last = (batch - 1) * sb + (heads - 1) * sh + (x.shape[2] - 1) * sn
    flat = x.as_strided((last // dim + 1, dim), (dim, 1), x.storage_offset())
    batches, columns = torch.arange(batch, device=x.device), torch.arange(heads, device=x.device)
    base = batches[:, None] * (sb // dim) + columns * (sh // dim)
    base = base.repeat_interleave(index.shape[0] // batch, dim=0)
    place = index * (sn // dim) + base[:, :, None] if sn != dim else index + base[:, :, None]
    return flat.index_select(0, place.reshape(-1)).view(*index.shape, dim)


def attend_rows(
    q: Tensor, k: Tensor, v: Tensor, tokens: Tensor, *, scale: float, starts: Tensor, sink_size: int,
    tail_starts: Tensor, lengths: Tensor, log_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Exact attention over anchors and tokens: q `[Q, Hq, d]`, k and v `[B, Hkv, N, d]` with `Q = B·T`, tokens
    `[Q, H, K]`, `H` = `Hkv` or `Hq`, -1 = none; log_weights `[Q, H, K]` is added to the scores of `tokens`.

    Returns `(out [Q, Hq, d], lse [Q, Hq])`.
    """
    count, heads_q, dim = q.shape
    heads_kv = k.shape[1]
    group = heads_q // heads_kv
    anchors = anchor_indices(starts, sink_size, tail_starts, lengths)
    index = torch.cat([tokens, anchors[:, None].expand(-1, tokens.shape[1], -1).to(tokens.dtype)], dim=-1)
    lists, width = index.shape[1] // heads_kv, index.shape[-1]
    index = index.reshape(count, heads_kv, lists * width)
    padded = index < 0
    index = index.clamp(min=0)
    acc = torch.float64 if q.dtype == torch.float64 else torch.float32
    keys = gather_rows(k, index).to(acc).view(count * heads_kv * lists, width, dim)
    query = q.to(acc).reshape(count * heads_kv * lists, group // lists, dim)
    scores = torch.bmm(query, keys.mT).mul_(scale)
    if log_weights is not None:
        extra = torch.nn.functional.pad(log_weights.to(acc), (0, anchors.shape[1]))
        scores += extra.reshape(-1, 1, width)
    scores.masked_fill_(padded.view(-1, 1, width), NEG_INF)
    if width == 0:
        lse = scores.new_full(scores.shape[:-1], NEG_INF)
    else:
        lse = torch.logsumexp(scores, -1)
    weights = torch.exp_(scores.sub_(torch.where(torch.isinf(lse), 0.0, lse)[..., None]))
    values = gather_rows(v, index).to(acc).view(count * heads_kv * lists, width, dim)
    return torch.bmm(weights, values).reshape(count, heads_q, dim).to(q.dtype), lse.reshape(count, heads_q)
