"""The rivals of a learned feature map, on captured tensors: what stands in for the keys of the mid region that no one
reads, at equal bytes.

Every estimator gives log weights `[Hq, T, N]` for the mid keys (any value elsewhere): `offline.output(scene, read,
log_weights)` adds them to the exact part, one normalisation. The two kernel estimators (`favor`, `identity_softmax`)
give a pair `(log φ_q [Hq, T, r], log φ_k [Hkv, N, r])` for `feature_logits`, as a trained map does.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparsekv.core.offline import NEG_INF, Scene
from sparsekv.kernels.completion import RANK
from sparsekv.models.feature_map import log_kernel


def phi_tokens(features: int, dim: int, *, moments: bool = False) -> float:
    """Size of a completion cache `(m, z, S)` of r features in tokens of `2d` elements: `r(d+2)/(2d)` (completion
    paper, budget accounting); `moments`: with mean and covariance of the keys (`ScoreMoments`)."""
    described = (min(RANK, dim) + 2) * dim if moments else 0
    return (features * (dim + 2) + described) / (2 * dim)


def equal_buckets(tokens: float, dim: int, rank: int = 0) -> int:
    """Buckets whose summaries (count, mean key, mean value, `rank` second moments) take the bytes of `tokens`."""
    return max(1, int(tokens * 2 * dim / (2 * dim + 1 + rank)))


def feature_logits(scene: Scene, log_q: Tensor, log_k: Tensor) -> Tensor:
    """`log Σ_j φ_qj φ_kj` of grouped heads: `[Hq, T, r]`, `[Hkv, N, r]` -> `[Hq, T, N]`."""
    return log_kernel(log_q.reshape(log_k.shape[0], -1, log_q.shape[-1]), log_k).reshape(scene.scores.shape)


def principal_directions(keys: Tensor, bucket: Tensor, num_buckets: int, rank: int) -> Tensor:
    """The `rank` leading directions of the spread of keys within their buckets, one basis a head: keys `[H, N, d]`,
    bucket `[H, N]` -> orthonormal `[H, d, rank]`."""
    member = torch.nn.functional.one_hot(bucket, num_buckets).to(keys.dtype)
    means = (member.mT @ keys) / member.sum(1).clamp(min=1)[..., None]
    spread = keys - means.gather(1, bucket[..., None].expand_as(keys))
    return torch.linalg.eigh(spread.mT @ spread).eigenvectors[..., -rank:]


def bucket_means(
    scene: Scene, bucket: Tensor, num_buckets: int, read: Tensor | None = None, *,
    projected: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Every unread key weighs what its bucket's mean key weighs: `Z_c = n_c·exp(q·mean k_c·scale)`, numerator
    `Z_c·mean v_c` over the unread keys of the bucket (what is read is taken out of counts and sums).

    bucket `[Hkv, N]`; read `[Hq, T, N]` bool or None. With `projected = (q [Hq, T, ρ], k [Hkv, N, ρ])`, queries (times
    the scale) and keys along ρ orthonormal directions, the second moment joins: `+ ½ Σ_ρ q_ρ² var_c(k_ρ)`, the mean
    of `exp` under a Gaussian bucket whose covariance is diagonal in these directions.
    """
    heads_kv, group = bucket.shape[0], scene.group
    unread = scene.mid if read is None else scene.mid & ~read
    left = unread.expand(scene.scores.shape).to(scene.scores.dtype)
    member = torch.nn.functional.one_hot(bucket, num_buckets).to(left.dtype)

    def total(x: Tensor) -> Tensor:
        return (x.reshape(heads_kv, -1, x.shape[-1]) @ member).reshape(*x.shape[:2], num_buckets)

    count = total(left).clamp(min=1)
    # the mean of q·k over a bucket is q·(mean k): the key sums need not be formed
    logits = total(torch.where(unread, scene.scores, 0.0)) / count
    if projected is not None:
        q, k = projected
        first = _bucket_moments(left, member, k, group) / count[..., None]
        second = _bucket_moments(left, member, k * k, group) / count[..., None]
        variance = (second - first * first).clamp(min=0)
        logits = logits + 0.5 * torch.einsum("htcr,htr->htc", variance, q * q)
    return logits.gather(-1, bucket.repeat_interleave(group, 0)[:, None].expand_as(left))


def _bucket_moments(left: Tensor, member: Tensor, k: Tensor, group: int) -> Tensor:
    """Sums of `k [Hkv, N, ρ]` over the unread keys of each bucket: `[Hq, T, C, ρ]`."""
    heads_q, count, length = left.shape
    heads_kv, _, rank = k.shape
    by_bucket = (member[..., None] * k[:, :, None]).reshape(heads_kv, length, -1)
    return (left.reshape(heads_kv, -1, length) @ by_bucket).reshape(heads_q, count, -1, rank)


