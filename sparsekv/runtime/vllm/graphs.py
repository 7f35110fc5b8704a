"""vLLM's full CUDA graphs twice: as they are, and without sparse decoding for batches that are too short for it.

A graph of a decode batch holds the launches of sparse steps whether a row wants them or not, some twenty a layer. vLLM
finds a graph by the number of rows alone, so that which of two is replayed is chosen here, by what the metadata builder
said of the batch. Where a version keeps its graphs elsewhere there is one graph, with sparse steps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor

BESIDE = 64
"""Every so many short requests in a batch, whose rows sparse steps pass by, double the required tokens."""


class Turn:
    """The choice of graphs in this process. least: requests shorter than this never decode sparsely [tokens]; together:
    what the others of a batch hold at least where they do [tokens]; short: whether the batch that was prepared last has
    too little for it; capturing: graphs of such batches; captured: there are some."""

    least: int | None = None
    together = 0
    short = False
    capturing = False
    captured = False

    def lowest(self, least: int, together: int = 0) -> None:
        """A group of layers whose requests decode sparsely from these lengths on."""
        first = self.least is None
        self.least = least if self.least is None else min(self.least, least)
        self.together = together if first else min(self.together, together)

    def take(self, lengths: Tensor) -> bool:
        """Decide whether the batch that is being prepared, its requests of at most `lengths [R]` tokens (on the CPU),
        is short."""
        if self.least is not None:
            long = lengths[lengths >= self.least]
            beside = lengths.shape[0] - long.shape[0]
            self.short = int(long.sum()) < max(1, self.together * (BESIDE + beside) // BESIDE)
        return self.short


TURN = Turn()


class Either:
    """Two graphs of one batch, of which one is replayed."""

    def __init__(self, sparse: Any, short: Any):
        self.sparse, self.short = sparse, short

    def replay(self) -> None:
        (self.short if TURN.short else self.sparse).replay()


def capture_twice(manager: Any, full: Any) -> None:
    """Make a class that keeps graphs by descriptor (`CudaGraphManager` of vLLM's second runner) capture both. full: the
    key of its full graphs among its descriptors."""
    once: Callable[..., None] = manager.capture
    if hasattr(manager, "captures_twice"):
        return
    manager.captures_twice = True

    @wraps(once)
    def capture(self: Any, *args: Any, **kwargs: Any) -> None:
        once(self, *args, **kwargs)
        if TURN.least is None or full not in self._capture_descs or not self.graphs:
            return
        sparse, wanted = self.graphs, self._capture_descs
        self.graphs, self._capture_descs, TURN.capturing = {}, {full: wanted[full]}, True
        try:
            once(self, *args, **kwargs)
        finally:
            short, self.graphs, self._capture_descs, TURN.capturing = self.graphs, sparse, wanted, False
        self.graphs = {key: Either(graph, short[key]) for key, graph in sparse.items()}
        TURN.captured = True

    manager.capture = capture
