"""The index of a layer's keys: buckets of the mid region and codes of all tokens; built and extended here only.

Keys may lie anywhere (`core/layer.py: CacheLayer`): they are asked for by their places in a request, and tokens are
listed by the numbers that the storage reads them by.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsekv.core.buckets import ALONE, Moves, fit_buckets, own_centroids
from sparsekv.core.layer import CacheLayer, choose_rows
from sparsekv.core.moments import all_of, key_covariance, key_mean
from sparsekv.core.regions import Regions
from sparsekv.core.sketch import code_size, fit_queries, fit_sketch, second_moment
from sparsekv.kernels import (
    BucketMeans,
    QueryModel,
    Sketch,
    assign_buckets,
    bucket_sums,
    build_index,
    extend_index,
    half_variance,
    round_means,
    square_sums,
)

USUAL_BUCKETS = 1024
"""Buckets a layer and KV head where nothing was trained."""
FITTED_KEYS = 16_384
"""Keys, evenly spaced, that a basis or the queries' side is fitted to, at most."""


class RouterLayer(NamedTuple):
    """The trained router of a layer: centroids `[Hkv, C, d]` of unit length, a query model or None, whether both see
    keys without RoPE (`pre`) or with it (`rot`), how buckets are scored by default, and a sketch with codes of
    `sketch_bytes`, or None. Centroids and sketch may have the batch in front, where every row has its own."""

    centroids: Tensor
    weights: QueryModel | None
    key_space: str
    scores: str
    sketch: Sketch | None = None
    sketch_bytes: int = 0


class Untrained(RouterLayer):
    """A layer that nothing was trained for: buckets begin at the request's own keys, its sketch is fitted to the
    request. Of centroids and sketch only the shapes count."""

    __slots__ = ()

    @classmethod
    def of_shape(cls, heads: int, dim: int, device: torch.device) -> Untrained:
        """Make one for a layer with so many KV heads, with as many buckets and bytes a code as a training makes by
        default."""
        width, wide = code_size(None, None, dim)
        empty = torch.zeros(heads, dim, 2 * width - wide, device=device)
        buckets = torch.zeros(1, dtype=torch.bool, device=device).expand(heads, USUAL_BUCKETS, dim)
        return cls(buckets, None, "rot", "mean_key", Sketch(empty, empty[:, 0], empty), width)


class Buckets(NamedTuple):
    """The buckets of B requests. centroids `[B, Hkv, C, d]`; order `[B, Hkv, M]` int32, the numbers of the mid region's
    tokens bucket by bucket, -1 behind them; offsets `[B, Hkv, C + 1]` int32, where a bucket begins.

    Where bucket means are the scores also sums `[B, Hkv, C, d]` of the rotated keys and squares `[B, Hkv, C]` of their
    lengths, float32 at least, and what is made of these: means, steps and spread as `kernels.BucketMeans` has them.
    """

    centroids: Tensor
    order: Tensor
    offsets: Tensor
    sums: Tensor | None = None
    squares: Tensor | None = None
    means: Tensor | None = None
    steps: Tensor | None = None
    spread: Tensor | None = None

    @property
    def counts(self) -> Tensor:
        """Tokens of every bucket, `[B, Hkv, C]`."""
        return self.offsets.diff(dim=-1)

    def scores(self, scale: float) -> BucketMeans:
        """The bucket means as scores."""
        assert self.means is not None and self.steps is not None and self.spread is not None
        return BucketMeans(self.means, self.steps, scale, self.spread)


def make_buckets(keys: CacheLayer, trained: RouterLayer, *, by_means: bool, moves: Moves | None) -> Buckets:
    """Make the buckets of the mid region.

    Args:
        keys: the layer.
        trained: its router.
        by_means: bucket means are the scores.
        moves: the move of trained buckets to these keys, after which none is empty (`core.buckets.fit_buckets`); None:
            they stay.
    """
    regions, heads = keys.regions, keys.num_kv_heads
    spaced = spaced_by(regions, partial((moves or ALONE).stride, buckets=trained.centroids.shape[-2]))
    end, rows = spaced.end, regions.starts.shape[0]
    held, joins = _held(keys, trained, 0, end), regions.mid_mask(0, end)
    if isinstance(trained, Untrained):
        centroids = own_centroids(held, regions.mid_first, regions.mid_last, trained.centroids.shape[1])
    else:
        centroids = trained.centroids.to(held.device).expand(rows, -1, -1, -1)
    if moves is not None:
        # every row has its own buckets: its heads are heads of one long row
        used, some_used = (x.repeat_interleave(heads, dim=0) for x in (joins, spaced.used(regions)))
        centroids, bucket = (x.unflatten(0, (rows, heads)) for x in fit_buckets(
            held.flatten(0, 1), centroids.flatten(0, 1), used, (spaced.take(held).flatten(0, 1), some_used), moves))
    else:
        bucket = assign_buckets(held, centroids)
    order, offsets = build_index(bucket, centroids.shape[2], regions.mid_first, regions.mid_last)
    numbers = keys.numbers(0, end)
    if numbers is not None:
        named = numbers.to(order.dtype)[:, None].expand(-1, heads, -1).gather(-1, order.clamp(min=0).long())
        order = torch.where(order < 0, order, named)
    buckets = Buckets(centroids, order, offsets)
    return _summed(buckets, keys, bucket, joins, 0, end) if by_means else buckets


