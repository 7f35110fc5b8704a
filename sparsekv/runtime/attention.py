"""One layer's attention: exact part and completion under one normalisation, and the dense path around them."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsekv.core.estimators.phi import Completion, PhiCompletion
from sparsekv.core.rows import attend_rows, gather_rows
from sparsekv.core.selectors.base import LayerView, Queries, Selection, Selector
from sparsekv.kernels import PhiRest, attend_buckets, attend_tokens, merge, phi_query
from sparsekv.kernels.dense import causal_attention
from sparsekv.kernels.reference import anchor_indices

QUERY_BLOCK = 64


class Attended(NamedTuple):
    """out `[B, Hq, T, d]`; loaded `[B, T]`: tokens read, mean over heads; context `[B, T]`: tokens there were."""

    out: Tensor
    loaded: Tensor
    context: Tensor
    selection: Selection


def sparse_attention(
    view: LayerView, queries: Queries, selector: Selector, completion: Completion | None,
) -> Attended:
    """Select, attend exactly to the selection and the anchors, complete with the rest, normalise once (METHODS)."""
    batch, heads_q, count, dim = queries.rot.shape
    q = queries.folded(queries.rot)
    starts, tails, lengths = view.regions.per_query(count)
    fused = completion.fused(view, queries) if isinstance(completion, PhiCompletion) else None
    routed = selector.routed(view, queries, fused) if completion is None or fused is not None else None
    if routed is not None:
        out, selection = routed
    else:
        selection = selector.select(view, queries)
        if selection.tokens is not None and selection.tokens.shape[1] == 1:
            selection.tokens = selection.tokens.expand(-1, view.num_kv_heads, -1)
        if selection.contiguous or selection.log_weights is not None:
            fused = None
        out, lse = exact_attention(q, view, selection, starts, tails, lengths,
                                   None if fused is None else phi_query(q, *fused))
        rest = selection.extra
        if completion is not None:
            rest = None if fused is not None else completion.partial(view, queries, selection)
        if rest is not None:
            rest_out, rest_lse = rest
            outs, lses = torch.stack([out, rest_out.to(out.dtype)]), torch.stack([lse, rest_lse.to(lse.dtype)])
            out, lse = merge(outs, lses)
    anchors = (lengths - starts) - view.regions.mid_sizes.repeat_interleave(count)
    loaded = selection.counts().to(torch.float32).mean(-1) + anchors
    selector.observe(view, queries, selection)
    return Attended(out.reshape(batch, count, heads_q, dim).transpose(1, 2), loaded.view(batch, count),
                    (lengths - starts).view(batch, count), selection)


def exact_attention(
    q: Tensor, view: LayerView, selection: Selection, starts: Tensor, tails: Tensor, lengths: Tensor,
    rest: PhiRest | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over anchors and selection, completed with `rest` (CUDA, one query a row): q `[B·T, Hq, d]` ->
    `(out [B·T, Hq, d], lse [B·T, Hq])`."""
    keys, values = view.keys, view.values
    regions: dict[str, Any] = {"scale": view.scale, "sink_size": view.regions.sink_size}
    if view.resident is not None:
        from sparsekv.runtime.offload import offloaded_attention

        return offloaded_attention(q, view, selection, starts, tails, lengths)
    if selection.contiguous:
        return contiguous_attention(q, view, selection.as_tokens(), starts, tails, lengths)
    if (not q.is_cuda and rest is None) or selection.log_weights is not None:
        return attend_rows(q, keys, values, selection.as_tokens(), starts=starts, tail_starts=tails, lengths=lengths,
                           log_weights=selection.log_weights, **regions)
    per_row = q.shape[0] // keys.shape[0]
    parts = []
    step = 1 if per_row > 1 else keys.shape[0]
    for b in range(0, keys.shape[0], step):
        rows = slice(b * per_row, (b + step) * per_row)
        k, v = (x[b:b + step].expand(rows.stop - rows.start, -1, -1, -1) for x in (keys, values))
        common = regions | {"starts": starts[rows], "tail_starts": tails[rows], "lengths": lengths[rows]}
        if selection.tokens is None and selection.order is not None:
            assert selection.offsets is not None and selection.buckets is not None
            order, offsets = (x[b:b + step].expand(k.shape[0], -1, -1) for x in (selection.order, selection.offsets))
            parts.append(attend_buckets(q[rows], k, v, order, offsets, selection.buckets[rows], rest=rest,
                                        **common))
        else:
            parts.append(attend_tokens(q[rows], k, v, selection.as_tokens()[rows], rest=rest, **common))
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def contiguous_attention(
    q: Tensor, view: LayerView, tokens: Tensor, starts: Tensor, tails: Tensor, lengths: Tensor,
) -> tuple[Tensor, Tensor]:
    """As `exact_attention` with the keys that are read, in order, at positions 0, 1, 2, … and the query at the last
    (TokenSelect §4.3): no distance exceeds the number of keys read."""
    count, heads_q, dim = q.shape
    anchors = anchor_indices(starts, view.regions.sink_size, tails, lengths)
    index = torch.cat([tokens, anchors[:, None].expand(-1, tokens.shape[1], -1)], dim=-1)
    index = torch.where(index < 0, view.length, index).sort(dim=-1).values
    used = index < view.length
    index = index.clamp(max=view.length - 1)
    new = torch.arange(index.shape[-1], device=q.device)
    keys = view.turn(gather_rows(view.keys, index), index, new.expand_as(index)).float()
    values = gather_rows(view.values, index).float()
    here, there = (lengths - 1)[:, None], used[:, 0].sum(-1, keepdim=True) - 1
    q = view.turn(q, here.expand(-1, heads_q), there.expand(-1, heads_q)).float()
    scores = (q.reshape(count, keys.shape[1], -1, dim) @ keys.mT) * view.scale
    scores = scores.masked_fill(~used[:, :, None], float("-inf"))
    out = (scores.softmax(-1) @ values).reshape(count, heads_q, dim)
    return out.to(view.keys.dtype), scores.logsumexp(-1).reshape(count, heads_q)


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, key_mask: Tensor | None = None,
    window: int | None = None, softcap: float | None = None, block: int = 1024,
) -> Tensor:
    """The model's own causal attention: query `[B, Hq, T, d]` are the last T of the keys `[B, Hkv, N, d]`.

    key_mask `[B, N]`, nonzero = a real token; window: a query sees that many keys, itself included. Runs over blocks
    of queries so that no mask larger than `block × N` is made. Returns `[B, Hq, T, d]`.
    """
    count, length = query.shape[2], key.shape[2]
    if key_mask is None and softcap is None and (window is None or window >= length):
        if count == 1:
            return sdpa(query, key, value, scale)
        if count == length:
            return sdpa(query, key, value, scale, causal=True)
        if query.is_cuda:
            return causal_attention(query, key, value, scale)
    columns = torch.arange(length, device=query.device)
    parts = []
    for first in range(0, count, block):
        rows = torch.arange(first, min(first + block, count), device=query.device) + (length - count)
        low = 0 if window is None else max(0, length - count + first - window + 1)
        high = int(length - count + min(first + block, count))
        mask = columns[low:high] <= rows[:, None]
        if window is not None:
            mask &= columns[low:high] > rows[:, None] - window
        mask = mask[None, None]
        if key_mask is not None:
            mask = mask & key_mask[:, None, None, low:high].bool()
        q, k, v = query[:, :, first:first + block], key[:, :, low:high], value[:, :, low:high]
        parts.append(sdpa(q, k, v, scale, mask=mask) if softcap is None else _capped(q, k, v, scale, mask, softcap))
    return torch.cat(parts, dim=2)


def sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, *, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """torch's attention; rows that see nothing come out as zero."""
    if q.shape[2] == 1 and not causal:
        # torch would read (CPU) or copy (with a mask) the cache once a query head: make a group's heads rows of one
        batch, heads_q, _, dim = q.shape
        grouped = q.reshape(batch, k.shape[1], heads_q // k.shape[1], dim)
        with _decode_backend(q):
            out = torch.nn.functional.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)
        out = out.reshape(batch, heads_q, 1, -1)
        return out if mask is None else out.nan_to_num(0.0)
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out if mask is None else out.nan_to_num(0.0)


def _decode_backend(q: Tensor) -> Any:
    """Any of torch's kernels but cuDNN's for a decode step: that one, torch's choice on Hopper, plans anew for every
    length of the cache, some 30 milliseconds a token."""
    if not q.is_cuda:
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def _capped(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor, softcap: float) -> Tensor:
    """Scores squeezed by `softcap · tanh(s / softcap)` before the softmax (Gemma 2)."""
    group = q.shape[1] // k.shape[1]
    scores = (q.float() @ k.float().repeat_interleave(group, 1).mT) * scale
    scores = (torch.tanh(scores / softcap) * softcap).masked_fill(~mask, float("-inf"))
    return (scores.softmax(-1).nan_to_num(0.0) @ v.float().repeat_interleave(group, 1)).to(q.dtype)
