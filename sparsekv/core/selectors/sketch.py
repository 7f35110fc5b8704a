"""The router's second stage: buckets give candidates, sketches of their keys tell them apart, the best are read."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparsekv.core.index import RouterLayer, Untrained, choose_buckets, fit_basis, fit_side, list_whole
from sparsekv.core.layer import CacheLayer, Queries, Selection
from sparsekv.core.regions import Regions, tokens_of_budget
from sparsekv.core.selectors.router import Router
from sparsekv.kernels import Sketch, sketch_tokens
from sparsekv.util.config import option
from sparsekv.util.errors import SparseKVError, check_choice

FITS = ("fixed", "fitted")
CANDIDATES = 0.2
"""Candidates that buckets give, a share of the context."""
ALL_CODES_ALONE, ALL_CODES = 1 << 19, 1 << 18
"""Break-even of scoring all codes: keys of a layer, its rows and KV heads together, up to which that takes no longer
than buckets and the codes of their candidates, of one row and of several (docs/log/decode.md)."""
LEAST_CANDIDATES = 4
"""Candidates for every token that is read, at least: among fewer the buckets choose, and not the sketches."""


@dataclass(eq=False)
class SketchRouter(Router):
    """Every key of the mid region has a code of some bytes beside the index (`core/sketch.py`). The best buckets give
    `candidates`, codes estimate their scores, and the tokens with the largest share of the group's attention are read.
    Up to the break-even length of a batch all codes are scored, and no buckets are made.

    `fixed`: codes are of the artifact's basis and depend on the key alone; only what queries multiply them by is fitted
    to the request's keys. `fitted`: the basis is that of this request, from its keys and its prompt's last queries; the
    artifact says the size of a code. Both are fitted again when the mid region has doubled. A layer without a sketch
    decodes by buckets alone; a layer that nothing was trained for is fitted to the request.
    """

    name: ClassVar[str] = "sketch"
    row_state: ClassVar[tuple[str, ...]] = ("buckets", "pool", "codes", "basis", "side", "fitted_sizes",
                                              "first")

    candidates: float | None = option(
        None, help="Tokens whose sketches are scored, those of the best buckets: a share of the context, and at least "
                   "four times the budget; 1 scores all without looking at buckets. Without it 0.2, and all up to "
                   "the length at which that is as fast: 64k tokens of one request with 8 KV heads, 32k / n of n "
                   "requests.",
        min=0.0, max=1.0)
    fit: str = option("fitted", help="The sketches' basis: fitted (to the request, at the end of its prefill) or fixed "
                                     "(the artifact's own: codes depend on the key alone, as vLLM needs them).")

    all_up_to: ClassVar[int | None] = None
    """Tokens of a mid region whose codes are all scored, set when decoding begins; before that None."""
    alone: ClassVar[bool] = True
    """Whether rows that are built together also decode together and without others; set by a server, whose do not."""

    @property
    def trained(self) -> RouterLayer:
        assert self.layer is not None, "a layer without an artifact is known when it is prepared"
        return self.layer

    def validate(self) -> None:
        if self.layer is not None:
            super().validate()
        check_choice("fit", self.fit, FITS)
        if self.candidates is not None and (isinstance(self.candidates, bool) or not 0 <= self.candidates <= 1):
            raise SparseKVError(f"candidates are a share of the context between 0 and 1, found {self.candidates!r}")
        if self.probes is not None:
            raise SparseKVError("selector sketch reads tokens and no whole buckets; give token_budget in place of "
                                "probes, or use selector router")

    def prepare(self, view: CacheLayer) -> None:
        self._settle(view)
        super().prepare(view)
        if self.all_up_to is None:
            self.all_up_to = self._break_even(view)  # type: ignore[misc]
        wanted = tokens_of_budget(float(CANDIDATES if self.candidates is None else self.candidates), view.regions)
        wanted = torch.maximum(wanted, LEAST_CANDIDATES * self.budget)
        self.pool = torch.where(self._scores_all(view.regions), view.regions.mid_sizes, wanted).clamp(
            max=view.regions.mid_sizes)
        self.widest_pool = int(self.pool.max()) if self.pool.numel() else 0
        self.first = view.regions.mid_first

    def stacks_by(self, view: CacheLayer) -> Hashable | None:
        self._settle(view)
        return super().stacks_by(view)

    def _settle(self, view: CacheLayer) -> None:
        """Without an artifact the layer's own shape says what is fitted to the request."""
        if self.layer is None:
            self.layer = Untrained.of_shape(view.num_kv_heads, view.head_dim, view.device)

    def build(self, view: CacheLayer) -> None:
        self.buckets, self.weights = None, self.query_model(view)
        self.codes: Tensor | None = None
        self.basis: Sketch | None = None
        """Of the request; None: the artifact's."""
        self.side: Tensor | None = None
        self.fitted_sizes: Tensor | None = None
        if not bool(self._scores_all(view.regions).all()):
            super().build(view)
            self._list_short(view)
        if self.trained.sketch is not None:
            self._fit(view)

    def extend(self, view: CacheLayer, old: Regions) -> None:
        grown = self._scores_all(old) & ~self._scores_all(view.regions)
        if self.buckets is not None:
            super().extend(view, old)
        if bool(grown.any()):  # these have buckets from here on
            others = self.buckets
            super().build(view)
            if others is not None and self.buckets is not None:
                self.buckets = choose_buckets(grown, self.buckets, others)
        self._list_short(view)
        if self.codes is None or self.fitted_sizes is None:
            return
        doubled = view.regions.mid_sizes > 2 * self.fitted_sizes
        if not bool(doubled.all()):
            self.codes = view.encoded(self.codes, self.sketch, self.trained.sketch_bytes, view.regions.edges[3])
        if bool(doubled.any()):
            self.remake(doubled, ("codes", "basis", "side", "fitted_sizes"), lambda: self._fit(view))

    def cost_bytes(self, view: CacheLayer) -> Tensor | float:
        """Codes of the candidates beside what chose those."""
        if self.codes is None:
            return super().cost_bytes(view)
        listed = self.codes.shape[2] if self.buckets is None else self.widest_pool
        codes = float(view.num_kv_heads * listed * self.trained.sketch_bytes)
        return codes if self.buckets is None else codes + self._bucket_bytes(view, listed)

    def select(self, view: CacheLayer, queries: Queries) -> Selection:
        return Selection(tokens=self._chosen(view, queries))

    @property
    def reads_codes(self) -> bool:
        return self.trained.sketch is not None

    @property
    def most_candidates(self) -> int:
        if not self.reads_codes:
            return super().most_candidates
        return max(self.widest_pool, self.all_up_to or 0)

    def _chosen(self, view: CacheLayer, queries: Queries) -> Tensor:
        if self.codes is None:
            return super()._chosen(view, queries)
        codes = self.codes
        if queries.seats is not None:  # the codes of all slots are every query's
            codes = codes.expand(len(queries.lengths), -1, -1, -1)
        among: dict[str, Any] = {"candidates": self._routed(view, queries, self.pool, self.widest_pool)} if (
            self.buckets is not None) else {
            "first": queries.per_query(self.first), "last": queries.per_query(view.regions.mid_last)}
        return sketch_tokens(queries.folded, self.sketch, codes, view.scale, queries.per_query(self.budget),
                             self.widest, **among)

    @property
    def sketch(self) -> Sketch:
        """The basis of the codes, and what these requests' queries are multiplied by."""
        if self.basis is not None:
            return self.basis
        trained = self.trained.sketch
        assert trained is not None
        return trained if self.side is None else trained._replace(queries=self.side)

    def _scores_all(self, regions: Regions) -> Tensor:
        """Rows whose codes are all scored, `[B]`: where that reads less than scoring the buckets, or is faster."""
        sizes = regions.mid_sizes
        if self.trained.sketch is None:
            return torch.zeros_like(sizes, dtype=torch.bool)
        if self.candidates is not None:
            return torch.full_like(sizes, self.candidates == 1, dtype=torch.bool)
        assert self.all_up_to is not None
        return sizes <= self.all_up_to

    def _break_even(self, view: CacheLayer) -> int:
        """Tokens of a row up to which all codes are scored."""
        buckets, dim = self.trained.centroids.shape[-2:]
        least = most_by_codes(self.trained.sketch_bytes, buckets, dim)
        rows, heads = view.regions.starts.shape[0], view.num_kv_heads // view.side_by_side
        return max(least, (ALL_CODES_ALONE if rows == 1 else ALL_CODES) // (rows * heads)) if self.alone else least

    def _list_short(self, view: CacheLayer) -> None:
        """Rows whose codes are all scored beside others' buckets: all of their tokens, in order, are in one bucket."""
        short = self._scores_all(view.regions)
        if self.buckets is not None and bool(short.any()):
            self.buckets = list_whole(self.buckets, view, short)

    def _fit(self, view: CacheLayer) -> None:
        """Codes of the mid region as it now is, and what queries multiply them by."""
        fixed, width, end = self.trained.sketch, self.trained.sketch_bytes, view.regions.edges[3]
        assert fixed is not None
        self.fitted_sizes = view.regions.mid_sizes
        untrained = isinstance(self.trained, Untrained)
        self.basis = fit_basis(view, fixed, width, always=untrained) if untrained or self.fit == "fitted" else None
        if self.basis is not None:
            self.codes, self.side = view.encoded(None, self.basis, width, end), None
            return
        self.codes = view.encoded(self.codes, fixed, width, end)
        self.side = fit_side(view, fixed, self.codes)


def most_by_codes(width: int, buckets: int, dim: int) -> int:
    """Tokens whose codes of `width` bytes take no more bytes than the buckets' means: as many are scored by their codes
    without looking at buckets."""
    return buckets * dim // max(1, width)