def grow_buckets(buckets: Buckets, keys: CacheLayer, trained: RouterLayer, old: Regions) -> Buckets:
    """Add to the buckets the tokens that joined the mid region after `old`."""
    low, end = old.edges[2], keys.regions.edges[3]
    bucket, joins = assign_buckets(_held(keys, trained, low, end), buckets.centroids), keys.regions.mid_mask(
        low, end, after=old.mid_last)
    numbers = keys.numbers(low, end)
    columns = torch.arange(low, end, device=bucket.device).expand(bucket.shape[0], -1)
    order, offsets = extend_index(buckets.order, buckets.offsets, torch.where(joins[:, None], bucket, -1),
                                  columns if numbers is None else numbers)
    grown = buckets._replace(order=order, offsets=offsets)
    return grown if buckets.sums is None else _summed(grown, keys, bucket, joins, low, end)


def list_whole(buckets: Buckets, view: CacheLayer, rows: Tensor) -> Buckets:
    """Put all tokens of the mid region of these rows `[B]` in the first bucket, in order, and the others empty: with as
    many candidates as tokens they choose as without buckets."""
    order, offsets, regions = buckets.order, buckets.offsets, view.regions
    ranks = torch.arange(order.shape[2], device=order.device)
    first, sizes, rows = (x[:, None] for x in (regions.mid_first, regions.mid_sizes, rows))
    listed, numbers = first + ranks, view.numbers(0, regions.edges[3])
    if numbers is not None and numbers.shape[1]:
        listed = numbers.gather(1, listed.clamp(max=numbers.shape[1] - 1))
    listed = torch.where(ranks < sizes, listed, -1).to(order.dtype)
    begins = sizes.to(offsets.dtype) * (torch.arange(offsets.shape[2], device=order.device) > 0)
    return buckets._replace(order=torch.where(rows[..., None], listed[:, None], order),
                            offsets=torch.where(rows[..., None], begins[:, None].to(offsets.dtype), offsets))


def choose_buckets(rows: Tensor, new: Buckets, old: Buckets) -> Buckets:
    """Row-wise select: `new` where `rows [B]`, else `old`."""
    width = max(new.order.shape[2], old.order.shape[2])
    chosen: Buckets = choose_rows(rows, *(
        x._replace(order=torch.nn.functional.pad(x.order, (0, width - x.order.shape[2]), value=-1))
        for x in (new, old)))
    return chosen


def _held(keys: CacheLayer, trained: RouterLayer, first: int, last: int) -> Tensor:
    """Keys in the space of the buckets."""
    return keys.keys_pre(first, last) if trained.key_space == "pre" else keys.keys_at(first, last)


def _summed(buckets: Buckets, keys: CacheLayer, bucket: Tensor, joins: Tensor, low: int, end: int) -> Buckets:
    """Add the rotated keys of the tokens that join `[B, end − low]`, which lie in bucket `[B, Hkv, end − low]`, to the
    sums, and make what scores the buckets then."""
    which = bucket, joins[:, None], buckets.centroids.shape[2]
    held = keys.keys_at(low, end)
    sums, squares = bucket_sums(held, *which)[1], square_sums(held, *which)
    if buckets.sums is not None and buckets.squares is not None:
        sums, squares = buckets.sums + sums, buckets.squares + squares
    means, steps = round_means(sums, buckets.counts)
    return buckets._replace(sums=sums, squares=squares, means=means, steps=steps,
                            spread=half_variance(squares, sums, buckets.counts))


