"""Learned feature maps as an estimator: one stable cache of feature sums, minus what was read (completion paper §4)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from sparsekv.core.estimators.base import Estimator
from sparsekv.core.layer import (
    CacheLayer,
    Queries,
    Selection,
    heads_joined,
    mapped,
    take_rows,
)
from sparsekv.core.moments import blocks, key_covariance, key_mean
from sparsekv.core.regions import Regions
from sparsekv.kernels import (
    RANK,
    BlockFeatures,
    CompletionQuery,
    FeatureMapWeights,
    KeyFeatures,
    KeyMap,
    PhiCache,
    PhiState,
    ScoreMoments,
    factored,
    for_request,
    fused,
    key_features,
    phi_join,
    phi_query,
    phi_sums,
    read_bound,
    remainder,
)
from sparsekv.kernels.launch import product_dtype


class TrainedMaps(Protocol):
    """The calibrated maps of one layer, as `artifacts.phi.PhiLayer` has them."""

    @property
    def capped(self) -> bool:
        """True where the estimated mass is capped."""

    @property
    def centred(self) -> bool:
        """True where half of the features see keys without the request's mean key."""

    @property
    def offset(self) -> Tensor:
        """`[Hq]`, or `[B, Hq]`, added to `log φ_q`: calibration shift and logarithm of the gate."""

    @property
    def query_map(self) -> FeatureMapWeights:
        """The map of every query head."""

    def of_keys(self, dtype: torch.dtype) -> KeyMap | FeatureMapWeights:
        """Return the map of every KV head, with products in `dtype`; as it is where it has blocks."""

    def at(self, share: float | Tensor) -> TrainedMaps:
        """Calibrated for a share of the context that is read, or for one a row."""


def phi_tokens(features: int, dim: int, *, moments: bool = False) -> float:
    """Size of a completion cache `(m, z, S)` of r features in tokens of `2d` elements: `r(d+2)/(2d)` (completion paper,
    appendix D); `moments`: with mean and covariance of the keys (`ScoreMoments`)."""
    described = (min(RANK, dim) + 2) * dim if moments else 0
    return (features * (dim + 2) + described) / (2 * dim)


