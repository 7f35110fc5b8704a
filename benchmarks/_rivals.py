"""Rivals of a learned feature map, behind the estimator's protocol: what else could stand for the keys not read, at
equal bytes. Dense on purpose: each gives a log weight to every unread key of the mid region."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparsekv.core.buckets import spherical_kmeans
from sparsekv.core.estimators import CentroidEstimator, Estimator
from sparsekv.core.estimators.centroid import equal_buckets
from sparsekv.core.estimators.phi import phi_tokens
from sparsekv.core.layer import LayerView, Queries, Selection
from sparsekv.core.offline import NEG_INF, scores
from sparsekv.kernels import assign_buckets
from sparsekv.models.feature_map import log_kernel

RANK = 16
UNIFORM = 0.1
MANY_BUCKETS = 256


class Dense(Estimator):
    """An estimate by log weights `[T, Hq, M]` of the mid keys. One row."""

    def __init__(self, tokens: float):
        self.tokens = tokens

    def build(self, view: LayerView) -> None:
        self.first, self.last = int(view.regions.mid_first[0]), int(view.regions.mid_last[0])
        self.keys, self.values = (x[0, :, self.first:self.last].float() for x in (view.keys, view.values))

    def log_weights(self, view: LayerView, queries: Queries, logits: Tensor, unread: Tensor) -> Tensor:
        """logits: `q·k·scale` of the mid keys; unread: which of them no one reads, both `[T, Hq, M]`."""
        raise NotImplementedError

    def partial(self, view: LayerView, queries: Queries, selection: Selection) -> tuple[Tensor, Tensor]:
        logits = scores(view, queries)[..., self.first:self.last]
        tokens = selection.as_tokens().long().repeat_interleave(logits.shape[1] // selection.as_tokens().shape[1], 1)
        place = torch.where(tokens >= 0, tokens - self.first, logits.shape[-1])
        unread = torch.ones(*logits.shape[:2], logits.shape[-1] + 1, dtype=torch.bool, device=logits.device)
        unread = unread.scatter_(-1, place, False)[..., :-1]
        found = self.log_weights(view, queries, logits, unread).masked_fill(~unread, NEG_INF)
        weights = found.softmax(-1).nan_to_num(0.0).unflatten(1, (self.values.shape[0], -1))
        return torch.einsum("thgm,hmd->thgd", weights, self.values).flatten(1, 2), found.logsumexp(-1)

    def cost_tokens(self, view: LayerView) -> float:
        return self.tokens

    def buckets(self, number: int) -> Tensor:
        """Bucket of every mid key `[Hkv, M]`, one-hot `[Hkv, M, C]`."""
        centroids = spherical_kmeans(self.keys, number)
        bucket = assign_buckets(self.keys[None], centroids)[0].long()
        return torch.nn.functional.one_hot(bucket, number).float()


class Moments(Dense):
    """Bucket means, and half the variance of the scores in a bucket along `RANK` principal directions of a head:
    the mean of `exp` under a Gaussian bucket whose covariance is diagonal in these directions."""

    def build(self, view: LayerView) -> None:
        super().build(view)
        dim = view.keys.shape[-1]
        self.member = self.buckets(max(1, int(self.tokens * 2 * dim / (2 * dim + 1 + RANK))))
        means = (self.member.mT @ self.keys) / self.member.sum(1).clamp(min=1)[..., None]
        spread = self.keys - self.member @ means
        self.basis = torch.linalg.eigh(spread.mT @ spread).eigenvectors[..., -RANK:]

    def log_weights(self, view: LayerView, queries: Queries, logits: Tensor, unread: Tensor) -> Tensor:
        left, heads = unread.float(), self.keys.shape[0]
        count = self.total(left).clamp(min=1)
        along = self.keys @ self.basis  # [Hkv, M, ρ]
        moments = []
        for x in (along, along * along):
            by_bucket = (self.member[..., None] * x[:, :, None]).flatten(2)  # [Hkv, M, C·ρ]
            sums = torch.einsum("thgm,hmx->thgx", left.unflatten(1, (heads, -1)), by_bucket).flatten(1, 2)
            moments.append(sums.unflatten(-1, (-1, RANK)) / count[..., None])
        variance = (moments[1] - moments[0].square()).clamp(min=0)
        q = queries.folded.float().unflatten(1, (heads, -1)) @ self.basis[None] * view.scale
        found = self.total(torch.where(unread, logits, 0.0)) / count
        return self.of_keys(found + 0.5 * torch.einsum("thcr,thr->thc", variance, q.flatten(1, 2).square()))

    def total(self, x: Tensor) -> Tensor:
        """Sums over buckets: `[T, Hq, M] -> [T, Hq, C]`."""
        return torch.einsum("thgm,hmc->thgc", x.unflatten(1, (self.keys.shape[0], -1)), self.member).flatten(1, 2)

    def of_keys(self, x: Tensor) -> Tensor:
        """What each key's bucket has: `[T, Hq, C] -> [T, Hq, M]`."""
        return torch.einsum("thgc,hmc->thgm", x.unflatten(1, (self.keys.shape[0], -1)), self.member).flatten(1, 2)


