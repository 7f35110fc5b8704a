"""Learned feature maps as an estimator: one stable cache of feature sums, minus what was read (completion paper §4)."""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch
from torch import Tensor

from sparsekv.core.estimators.base import Estimator
from sparsekv.core.layer import LayerView, Queries, Selection, choose_rows, take_rows
from sparsekv.core.moments import BLOCK, DEVICE_BLOCK, blocks, counted, edges_of, key_covariance, key_mean
from sparsekv.core.regions import Regions
from sparsekv.kernels import (
    RANK,
    CompletionQuery,
    FeatureMapWeights,
    KeyMap,
    PhiCache,
    PhiState,
    ScoreMoments,
    factored,
    gather_rows,
    log_phi_keys,
    phi_cache,
    phi_extend,
    phi_features,
    phi_query,
    products,
    read_bound,
    remainder,
)
from sparsekv.kernels.launch import acc_dtype, finite, product_dtype


class TrainedMaps(Protocol):
    """The calibrated maps of one layer, as `artifacts.phi.PhiLayer` has them."""

    @property
    def capped(self) -> bool:
        """Whether the estimated mass is capped."""

    @property
    def centred(self) -> bool:
        """Whether half of the features see keys without the request's mean key."""

    @property
    def offset(self) -> Tensor:
        """`[Hq]`, or `[B, Hq]`, added to `log φ_q`: calibration shift and logarithm of the gate."""

    @property
    def query_map(self) -> FeatureMapWeights:
        """Of every query head."""

    def of_keys(self, dtype: torch.dtype) -> tuple[KeyMap, ...]:
        """Of every KV head, with products in `dtype`, as `log_phi_keys` takes them."""

    def at(self, share: float | Tensor) -> TrainedMaps:
        """Calibrated for a share of the context that is read."""


def phi_tokens(features: int, dim: int, *, moments: bool = False) -> float:
    """Size of a completion cache `(m, z, S)` of r features in tokens of `2d` elements: `r(d+2)/(2d)` (completion paper,
    appendix D); `moments`: with mean and covariance of the keys (`ScoreMoments`)."""
    described = (min(RANK, dim) + 2) * dim if moments else 0
    return (features * (dim + 2) + described) / (2 * dim)


