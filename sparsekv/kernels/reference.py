"""Every operation of the decode step in plain torch: the truth the Triton kernels are tested against.

Conventions (all functions):

- `Hq` query heads, `Hkv` key-value heads, group `G = Hq // Hkv`; query head `h` reads KV head `h // G`.
- `q: [B, Hq, d]` is one query token a row; `k, v: [B, Hkv, N, d]` with any strides (expanded batches included).
- Partial attention returns `(out, lse)`: `out [B, Hq, d]` normalised over its own set, `lse [B, Hq]` the natural
  logarithm of the set's mass. The empty set is `out = 0, lse = -inf`, and every function accepts it.
- Lists of tokens or buckets are padded with -1. `order`, `offsets` are the CSR of an index: the tokens of bucket `c` of
  KV head `h` are `order[b, h, offsets[b, h, c] : offsets[b, h, c + 1]]`.
- Arithmetic is float32 for half inputs and float64 for float64 inputs; outputs have the dtype of `q`, `lse` the
  arithmetic's.
- Row `b` holds real tokens in `[starts[b], lengths[b])` (left padding before). Its anchors are
  `[starts[b], starts[b] + sink_size)` and `[tail_starts[b], lengths[b])`, disjoint by construction: a token under
  both is read once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

NEG_INF = float("-inf")


def _acc(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _softmax_attend(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """scores [..., n] with -inf where masked, values [..., n, d] -> (out [..., d], lse [...]); empty sets allowed."""
    lse = torch.logsumexp(scores, dim=-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], NEG_INF)
    weights = torch.exp(scores - torch.where(torch.isinf(lse), torch.zeros_like(lse), lse)[..., None])
    return torch.einsum("...n,...nd->...d", weights, values), lse


def anchor_indices(starts: Tensor, sink_size: int, tail_starts: Tensor, lengths: Tensor) -> Tensor:
    """Token indices of sink and tail, `[B, n]` padded with -1; each token once."""
    longest_tail = int((lengths - tail_starts).clamp(min=0).max()) if lengths.numel() else 0
    sink = starts[:, None] + torch.arange(sink_size, device=starts.device)
    sink = torch.where(sink < torch.minimum(tail_starts, lengths)[:, None], sink, -1)
    tail = tail_starts[:, None] + torch.arange(longest_tail, device=starts.device)
    tail = torch.where(tail < lengths[:, None], tail, -1)
    return torch.cat([sink, tail], dim=1)


def attend_tokens(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, *, scale: float,
    starts: Tensor, sink_size: int, tail_starts: Tensor, lengths: Tensor,
) -> tuple[Tensor, Tensor]:
    """Exact attention over the anchors and a list of tokens.

    indices: `[B, H, K]` with `H` = `Hkv` (shared by the group) or `Hq`; -1 = none. No token may appear twice or be
    an anchor. Returns `(out, lse)`.
    """
    batch, heads_q, dim = q.shape
    heads_kv = k.shape[1]
    group = heads_q // heads_kv
    acc = _acc(q)
    anchors = anchor_indices(starts, sink_size, tail_starts, lengths)
    indices = torch.cat([indices, anchors[:, None].expand(-1, indices.shape[1], -1).to(indices.dtype)], dim=-1)
    per_kv = indices.reshape(batch, heads_kv, indices.shape[1] // heads_kv * indices.shape[2]).clamp(min=0).long()
    rows = torch.arange(batch, device=q.device)[:, None, None]
    heads = torch.arange(heads_kv, device=q.device)[None, :, None]
    keys, values = (x[rows, heads, per_kv].to(acc) for x in (k, v))
    lists, listed = indices.shape[1] // heads_kv, indices.shape[2]
    keys, values = (x.reshape(batch, heads_kv, lists, listed, dim) for x in (keys, values))
    mask = (indices >= 0).reshape(batch, heads_kv, lists, listed)
    query = q.to(acc).reshape(batch, heads_kv, group, dim)
    if keys.shape[2] == 1:
        scores = (query @ keys[:, :, 0].mT) * scale
        scores = scores.masked_fill(~mask, NEG_INF)
        lse = torch.logsumexp(scores, -1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], NEG_INF)
        weights = torch.exp(scores - torch.where(torch.isinf(lse), 0.0, lse)[..., None])
        out = weights @ values[:, :, 0]
    else:
        scores = torch.einsum("bhgd,bhgnd->bhgn", query, keys) * scale
        out, lse = _softmax_attend(scores.masked_fill(~mask, NEG_INF), values)
    return out.reshape(batch, heads_q, dim).to(q.dtype), lse.reshape(batch, heads_q)


def bucket_tokens(order: Tensor, offsets: Tensor, buckets: Tensor) -> Tensor:
    """The tokens of the chosen buckets, `[B, Hkv, K]` padded with -1 to the longest list.

    order `[B, Hkv, M]`, offsets `[B, Hkv, C + 1]`, buckets `[B, Hkv, L]` (-1 = none, no bucket twice).
    """
    chosen = buckets.clamp(min=0).long()
    first = offsets.gather(-1, chosen)
    sizes = torch.where(buckets >= 0, offsets.gather(-1, chosen + 1) - first, 0)
    ends = sizes.cumsum(-1)
    longest = int(ends[..., -1].max()) if ends.numel() else 0
    slots = torch.arange(longest, device=order.device).expand(*ends.shape[:-1], longest).contiguous()
    which = torch.searchsorted(ends.contiguous(), slots, right=True).clamp(max=max(buckets.shape[-1] - 1, 0))
    within = slots - (ends.gather(-1, which) - sizes.gather(-1, which))
    position = (first.gather(-1, which) + within).clamp(0, max(order.shape[-1] - 1, 0))
    tokens = order.gather(-1, position) if order.shape[-1] else torch.full_like(position, -1)
    return torch.where(slots < ends[..., -1:], tokens, -1)


def attend_buckets(
    q: Tensor, k: Tensor, v: Tensor, order: Tensor, offsets: Tensor, buckets: Tensor, *, scale: float,
    starts: Tensor, sink_size: int, tail_starts: Tensor, lengths: Tensor,
) -> tuple[Tensor, Tensor]:
    """Exact attention over the anchors and every token of the chosen buckets (Saap §4.3). Returns `(out, lse)`."""
    return attend_tokens(q, k, v, bucket_tokens(order, offsets, buckets), scale=scale, starts=starts,
                         sink_size=sink_size, tail_starts=tail_starts, lengths=lengths)


def merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Combine partial attentions over disjoint sets: outs `[S, ..., d]`, lses `[S, ...]` -> `([..., d], [...])`."""
    lse = torch.logsumexp(lses, dim=0)
    weights = torch.exp(lses - torch.where(torch.isinf(lse), torch.zeros_like(lse), lse))
    out = (weights[..., None] * outs.to(weights.dtype)).sum(0)
    return out.to(outs.dtype), lse


