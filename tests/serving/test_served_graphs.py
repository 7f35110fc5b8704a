"""Which of two graphs of a batch is replayed, with a keeper of graphs like vLLM's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparsekv.runtime.vllm import graphs
from sparsekv.runtime.vllm.graphs import Either, Turn, capture_twice


class Graph:
    def __init__(self, name: str, log: list[str]):
        self.name, self.log = name, log

    def replay(self) -> None:
        self.log.append(self.name)


def keeper() -> Any:
    """A new class every time, since a class is changed for good."""

    class Manager:
        def __init__(self) -> None:
            self.graphs: dict[str, Any] = {}
            self._capture_descs = {"piecewise": ["p1", "p2"], "full": ["f1", "f2"]}
            self.log: list[str] = []
            self.pieces = 0

        def capture(self, name: str) -> None:
            for kind, descs in self._capture_descs.items():
                for desc in descs:
                    if kind == "piecewise":
                        self.pieces += 1
                        continue
                    assert desc not in self.graphs
                    kind_of = "short" if graphs.TURN.capturing else "sparse"
                    self.graphs[desc] = Graph(f"{name} {desc} {kind_of}", self.log)

    return Manager


@pytest.fixture
def turn(monkeypatch: pytest.MonkeyPatch) -> Turn:
    new = Turn()
    monkeypatch.setattr(graphs, "TURN", new)
    return new


def test_a_batch_of_short_requests_replays_the_graph_without_sparse_steps(turn: Turn) -> None:
    kind = keeper()
    capture_twice(kind, "full")
    capture_twice(kind, "full")
    turn.lowest(500)
    turn.lowest(300)
    turn.lowest(400)
    manager = kind()
    manager.capture("x")
    assert turn.captured and not turn.capturing and manager.pieces == 2
    assert manager._capture_descs == {"piecewise": ["p1", "p2"], "full": ["f1", "f2"]}
    for longest, key in ((299, "f1"), (300, "f1"), (2, "f2")):
        assert turn.take(torch.tensor([longest, 1])) == (longest < 300)
        manager.graphs[key].replay()
    assert manager.log == ["x f1 short", "x f1 sparse", "x f2 short"]


def test_short_is_what_the_long_requests_hold_together(turn: Turn) -> None:
    turn.lowest(100, 400)
    turn.lowest(120, 350)
    some = [10] * graphs.BESIDE
    for lengths, short in (([349], True), ([350], False), ([250, 99], True), ([252, 99, 103], False), ([0, 0], True),
                           ([699, *some], True), ([700, *some], False)):
        assert turn.take(torch.tensor(lengths)) is short is turn.short


def test_without_sparse_layers_or_full_graphs_nothing_is_captured_twice(turn: Turn) -> None:
    kind = keeper()
    capture_twice(kind, "full")
    manager = kind()
    manager.capture("x")
    assert not turn.take(torch.tensor([1])) and not any(isinstance(g, Either) for g in manager.graphs.values())
    turn.lowest(300)
    other = kind()
    del other._capture_descs["full"]
    other.capture("x")
    assert not turn.captured and not other.graphs


def test_a_capture_that_fails_leaves_the_first_graphs(turn: Turn) -> None:
    kind = keeper()
    inner = kind.capture

    def fails(self: Any, name: str) -> None:
        if graphs.TURN.capturing:
            raise MemoryError
        inner(self, name)

    kind.capture = fails
    capture_twice(kind, "full")
    turn.lowest(300)
    manager = kind()
    with pytest.raises(MemoryError):
        manager.capture("x")
    assert sorted(manager.graphs) == ["f1", "f2"] and not turn.capturing and not turn.captured
