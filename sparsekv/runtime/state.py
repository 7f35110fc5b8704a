"""What one attachment keeps for one layer of one cache: regions, selector, completion; built when decoding starts."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor

from sparsekv.core.selectors.base import LayerView


class LayerState:
    """The sparse state of one layer: made for a plan, grown with the cache, forked and reordered with it."""

    def __init__(self, plan: Any, view: LayerView):
        self.plan = plan
        self.regions = view.regions
        self.selector = plan.selector(view.layer_idx)
        self.completion = plan.completion(view.layer_idx)
        if self.completion is not None:
            self.completion.build(view)
            view.completion_tokens = self.completion.cost_tokens(view)
        self.completion_tokens = view.completion_tokens
        self.selector.build(view)
        if self.completion is not None:
            self.completion.reads(view, self.selector.read_share(view))
        self.resident: Any = None
        self._earliest: tuple[Tensor | None, int] = (None, 0)

    def outgrown(self, past: int) -> bool:
        """Whether tail and decode window of a cache of `past` tokens have outgrown their room."""
        tails = self.regions.tail_starts
        if self._earliest[0] is not tails:
            # read once a mid region: a step must not wait for the device
            self._earliest = (tails, int(tails.min()))
        return past - self.plan.window_size - self.plan.decode_window > self._earliest[1]

    def advance(self, view: LayerView, past: int) -> None:
        """Bring regions up to a cache of `view.regions.length` tokens, of which the first `past` may move into the
        index: when tail and decode window outgrow their room, the oldest tokens join the mid region.

        `view.regions` is replaced by the new regions.
        """
        old = self.regions.grown(past)
        self.regions = self.regions.grown(view.regions.length)
        if self.outgrown(past):
            self.regions = self.regions.moved(past - self.plan.window_size - self.plan.decode_window // 2)
            view.regions = self.regions
            view.completion_tokens = self.completion_tokens
            self.selector.extend(view, old)
            if self.completion is not None:
                self.completion.extend(view, old)
                self.completion.reads(view, self.selector.read_share(view))
            if self.resident is not None:
                self.resident.trim(self.regions)
        view.regions = self.regions
        view.completion_tokens = self.completion_tokens

    def cropped(self, length: int) -> LayerState | None:
        """The state of a cache cut to `length` tokens; None where the cut reaches the index, which is built anew."""
        if length < int(self.regions.tail_starts.max()):
            return None
        self.regions = self.regions.grown(length)
        if self.resident is not None:
            self.resident.crop(length)
        return self

    def take_rows(self, index: Tensor) -> None:
        self.regions = self.regions.rows(index)
        self.selector.take_rows(index)
        self.selector.keep_budget(self.regions, index)
        if self.completion is not None:
            self.completion.take_rows(index)
        if self.resident is not None:
            self.resident.take_rows(index)

    def fork(self) -> LayerState:
        other: Any = copy.copy(self)
        other.selector = self.selector.fork()
        other.completion = None if self.completion is None else self.completion.fork()
        other.resident = None if self.resident is None else self.resident.fork()
        return other
