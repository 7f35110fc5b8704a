"""Learned buckets: a query model, or the request's own bucket means, picks partitions of the keys (Saap)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from torch import Tensor

from sparsekv.core.buckets import ALONE, BEFORE_CODES, Moves
from sparsekv.core.index import Buckets, RouterLayer, grow_buckets, make_buckets
from sparsekv.core.layer import CacheLayer, Queries, Selection, heads_joined
from sparsekv.core.regions import Regions
from sparsekv.core.selectors.base import Selector, Spends
from sparsekv.kernels import Candidates, QueryModel, RouterScores, route, route_tokens
from sparsekv.util.config import option
from sparsekv.util.errors import SparseKVError, check_choice

SCORES = ("mlp", "mean_key")
USUAL_BUDGET = 0.05
"""Share of the context that is read where neither budget nor probes are given."""


@dataclass(eq=False)
class Router(Selector):
    """Buckets of keys by spherical k-means, trained; a query scores them by a trained model (`mlp`, Saap §4.2) or by
    the means of the request's own keys (`mean_key`, this project's).

    With `token_budget` the best buckets by probability per token are read, the last one in part
    (`kernels.route_tokens`); with `probes` the most probable ones, whole (Saap §4.3).
    """

    name: ClassVar[str] = "router"
    replayable: ClassVar[bool] = True
    spends: ClassVar[Spends] = Spends.AT_STEP
    row_state: ClassVar[tuple[str, ...]] = ("buckets",)
    restorable: ClassVar[bool] = True

    probes: int | None = option(None, help="Buckets read per query and KV head, whole, instead of a token budget; the "
                                           "paper's is 32 [buckets].", min=1)
    scores: str | None = option(None, help="How a query scores buckets: mlp or mean_key; without it the artifact's.")
    adapt: bool = option(True, help="Trained buckets move to this request's keys at the end of its prefill, and none "
                                    "stays empty; mean_key scores only: a query model knows no such bucket.")
    layer: Any = None
    """A `RouterLayer`."""

    @property
    def moves(self) -> Moves:
        """The move of trained buckets to a request."""
        return BEFORE_CODES if self.reads_codes else ALONE

    @property
    def trained(self) -> RouterLayer:
        """Raises SparseKVError where there is none."""
        if self.layer is None:
            raise SparseKVError(f"selector {self.name} needs a trained router: give router=...")
        return self.layer

    def validate(self) -> None:
        super().validate()
        if self.scores is not None:
            check_choice("scores", self.scores, SCORES)
        buckets = self.trained.centroids.shape[-2]
        if self.probes is not None and self.token_budget is not None:
            raise SparseKVError(f"selector {self.name} takes probes or token_budget, found both; leave one out")
        if self.probes is not None and not 1 <= self.probes <= buckets:
            raise SparseKVError(f"probes must be between 1 and the router's {buckets} buckets, found {self.probes}")
        if self.scores == "mlp" and self.trained.weights is None:
            raise SparseKVError("scores mlp needs the query model, and this router was saved without one; use mean_key")

    @property
    def spent_budget(self) -> int | float | None:
        return USUAL_BUDGET if self.token_budget is None and self.probes is None else self.token_budget

    @property
    def reads_without_budget(self) -> bool:
        return self.probes is not None

    def read_share(self, view: CacheLayer) -> float | Tensor:
        return super().read_share(view) if self.probes is None else self.probes / self.trained.centroids.shape[-2]

    def build(self, view: CacheLayer) -> None:
        self.weights = self.query_model(view)
        self.buckets: Buckets | None = make_buckets(view, self.trained, by_means=self.weights is None,
                                                    moves=self.moves if self.weights is None and self.adapt else None)

    def restore(self, view: CacheLayer, state: dict[str, Any]) -> None:
        super().restore(view, state)
        self.weights = self.query_model(view)

    def stacks_by(self, view: CacheLayer) -> Hashable | None:
        trained = self.trained
        if (self.scores or trained.scores) == "mlp":
            return None
        options = tuple(getattr(self, f.name) for f in fields(self) if f.name != "layer")
        return type(self), options, trained.key_space, trained.sketch is None, trained.sketch_bytes

    def of_heads(self, others: Sequence[Self], views: Sequence[CacheLayer]) -> Self:
        joined, layers = self.fork(), [one.layer for one in (self, *others)]
        joined.layer = heads_joined([layer._replace(weights=None) for layer in layers])
        return joined

    def extend(self, view: CacheLayer, old: Regions) -> None:
        assert self.buckets is not None
        self.buckets = grow_buckets(self.buckets, view, self.trained, old)

    def cost_bytes(self, view: CacheLayer) -> Tensor | float:
        listed = self.widest if self.probes is None else int(self.read_share(view) * view.length)
        return self._bucket_bytes(view, listed)

    def select(self, view: CacheLayer, queries: Queries) -> Selection:
        if self.probes is None:
            return Selection(tokens=self._chosen(view, queries))
        assert self.buckets is not None
        counts = self.buckets.counts
        chosen = route(self._asking(queries), self._scores(view), counts, min(self.probes, counts.shape[-1]))
        return Selection(buckets=chosen, order=self.buckets.order, offsets=self.buckets.offsets)

    @property
    def reads_codes(self) -> bool:
        """True where codes tell candidates apart."""
        return False

    @property
    def most_candidates(self) -> int:
        """The most candidates of a mid region as large as the one that was prepared for, or smaller."""
        return self.widest

    @property
    def bucket_sizes(self) -> Tensor:
        """Tokens of every bucket of the mid region, `[B, Hkv, C]`."""
        assert self.buckets is not None
        return self.buckets.counts

    def _chosen(self, view: CacheLayer, queries: Queries) -> Tensor:
        """List the tokens that the budget buys, by number: `[Q, Hkv, widest]` int32 padded with -1."""
        return route_tokens(*self._routed(view, queries, self.budget, self.widest))

    def _routed(self, view: CacheLayer, queries: Queries, budget: Tensor, widest: int) -> Candidates:
        """The tokens of the best buckets for a budget, by row, as the kernels list them."""
        assert self.buckets is not None
        order = self.buckets.order  # by seat one list for all queries
        order = order if queries.seats is None else order.expand(len(queries.lengths), -1, -1)
        return Candidates(self._asking(queries), self._scores(view), order, self.buckets.offsets,
                          queries.per_query(budget), widest, queries.seats)

    def _scores(self, view: CacheLayer) -> RouterScores:
        """The query model, or the bucket means as scores."""
        assert self.buckets is not None
        return self.buckets.scores(view.scale) if self.weights is None else self.weights

    def _asking(self, queries: Queries) -> Tensor:
        """The queries in the space of the scores, `[Q, Hq, d]`."""
        pre = self.weights is not None and self.trained.key_space == "pre"
        return queries.folded_pre if pre else queries.folded

    def query_model(self, view: CacheLayer) -> QueryModel | None:
        """The query model in the precision of the keys; None where bucket means are the scores."""
        trained = self.trained
        if (self.scores or trained.scores) != "mlp":
            return None
        assert trained.weights is not None
        return QueryModel(*(w.to(view.device, view.dtype).contiguous() for w in trained.weights))

    def _bucket_bytes(self, view: CacheLayer, listed: int) -> float:
        """Count the bytes of what scores the buckets, where they begin, and the places of the tokens listed."""
        heads, buckets, dim = self.trained.centroids.shape
        size = view.dtype.itemsize
        scored = heads * buckets * (dim + 8) if self.weights is None else size * sum(w.numel() for w in self.weights)
        return float(scored + 4 * heads * (buckets + 1 + listed))