class PhiEstimator(Estimator):
    """The stable cache of feature sums `(m, z, S)`, minus the selection (completion paper §4.4, appendix C).

    Features of the mid keys are kept, `2r` bytes a key in half precision, and the sums are of what is kept: taking all
    keys out leaves nothing. Where keys lie in CPU memory they are not kept but made from what a step fetches. Maps with
    a centred half take the mid region's mean key when the cache was built, `centre [B, Hkv, d]`; where the mid region
    has doubled since, the cache is built anew. With `capped` maps the mass is capped (`kernels.mass_cap`) by mean and
    covariance of the mid region's keys; both are this project's own.
    """

    row_state: ClassVar[tuple[str, ...]] = ("state", "mean", "built_size", "covariance")

    def __init__(self, layer: TrainedMaps):
        self.layer = self.calibrated = layer
        self.share: float | Tensor = 0.0
        self.state: PhiState
        self.mean: Tensor | None = None
        self.built_size: Tensor | None = None
        self.covariance: Tensor | None = None
        self.weights: FeatureMapWeights | None = None
        self.key_maps: tuple[KeyMap, ...] = ()

    def build(self, view: LayerView) -> None:
        first, last = view.regions.mid_first, view.regions.mid_last
        edges = edges_of(first, last)  # known once, so that what follows is queued without a wait
        self.mean = mean = key_mean(view.keys, first, last, edges)
        self.built_size = view.regions.mid_sizes if self.layer.centred else None
        centre = None if self.centre is None else view.scale * self.centre
        if view.keys_on_device:
            self.state = self._with_features(view, first, last, edges)._replace(centre=centre)
        else:
            self.state = PhiState(*self._sum(view, first, last), centre=centre)
        if self.layer.capped:
            self._describe(view, view.scale * mean, view.scale**2 * key_covariance(view.keys, first, last, mean, edges))

    @property
    def centre(self) -> Tensor | None:
        """The mean key `[B, Hkv, d]` that a centred half takes off."""
        return self.mean if self.layer.centred else None

    def extend(self, view: LayerView, old: Regions) -> None:
        doubled = None if self.built_size is None else view.regions.mid_sizes > 2 * self.built_size
        if doubled is None or not bool(doubled.all()):
            self._extend(view, old)
        if doubled is not None and bool(doubled.any()):  # of those rows alone: a row is what it is by itself
            kept = {name: getattr(self, name) for name in self.row_state}
            self.build(view)
            if not bool(doubled.all()):
                for name, value in kept.items():
                    setattr(self, name, choose_rows(doubled, getattr(self, name), value))

    def _extend(self, view: LayerView, old: Regions) -> None:
        """The tokens that joined, with the mean key of when the cache was built."""
        first, last = torch.maximum(old.mid_last, view.regions.mid_first), view.regions.mid_last
        if self.covariance is not None and self.state.moments is not None:
            mean, key = key_mean(view.keys, first, last), self.state.moments.key
            part = (1 - old.mid_sizes / view.regions.mid_sizes.clamp(min=1))[:, None, None]
            away = view.scale * mean - key
            between = (part * (1 - part))[..., None] * away[..., None] * away[..., None, :]
            within = view.scale**2 * key_covariance(view.keys, first, last, mean) - self.covariance
            self._describe(view, key + part * away, self.covariance + part[..., None] * within + between)
        if self.state.features is not None:
            self.state = self._with_more_features(view, self.state, self.state.features, first, last)
        else:
            self.state = self.state._replace(**self._sum(view, first, last, PhiCache(*self.state[:3]))._asdict())

    def reads(self, view: LayerView, share: float | Tensor) -> None:
        self.layer, self.share = self.calibrated.at(share), share
        if self.state.moments is not None:
            self.state = self.state._replace(moments=self.state.moments._replace(bound=self._bound(view)))

    @property
    def in_kernel(self) -> bool:
        return self.state.features is not None

    def query(self, view: LayerView, queries: Queries) -> CompletionQuery:
        if self.weights is None:
            self.weights = FeatureMapWeights(*(w.to(queries.rot.dtype).contiguous() for w in self.layer.query_map))
        offset = self.layer.offset if self.layer.offset.dim() == 1 else queries.per_query(self.layer.offset)
        return phi_query(queries.folded, self.weights, offset, self.state)

    def partial(self, view: LayerView, queries: Queries, selection: Selection) -> tuple[Tensor, Tensor]:
        tokens = view.listed(selection)
        keys, values = view.gather(tokens)
        if self.state.features is not None:
            features = gather_rows(self.state.features, view.by_head(tokens))
        else:
            count, heads, width, dim = keys.shape
            lists = heads // view.num_kv_heads
            features = self._features(view, keys.reshape(count, view.num_kv_heads, lists * width, dim))
        features = features.reshape(*tokens.shape, features.shape[-1])
        return remainder(self.query(view, queries), features, values, tokens >= 0)

    def cost_tokens(self, view: LayerView) -> float:
        return phi_tokens(self.state.m.shape[-1], view.keys.shape[-1], moments=self.layer.capped)

    def feature_tokens(self, view: LayerView) -> float:
        """The features of a key: `r/(2d)`, none where they are made from the key."""
        return 0.0 if self.state.features is None else self.state.features.shape[-1] / (2 * view.keys.shape[-1])

    def cost_bytes(self, view: LayerView) -> Tensor | float:
        """The cache, and the features of the tokens that are read. The maps themselves, the same for all rows, are not
        counted, as the model's weights are not."""
        kept = self.state.features
        length = view.regions.context if isinstance(self.share, Tensor) else view.length
        listed = 0.0 if kept is None else self.share * length * kept.shape[-1] * kept.element_size()
        return super().cost_bytes(view) + listed * view.num_kv_heads

    def take_rows(self, index: Tensor) -> None:
        super().take_rows(index)
        if isinstance(self.share, Tensor):
            self.share = take_rows(self.share, index)
            self.layer = self.calibrated.at(self.share)

    def _log_k(self, view: LayerView, keys: Tensor, mean: Tensor | None = None) -> Tensor:
        """Log-features of keys `[B, Hkv, n, d]`, float32 at least; mean: `self.mean` of their rows. Maps run in the
        precision of the keys only where features are kept: those made anew of a fetched key must be the ones that were
        summed."""
        dtype = product_dtype(keys) if view.keys_on_device else acc_dtype(keys)
        if not self.key_maps or self.key_maps[0].w_in.dtype != dtype:
            self.key_maps = self.layer.of_keys(dtype)
        return log_phi_keys(keys, self.key_maps, self.mean if mean is None else mean)

    def _features(self, view: LayerView, keys: Tensor) -> Tensor:
        """Features of fetched keys `[Q, Hkv, n, d]`, relative to the cache's shift."""
        per_row = keys.shape[0] // self.state.m.shape[0]
        mean = None if self.mean is None else self.mean.repeat_interleave(per_row, dim=0)
        return phi_features(self._log_k(view, keys, mean), self.state.m.repeat_interleave(per_row, dim=0))

    def _sum(self, view: LayerView, first: Tensor, last: Tensor, cache: PhiCache | None = None) -> PhiCache:
        """The tokens `first[b] <= i < last[b]` summed into the cache, a block at a time."""
        for block, inside in blocks(first, last):
            logs = counted(self._log_k(view, view.keys[:, :, block]), inside, float("-inf"))
            values = view.values[:, :, block]
            cache = phi_cache(logs, values) if cache is None else phi_extend(cache, logs, values)
        assert cache is not None
        return cache

    def _with_features(self, view: LayerView, first: Tensor, last: Tensor, edges: list[int]) -> PhiState:
        """The cache of the tokens `first[b] <= i < last[b]` with their features, in the keys' precision and relative to
        m; the sums are of what was rounded."""
        parts: list[tuple[Tensor, Tensor]] = []
        m = features = None
        for block, inside in blocks(first, last, edges, 0):
            logs = counted(self._log_k(view, view.keys[:, :, block]), inside, float("-inf"))
            if m is None or features is None:
                m = logs.new_full((*logs.shape[:2], logs.shape[3]), float("-inf"))
                features = view.keys.new_empty(*logs.shape[:2], max(0, edges[3]), logs.shape[3])
            if logs.shape[2]:
                m = torch.maximum(m, logs.amax(2))
            part = features[:, :, block]
            torch.exp(logs.sub_(finite(m)[:, :, None]), out=part)  # `phi_features`, in as few passes as there may be
            parts.append((part, m))
        assert m is not None and features is not None
        for part, shift in parts[:-1]:
            part.mul_(torch.exp(torch.where(torch.isinf(m), 0.0, shift - m))[:, :, None])
        return PhiState(m, *_sums(features, view.values[:, :, :features.shape[2]], m.dtype), features)

    def _with_more_features(
        self, view: LayerView, state: PhiState, features: Tensor, first: Tensor, last: Tensor,
    ) -> PhiState:
        """The same with the tokens `first[b] <= i < last[b]` added, the shift as it was."""
        z, s, parts = state.z, state.s, [features[:, :, :int(first.min())]]
        for block, inside in blocks(first, last):
            # what a row does not count may exceed any number
            new = counted(phi_features(self._log_k(view, view.keys[:, :, block]), state.m), inside).to(features.dtype)
            # rows whose mid region ends later than the others' already have some of these
            there = features[:, :, block]
            parts.append(new + torch.nn.functional.pad(there, (0, 0, 0, new.shape[2] - there.shape[2])))
            more = _sums(new, view.values[:, :, block], z.dtype)
            z, s = z + more[0], s + more[1]
        return state._replace(z=z, s=s, features=torch.cat(parts, dim=2))

    def _describe(self, view: LayerView, mean: Tensor, covariance: Tensor) -> None:
        """The moments of the mid region as it is now."""
        self.covariance = covariance
        moments = ScoreMoments(mean, *factored(covariance), view.regions.mid_sizes.to(mean.dtype), self._bound(view))
        self.state = self.state._replace(moments=moments)

    def _bound(self, view: LayerView) -> Tensor:
        """Where the keys that are read begin among those of the mid region."""
        return read_bound(self.share * view.regions.context / view.regions.mid_sizes.clamp(min=1))


def _sums(features: Tensor, values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`z [B, Hkv, r]` and `S [B, Hkv, r, d]` of features `[B, Hkv, n, r]`."""
    if dtype == features.dtype:
        return features.sum(2), products(features, values)
    s = torch.zeros(*features.shape[:2], features.shape[3], values.shape[3], dtype=dtype, device=features.device)
    size = DEVICE_BLOCK if features.is_cuda else BLOCK
    for a in range(0, features.shape[2], size):
        s += products(features[:, :, a:a + size], values[:, :, a:a + size])
    return features.sum(2, dtype=dtype), s
