"""The router's second stage: buckets give candidates, sketches of their keys tell them apart, the best are read."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sparsekv.core.estimators.phi import key_covariance, key_mean
from sparsekv.core.layer import LayerView, Queries, Selection
from sparsekv.core.regions import Regions, tokens_of_budget
from sparsekv.core.selectors.router import Router
from sparsekv.core.sketch import fit_queries, fit_sketch, second_moment
from sparsekv.foundation.config import option
from sparsekv.foundation.errors import SparseKVError
from sparsekv.kernels import Sketch, encode_keys, sketch_tokens

FITS = ("fitted", "fixed")
CANDIDATES = 0.1
"""Candidates that buckets give, a share of the context."""
LEAST_CANDIDATES = 4
"""Candidates for every token that is read, at least: among fewer the buckets choose, and not the sketches."""
FITTED_KEYS = 16_384
"""Keys, evenly spaced, that a basis or the queries' side is fitted to, at most."""


@dataclass(eq=False)
class SketchRouter(Router):
    """Every key of the mid region has a code of some bytes beside the index (`core/sketch.py`). The best buckets give
    `candidates`, codes estimate their scores, and the tokens with the largest share of the group's attention are read.
    While the mid region's codes take no more bytes than the bucket means, all are scored, and no index is built.

    `fixed`: codes are of the artifact's basis and depend on the key alone; only what queries multiply them by is fitted
    to the request's keys. `fitted`: the basis is that of this request, from its keys and its prompt's last queries; the
    artifact says the size of a code. Both are fitted again when the mid region has doubled. A layer without a sketch
    decodes by buckets alone.
    """

    name: ClassVar[str] = "sketch"
    source: ClassVar[str] = "this project's own"
    row_state: ClassVar[tuple[str, ...]] = (*Router.row_state, "pool", "codes", "turned", "asks", "fitted_sizes")

    candidates: float | None = option(
        None, help="Tokens whose sketches are scored, those of the best buckets: a share of the context, and at least "
                   "four times the budget; 1 scores all without looking at buckets. Without it 0.1, and all of a "
                   "context whose sketches are no larger than the bucket means (4k tokens for 1024 buckets).",
        min=0.0, max=1.0)
    fit: str = option("fitted", help="The sketches' basis: fitted (to the request, at the end of its prefill) or fixed "
                                     "(the artifact's own: codes depend on the key alone).")

    def validate(self) -> None:
        super().validate()
        if self.fit not in FITS:
            raise SparseKVError(f"unknown fit {self.fit!r}: expected one of {', '.join(FITS)}")
        if self.candidates is not None and (isinstance(self.candidates, bool) or not 0 <= self.candidates <= 1):
            raise SparseKVError(f"candidates are a share of the context between 0 and 1, found {self.candidates!r}")
        if self.probes is not None:
            raise SparseKVError("selector sketch reads tokens and no whole buckets; give token_budget in place of "
                                "probes, or use selector router")
        if getattr(self.artifact, "sketch", None) is None:
            warnings.warn("this router was trained without sketches and decodes by buckets alone; train it again for "
                          "selector sketch", stacklevel=2)

    def prepare(self, view: LayerView) -> None:
        super().prepare(view)
        wanted = tokens_of_budget(float(CANDIDATES if self.candidates is None else self.candidates), view.regions)
        self.pool = torch.maximum(wanted, LEAST_CANDIDATES * self.budget).clamp(max=view.regions.mid_sizes)
        self.widest_pool = int(self.pool.max()) if self.pool.numel() else 0

    def build(self, view: LayerView) -> None:
        trained = self.artifact.layer(view.layer_idx)
        self.fixed: Sketch | None = trained.sketch
        self.width: int = trained.sketch_bytes
        self.codes: Tensor | None = None
        self.routed: bool = self._needs_buckets(view)
        for name in Router.row_state:
            setattr(self, name, None)
        if self.routed:
            super().build(view)
        if self.fixed is not None:
            self._fit(view)

    def extend(self, view: LayerView, old: Regions) -> None:
        if self.routed:
            super().extend(view, old)
        elif self._needs_buckets(view):
            self.routed = True
            super().build(view)
        if self.codes is None:
            return
        if bool((view.regions.mid_sizes > 2 * self.fitted_sizes).any()):
            self._fit(view)
        else:
            self.codes = self._more(view, self.sketch)

    def cost_bytes(self, view: LayerView) -> Tensor | float:
        """Codes of the candidates beside what chose those."""
        if self.codes is None:
            return super().cost_bytes(view)
        listed = self.widest_pool if self.routed else self.codes.shape[2]
        codes = float(view.num_kv_heads * listed * self.width)
        return codes + (super().cost_bytes(view) if self.routed else 0.0)

    def _listed(self, view: LayerView) -> int:
        return self.widest_pool if self.codes is not None else super()._listed(view)

    def select(self, view: LayerView, queries: Queries) -> Selection:
        if self.codes is None:
            return super().select(view, queries)
        candidates, where = None, {}
        if self.routed:
            candidates = self._candidates(view, queries, self.pool, self.widest_pool)
        else:
            where = {"first": queries.per_query(view.regions.mid_first), "last": queries.per_query(
                view.regions.mid_last)}
        return Selection(tokens=sketch_tokens(queries.folded, self.sketch, self.codes, view.scale, queries.per_query(
            self.budget), self.widest, candidates, **where))

    def _needs_buckets(self, view: LayerView) -> bool:
        """Whether buckets choose the candidates: not where scoring every code reads less than scoring the buckets."""
        if self.fixed is None:
            return True
        if self.candidates is not None:
            return self.candidates < 1
        buckets, dim = self.artifact.layer(view.layer_idx).centroids.shape[-2:]
        return outweighs(int(view.regions.mid_sizes.max()), self.width, buckets, dim)

    @property
    def sketch(self) -> Sketch:
        """What the codes were made with."""
        if self.turned is not None:
            return self.turned
        assert self.fixed is not None and self.asks is not None
        return self.fixed._replace(queries=self.asks)

    def _fit(self, view: LayerView) -> None:
        """Codes of the mid region as it now is, and what queries multiply them by."""
        assert self.fixed is not None
        end = int(view.regions.mid_last.max())
        step = max(1, -(-end // FITTED_KEYS))
        keys = view.keys[:, :, :end:step]
        self.turned: Sketch | None = None
        self.asks: Tensor | None = None
        self.fitted_sizes = view.regions.mid_sizes
        moment = recent_moment(view) if self.fit == "fitted" else None
        if moment is not None:
            wide = 2 * self.width - self.fixed.rank
            first, last = (-(-edge // step) for edge in (view.regions.mid_first, view.regions.mid_last))
            mean = key_mean(keys, first, last)
            self.turned = fit_sketch(moment, mean, key_covariance(keys, first, last, mean), self.width, wide)
            self.codes = None
        self.codes = self._more(view, self.turned or self.fixed)
        if self.turned is None:
            used = view.regions.mid_mask(0, end)[:, ::step]
            self.asks = fit_queries(self.fixed, self.codes[:, :, :end:step], keys, used)

    def _more(self, view: LayerView, sketch: Sketch) -> Tensor:
        """The codes with those of the keys that have none."""
        known = 0 if self.codes is None else self.codes.shape[2]
        new = encode_keys(view.keys[:, :, known:int(view.regions.mid_last.max())], sketch, self.width)
        return new if self.codes is None else torch.cat([self.codes, new], dim=2)


def outweighs(tokens: int, width: int, buckets: int, dim: int) -> bool:
    """Whether codes of `width` bytes are more bytes than the buckets' means."""
    return tokens * width > buckets * dim


def recent_moment(view: LayerView) -> Tensor | None:
    """The second moment of the prompt's last queries, `[B, Hkv, d, d]`; None where they are not known."""
    recent = view.recent_queries
    if recent is None or not recent.shape[2]:
        return None
    place = torch.arange(view.recent_end - recent.shape[2], view.recent_end, device=recent.device)
    return second_moment(recent, view.num_kv_heads, place >= view.regions.starts[:, None])
