"""One decode step of one layer: exact attention over what is selected, an estimate of the rest, one normalisation; and
what a layer of a cache keeps between steps."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from sparsekv.core.estimators import Estimator
from sparsekv.core.layer import LayerView, Queries, Selection
from sparsekv.core.regions import Regions
from sparsekv.core.selectors.base import Selector, Spends
from sparsekv.core.stacked import build_estimators, build_selectors
from sparsekv.core.streams import beside
from sparsekv.kernels import add_sinks, merge


class Step(NamedTuple):
    """out `[B, Hq, T, d]`, lse `[Q, Hq]`, and what was read."""

    out: Tensor
    lse: Tensor
    selection: Selection


class Parts(NamedTuple):
    """A step before its two parts are merged: `[Q, Hq, d]` and `[Q, Hq]` each; rest_lse is -inf without an estimate."""

    exact_out: Tensor
    exact_lse: Tensor
    rest_out: Tensor
    rest_lse: Tensor
    selection: Selection


def sparse_step(view: LayerView, queries: Queries, selector: Selector, estimator: Estimator | None) -> Step:
    """Select, attend exactly to the selection and the anchors, complete with the estimate of the rest, normalise once
    (completion paper §4.4, §4.5). Waits for no device unless the selector does."""
    rest = None
    if estimator is not None and estimator.in_kernel:
        with beside(view.device) as join:  # what needs no list, beside the selection
            anchored = view.anchors(queries, estimator.key_sizes)
            query = estimator.query(view, queries)
        selection = selector.select(view, queries)
        join()
        out, lse = view.attend(queries, selection, query, anchored)
    else:
        selection = selector.select(view, queries)
        out, lse, rest = _apart(view, queries, selection, estimator)
    if rest is not None:
        out, lse = merge(torch.stack([out, rest[0].to(out.dtype)]), torch.stack([lse, rest[1].to(lse.dtype)]))
    if view.sinks is not None:
        out, lse = add_sinks(out, lse, view.sinks)
    batch, heads, count, dim = queries.rot.shape
    return Step(out.reshape(batch, count, heads, dim).transpose(1, 2), lse, selection)


def two_parts(view: LayerView, queries: Queries, selector: Selector, estimator: Estimator | None) -> Parts:
    """The same step, exact part and estimate apart and without learned sinks: what calibration shifts against each
    other."""
    selection = selector.select(view, queries)
    out, lse, rest = _apart(view, queries, selection, estimator)
    return Parts(out, lse, *(rest or (torch.zeros_like(out), torch.full_like(lse, float("-inf")))), selection)


def _apart(
    view: LayerView, queries: Queries, selection: Selection, estimator: Estimator | None,
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    """Exact part, its log mass, and the estimate of the rest if there is one."""
    out, lse = view.attend(queries, selection)
    return out, lse, selection.rest if estimator is None else estimator.partial(view, queries, selection)


class LayerState:
    """What one layer of a cache keeps while it decodes sparsely: its view, selector and estimator, which were built
    when decoding began (`build_layers`); grown with the cache, forked and reordered with it.

    `decode_window`: generated tokens stay exact until there are more than this; then all but half of them, and the
    local window of `window_size`, join the mid region.
    """

    def __init__(
        self, view: LayerView, selector: Selector, estimator: Estimator | None, *, window_size: int,
        decode_window: int, owner: object = None,
    ):
        self.owner = owner
        """Who made it: another attachment makes its own."""
        self.view, self.selector, self.estimator = view, selector, estimator
        self.window_size, self.decode_window = window_size, decode_window
        self._read_borders()

    def outgrown(self, past: int) -> bool:
        """Whether tail and decode window of a cache of `past` tokens have outgrown their room."""
        return past >= self.room

    @property
    def room(self) -> int:
        """The length of a cache whose next step moves the region's border."""
        return self._earliest + self.window_size + self.decode_window + 1

    @property
    def replayable(self) -> bool:
        """Whether a step is the same work on the device every time."""
        return self.selector.replayable and (self.estimator is None or self.estimator.in_kernel)

    def advance(self, past: int, length: int) -> None:
        """The cache has grown to `length` tokens, of which the first `past` may join the mid region: the oldest of the
        tail do, when it outgrows its room. `view.keys` and `view.values` are those of `length` tokens already."""
        view = self.view
        old = view.regions.grown(past)
        view.regions = view.regions.grown(length)
        if not self.outgrown(past):
            return
        view.regions = view.regions.moved(past - self.window_size - self.decode_window // 2)
        grow(view, old, self.selector, self.estimator)
        view.moved()
        self._read_borders()

    def step(self, queries: Queries) -> Step:
        return sparse_step(self.view, queries, self.selector, self.estimator)

    def spend(self, budget: int | float) -> LayerState | None:
        """The state with another budget; None where what was built depends on it, and is built anew. Raises
        SparseKVError."""
        if self.selector.spends is Spends.AT_BUILD:
            return None
        self.selector.token_budget = budget
        self.selector.prepare(self.view)
        if self.estimator is not None:
            self.estimator.reads(self.view, self.selector.read_share(self.view))
        return self

    def cropped(self, length: int) -> LayerState | None:
        """The state of a cache cut to `length` tokens; None where the cut reaches the mid region, which is built
        anew."""
        if length < self._latest:
            return None
        self.view.crop(length)
        return self

    def take_rows(self, index: Tensor) -> None:
        """Keep the chosen rows of the batch, in that order."""
        index = index.to(self.view.device)
        self.view.take_rows(index)
        self.selector.take_rows(index)
        if self.estimator is not None:
            self.estimator.take_rows(index)
        self._read_borders()

    def fork(self) -> Self:
        other = copy.copy(self)
        other.view = self.view.fork()
        other.selector = self.selector.fork()
        other.estimator = None if self.estimator is None else self.estimator.fork()
        return other

    def _read_borders(self) -> None:
        """Where the tail begins, read once a mid region: a step must not wait for the device."""
        tails = self.view.regions.tail_starts
        self._earliest, self._latest = (int(tails.min()), int(tails.max())) if tails.numel() else (0, 0)


def build(view: LayerView, selector: Selector, estimator: Estimator | None) -> None:
    """What a prefill ends with: the estimate of the mid region, then the selector's state over it."""
    build_layers([view], [selector], [estimator])


def build_layers(
    views: Sequence[LayerView], selectors: Sequence[Selector], estimators: Sequence[Estimator | None],
) -> None:
    """The same of several layers, which are built at once where they are alike (`core/stacked.py`)."""
    completed = [(view, e) for view, e in zip(views, estimators, strict=True) if e is not None]
    build_estimators([view for view, _ in completed], [e for _, e in completed])
    for view, one in completed:
        view.completion_tokens = one.cost_tokens(view)
    build_selectors(views, selectors)
    for view, selector, estimator in zip(views, selectors, estimators, strict=True):
        if estimator is not None:
            estimator.reads(view, selector.read_share(view))


def grow(view: LayerView, old: Regions, selector: Selector, estimator: Estimator | None) -> None:
    """The mid region has grown from `old` to that of the view: so do state and estimate."""
    selector.prepare(view)
    selector.extend(view, old)
    if estimator is not None:
        estimator.extend(view, old)
        estimator.reads(view, selector.read_share(view))
