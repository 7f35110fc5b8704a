"""Learned buckets: read every key of the buckets the router picks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sparsekv.artifacts.router import RouterLayer
from sparsekv.config import option
from sparsekv.errors import SparseKVError
from sparsekv.kernels import (
    RouterWeights,
    assign_buckets,
    build_index,
    mean_key_logits,
    router_logits,
    top_buckets,
)
from sparsekv.runtime.selectors.base import LayerView, Queries, Selection, Selector, fold

CHUNK = 16_384


@dataclass(eq=False)
class Router(Selector):
    """Saap §4: mid keys in buckets by the artifact's centroids; a query reads its `probes` best buckets whole, or as
    many whole buckets, by predicted mass per key, as fit in `token_budget`."""

    name: ClassVar[str] = "router"
    source: ClassVar[str] = "Saap §4"
    needs_budget: ClassVar[bool] = False

    probes: int | None = option(None, help="Buckets ℓ read per query and KV head [buckets]; 32 unless token_budget is "
                                           "given.")

    def __post_init__(self) -> None:
        self.layer: RouterLayer | None = None

    def validate(self) -> None:
        super().validate()
        if self.probes is not None and self.token_budget is not None:
            raise SparseKVError("router takes probes or token_budget, both were given; leave one out")

    def use(self, layer: RouterLayer) -> None:
        """The trained part for this layer."""
        self.layer = layer
        buckets = layer.centroids.shape[1]
        if self.probes is not None and not 1 <= self.probes <= buckets:
            raise SparseKVError(f"probes must be between 1 and the router's {buckets} buckets, found {self.probes}")

    def build(self, view: LayerView) -> None:
        layer = self._layer()
        buckets = layer.centroids.shape[1]
        parts, sums = [], 0
        centroids = layer.centroids.to(view.keys.device)
        mid = view.regions.mid_mask()[:, None]
        for a in range(0, view.length, CHUNK):
            b = min(a + CHUNK, view.length)
            keys = view.keys[:, :, a:b] if layer.key_space == "rot" else view.keys_pre(a, b)
            bucket = assign_buckets(keys, centroids)
            parts.append(bucket)
            if layer.scores != "mlp":
                index = torch.where(mid[..., a:b], bucket, buckets)[..., None].expand(-1, -1, -1, keys.shape[-1])
                shape = (*bucket.shape[:2], buckets + 1, keys.shape[-1])
                sums = sums + torch.zeros(shape, device=keys.device).scatter_add_(2, index, view.keys[:, :, a:b].float())
        regions = view.regions
        self.order, self.offsets = build_index(torch.cat(parts, -1), buckets, regions.mid_first, regions.mid_last)
        self.counts = self.offsets.diff(dim=-1)
        self.means = None
        if isinstance(sums, Tensor):
            self.means = sums[:, :, :buckets] / self.counts.clamp(min=1)[..., None]
        self.weights = None
        if layer.weights is not None:
            self.weights = RouterWeights(*(w.to(view.keys.device) for w in layer.weights))

    def select(self, view: LayerView, queries: Queries) -> Selection:
        logits = self.logits(view, queries)
        counts = fold(self.counts, queries.count)
        if self.token_budget is None:
            chosen = top_buckets(logits, view.num_kv_heads, min(self.probes or 32, counts.shape[-1]), counts)
        else:
            budget = self.budget_tokens(view).repeat_interleave(queries.count)
            chosen = buckets_within(logits, counts, budget, view.num_kv_heads)
        return Selection(buckets=chosen, order=self.order, offsets=self.offsets)

    def logits(self, view: LayerView, queries: Queries) -> Tensor:
        """Scores of every bucket for every query head, `[Q, Hq, C]`."""
        layer = self._layer()
        total: Tensor | None = None
        if self.means is not None:
            total = mean_key_logits(queries.folded(queries.rot), fold(self.means, queries.count),
                                    fold(self.counts, queries.count), view.scale)
        if self.weights is not None:
            q = queries.folded(queries.rot if layer.key_space == "rot" else queries.pre)
            trained = router_logits(q, self.weights)
            total = trained if total is None else total + trained
        assert total is not None
        return total

    def _layer(self) -> RouterLayer:
        if self.layer is None:
            raise SparseKVError("selector router needs a router artifact: attach(model, router=...)")
        return self.layer


def buckets_within(logits: Tensor, counts: Tensor, budget: Tensor, heads_kv: int) -> Tensor:
    """Whole buckets in order of predicted mass per key while they fit: logits `[Q, Hq, C]`, counts `[Q, Hkv, C]`,
    budget `[Q]` tokens -> `[Q, Hkv, L]` padded with -1."""
    rows, _, buckets = logits.shape
    mass = logits.softmax(-1).nan_to_num(0.0).reshape(rows, heads_kv, -1, buckets).sum(2)
    order = (mass / counts.clamp(min=1)).masked_fill(counts == 0, -1.0).argsort(-1, descending=True)
    sizes = counts.gather(-1, order)
    fits = (sizes.cumsum(-1) <= budget[:, None, None]) & (sizes > 0)
    chosen = torch.where(fits, order, -1)
    widest = max(1, int(fits.sum(-1).max()))
    return chosen[..., :widest].to(torch.int32)