class Sampling(Moments):
    """Unread keys drawn with replacement, each weighing `w / (count·p)`: unbiased in mass and numerator. `importance`:
    half of the reads choose where to look, by mean keys, the other half are keys drawn there; a uniform part keeps a
    key that the means overlook from weighing without bound."""

    def __init__(self, tokens: float, *, importance: bool, seed: int = 0):
        super().__init__(tokens)
        self.importance, self.seed = importance, seed

    def build(self, view: LayerView) -> None:
        Dense.build(self, view)
        self.generator = torch.Generator(device=view.device).manual_seed(self.seed)
        if self.importance:
            dim = view.keys.shape[-1]
            self.member = self.buckets(max(1, int(self.tokens * dim / (dim + 1))))

    def log_weights(self, view: LayerView, queries: Queries, logits: Tensor, unread: Tensor) -> Tensor:
        count, log_p = max(1, int(self.tokens)), torch.zeros_like(logits)
        if self.importance:
            count = max(1, int(self.tokens / 2))
            means = self.total(logits) / self.total(torch.ones_like(logits)).clamp(min=1)
            log_p = ((1 - UNIFORM) * self.of_keys(means).softmax(-1) + UNIFORM / logits.shape[-1]).log()
        log_p = log_p.masked_fill(~unread, NEG_INF).log_softmax(-1)
        # a query without unread keys draws what nobody looks at
        p = torch.where(unread.any(-1, keepdim=True), log_p.exp(), 1.0).flatten(0, 1)
        drawn = torch.multinomial(p, count, replacement=True, generator=self.generator).unflatten(0, logits.shape[:2])
        times = torch.zeros_like(logits).scatter_add_(-1, drawn, torch.ones_like(drawn, dtype=logits.dtype))
        return torch.where(times > 0, logits + times.log() - math.log(count) - log_p, NEG_INF)


class Kernel(Dense):
    """`log Σ_j φ_qj φ_kj` of fixed features. They have no scale of their own: `shift [Hq]` is added."""

    def __init__(self, tokens: float, shift: Tensor | float = 0.0):
        super().__init__(tokens)
        self.shift = shift

    def features(self, queries: Tensor, keys: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """`log φ` of queries `[Hkv, n, d]` and keys `[Hkv, M, d]`."""
        raise NotImplementedError

    def log_weights(self, view: LayerView, queries: Queries, logits: Tensor, unread: Tensor) -> Tensor:
        heads = self.keys.shape[0]
        q = queries.rot[0].float().reshape(heads, -1, self.keys.shape[-1])
        found = log_kernel(*self.features(q, self.keys, view.scale))
        found = found.reshape(logits.shape[1], logits.shape[0], -1).transpose(0, 1)
        return found + (self.shift[:, None] if isinstance(self.shift, Tensor) else self.shift)


class RandomFeatures(Kernel):
    """Positive random features (FAVOR+): `φ(x) = exp(ω·x − ‖x‖²/2)/√r` for both sides, `x` times `√scale`, directions
    `[r, d]`. Keys are centred and the sides scaled to equal norms first: exact identities that lower the variance."""

    def __init__(self, tokens: float, directions: Tensor, shift: Tensor | float = 0.0):
        super().__init__(tokens, shift)
        self.directions = directions

    def features(self, queries: Tensor, keys: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        centre, directions = keys.mean(1, keepdim=True), self.directions.to(keys.device)
        keys = keys - centre
        balance = (keys.square().mean((1, 2)) / queries.square().mean((1, 2)).clamp(min=1e-12)).clamp(min=1e-12)
        balance = balance[:, None, None] ** 0.25
        half = 0.5 * math.log(directions.shape[0])
        log_q, log_k = (z @ directions.T - 0.5 * z.square().sum(-1, keepdim=True) - half
                        for z in (queries * balance * scale**0.5, keys / balance * scale**0.5))
        return log_q + (queries @ centre.mT) * scale, log_k


class IdentitySoftmax(Kernel):
    """The untrained map of Hedgehog: `φ(x) = [softmax(x), softmax(−x)]`, `2d` features."""

    def features(self, queries: Tensor, keys: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        log_q, log_k = (torch.cat([x.log_softmax(-1), (-x).log_softmax(-1)], -1) for x in (queries, keys))
        return log_q, log_k


def orthogonal_directions(features: int, dim: int, seed: int = 0) -> Tensor:
    """Gaussian directions `[r, d]`, orthogonal in blocks of `d` (FAVOR+): less variance than independent ones."""
    generator = torch.Generator().manual_seed(seed)
    factors = torch.linalg.qr(torch.randn(-(-features // dim), dim, dim, generator=generator))
    # the signs of R make Q uniform over rotations
    blocks = factors.Q * factors.R.diagonal(dim1=-2, dim2=-1).sign()[:, None]
    lengths = torch.randn(features, dim, generator=generator).norm(dim=-1, keepdim=True)
    return blocks.mT.flatten(0, 1)[:features] * lengths


def rivals(features: int, dim: int, shifts: dict[str, Tensor] | None = None, seed: int = 0) -> dict[str, Estimator]:
    """Every rival by name, at the bytes of a φ cache of `features`; shifts: of those without a scale of their own."""
    tokens, shifts = phi_tokens(features, dim, moments=True), shifts or {}
    return {
        "centroid": CentroidEstimator(equal_buckets(tokens, dim)),
        f"centroid_{MANY_BUCKETS}": CentroidEstimator(MANY_BUCKETS),
        "moments": Moments(tokens), "sampling": Sampling(tokens, importance=True, seed=seed),
        "sampling_uniform": Sampling(tokens, importance=False, seed=seed),
        "prf": RandomFeatures(tokens, orthogonal_directions(features, dim, seed), shifts.get("prf", 0.0)),
        "hedgehog": IdentitySoftmax(phi_tokens(2 * dim, dim), shifts.get("hedgehog", 0.0))}
