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

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

NEG_INF = float("-inf")
RANK = 16
"""Rows in which the covariance of the keys is kept."""
REST_EPS = 1e-5


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


class ScoreMoments(NamedTuple):
    """What a query's scores over the mid region have for mean and variance, the softmax scale included: key
    `[B, Hkv, d]`, the mean of its keys; factors `[B, Hkv, ρ, d]` and rest `[B, Hkv, d]`, their covariance as
    `factorsᵀ factors + diag(rest)` (`factored`); size `[B]` float32, its tokens. bound `[B]`: the quantile of the
    standard normal distribution above which scores are read (`read_bound`)."""

    key: Tensor
    factors: Tensor
    rest: Tensor
    size: Tensor
    bound: Tensor


class PhiStore(NamedTuple):
    """The stable cache of a request, m, z `[B, Hkv, r]`, s `[B, Hkv, r, d]`, with what the keys that are read are
    taken out by: features `[B, Hkv, N, r]` of every key, linear, relative to m (`phi_features`); or, for whole
    buckets, the sums of each, bucket_z `[B, Hkv, C, r]` and bucket_s `[B, Hkv, C, r, d]` (`phi_bucket_sums`).

    centre `[B, Hkv, d]`, for maps with a centred half: the softmax scale times the key that was taken off the keys
    before their second half of features; a query adds its product with it to its own second half. moments: what the
    estimated mass is capped by, if it is."""

    m: Tensor
    z: Tensor
    s: Tensor
    features: Tensor | None = None
    bucket_z: Tensor | None = None
    bucket_s: Tensor | None = None
    centre: Tensor | None = None
    moments: ScoreMoments | None = None


class PhiRest(NamedTuple):
    """What a completed step needs beside keys and values: the estimate of key `i` is `e^c · Σ_j a_j features_ij`.

    a `[B, Hq, r]`, c `[B, Hq]`: features of the query, largest 1. whole `[B, Hq]`, base `[B, Hq, d]`: the estimate of
    the whole mid region, its mass and its sum of values, both over `e^c`. features, bucket_z, bucket_s: `PhiStore`'s.
    cap `[B, Hq]`: what the log mass of what is left is at most taken for.
    """

    a: Tensor
    c: Tensor
    whole: Tensor
    base: Tensor
    features: Tensor | None = None
    bucket_z: Tensor | None = None
    bucket_s: Tensor | None = None
    cap: Tensor | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> PhiRest:
        """With every tensor changed."""
        return PhiRest(*(None if x is None else change(x) for x in self))  # type: ignore[arg-type]


def phi_query(log_phi_q: Tensor, store: PhiStore, dtype: torch.dtype | None = None) -> PhiRest:
    """The query's side of the completion: log_phi_q `[B, Hq, r]`; `a` is rounded to `dtype` before it is used, so that
    whole and parts agree."""
    group = log_phi_q.shape[1] // store.m.shape[1]
    m, z, s = (x.repeat_interleave(group, dim=1) for x in (store.m, store.z, store.s))
    t = log_phi_q + torch.where(torch.isinf(m), torch.zeros_like(m), m)
    c = t.amax(-1)
    a = torch.exp(t - torch.where(torch.isinf(c), torch.zeros_like(c), c)[..., None]).to(dtype or t.dtype)
    exact = a.to(z.dtype)
    return PhiRest(a, c, (exact * z).sum(-1), torch.einsum("bhr,bhrd->bhd", exact, s), *store[3:6])


def read_bound(share: Tensor) -> Tensor:
    """Where the best `share` of a standard normal distribution begins; infinite for none."""
    return torch.special.ndtri(1 - share.clamp(0.0, 0.999))


def mass_cap(mean: Tensor, variance: Tensor, size: Tensor, bound: Tensor) -> Tensor:
    """What `log Σ exp(s)` over `size` keys less the best ones is at most taken for: what it were, had the scores the
    normal distribution of their mean and variance (the mass of a log-normal one below its `bound`, which is in standard
    deviations from the mean). No limit where nothing is read: a few best keys, which are no normal tail, then hold most
    of the mass. Any shapes that broadcast. Ours, not the papers': on texts unlike the training text a map may
    overestimate all keys of a query manyfold."""
    expected = size.log() + mean + variance / 2 + torch.special.log_ndtr(bound - variance.clamp(min=0).sqrt())
    return torch.where(torch.isinf(bound), torch.inf, expected)


