"""What several operations pass to one another. Shapes as in the conventions of `sparsekv.kernels`."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class QueryModel(NamedTuple):
    """The trained query model of one layer, batch norm folded in (Saap §4): w1 `[Hkv, d, hidden]`, b1
    `[Hkv, hidden]`, w2 `[Hkv, hidden, C]`, b2 `[Hkv, C]`."""

    w1: Tensor
    b1: Tensor
    w2: Tensor
    b2: Tensor


class BucketMeans(NamedTuple):
    """The untrained scores of a request: means `[B, Hkv, C, d]` int8 of the rotated keys of every bucket, in steps
    `[B, Hkv, C]` float32 (`round_means`), the softmax scale, and spread `[B, Hkv, C]` float32: half the variance of a
    bucket's keys in a direction (`half_variance`)."""

    means: Tensor
    steps: Tensor
    scale: float
    spread: Tensor


RouterScores = QueryModel | BucketMeans


class FeatureMapWeights(NamedTuple):
    """Weights of `H` independent feature maps; leading dimensions may be more than one (layers, heads).

    w_in `[..., d, w]`, b_in `[..., w]`; of n blocks, none or more, one below the other, w_a and w_b `[..., n·w, w]`,
    b_a `[..., n·w]`, alpha `[..., n]`; w_out `[..., w, r]`, b_out `[..., r]`.
    """

    w_in: Tensor
    b_in: Tensor
    w_a: Tensor
    b_a: Tensor
    w_b: Tensor
    alpha: Tensor
    w_out: Tensor
    b_out: Tensor


class KeyMap(NamedTuple):
    """A feature map of `H` KV heads as it is run over the keys of a context (`key_map`), matrices in the precision of
    the products. Nothing comes between the block and the output, which are one: w_block `[H, w, r]` is
    `α · w_b · w_out`; without a block it has no rows. stem: w_in unrounded. first: the first of its features; those
    that several maps make are added."""

    stem: Tensor
    w_in: Tensor
    b_in: Tensor
    w_a: Tensor
    b_a: Tensor
    w_out: Tensor
    w_block: Tensor
    b_out: Tensor
    first: int = 0


class PhiCache(NamedTuple):
    """The stable cache of sums of features (completion paper, appendix C): m, z `[B, Hkv, r]`, s `[B, Hkv, r, d]`.

    `m_j` is the largest log-feature, `z_j` and `s_j` the sums of `exp(log φ_j − m_j)` and of the same times the value.
    """

    m: Tensor
    z: Tensor
    s: Tensor


class ScoreMoments(NamedTuple):
    """Mean and covariance of the mid region's keys, the softmax scale included, from which a query's scores have
    theirs: key `[B, Hkv, d]`, the mean; factors `[B, Hkv, ρ, d]` and rest `[B, Hkv, d]`, the covariance as
    `factorsᵀ factors + diag(rest)` (`factored`); size `[B]` float32, tokens of the mid region. bound `[B]`: the
    quantile of the standard normal distribution above which scores are read (`read_bound`)."""

    key: Tensor
    factors: Tensor
    rest: Tensor
    size: Tensor
    bound: Tensor


class PhiState(NamedTuple):
    """What the completion keeps of a request: the stable cache, m, z `[B, Hkv, r]`, s `[B, Hkv, r, d]`.

    features `[B, Hkv, N, r]`: of every key, linear and relative to m (`phi_features`); keys that are read are taken out
    by theirs. centre `[B, Hkv, d]`, for maps with a centred half: the softmax scale times the mean key. moments: what
    the estimated mass is capped by, if it is.
    """

    m: Tensor
    z: Tensor
    s: Tensor
    features: Tensor | None = None
    centre: Tensor | None = None
    moments: ScoreMoments | None = None


class CompletionQuery(NamedTuple):
    """The query's side of the completion: the estimate of key `i` is `e^log_scale · Σ_j features_j key_features_ij`.

    features `[Q, Hq, r]`, the largest 1; log_scale `[Q, Hq]`. mass `[Q, Hq]`, numerator `[Q, Hq, d]`: the estimate of
    the whole mid region, its mass and its sum of values, both over `e^log_scale`. cap `[Q, Hq]`: the log mass of what
    is not read is at most that. key_features `[B, Hkv, N, r]`: `PhiState.features`.
    """

    features: Tensor
    log_scale: Tensor
    mass: Tensor
    numerator: Tensor
    cap: Tensor | None = None
    key_features: Tensor | None = None
