"""Kernels are loaded, and compiled where the machine has not yet, while a prompt is read: a step on a made-up layer, in
a thread of its own. Maps of estimators are copied to the device beside it too. What needs them waits for
them. Triton keeps on disk what it has compiled."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from sparsekv.core.estimators import Estimator
from sparsekv.core.layer import LayerView, Queries
from sparsekv.core.selectors import Selector
from sparsekv.core.step import build, sparse_step
from sparsekv.kernels import append_token, rotate_pair
from sparsekv.runtime.break_even import Shape, full_step, key_of, made_up
from sparsekv.util.memory import free_memory

LONGEST, ROWS = 131_072, 16
"""Of the layer, whose length is the prompt's: tokens of all its rows at most, since longer lists take other kernels;
and rows at most, as many as take the form of φ's query side for several rows."""
_WARM: set[Any] = set()
"""What was loaded in this process: steps by `break_even.key_of`, products by `fused.Fused.loads`."""


def take_turns(driver: Any) -> None:
    """Let threads make Triton's launchers one after the other. Triton 3.6 loads each as a Python module of one and the
    same name: a thread may be given what another has just loaded, and its kernel is then launched with the arguments of
    another kernel.

    Args:
        driver: Triton's active one.
    """
    make = getattr(driver, "launcher_cls", None)
    if make is not None and getattr(make, "func", None) is not _in_turn:
        driver.launcher_cls = functools.partial(_in_turn, make)


_TURN = threading.RLock()


def _in_turn(make: Callable[..., Any], *source: Any, **more: Any) -> Any:
    with _TURN:
        return make(*source, **more)


class Warming:
    """The threads; none where all is loaded."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._copies: list[Future[None]] = []
        self._copier: ThreadPoolExecutor | None = None

    def copy(self, load: Callable[[], Iterable[torch.Tensor]], device: torch.device) -> None:
        """Tensors that a call puts on the device, one call after another in one thread; they are the caller's stream's
        to read after `wait`."""
        if self._copier is None:
            self._copier = ThreadPoolExecutor(1, "copies")
        reader = torch.cuda.current_stream(device) if device.type == "cuda" else None

        def copied() -> None:
            for x in load():
                if reader is not None:
                    x.record_stream(reader)

        self._copies.append(self._copier.submit(_alone, copied, device))

    def start(
        self, shape: Shape, selector: Selector, estimator: Estimator | None, sinks: int, window: int, length: int,
    ) -> None:
        """selector, estimator: of one layer, not built yet; sinks, window: tokens of sink and local window; length: of
        the prompt."""
        key = key_of(shape, selector, estimator, sinks, window)
        if key in _WARM or not selector.replayable:
            return
        _WARM.add(key)
        length = min(length, max(_longest(shape), 4 * (sinks + window)))
        for part in (functools.partial(one_step, selector, estimator), full_step):
            self._run(_tried, part, shape, sinks, window, length)

    def load(self, loads: dict[Any, Callable[[], Any]], device: torch.device) -> None:
        """Kernels that calls load, by what they load."""
        for key, load in loads.items():
            if key not in _WARM:
                _WARM.add(key)
                self._run(_alone, load, device)

    def _run(self, work: Callable[..., None], *given: Any) -> None:
        if torch.cuda.is_available():
            with contextlib.suppress(Exception):  # without Triton the step says so
                from triton.runtime import driver

                take_turns(driver.active)
        thread = threading.Thread(target=work, args=given, daemon=True)
        thread.start()
        self._threads.append(thread)

    def wait(self) -> None:
        """Wait until all is loaded."""
        for thread in self._threads:
            thread.join()
        for copy in self._copies:
            copy.result()
        self._threads, self._copies = [], []


def _longest(shape: Shape) -> int:
    """Tokens of a row of the layer at most: every part has a layer of its own, which must leave the prompt its
    memory."""
    most = LONGEST // shape.rows
    if shape.device.type == "cuda":
        most = min(most, free_memory(shape.device) // 16 // shape.token_bytes)
    return most


def one_step(selector: Selector, estimator: Estimator | None, view: LayerView, queries: Queries) -> None:
    """Build forks of both over a layer, and take a step."""
    selector, estimator = selector.fork(), None if estimator is None else estimator.fork()
    build(view, selector, estimator)
    sparse_step(view, queries, selector, estimator)


def full_token(shape: Shape) -> None:
    """A token of a layer that reads all: rotation, storage, attention."""
    view, queries = made_up(shape, 0, 1, 64)
    new, lengths = view.keys[:, :, :1].clone(), view.regions.mid_last.new_full((shape.rows,), 64)
    angles = new.new_zeros(shape.rows, 1, shape.dim)
    rotate_pair(queries.folded[:, :, None].contiguous(), new, angles, angles)
    append_token(new, new, view.keys, view.values, lengths)
    full_step(view, queries)


def _tried(part: Callable[..., Any], shape: Shape, sinks: int, window: int, length: int) -> None:
    """A part on a layer of its own."""
    _alone(lambda: part(*made_up(shape, sinks, window, length)), shape.device)


def _alone(work: Callable[[], Any], device: torch.device) -> None:
    """Work on a stream of this thread; what fails here fails again in the step, which says so."""
    with contextlib.suppress(Exception), torch.no_grad():
        if device.type != "cuda":
            work()
            return
        with torch.cuda.device(device):
            stream = torch.cuda.Stream(device)
            with torch.cuda.stream(stream):
                work()
            stream.synchronize()