class Spaced(NamedTuple):
    """Sampled keys of every row, evenly spaced from its first token to the end of its mid region: a row's are the same
    whatever is padded before it. Those of all rows lie in one stretch from `low` to `end`, `stride` apart; or they are
    at `places [B, n]`, a row's own `steps [B]` apart, and past its end where it has fewer."""

    low: int
    end: int
    stride: int
    steps: Tensor | None = None
    places: Tensor | None = None

    def take(self, x: Tensor) -> Tensor:
        """Sample keys, or codes: `[B, Hkv, N, d]` -> `[B, Hkv, n, d]`."""
        if self.places is None:
            return x[:, :, self.low:self.end:self.stride]
        index = self.places.clamp(max=max(self.end - 1, 0)).to(x.device)
        return x[torch.arange(x.shape[0], device=x.device)[:, None, None],
                 torch.arange(x.shape[1], device=x.device)[:, None], index[:, None]]

    def used(self, regions: Regions) -> Tensor:
        """Mark those in the mid region, `[B, n]`."""
        if self.places is None:
            return regions.mid_mask(self.low, self.end)[:, ::self.stride]
        return (self.places >= regions.mid_first[:, None]) & (self.places < regions.mid_last[:, None])

    def of(self, regions: Regions) -> tuple[Tensor, Tensor]:
        """The first of them in the mid region, and the first behind it, `[B]`."""
        start, step = (self.low, self.stride) if self.steps is None else (regions.starts, self.steps)
        return -(-(regions.mid_first - start) // step), -(-(regions.mid_last - start) // step)


def spaced_by(regions: Regions, stride_of: Callable[[Any], Any]) -> Spaced:
    """Sampled keys of every row. stride_of: the stride for a number of tokens, rising with it; below 1, all are taken.
    Waits for the device once, where nobody has for these regions."""
    low, latest, earliest, end = regions.spans
    low = min(low, end)
    stride = max(1, int(stride_of(end - low)))
    if stride == 1 or (low == latest and earliest == end):
        return Spaced(low, end, stride)
    steps = stride_of(regions.mid_last - regions.starts).clamp(min=1)
    most = int((-(-(regions.mid_last - regions.starts) // steps)).max())
    places = regions.starts[:, None] + steps[:, None] * torch.arange(most, device=steps.device)
    return Spaced(low, end, stride, steps, places)


def fit_stride(tokens: Any) -> Any:
    """Stride of the keys used to fit the sketch."""
    return -(-tokens // FITTED_KEYS)


def fit_basis(keys: CacheLayer, fixed: Sketch, width: int, *, always: bool = False) -> Sketch | None:
    """Fit a sketch to these requests: their keys and their prompts' last queries.

    Args:
        keys: the layer.
        fixed: the artifact's sketch, whose size of a code is kept.
        width: of a code [bytes].
        always: where no last query is known, fit one for queries of any direction.

    Returns:
        The sketch, with the batch in front; None where no query is known and `always` is off.
    """
    moment = recent_moment(keys)
    if moment is None:
        if not always:
            return None
        rows, heads, _, dim = keys.shape
        moment = torch.eye(dim, device=keys.device).expand(rows, heads, dim, dim)
    spaced = spaced_by(keys.regions, fit_stride)
    some, (first, last) = all_of(_some_keys(keys, spaced)), spaced.of(keys.regions)
    mean = key_mean(some, first, last)
    return fit_sketch(moment, mean, key_covariance(some, first, last, mean), width, 2 * width - fixed.rank)


def fit_side(keys: CacheLayer, fixed: Sketch, codes: Tensor | None) -> Tensor:
    """Fit what queries multiply the artifact's codes by to these requests' keys: `[B, Hkv, d, r]`."""
    spaced = spaced_by(keys.regions, fit_stride)
    if spaced.places is None:
        some = keys.codes_at(codes, spaced.low, spaced.end, spaced.stride)
    else:
        some = spaced.take(keys.codes_at(codes, 0, spaced.end, 1))
    return fit_queries(fixed, some, _some_keys(keys, spaced), spaced.used(keys.regions))


def _some_keys(keys: CacheLayer, spaced: Spaced) -> Tensor:
    if spaced.places is None:
        return keys.keys_at(spaced.low, spaced.end, spaced.stride)
    return spaced.take(keys.keys_at(0, spaced.end))


def recent_moment(keys: CacheLayer) -> Tensor | None:
    """The second moment of the prompt's last queries, `[B, Hkv, d, d]`; None where they are not known."""
    recent = keys.recent_queries
    if recent is None or not recent.shape[2]:
        return None
    positions = torch.arange(keys.recent_end - recent.shape[2], keys.recent_end, device=recent.device)
    return second_moment(recent, keys.num_kv_heads, positions >= keys.regions.starts[:, None])
