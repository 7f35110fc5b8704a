"""Exact attention over a list of tokens on the CPU: contiguous rows are gathered once and multiplied in batches.

The same function as `kernels.reference.attend_tokens` without copying the cache to float32 and without expanding it
over the queries; the CPU path of every selector. Its truth in the tests is the reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsekv.kernels.reference import anchor_indices

NEG_INF = float("-inf")


def gather_rows(x: Tensor, index: Tensor, *, pinned: bool = False) -> Tensor:
    """`x[b, h, index[q, h, :]]` with `b = q // T`: x `[B, H, N, d]` (last dimension contiguous), index `[Q, H, K]` ≥ 0
    -> `[Q, H, K, d]`, in page-locked memory if `pinned`."""
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
    out = torch.empty(index.numel(), dim, dtype=x.dtype, pin_memory=True) if pinned else None
    return torch.index_select(flat, 0, place.reshape(-1), out=out).view(*index.shape, dim)


def attend_rows(
    q: Tensor, k: Tensor, v: Tensor, tokens: Tensor, *, scale: float, starts: Tensor, sink_size: int,
    tail_starts: Tensor, lengths: Tensor, log_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Exact attention over anchors and tokens: q `[Q, Hq, d]`, k and v `[B, Hkv, N, d]` with `Q = B·T`, tokens
    `[Q, H, K]`, `H` = `Hkv` or `Hq`, -1 = none; log_weights `[Q, H, K]` is added to the scores of `tokens`.

    Returns `(out [Q, Hq, d], lse [Q, Hq])`.
    """
    count, _, dim = q.shape
    heads_kv = k.shape[1]
    anchors = anchor_indices(starts, sink_size, tail_starts, lengths)
    index = torch.cat([tokens, anchors[:, None].expand(-1, tokens.shape[1], -1).to(tokens.dtype)], dim=-1)
    lists, width = index.shape[1] // heads_kv, index.shape[-1]
    used = index >= 0
    index = index.clamp(min=0).reshape(count, heads_kv, lists * width)
    keys, values = (gather_rows(x, index).view(count, heads_kv * lists, width, dim) for x in (k, v))
    if log_weights is not None:
        log_weights = torch.nn.functional.pad(log_weights, (0, anchors.shape[1]))
    return attend_gathered(q, keys, values, used, scale, log_weights)


def attend_gathered(
    q: Tensor, keys: Tensor, values: Tensor, used: Tensor, scale: float, log_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over rows already gathered: q `[Q, Hq, d]`, keys and values `[Q, H, n, d]` with `H` dividing `Hq`, used
    `[Q, H, n]` false = padding. Returns `(out [Q, Hq, d], lse [Q, Hq])`; the empty set is `0, -inf`."""
    count, heads_q, dim = q.shape
    lists, width = keys.shape[1], keys.shape[2]
    acc = torch.float64 if q.dtype == torch.float64 else torch.float32
    keys, values = (x.to(acc).reshape(count * lists, width, dim) for x in (keys, values))
    query = q.to(acc).reshape(count * lists, heads_q // lists, dim)
    scores = torch.bmm(query, keys.mT).mul_(scale)
    if log_weights is not None:
        scores += log_weights.to(acc).reshape(-1, 1, width)
    scores.masked_fill_(~used.reshape(-1, 1, width), NEG_INF)
    if width == 0:
        lse = scores.new_full(scores.shape[:-1], NEG_INF)
    else:
        lse = torch.logsumexp(scores, -1)
    weights = torch.exp_(scores.sub_(torch.where(torch.isinf(lse), 0.0, lse)[..., None]))
    return torch.bmm(weights, values).reshape(count, heads_q, dim).to(q.dtype), lse.reshape(count, heads_q)
