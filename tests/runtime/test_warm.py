"""Loading kernels beside a prompt: a step is taken, it is done once, and a failure is left to the step."""

from __future__ import annotations

import functools
import threading
import time
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from tiny import make_model
from tiny_artifacts import artifacts

from sparsekv.core.estimators import PhiEstimator
from sparsekv.core.layer import LayerView
from sparsekv.core.selectors import SELECTORS
from sparsekv.core.streams import recording_stream
from sparsekv.runtime import warm
from sparsekv.runtime.break_even import Shape, made_up
from sparsekv.runtime.warm import Warming, one_step

SHAPE = Shape(2, 4, 2, 16, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(("name", "completes"), [
    ("sketch", True), ("sketch", False), ("router", True), ("topk", False)])
def test_a_step_leaves_selector_and_estimator_unbuilt(name: str, completes: bool) -> None:
    router, phi = artifacts(make_model())
    selector = SELECTORS[name](token_budget=0.1)
    if selector.is_trained():
        selector.layer = router.layer(1)
    estimator = PhiEstimator(phi.layer(1)) if completes else None
    before = dict(selector.__dict__), None if estimator is None else dict(estimator.__dict__)
    one_step(selector, estimator, *made_up(SHAPE, 2, 9, 150))
    assert selector.__dict__ == before[0] and (estimator is None or estimator.__dict__ == before[1])


def test_maps_are_loaded_beside_a_prompt_once_for_all_forks() -> None:
    _, phi = artifacts(make_model())
    made = PhiEstimator(phi.layer(1))
    threads, warming = [], Warming()

    def load(one: PhiEstimator) -> list[torch.Tensor]:
        threads.append(threading.current_thread())
        return one.load(torch.float32, SHAPE.device)

    for one in (made.fork(), made.fork()):
        warming.copy(functools.partial(load, one), SHAPE.device)
    warming.wait()
    assert len(threads) == 2 and threads[0] is threads[1] is not threading.main_thread()
    loaded = dict(made.of_keys), dict(made.of_queries)
    assert all(list(found) == [torch.float32] for found in loaded)
    later = made.fork()
    later.build(made_up(SHAPE, 2, 9, 150)[0])
    assert later.key_map is loaded[0][torch.float32] and later.weights is loaded[1][torch.float32]
    warming.copy(lambda: 1 / 0, SHAPE.device)  # type: ignore[arg-type, return-value]
    warming.wait()  # what fails is left to the step


def test_launchers_are_made_one_at_a_time() -> None:
    """Triton 3.6 gives a thread the launcher that another has just loaded, where both are made at once."""
    inside, most = [], []

    def make(source: str, metadata: int) -> tuple[str, int]:
        inside.append(source)
        most.append(len(inside))
        time.sleep(0.01)
        inside.remove(source)
        return source, metadata

    driver = SimpleNamespace(launcher_cls=make)
    for _ in range(2):
        warm.take_turns(driver)
    assert driver.launcher_cls.args == (make,)
    threads = [threading.Thread(target=driver.launcher_cls, args=(str(i), i)) for i in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 5 and driver.launcher_cls("a", 1) == ("a", 1)


def test_threads_take_turns_from_the_first_one_on(monkeypatch) -> None:
    driver = SimpleNamespace(launcher_cls=tuple)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("triton.runtime.driver", SimpleNamespace(active=driver))
    warming = Warming()
    warming.load({"one launch, of this test": lambda: None}, SHAPE.device)
    warming.wait()
    assert driver.launcher_cls.args == (tuple,)


def test_one_row_alone_is_recorded_first(monkeypatch) -> None:
    made = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: made.append(priority))
    for rows in (1, 2, 24):
        recording_stream(SHAPE.device, rows)
    assert made == [-1, 0, 0]


class Watched(SELECTORS["topk"]):
    """Says which threads build it."""

    threads: ClassVar[list[threading.Thread]] = []

    def build(self, view: LayerView) -> None:
        self.threads.append(threading.current_thread())
        super().build(view)


class WatchedOnTheHost(Watched):
    replayable: ClassVar[bool] = False


def test_it_is_done_once_a_process_and_what_fails_is_left_to_the_step() -> None:
    for kind in (Watched, Watched, WatchedOnTheHost):
        warming = Warming()
        warming.start(SHAPE, kind(token_budget=5), None, 2, 9, 150)
        warming.wait()
    assert len(Watched.threads) == 1 and threading.main_thread() not in Watched.threads
    warm._tried(lambda view, queries: 1 / 0, SHAPE, 2, 9, 150)  # no CUDA here, or the division: neither comes out


def test_the_layer_leaves_a_prompt_its_memory(monkeypatch) -> None:
    one, many = (Shape(rows, 32, 8, 128, torch.bfloat16, torch.device("cuda")) for rows in (1, 16))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 << 30, 80 << 30))
    assert warm._longest(one) == warm.LONGEST and warm._longest(many) == warm.LONGEST // 16
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 << 30, 24 << 30))
    assert warm._longest(one) == 32_768  # a sixteenth of 2 GiB, of 4 KiB a token
    assert warm._longest(many) == 2048
    assert warm._longest(SHAPE) == warm.LONGEST // 2
