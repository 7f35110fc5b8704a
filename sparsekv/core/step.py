"""One decode step of one layer: exact attention over what is selected, an estimate of the rest, one normalisation; and
what a layer of a cache keeps between steps."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from sparsekv.core import stacked
from sparsekv.core.estimators import Estimator
from sparsekv.core.layer import CacheLayer, LayerView, Queries, Selection
from sparsekv.core.regions import Regions, TailRule
from sparsekv.core.selectors.base import Selector, Spends
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


def sparse_step(view: CacheLayer, queries: Queries, selector: Selector, estimator: Estimator | None) -> Step:
    """Take a decode step of one layer: exact attention to what is selected and to the anchors, completed with an
    estimate of the rest, normalised once (completion paper §4.4, §4.5). Waits for no device unless the selector does.

    Args:
        view: keys and values of the layer, wherever they lie.
        queries: T of every row.
        selector, estimator: built over the view, their rows those of the queries, or by seat.

    Returns:
        out `[B, Hq, T, d]`, lse `[Q, Hq]` and the selection.
    """
    completion = anchored = rest = None
    if estimator is not None and estimator.in_kernel:
        # 1. beside the selection: what needs no list, the anchors and the queries' side of the estimate
        with beside(view.device) as join:
            anchored = view.anchors(queries, estimator.key_sizes)
            completion = estimator.query(view, queries)
        # 2. select the tokens to read
        selection = selector.select(view, queries)
        join()
    else:
        selection = selector.select(view, queries)
    selection = without_weights(selection, estimator)
    # 3. attend to anchors and selection, less their estimates where the kernel completes
    out, lse = view.attend(queries, selection, completion, anchored)
    # 4. merge what the kernel has not: an estimate that is a part of its own, and learned sinks
    if completion is None:
        rest = selection.rest if estimator is None else estimator.partial(view, queries, selection)
    if rest is not None:
        out, lse = merge(torch.stack([out, rest[0].to(out.dtype)]), torch.stack([lse, rest[1].to(lse.dtype)]))
    if view.sinks is not None:
        out, lse = add_sinks(out, lse, view.sinks)
    batch, heads, count, dim = queries.rot.shape
    return Step(out.reshape(batch, count, heads, dim).transpose(1, 2), lse, selection)


def two_parts(view: CacheLayer, queries: Queries, selector: Selector, estimator: Estimator | None) -> Parts:
    """Take the step, exact part and estimate apart and without learned sinks: what calibration shifts against each
    other."""
    selection = without_weights(selector.select(view, queries), estimator)
    out, lse = view.attend(queries, selection)
    rest = selection.rest if estimator is None else estimator.partial(view, queries, selection)
    return Parts(out, lse, *(rest or (torch.zeros_like(out), torch.full_like(lse, float("-inf")))), selection)


def without_weights(selection: Selection, estimator: Estimator | None) -> Selection:
    """The selection as it is completed: weights by which a sample stands for all would count the rest twice."""
    return selection if estimator is None or selection.log_weights is None else replace(selection, log_weights=None)


class LayerState:
    """The state of a layer of a cache that decodes sparsely: its view, selector and estimator, which were built when
    decoding began (`build_layers`); grown with the cache, forked and reordered with it."""

    def __init__(
        self, view: CacheLayer, selector: Selector, estimator: Estimator | None, tails: TailRule, owner: object = None,
    ):
        self.owner = owner
        """Who made it: another attachment makes its own."""
        self.view, self.selector, self.estimator, self.tails = view, selector, estimator, tails
        self._moves: list[tuple[int, Regions]] = [(0, view.regions)]
        """The regions so far, and the length of the cache whose next step gave them; of the rows as they are."""

    @property
    def room(self) -> int:
        """The length of a cache whose next step moves the region's border."""
        return self.view.regions.edges[2] + self.tails.longest

    def built(self) -> dict[str, dict[str, Any]] | None:
        """Return what `restore` takes; None where the mid region has grown since, or more than that was built."""
        parts = {"selector": self.selector, **({} if self.estimator is None else {"estimator": self.estimator})}
        if len(self._moves) > 1 or self._moves[0][0] or not all(part.restorable for part in parts.values()):
            return None
        return {name: {x: getattr(part, x) for x in part.row_state} for name, part in parts.items()}

    @property
    def replayable(self) -> bool:
        """True where a step is the same work on the device every time."""
        return self.selector.replayable and (self.estimator is None or self.estimator.in_kernel)

    def advance(self, past: int, length: int) -> None:
        """The cache has grown to `length` tokens, of which the first `past` may join the mid region: the oldest of the
        tail do, when it outgrows its room. `view.keys` and `view.values` are those of `length` tokens already."""
        view = self.view
        old = view.regions.grown(past)
        view.regions = view.regions.grown(length)
        if past < self.room:
            return
        view.regions = view.regions.moved(self.tails.moved_to(past), past - self.tails.longest)
        grow(view, old, self.selector, self.estimator)
        view.moved()
        self._moves.append((past, view.regions))

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
            self.estimator.set_read_share(self.view, self.selector.read_share(self.view))
        return self

    def cropped(self, length: int) -> LayerState | None:
        """The state of a cache cut to `length` tokens, as if it had never been longer; None where it is built anew: the
        cut reaches the mid region, or goes back before the rows were chosen or, of keys in CPU memory, before the
        region's border."""
        if length < self.view.regions.edges[3]:
            return None
        kept = [move for move in self._moves if move[0] <= length]
        if len(kept) < len(self._moves):
            if type(self.view) is not LayerView or not kept:
                return None
            self._back(self.view, kept)
        self.view.crop(length)
        return self

    @torch.no_grad()
    def _back(self, view: LayerView, moves: list[tuple[int, Regions]]) -> None:
        """The borders go back: what was built is built and grown again."""
        self._moves = moves
        whole = view.keys, view.values
        for number, (_, regions) in enumerate(moves):
            old, view.regions = view.regions.grown(regions.length), regions
            view.keys, view.values = (x[:, :, :regions.length] for x in whole)
            if number:
                grow(view, old, self.selector, self.estimator)
            else:
                build(view, self.selector, self.estimator)
        view.keys, view.values = whole

    def take_rows(self, index: Tensor) -> None:
        """Keep the chosen rows of the batch, in that order."""
        index = index.to(self.view.device)
        self.view.take_rows(index)
        self.selector.take_rows(index)
        if self.estimator is not None:
            self.estimator.take_rows(index)
        self._moves = [(self._moves[-1][0] + 1, self.view.regions)]

    def fork(self) -> Self:
        other = copy.copy(self)
        other._moves = list(self._moves)
        other.view = self.view.fork()
        other.selector = self.selector.fork()
        other.estimator = None if self.estimator is None else self.estimator.fork()
        return other