def factored(covariance: Tensor, rank: int = RANK) -> tuple[Tensor, Tensor]:
    """A covariance `[..., d, d]` as `rank` rows `[..., ρ, d]`, by Cholesky steps on the largest variance that is left,
    and the variances after them, `[..., d]`: `rowsᵀ rows + diag(left)`, its diagonal exact."""
    left = covariance.diagonal(dim1=-2, dim2=-1).clone()
    least = 1e-6 * left.amax(-1, keepdim=True)
    rows = covariance.new_zeros(*left.shape[:-1], min(rank, left.shape[-1]), left.shape[-1])
    for step in range(rows.shape[-2]):
        pivot = left.argmax(-1, keepdim=True)
        where = pivot[..., None]
        row = covariance.gather(-2, where.expand(*pivot.shape, left.shape[-1]))[..., 0, :]
        row = row - (rows.gather(-1, where.expand(*rows.shape[:-1], 1)) * rows).sum(-2)
        size = left.gather(-1, pivot)
        row = torch.where(size > least, row / size.clamp(min=1e-30).sqrt(), 0.0)
        rows[..., step, :] = row
        left = (left - row.square()).clamp(min=0)
    return rows, left


def moments_cap(q: Tensor, moments: ScoreMoments, offset: Tensor) -> Tensor:
    """`mass_cap` of the mid region for queries `[B, Hq, d]`, offset `[Hq]` or `[B, Hq]` added: `[B, Hq]`."""
    acc = _acc(q)
    heads = moments.key.shape[1]
    query = q.to(acc).reshape(q.shape[0], heads, -1, q.shape[-1])
    mean = torch.einsum("bhgd,bhd->bhg", query, moments.key.to(acc))
    along = query @ moments.factors.to(acc).mT
    variance = along.square().sum(-1) + torch.einsum("bhgd,bhd->bhg", query.square(), moments.rest.to(acc))
    size, bound = (x.to(acc)[:, None] for x in (moments.size, moments.bound))
    return mass_cap(mean.flatten(1) + offset, variance.flatten(1), size, bound)


def phi_features(log_phi_k: Tensor, m: Tensor) -> Tensor:
    """Features in the cache's scale, `exp(log φ_k − m)`: `[B, Hkv, N, r]`, m `[B, Hkv, r]`. Keys that come after the
    cache was built keep its shift and may exceed 1."""
    return torch.exp(log_phi_k - torch.where(torch.isinf(m), torch.zeros_like(m), m)[:, :, None])