class PhiEstimator(Estimator):
    """The stable cache of feature sums `(m, z, S)`, minus the selection (completion paper §4.4, appendix C).

    No features are kept: a step makes those of the keys that it reads, by the function that made what is summed, in the
    same rounding, so that taking all keys out leaves nothing. Maps with a centred half take the mid region's mean key
    when the cache was built, `centre [B, Hkv, d]`; where the mid region has doubled since, the cache is built anew.
    With `capped` maps the mass is capped (`kernels.mass_cap`) by mean and covariance of the mid region's keys; both are
    this project's own. Maps of keys with blocks, the paper's, are run outside the attention kernel: the estimate is
    then a part of its own.
    """

    row_state: ClassVar[tuple[str, ...]] = ("state", "mean", "bias", "built_size", "covariance")
    restorable: ClassVar[bool] = True

    def __init__(self, layer: TrainedMaps):
        self.layer = self.calibrated = layer
        self.share: float | Tensor = 0.0
        self.state: PhiState
        self.mean: Tensor | None = None
        self.bias: Tensor | None = None
        self.built_size: Tensor | None = None
        self.built_equal: int | None = None
        """`built_size` where it is that of every row."""
        self.covariance: Tensor | None = None
        self.of_keys: dict[torch.dtype, KeyMap | FeatureMapWeights] = {}
        self.of_queries: dict[torch.dtype, FeatureMapWeights] = {}
        """Both maps as they are run, by precision, made once for all forks."""
        self.weights: FeatureMapWeights | None = None
        self.key_map: KeyMap | FeatureMapWeights | None = None

    def build(self, view: CacheLayer) -> None:
        first, last = view.regions.mid_first, view.regions.mid_last
        edges = view.regions.edges
        self.mean = mean = key_mean(view.keys_at, first, last, edges)
        self.built_size = view.regions.mid_sizes if self.layer.centred else None
        self._built_over(view)
        centre = None if self.centre is None else view.scale * self.centre
        key_map = self.map_for(view)
        maps = for_request(key_map, mean)
        self.bias = maps.bias if isinstance(maps, KeyFeatures) else None
        self.state = PhiState(*self._sum(view, maps, first, last, edges), centre)
        if self.layer.capped:
            covariance = key_covariance(view.keys_at, first, last, mean, edges)
            self._describe(view, view.scale * mean, view.scale**2 * covariance)

    def restore(self, view: CacheLayer, state: dict[str, Any]) -> None:
        super().restore(view, state)
        self._built_over(view)
        self.map_for(view)

    def _built_over(self, view: CacheLayer) -> None:
        equal = view.regions.equal
        self.built_equal = None if equal is None else equal[1] - equal[0]

    def load(self, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        return [*self._map_of_keys(dtype, device), *self._query_maps(dtype)]

    def map_for(self, view: CacheLayer) -> KeyMap | FeatureMapWeights:
        """The map of keys in the precision of a view's and on its device, and whether the kernels run it there."""
        if self.key_map is None:
            self.key_map = self._map_of_keys(view.dtype, view.device)
        self._query_maps(view.dtype)  # here, so that the first step does not wait for them
        runs = fused(self.key_map) or not self.key_map.w_in.is_cuda
        self.in_kernel = view.in_place and isinstance(self.key_map, KeyMap) and runs
        return self.key_map

    def stacks_by(self, view: CacheLayer) -> Hashable | None:
        return self.layer.centred, self.layer.capped, tuple(x.shape for x in self.map_for(view))

    def of_heads(self, others: Sequence[PhiEstimator], views: Sequence[CacheLayer]) -> PhiEstimator:
        whole = PhiEstimator(self.layer)
        whole.of_queries = self.of_queries
        whole.key_map = heads_joined([e.map_for(view) for e, view in zip((self, *others), views, strict=True)])
        return whole

    def take_heads(self, whole: PhiEstimator, state: dict[str, Any]) -> None:
        super().take_heads(whole, state)
        self.built_equal = whole.built_equal

    @property
    def centre(self) -> Tensor | None:
        """The mean key `[B, Hkv, d]` that a centred half takes off."""
        return self.mean if self.layer.centred else None

    def extend(self, view: CacheLayer, old: Regions) -> None:
        equal = view.regions.equal
        if self.built_size is not None and self.built_equal is not None and equal is not None:
            if equal[1] - equal[0] > 2 * self.built_equal:
                self.build(view)
            else:
                self._extend(view, old)
            return
        doubled = None if self.built_size is None else view.regions.mid_sizes > 2 * self.built_size
        if doubled is None or not bool(doubled.all()):
            self._extend(view, old)
        if doubled is not None and bool(doubled.any()):
            self.remake(doubled, self.row_state, lambda: self.build(view))

    def _extend(self, view: CacheLayer, old: Regions) -> None:
        """The tokens that joined, with the mean key of when the cache was built."""
        first, last = torch.maximum(old.mid_last, view.regions.mid_first), view.regions.mid_last
        before, after = old.equal, view.regions.equal
        edges = None
        if before is not None and after is not None:
            begin = max(before[1], after[0])
            edges = [begin, begin, after[1], after[1]]
        if self.covariance is not None and self.state.moments is not None:
            mean, key = key_mean(view.keys_at, first, last, edges), self.state.moments.key
            part = (1 - old.mid_sizes / view.regions.mid_sizes.clamp(min=1))[:, None, None]
            away = view.scale * mean - key
            between = (part * (1 - part))[..., None] * away[..., None] * away[..., None, :]
            within = view.scale**2 * key_covariance(view.keys_at, first, last, mean, edges) - self.covariance
            self._describe(view, key + part * away, self.covariance + part[..., None] * within + between)
        more = self._sum(view, self._maps(), first, last, edges)
        self.state = self.state._replace(**phi_join(PhiCache(*self.state[:3]), more)._asdict())

    def set_read_share(self, view: CacheLayer, share: float | Tensor) -> None:
        self.layer, self.share = self.calibrated.at(share), share
        if self.state.moments is not None:
            self.state = self.state._replace(moments=self.state.moments._replace(bound=self._bound(view)))

    @property
    def key_sizes(self) -> tuple[int, int]:
        assert self.key_map is not None
        units, features = self.key_map.w_out.shape[-2:]
        return units, features

    def query(self, view: CacheLayer, queries: Queries) -> CompletionQuery:
        weights, offset, maps = self._query_maps(queries.rot.dtype), self.layer.offset, self._maps()
        offset = offset if offset.dim() == 1 else queries.per_query(offset)
        found = phi_query(queries.folded, weights, offset, self.state, queries.seats)
        return found._replace(keys=maps) if isinstance(maps, KeyFeatures) else found

    def partial(self, view: CacheLayer, queries: Queries, selection: Selection) -> tuple[Tensor, Tensor]:
        tokens = view.listed(selection)
        keys, values = view.gather(tokens)
        count, heads, width, dim = keys.shape
        lists = heads // view.num_kv_heads
        features = key_features(keys.reshape(count, view.num_kv_heads, lists * width, dim), self._maps())
        features = features.reshape(*tokens.shape, features.shape[-1])
        return remainder(self.query(view, queries), features, values, tokens >= 0)

    def _map_of_keys(self, dtype: torch.dtype, device: torch.device) -> KeyMap | FeatureMapWeights:
        """The map of keys in the precision that products of such keys have, on the device."""
        precision = product_dtype(torch.empty(0, dtype=dtype, device=device))
        if precision not in self.of_keys:
            self.of_keys[precision] = mapped(lambda w: w.to(device), self.layer.of_keys(precision))
        return self.of_keys[precision]

    def _query_maps(self, dtype: torch.dtype) -> FeatureMapWeights:
        """The maps of queries in their precision, where the offset lies: the trained ones may lie elsewhere."""
        if self.weights is None:
            if dtype not in self.of_queries:
                device = self.layer.offset.device
                self.of_queries[dtype] = FeatureMapWeights(
                    *(w.to(device).to(dtype).contiguous() for w in self.layer.query_map))
            self.weights = self.of_queries[dtype]
        return self.weights

    def cost_tokens(self, view: CacheLayer) -> float:
        return phi_tokens(self.state.m.shape[-1], view.head_dim, moments=self.layer.capped)

    def _maps(self) -> KeyFeatures | BlockFeatures:
        """Return the map that makes the features of keys, relative to the cache's shift."""
        if isinstance(self.key_map, FeatureMapWeights):
            return BlockFeatures(self.key_map, self.state.m)
        assert self.key_map is not None and self.bias is not None
        return KeyFeatures(self.key_map.w_in, self.bias, self.key_map.w_out, self.key_map.b_out, self.state.m)

    def take_rows(self, index: Tensor) -> None:
        super().take_rows(index)
        if isinstance(self.share, Tensor):
            self.share = take_rows(self.share, index)
            self.layer = self.calibrated.at(self.share)

    def _sum(
        self, view: CacheLayer, maps: KeyFeatures | BlockFeatures, first: Tensor, last: Tensor,
        edges: list[int] | None = None,
    ) -> PhiCache:
        """The cache of the tokens `first[b] <= i < last[b]`, a block at a time."""
        cache: PhiCache | None = None
        for block, _ in blocks(first, last, edges):
            a, b = block.start, block.stop
            part = phi_sums(view.keys_at(a, b), view.values_at(a, b), first - a, last - a, maps)
            cache = part if cache is None else phi_join(cache, part)
        assert cache is not None
        return cache

    def _describe(self, view: CacheLayer, mean: Tensor, covariance: Tensor) -> None:
        """The moments of the mid region as it is now."""
        self.covariance = covariance
        moments = ScoreMoments(mean, *factored(covariance), view.regions.mid_sizes.to(mean.dtype), self._bound(view))
        self.state = self.state._replace(moments=moments)

    def _bound(self, view: CacheLayer) -> Tensor:
        """Find where the keys that are read begin among those of the mid region."""
        return read_bound(self.share * view.regions.context / view.regions.mid_sizes.clamp(min=1))
