"""The router's second stage: buckets give candidates, sketches of their keys tell them apart, the best are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sparsekv.core.index import Index, choose_buckets, fit_basis, fit_side, list_whole
from sparsekv.core.layer import CacheLayer, Queries, Selection, choose_rows
from sparsekv.core.regions import Regions, tokens_of_budget
from sparsekv.core.selectors.router import Router
from sparsekv.kernels import Sketch
from sparsekv.util.config import option
from sparsekv.util.errors import SparseKVError, check_choice

FITS = ("fixed", "fitted")
CANDIDATES = 0.1
"""Candidates that buckets give, a share of the context."""
LEAST_CANDIDATES = 4
"""Candidates for every token that is read, at least: among fewer the buckets choose, and not the sketches."""


@dataclass(eq=False)
class SketchRouter(Router):
    """Every key of the mid region has a code of some bytes beside the index (`core/sketch.py`). The best buckets give
    `candidates`, codes estimate their scores, and the tokens with the largest share of the group's attention are read.
    While the mid region's codes take no more bytes than the bucket means, all are scored, and no buckets are made.

    `fixed`: codes are of the artifact's basis and depend on the key alone; only what queries multiply them by is fitted
    to the request's keys. `fitted`: the basis is that of this request, from its keys and its prompt's last queries; the
    artifact says the size of a code. Both are fitted again when the mid region has doubled. A layer without a sketch
    decodes by buckets alone.
    """

    name: ClassVar[str] = "sketch"
    row_state: ClassVar[tuple[str, ...]] = ("buckets", "pool", "codes", "basis", "side", "fitted_sizes",
                                              "first")

    candidates: float | None = option(
        None, help="Tokens whose sketches are scored, those of the best buckets: a share of the context, and at least "
                   "four times the budget; 1 scores all without looking at buckets. Without it 0.1, and all of a "
                   "context whose sketches are no larger than the bucket means (4k tokens for 1024 buckets).",
        min=0.0, max=1.0)
    fit: str = option("fixed", help="The sketches' basis: fixed (the artifact's own: codes depend on the key alone) or "
                                    "fitted (to the request, at the end of its prefill).")

    def validate(self) -> None:
        super().validate()
        check_choice("fit", self.fit, FITS)
        if self.candidates is not None and (isinstance(self.candidates, bool) or not 0 <= self.candidates <= 1):
            raise SparseKVError(f"candidates are a share of the context between 0 and 1, found {self.candidates!r}")
        if self.probes is not None:
            raise SparseKVError("selector sketch reads tokens and no whole buckets; give token_budget in place of "
                                "probes, or use selector router")

    def prepare(self, view: CacheLayer) -> None:
        super().prepare(view)
        buckets, dim = self.trained.centroids.shape[-2:]
        self.all_up_to = most_by_codes(self.trained.sketch_bytes, buckets, dim)
        wanted = tokens_of_budget(float(CANDIDATES if self.candidates is None else self.candidates), view.regions)
        wanted = torch.maximum(wanted, LEAST_CANDIDATES * self.budget)
        self.pool = torch.where(self._scores_all(view.regions), view.regions.mid_sizes, wanted).clamp(
            max=view.regions.mid_sizes)
        self.widest_pool = int(self.pool.max()) if self.pool.numel() else 0
        self.first = view.regions.mid_first

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
        every = bool(doubled.all())
        if not every:
            self.codes = view.encoded(self.codes, self.sketch, self.trained.sketch_bytes, view.regions.edges[3])
        if bool(doubled.any()):  # of those rows alone: rows are independent of the batch
            names = ("codes", "basis", "side", "fitted_sizes")
            kept = {name: getattr(self, name) for name in names}
            self._fit(view)
            if not every:
                for name, value in kept.items():
                    setattr(self, name, choose_rows(doubled, getattr(self, name), value))

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
        buckets, dim = self.trained.centroids.shape[-2:]
        return max(self.widest_pool, most_by_codes(self.trained.sketch_bytes, buckets, dim))

    @property
    def index(self) -> Index:
        if self.codes is None:
            return super().index
        return Index(self.buckets, self.weights, self.codes, self.sketch, self.budget, self.pool, self.widest,
                     self.widest_pool, self.first)

    @property
    def sketch(self) -> Sketch:
        """What the codes were made with, and what these requests' queries are multiplied by."""
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
        return sizes <= self.all_up_to

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
        self.basis = fit_basis(view, fixed, width) if self.fit == "fitted" else None
        if self.basis is not None:
            self.codes, self.side = view.encoded(None, self.basis, width, end), None
            return
        self.codes = view.encoded(self.codes, fixed, width, end)
        self.side = fit_side(view, fixed, self.codes)


def most_by_codes(width: int, buckets: int, dim: int) -> int:
    """Tokens whose codes of `width` bytes take no more bytes than the buckets' means: as many are scored by their codes
    without looking at buckets."""
    return buckets * dim // max(1, width)