def phi_bucket_sums(features: Tensor, v: Tensor, order: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of features, alone and times values, over the tokens of every bucket: features `[B, H, N, r]`,
    v `[B, H, N, d]` -> `[B, H, C, r]`, `[B, H, C, r, d]`."""
    batch, heads, _, width = features.shape
    buckets, acc = offsets.shape[-1] - 1, _acc(v)
    z = torch.zeros(batch, heads, buckets, width, dtype=acc, device=v.device)
    s = torch.zeros(batch, heads, buckets, width, v.shape[-1], dtype=acc, device=v.device)
    edges = offsets.tolist()
    for b in range(batch):
        for h in range(heads):
            for c in range(buckets):
                tokens = order[b, h, edges[b][h][c]:edges[b][h][c + 1]].long()
                f = features[b, h, tokens].to(acc)
                z[b, h, c], s[b, h, c] = f.sum(0), f.mT @ v[b, h, tokens].to(acc)
    return z, s


def attend_tokens(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, *, scale: float,
    starts: Tensor, sink_size: int, tail_starts: Tensor, lengths: Tensor, rest: PhiRest | None = None,
) -> tuple[Tensor, Tensor]:
    """Exact attention over the anchors and a list of tokens; with `rest`, completed by what the features estimate of
    the unread mid region, under one normalisation (completion paper §4.4).

    indices: `[B, H, K]` with `H` = `Hkv` (shared by the group) or `Hq`; -1 = none. No token may appear twice or be
    an anchor. Returns `(out, lse)`.
    """
    if rest is not None:
        exact = attend_tokens(q, k, v, indices, scale=scale, starts=starts, sink_size=sink_size,
                              tail_starts=tail_starts, lengths=lengths)
        left = _remainder(rest, v, indices, q.shape[1])
        return merge(torch.stack([exact[0], left[0].to(q.dtype)]), torch.stack([exact[1], left[1].to(exact[1].dtype)]))
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


def _remainder(rest: PhiRest, v: Tensor, indices: Tensor, heads_q: int) -> tuple[Tensor, Tensor]:
    """The whole estimate less that of the tokens read, as one more partial attention."""
    acc = _acc(v)
    assert rest.features is not None
    indices = indices.repeat_interleave(heads_q // indices.shape[1], dim=1)
    at = indices.clamp(min=0).long()[..., None]
    features, values = (x.repeat_interleave(heads_q // x.shape[1], dim=1) for x in (rest.features, v))
    features, values = (x.gather(2, at.expand(-1, -1, -1, x.shape[-1])).to(acc) for x in (features, values))
    taken = torch.einsum("bhr,bhkr->bhk", rest.a.to(acc), features) * (indices >= 0)
    return _left(rest, taken.sum(-1), torch.einsum("bhk,bhkd->bhd", taken, values))


def _bucket_remainder(rest: PhiRest, buckets: Tensor, heads_q: int) -> tuple[Tensor, Tensor]:
    """The same for whole buckets `[B, Hkv, L]`, by their sums."""
    assert rest.bucket_z is not None and rest.bucket_s is not None
    group, acc = heads_q // buckets.shape[1], _acc(rest.base)
    buckets = buckets.repeat_interleave(group, dim=1)
    at, a = buckets.clamp(min=0).long(), rest.a.to(acc)
    z = rest.bucket_z.repeat_interleave(group, dim=1)
    s = rest.bucket_s.repeat_interleave(group, dim=1)
    z = z.gather(2, at[..., None].expand(-1, -1, -1, z.shape[-1])).to(acc)
    s = s.gather(2, at[..., None, None].expand(-1, -1, -1, *s.shape[-2:])).to(acc)
    there = (buckets >= 0).to(acc)
    return _left(rest, torch.einsum("bhr,bhlr,bhl->bh", a, z, there), torch.einsum("bhr,bhlrd,bhl->bhd", a, s, there))


def _left(rest: PhiRest, mass: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The whole less what was taken; dropped where it is rounding error of the whole."""
    acc = mass.dtype
    left, out = rest.whole.to(acc) - mass, rest.base.to(acc) - values
    live = left > REST_EPS * rest.whole.to(acc)
    safe = torch.where(live, left, 1.0)
    lse = torch.where(live, safe.log() + rest.c.to(acc), NEG_INF)
    if rest.cap is not None:
        lse = torch.minimum(lse, rest.cap.to(acc))
    return torch.where(live[..., None], out / safe[..., None], 0.0), lse


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
    starts: Tensor, sink_size: int, tail_starts: Tensor, lengths: Tensor, rest: PhiRest | None = None,
) -> tuple[Tensor, Tensor]:
    """Exact attention over the anchors and every token of the chosen buckets (Saap §4.3), completed with `rest`.
    Returns `(out, lse)`."""
    if rest is not None and rest.bucket_s is not None:
        exact = attend_buckets(q, k, v, order, offsets, buckets, scale=scale, starts=starts, sink_size=sink_size,
                               tail_starts=tail_starts, lengths=lengths)
        left = _bucket_remainder(rest, buckets, q.shape[1])
        return merge(torch.stack([exact[0], left[0].to(q.dtype)]), torch.stack([exact[1], left[1].to(exact[1].dtype)]))
    return attend_tokens(q, k, v, bucket_tokens(order, offsets, buckets), scale=scale, starts=starts,
                         sink_size=sink_size, tail_starts=tail_starts, lengths=lengths, rest=rest)


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


class BucketMeans(NamedTuple):
    """What `mean_key` scores need of a request: means `[B, Hkv, C, d]` of the rotated keys, and the logits' scale."""

    means: Tensor
    scale: float


def route(
    q: Tensor, weights: RouterWeights | None, heads_kv: int, probes: int, counts: Tensor | None = None, *,
    means: BucketMeans | None = None, q_means: Tensor | None = None, density: bool = False,
) -> Tensor:
    """The best buckets by the query model, the bucket means, or their sum; see `kernels.route`."""
    logits = torch.zeros((), dtype=_acc(q), device=q.device)
    if weights is not None:
        logits = router_logits(q, weights)
    if means is not None:
        if counts is None:
            raise ValueError("scores by bucket means need the buckets' sizes: give counts")
        logits = logits + mean_key_logits(q if q_means is None else q_means, means.means, counts, means.scale)
    return top_buckets(logits, heads_kv, probes, counts, density)


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


