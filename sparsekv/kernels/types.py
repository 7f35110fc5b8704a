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
    """The map of keys of `H` KV heads as it is run (`key_map`): one hidden layer, `relu(k W_in + bias) W_out + b_out`,
    its output the logarithm of the features to the base 2. w_in `[H, d, u]` and w_out `[H, u, r]` in the precision of
    the products, b_in `[H, u]` and b_out `[H, r]` in float32 at least. of_mean `[H, d, u]`: what comes to b_in for a
    request's mean key."""

    w_in: Tensor
    b_in: Tensor
    of_mean: Tensor
    w_out: Tensor
    b_out: Tensor


class KeyFeatures(NamedTuple):
    """The map of keys as a batch of requests has it (`for_request`): bias `[B, Hkv, u]` with what their mean keys come
    to; shift `[B, Hkv, r]`: `PhiCache.m`, which features are relative to."""

    w_in: Tensor
    bias: Tensor
    w_out: Tensor
    b_out: Tensor
    shift: Tensor


class BlockFeatures(NamedTuple):
    """A map of keys with ReZero blocks (completion paper, appendix J) as a batch of requests has it: weights `[Hkv,
    ...]` in float32 at least; shift as in `KeyFeatures`. No kernel runs it."""

    weights: FeatureMapWeights
    shift: Tensor


class PhiCache(NamedTuple):
    """The stable cache of sums of features (completion paper, appendix C): m, z `[B, Hkv, r]`, s `[B, Hkv, r, d]`.

    `m_j` is the largest logarithm of a feature to the base 2, rounded up, `z_j` and `s_j` the sums of `2^(log₂ φ_j −
    m_j)` and of the same times the value.
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
    """The state of the completion of a request: the stable cache, m, z `[B, Hkv, r]`, s `[B, Hkv, r, d]`.

    centre `[B, Hkv, d]`, for maps with a centred half: the softmax scale times the mean key. moments: what the
    estimated mass is capped by, if it is.
    """

    m: Tensor
    z: Tensor
    s: Tensor
    centre: Tensor | None = None
    moments: ScoreMoments | None = None


class BucketSums(NamedTuple):
    """The buckets of B requests as a completion: means `[B, Hkv, C, d]` of the keys with RoPE, counts `[B, Hkv, C]` and
    sums `[B, Hkv, C, d]` of the values, both float32 at least."""

    means: Tensor
    counts: Tensor
    sums: Tensor


class KeyBuckets(NamedTuple):
    """Buckets of keys as a one-hot map: number `[B or 1, Hkv, N]` int16, the bucket of every token by its number; where
    `listed`, `[Q, H, K]`, that of every token of the list."""

    number: Tensor
    listed: bool = False


class CompletionQuery(NamedTuple):
    """The query's side of the completion: the estimate of key `i` is `e^log_scale · Σ_j features_j key_features_ij`.

    features `[Q, Hq, r]`, the largest 1; log_scale `[Q, Hq]`. mass `[Q, Hq]`, numerator `[Q, Hq, d]`: the estimate of
    the whole mid region, its mass and its sum of values, both over `e^log_scale`. cap `[Q, Hq]`: the log mass of what
    is not read is at most that. keys: by which the features of keys are made, a map (`key_features`) or the buckets
    that keys lie in; seats `[Q]` int64: the rows of bias and shift of the map that are the queries', where those are
    kept by seat.
    """

    features: Tensor
    log_scale: Tensor
    mass: Tensor
    numerator: Tensor
    cap: Tensor | None = None
    keys: KeyFeatures | KeyBuckets | None = None
    seats: Tensor | None = None