def sampled(
    scene: Scene, count: int, read: Tensor | None = None, *, proposal: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """`count` unread keys a query and head, drawn with replacement, key i with probability `p_i ∝ exp(proposal_i)`
    (None: uniform). Each weighs `w_i / (count·p_i)` for every time it was drawn, which leaves mass and numerator
    unbiased; keys not drawn get -inf. proposal `[Hq, T, N]`."""
    unread = (scene.mid if read is None else scene.mid & ~read).expand(scene.scores.shape)
    logits = torch.zeros_like(scene.scores) if proposal is None else proposal
    log_p = logits.masked_fill(~unread, NEG_INF).log_softmax(-1)
    some = unread.any(-1, keepdim=True)
    p = torch.where(some, log_p.exp(), 1.0).flatten(0, 1)  # a query without unread keys draws what nobody looks at
    drawn = torch.multinomial(p, count, replacement=True, generator=generator).reshape(*log_p.shape[:2], count)
    times = torch.zeros_like(log_p).scatter_add_(-1, drawn, torch.ones_like(drawn, dtype=log_p.dtype))
    weights = scene.scores + times.log() - math.log(count) - log_p
    return torch.where(unread & (times > 0), weights, NEG_INF)


def mixture(scene: Scene, log_weights: Tensor, uniform: float = 0.1) -> Tensor:
    """A proposal for importance sampling: `log((1 − u)·softmax(log_weights) + u/|M|)` over the mid region. The uniform
    part keeps a key that the weights overlook from weighing without bound."""
    weights = log_weights.masked_fill(~scene.mid, NEG_INF).softmax(-1).nan_to_num(0.0)
    return ((1 - uniform) * weights + uniform / scene.mid.sum(-1, keepdim=True).clamp(min=1)).log()


def favor(queries: Tensor, keys: Tensor, directions: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """Fixed positive random features (FAVOR+): `φ(x) = exp(ω·x − ‖x‖²/2)/√r` for both sides, `x` times `√scale`.

    `E_ω[φ(q)·φ(k)] = exp(q·k·scale)`. queries `[Hq, T, d]`, keys `[Hkv, N, d]` with RoPE, directions `[r, d]`. Keys are
    centred, and the two sides scaled to equal norms, before the features are taken; both are exact identities of the
    kernel and lower its variance.
    """
    heads_kv = keys.shape[0]
    centre = keys.mean(1, keepdim=True)
    grouped = queries.reshape(heads_kv, -1, queries.shape[-1])
    keys = keys - centre
    balance = (keys.square().mean((1, 2)) / grouped.square().mean((1, 2)).clamp(min=1e-12)).clamp(min=1e-12) ** 0.25
    x, y = grouped * balance[:, None, None] * scale**0.5, keys / balance[:, None, None] * scale**0.5
    half = 0.5 * math.log(directions.shape[0])
    log_q, log_k = (z @ directions.T - 0.5 * z.square().sum(-1, keepdim=True) - half for z in (x, y))
    log_q = log_q + (grouped @ centre.mT) * scale
    return log_q.reshape(*queries.shape[:2], -1), log_k


def orthogonal_directions(features: int, dim: int, generator: torch.Generator | None = None) -> Tensor:
    """Gaussian directions `[r, d]`, orthogonal in blocks of `d` (FAVOR+): less variance than independent ones."""
    factors = torch.linalg.qr(torch.randn(-(-features // dim), dim, dim, generator=generator))
    # the signs of R make Q uniform over rotations
    blocks = factors.Q * factors.R.diagonal(dim1=-2, dim2=-1).sign()[:, None]
    lengths = torch.randn(features, dim, generator=generator).norm(dim=-1, keepdim=True)
    return blocks.mT.flatten(0, 1)[:features] * lengths


def identity_softmax(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """The untrained feature map of Hedgehog: identity, then `φ(x) = [softmax(x), softmax(−x)]`, `2d` features."""
    log_q, log_k = (torch.cat([x.log_softmax(-1), (-x).log_softmax(-1)], -1) for x in (queries, keys))
    return log_q, log_k


def mass_shift(scene: Scene, log_weights: Tensor) -> Tensor:
    """Per head the mean over queries of `log Σ_M w − log Σ_M ŵ`, `[Hq]`: what a map without an absolute scale has to
    be shifted by. Queries with an empty mid region do not count."""
    truth, guess = (x.masked_fill(~scene.mid, NEG_INF).logsumexp(-1) for x in (scene.scores, log_weights))
    known = torch.isfinite(truth) & torch.isfinite(guess)
    return torch.where(known, truth - guess, 0.0).sum(-1) / known.sum(-1).clamp(min=1)
