"""Learned buckets: a query model, or the request's own bucket means, picks partitions of the keys (Saap)."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from sparsekv.core.buckets import fit_buckets
from sparsekv.core.layer import LayerView, Queries, Selection
from sparsekv.core.regions import Regions
from sparsekv.core.selectors.base import Selector
from sparsekv.foundation.config import option
from sparsekv.foundation.errors import SparseKVError
from sparsekv.kernels import (
    BucketMeans,
    Candidates,
    QueryModel,
    RouterScores,
    assign_buckets,
    bucket_sums,
    build_index,
    extend_index,
    half_variance,
    round_means,
    route,
    route_tokens,
    square_sums,
)

SCORES = ("mlp", "mean_key")
DEFAULT_BUDGET = 0.05


@dataclass(eq=False)
class Router(Selector):
    """Buckets of keys by spherical k-means, trained; a query scores them by a trained model (`mlp`, Saap §4.2) or by
    the means of the request's own keys (`mean_key`, this project's).

    With `token_budget` the best buckets by probability per token are read, the last one in part
    (`kernels.route_tokens`); with `probes` the most probable ones, whole (Saap §4.3). `artifact` is a RouterArtifact,
    or anything whose `.layer(i)` has centroids, weights, key_space and scores.
    """

    name: ClassVar[str] = "router"
    source: ClassVar[str] = "Saap §4"
    replayable: ClassVar[bool] = True
    budget_free: ClassVar[bool] = True
    row_state: ClassVar[tuple[str, ...]] = ("centroids", "assignment", "order", "offsets", "counts", "key_sums",
                                            "square_sums", "means", "steps", "spread")
    needs_budget: ClassVar[bool] = False
    artifact_kind: ClassVar[str | None] = "router"

    probes: int | None = option(None, help="Buckets read per query and KV head, whole, instead of a token budget; the "
                                           "paper's is 32 [buckets].", min=1)
    scores: str | None = option(None, help="How a query scores buckets: mlp or mean_key; without it the artifact's.")
    adapt: bool = option(True, help="Trained buckets move to this request's keys at the end of its prefill, and none "
                                    "stays empty; mean_key scores only: a query model knows no such bucket.")
    artifact: Any = None

    def validate(self) -> None:
        super().validate()
        if self.scores not in (None, *SCORES):
            raise SparseKVError(f"unknown scores {self.scores!r}: expected one of {', '.join(SCORES)}")
        if self.artifact is None:
            raise SparseKVError(f"selector {self.name} needs a trained router: give router=...")
        if self.probes is not None and self.token_budget is not None:
            raise SparseKVError(f"selector {self.name} takes probes or token_budget, found both; leave one out")
        buckets = self.artifact.centroids.shape[-2]
        if self.probes is not None and not 1 <= self.probes <= buckets:
            raise SparseKVError(f"probes must be between 1 and the router's {buckets} buckets, found {self.probes}")
        if self.probes is None and self.token_budget is None:
            self.token_budget = DEFAULT_BUDGET

    def serves(self, layer_idx: int) -> bool:
        return self.artifact.layer(layer_idx) is not None

    def to(self, device: Any) -> Self:
        moved = copy.copy(self)
        moved.artifact = self.artifact.to(device)
        return moved

    def read_share(self, view: LayerView) -> float:
        return super().read_share(view) if self.probes is None else self.probes / self.centroids.shape[-2]

    def build(self, view: LayerView) -> None:
        trained = self.artifact.layer(view.layer_idx)
        how = self.scores or trained.scores
        if how == "mlp" and trained.weights is None:
            raise SparseKVError("scores mlp needs the query model, and this router was saved without one; use mean_key")
        self.space = trained.key_space
        self.weights: QueryModel | None = trained.weights if how == "mlp" else None
        end = int(view.regions.mid_last.max())
        rows = view.keys.shape[0]
        self.centroids = trained.centroids.to(view.keys.device).expand(rows, -1, -1, -1)
        if how == "mean_key" and self.adapt:
            # every row has its own buckets: its heads are heads of one long row
            used = view.regions.mid_mask(0, end).repeat_interleave(view.num_kv_heads, dim=0).to(view.keys.device)
            found = fit_buckets(self._keys(view, 0, end).flatten(0, 1), self.centroids.flatten(0, 1), used)
            self.centroids, self.assignment = (x.unflatten(0, view.keys.shape[:2]) for x in found)
        else:
            self.assignment = self._assign(view, 0, end)
        self.order, self.offsets = build_index(self.assignment, self.centroids.shape[2], view.regions.mid_first,
                                               view.regions.mid_last)
        self.counts = self.offsets.diff(dim=-1)
        self.key_sums: Tensor | None = None
        self.square_sums: Tensor | None = None
        self.means: Tensor | None = None
        self.steps: Tensor | None = None
        self.spread: Tensor | None = None
        if how == "mean_key":
            self._sum_keys(view, view.regions.mid_first, 0, end)

    def extend(self, view: LayerView, old: Regions) -> None:
        first = torch.maximum(old.mid_last, view.regions.mid_first)
        low, end = int(old.mid_last.min()), int(view.regions.mid_last.max())
        new = self._assign(view, self.assignment.shape[-1], end)
        self.assignment = torch.cat([self.assignment, new], dim=-1)
        columns = torch.arange(low, end, device=view.device)
        joins = (columns >= first[:, None]) & (columns < view.regions.mid_last[:, None])
        joined = torch.where(joins[:, None], self.assignment[..., low:end], -1)
        self.order, self.offsets = extend_index(self.order, self.offsets, joined,
                                                columns.expand(view.keys.shape[0], -1))
        self.counts = self.offsets.diff(dim=-1)
        if self.key_sums is not None:
            self._sum_keys(view, first, low, end)

    def cost_bytes(self, view: LayerView) -> Tensor | float:
        """What scores the buckets, where they begin, and the places of the tokens listed."""
        heads, buckets, dim = self.centroids.shape[1:]
        size = view.keys.element_size()
        scored = heads * buckets * (dim + 8) if self.weights is None else size * sum(w.numel() for w in self.weights)
        return float(scored + 4 * heads * (buckets + 1 + self._listed(view)))

    def _listed(self, view: LayerView) -> int:
        """Tokens of a list of candidates."""
        return self.widest if self.probes is None else int(self.read_share(view) * view.length)

    def select(self, view: LayerView, queries: Queries) -> Selection:
        if self.probes is None:
            return Selection(tokens=route_tokens(*self._candidates(view, queries, self.budget, self.widest)))
        q = self._asking(queries)
        chosen = route(q, self._scores(view, q), self.counts, min(self.probes, self.counts.shape[-1]))
        return Selection(buckets=chosen, order=self.order, offsets=self.offsets)

    def _candidates(self, view: LayerView, queries: Queries, budget: Tensor, widest: int) -> Candidates:
        """The best buckets' tokens, `budget [B]` of them."""
        q = self._asking(queries)
        return Candidates(q, self._scores(view, q), self.order, self.offsets, queries.per_query(budget), widest)

    def _asking(self, queries: Queries) -> Tensor:
        """The queries in the space of the scores, `[Q, Hq, d]`."""
        return queries.folded_pre if self.weights is not None and self.space == "pre" else queries.folded

    def _scores(self, view: LayerView, q: Tensor) -> RouterScores:
        if self.weights is not None:
            if self.weights.w1.dtype != q.dtype:
                self.weights = QueryModel(*(w.to(q.dtype).contiguous() for w in self.weights))
            return self.weights
        if self.means is None:
            assert self.key_sums is not None and self.square_sums is not None
            self.means, self.steps = round_means(self.key_sums, self.counts)
            self.spread = half_variance(self.square_sums, self.key_sums, self.counts)
        assert self.steps is not None and self.spread is not None
        return BucketMeans(self.means, self.steps, view.scale, self.spread)

    def _keys(self, view: LayerView, first: int, last: int) -> Tensor:
        return view.keys_pre(first, last) if self.space == "pre" else view.keys[:, :, first:last]

    def _assign(self, view: LayerView, first: int, last: int) -> Tensor:
        """Bucket of the keys `first..last`, `[B, Hkv, last − first]` int32."""
        return assign_buckets(self._keys(view, first, last), self.centroids)

    def _sum_keys(self, view: LayerView, first: Tensor, low: int, end: int) -> None:
        """Add the rotated keys of the tokens from `first[b]` on to the sums of their buckets, `[B, Hkv, C, d]`, and
        their squared lengths."""
        self.means = None
        columns = torch.arange(low, end, device=view.device)
        joins = (columns >= first[:, None]) & (columns < view.regions.mid_last[:, None])
        which = self.assignment[..., low:end], joins[:, None].to(view.keys.device), self.centroids.shape[2]
        sums, squares = bucket_sums(view.keys[:, :, low:end], *which)[1], square_sums(view.keys[:, :, low:end], *which)
        self.key_sums = sums if self.key_sums is None else self.key_sums + sums
        self.square_sums = squares if self.square_sums is None else self.square_sums + squares