def assign_buckets(keys: Tensor, centroids: Tensor) -> Tensor:
    """Largest inner product: keys `[B, H, N, d]`, centroids `[H, C, d]` -> bucket of every key `[B, H, N]` int64."""
    acc = _acc(keys)
    return torch.einsum("bhnd,hcd->bhnc", keys.to(acc), centroids.to(acc)).argmax(-1)


def build_index(assignment: Tensor, num_buckets: int, first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """CSR of the tokens `first[b] <= i < last[b]`: assignment `[B, H, N]` -> order `[B, H, N]`, offsets `[B, H, C+1]`.

    Tokens keep their order inside a bucket. Entries of `order` past `offsets[..., C]` are -1. Both int32.
    """
    batch, heads, length = assignment.shape
    positions = torch.arange(length, device=assignment.device)
    inside = (positions >= first[:, None]) & (positions < last[:, None])
    keyed = torch.where(inside[:, None], assignment.long(), num_buckets)
    order = torch.argsort(keyed, dim=-1, stable=True)
    counts = torch.zeros(batch, heads, num_buckets + 1, dtype=torch.int64, device=assignment.device)
    counts.scatter_add_(-1, keyed, torch.ones_like(keyed))
    offsets = torch.nn.functional.pad(counts[..., :num_buckets].cumsum(-1), (1, 0))
    order = torch.where(positions < offsets[..., -1:], order, -1)
    return order.to(torch.int32), offsets.to(torch.int32)


class RouterWeights(NamedTuple):
    """The query model of one layer, batch norm folded in. `H` = `Hkv` (one a group) or `Hq`.

    w1 `[H, d, hidden]`, b1 `[H, hidden]`, w2 `[H, hidden, C]`, b2 `[H, C]`.
    """

    w1: Tensor
    b1: Tensor
    w2: Tensor
    b2: Tensor


def router_logits(q_pre: Tensor, weights: RouterWeights) -> Tensor:
    """`W2 relu(W1 q + b1) + b2` (Saap §4.2): q_pre `[B, Hq, d]` without RoPE -> logits `[B, Hq, C]`."""
    batch, heads_q, dim = q_pre.shape
    models = weights.w1.shape[0]
    acc = _acc(q_pre)
    query = q_pre.to(acc).reshape(batch, models, heads_q // models, dim)
    hidden = torch.einsum("bhgd,hdn->bhgn", query, weights.w1.to(acc)) + weights.b1.to(acc)[:, None]
    logits = torch.einsum("bhgn,hnc->bhgc", hidden.relu(), weights.w2.to(acc)) + weights.b2.to(acc)[:, None]
    return logits.reshape(batch, heads_q, -1)


def mean_key_logits(q_rot: Tensor, means: Tensor, counts: Tensor, scale: float) -> Tensor:
    """`log n_c + q·mean_c·scale`: q_rot `[B, Hq, d]`, means `[B, Hkv, C, d]`, counts `[B, Hkv, C]` -> `[B, Hq, C]`.

    The untrained router: the log-mass of a bucket under a bound by Jensen. Empty buckets get -inf.
    """
    batch, heads_q, dim = q_rot.shape
    heads_kv = means.shape[1]
    acc = _acc(q_rot)
    query = q_rot.to(acc).reshape(batch, heads_kv, heads_q // heads_kv, dim)
    logits = torch.einsum("bhgd,bhcd->bhgc", query, means.to(acc)) * scale + counts.to(acc).log()[:, :, None]
    return logits.reshape(batch, heads_q, -1)


def top_buckets(logits: Tensor, heads_kv: int, probes: int, counts: Tensor | None = None) -> Tensor:
    """The `probes` buckets with the largest summed probability: logits `[B, Hq, C]` -> `[B, Hkv, probes]` int32.

    `p_c = Σ_{g in group} softmax_c(logits_g)`. With `counts [B, Hkv, C]` empty buckets are never chosen: where
    fewer than `probes` are non-empty the list is padded with -1.
    """
    batch, heads_q, buckets = logits.shape
    scores = logits.softmax(-1).nan_to_num(0.0).reshape(batch, heads_kv, heads_q // heads_kv, buckets).sum(2)
    if counts is not None:
        scores = scores.masked_fill(counts <= 0, NEG_INF)
    values, chosen = scores.topk(min(probes, buckets), dim=-1)
    return torch.where(torch.isinf(values), -1, chosen).to(torch.int32)


class PhiCache(NamedTuple):
    """The stable completion cache of one layer (completion paper, appendix C): `m, z [B, Hkv, r]`, `s [B, Hkv, r, d]`.

    `m_j` is the largest log-feature, `z_j` and `s_j` the sums of `exp(log φ_j − m_j)` and of the same times the value.
    """

    m: Tensor
    z: Tensor
    s: Tensor


def phi_cache(log_phi_k: Tensor, v: Tensor, mask: Tensor | None = None) -> PhiCache:
    """Sum features over the mid region: log_phi_k `[B, Hkv, M, r]`, v `[B, Hkv, M, d]`, mask `[B, Hkv or 1, M]` true =
    counted. An empty region gives `m = -inf, z = 0, s = 0`."""
    logs = log_phi_k.to(_acc(log_phi_k))
    if mask is not None:
        logs = logs.masked_fill(~mask[..., None], NEG_INF)
    if logs.shape[2] == 0:
        m = logs.new_full((*logs.shape[:2], logs.shape[3]), NEG_INF)
    else:
        m = logs.amax(dim=2)
    weights = torch.exp(logs - torch.where(torch.isinf(m), torch.zeros_like(m), m)[:, :, None])
    return PhiCache(m, weights.sum(2), weights.mT @ v.to(logs.dtype))


def phi_extend(cache: PhiCache, log_phi_k: Tensor, v: Tensor) -> PhiCache:
    """Add keys that joined the mid region: same shapes as `phi_cache`; the shift rises where it must."""
    new = phi_cache(log_phi_k, v)
    m = torch.maximum(cache.m, new.m)
    safe = torch.where(torch.isinf(m), torch.zeros_like(m), m)
    old_scale, new_scale = torch.exp(cache.m - safe), torch.exp(new.m - safe)
    return PhiCache(m, cache.z * old_scale + new.z * new_scale,
                    cache.s * old_scale[..., None] + new.s * new_scale[..., None])


def phi_remainder(cache: PhiCache, log_phi_r: Tensor, v_r: Tensor, mask: Tensor) -> PhiCache:
    """Subtract the retrieved keys R with the same shift (completion paper §4.4): log_phi_r `[B, Hkv, K, r]`,
    v_r `[B, Hkv, K, d]`, mask `[B, Hkv, K]`. `z` is clamped at zero."""
    logs = log_phi_r.to(cache.z.dtype).masked_fill(~mask[..., None], NEG_INF)
    weights = torch.exp(logs - torch.where(torch.isinf(cache.m), torch.zeros_like(cache.m), cache.m)[:, :, None])
    values = v_r.to(weights.dtype).masked_fill(~mask[..., None], 0.0)
    return PhiCache(cache.m, (cache.z - weights.sum(2)).clamp(min=0.0), cache.s - weights.mT @ values)


def phi_partial(
    log_phi_q: Tensor, cache: PhiCache, *, full_z: Tensor | None = None, eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """Evaluate the completion as one more partial attention: log_phi_q `[B, Hq, r]` -> `(out [B, Hq, d], lse [B, Hq])`.

    `t_j = log φ_qj + m_j + log z_j`, `lse = logsumexp_j t_j`, `out = Σ_j softmax_j(t) · s_j / z_j`. Features whose
    `z_j` is at most `eps` of `full_z_j` (the value before subtraction; default: of 1) contribute nothing: what is left
    of them is rounding error.
    """
    batch, heads_q, features = log_phi_q.shape
    heads_kv = cache.z.shape[1]
    floor = eps * (torch.ones_like(cache.z) if full_z is None else full_z)
    live = cache.z > floor
    safe_z = torch.where(live, cache.z, 1.0)
    base = torch.where(live, cache.m + safe_z.log(), NEG_INF)
    t = log_phi_q.to(cache.z.dtype).reshape(batch, heads_kv, -1, features) + base[:, :, None]
    out, lse = _softmax_attend(t, (cache.s / safe_z[..., None]).masked_fill(~live[..., None], 0.0)[:, :, None])
    return out.reshape(batch, heads_q, -1).to(log_phi_q.dtype), lse.reshape(batch, heads_q)