def build(view: CacheLayer, selector: Selector, estimator: Estimator | None) -> None:
    """Build the estimate of the mid region at the end of a prefill, then the selector's state over it."""
    build_layers([view], [selector], [estimator])


def build_layers(
    views: Sequence[CacheLayer], selectors: Sequence[Selector], estimators: Sequence[Estimator | None],
) -> None:
    """Build selectors and estimators over several layers, at once where they are alike (`core/stacked.py`)."""
    completed = [(view, e) for view, e in zip(views, estimators, strict=True) if e is not None]
    stacked.build_alike([view for view, _ in completed], [e for _, e in completed], stacked.SUMMED_BYTES)
    for view, one in completed:
        view.completion_tokens = one.cost_tokens(view)
    stacked.build_alike(views, selectors, stacked.STACKED_BYTES)
    for view, selector, estimator in zip(views, selectors, estimators, strict=True):
        if estimator is not None:
            estimator.set_read_share(view, selector.read_share(view))


def restore(
    view: CacheLayer, selector: Selector, estimator: Estimator | None, states: dict[str, dict[str, Any]],
) -> None:
    """Restore what `build` over the view left, from the `row_state` of both, `selector` and `estimator`."""
    if estimator is not None:
        estimator.restore(view, states["estimator"])
        view.completion_tokens = estimator.cost_tokens(view)
    selector.prepare(view)
    selector.restore(view, states["selector"])
    if estimator is not None:
        estimator.set_read_share(view, selector.read_share(view))


def grow(view: CacheLayer, old: Regions, selector: Selector, estimator: Estimator | None) -> None:
    """Take the tokens in that joined the mid region, which was `old`: into the selector's state and the estimate."""
    selector.prepare(view)
    selector.extend(view, old)
    if estimator is not None:
        estimator.extend(view, old)
        estimator.set_read_share(view, selector.read_share(view))