def top_buckets(
    logits: Tensor, heads_kv: int, probes: int, counts: Tensor | None = None, density: bool = False,
) -> Tensor:
    """The `probes` buckets with the largest summed probability: logits `[B, Hq, C]` -> `[B, Hkv, probes]` int32.

    `p_c = Σ_{g in group} softmax_c(logits_g)`, with `density` divided by the bucket's keys. With `counts [B, Hkv, C]`
    empty buckets have no probability and are never chosen: where fewer than `probes` are non-empty the list is padded
    with -1.
    """
    batch, heads_q, buckets = logits.shape
    logits = logits.reshape(batch, heads_kv, heads_q // heads_kv, buckets)
    if counts is not None:
        logits = logits.masked_fill((counts <= 0)[:, :, None], NEG_INF)
    scores = logits.softmax(-1).nan_to_num(0.0).sum(2)
    if counts is not None and density:
        scores = scores / counts.clamp(min=1)
    if counts is not None:
        scores = scores.masked_fill(counts <= 0, NEG_INF)
    values, chosen = scores.topk(min(probes, buckets), dim=-1)
    return torch.where(torch.isinf(values), -1, chosen).to(torch.int32)


class FeatureMapWeights(NamedTuple):
    """Weights of `H` independent maps; leading dimensions may be more than one (layers, heads).

    w_in `[..., d, w]`, b_in and b_a `[..., w]`, w_a and w_b `[..., w, w]`, alpha `[..., 1]`, w_out `[..., w, r]`,
    b_out `[..., r]`.
    """

    w_in: Tensor
    b_in: Tensor
    w_a: Tensor
    b_a: Tensor
    w_b: Tensor
    alpha: Tensor
    w_out: Tensor
    b_out: Tensor


def log_phi(x: Tensor, weights: FeatureMapWeights) -> Tensor:
    """`log φ(x)`: x `[..., H, T, d]` with RoPE -> `[..., H, T, r]`.

    Stem `h = gelu(W_in x + b)`, one ReZero block `h + α·W_b gelu(W_a h + b_a)`, output `φ = exp(W_out h + b_out)`, of
    which the logarithm is kept: nothing leaves the log domain.
    """
    x = x.to(weights.w_in.dtype)
    h = F.gelu(x @ weights.w_in + weights.b_in[..., None, :], approximate="tanh")
    inner = F.gelu(h @ weights.w_a + weights.b_a[..., None, :], approximate="tanh")
    h = h + weights.alpha[..., None] * (inner @ weights.w_b)
    return h @ weights.w_out + weights.b_out[..., None, :]


def add_centre(log_phi_q: Tensor, queries: Tensor, centre: Tensor | None) -> Tensor:
    """`log φ_q [..., Hq, T, r]` with `q · centre` added to the second half of the features: queries `[..., Hq, T, d]`,
    centre `[..., Hkv, d]`, the mean key times the softmax scale, so that `exp(scale · q·k̄)` is exact. None adds
    nothing."""
    if centre is None:
        return log_phi_q
    group = queries.shape[-3] // centre.shape[-2]
    shared = torch.einsum("...td,...d->...t", queries.to(centre.dtype), centre.repeat_interleave(group, dim=-2))
    half = log_phi_q.shape[-1] // 2
    return torch.cat([log_phi_q[..., :half], log_phi_q[..., half:] + shared[..., None].to(log_phi_q.dtype)], dim=-1)


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


def paged_scores(
    q: Tensor, k: Tensor, first: Tensor, last: Tensor, *, scale: float, table: Tensor | None = None,
    per_group: bool = False,
) -> Tensor:
    """The heads' soft vote on every token; see `kernels.paged_scores`."""
    batch, _, dim = q.shape
    if table is not None:
        k = k.gather(2, table.long()[:, None, :, None].expand(-1, k.shape[1], -1, dim))
    acc = _acc(q)
    scores = (q.to(acc).reshape(batch, k.shape[1], -1, dim) @ k.to(acc).mT) * scale
    place = torch.arange(k.shape[2], device=q.device)
    inside = (place >= first[:, None]) & (place < last[:, None])
    p = scores.masked_fill(~inside[:, None, None], NEG_INF).softmax(-1).nan_to_num(0.0).sum(2)
    return p if per_group else p.sum(1, keepdim=True)
