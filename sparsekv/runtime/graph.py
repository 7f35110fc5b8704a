"""A plan's steps: replayed from a CUDA graph, captured into one, or run as they are."""

from __future__ import annotations

import gc
import signal
import time
import warnings
from typing import Any

import torch
from torch import Tensor

from sparsekv.runtime.plan import Plan
from sparsekv.util.errors import SparseKVError, first_line

PACKAGES = ("torch", "triton", "transformers", "transformers_modules", "sparsekv")
"""Whose errors are failures of a step, and not what a user raised in it."""


def take_step(plan: Plan, ids: Tensor, positions: Tensor | None) -> Tensor:
    """One token of every row: ids, positions `[B, 1]`, None: the next of the cache. Returns logits `[B, 1, V]`,
    overwritten by the next step. On a CUDA device a plan is captured once nothing is moved between its steps."""
    plan.begin(ids, positions)
    if plan.graph is not None:
        plan.graph.replay()
    elif plan.device.type == "cuda" and plan.steady and plan.layers.not_captured is None:
        plan.logits = _capture(plan)
    else:
        plan.logits = plan.run()
    return plan.finish()


def _capture(plan: Plan) -> Tensor:
    """The step as it is, and its graph for those that follow."""
    began = time.perf_counter()
    here, stream = torch.cuda.current_stream(plan.device), torch.cuda.Stream(plan.device)
    stream.wait_stream(here)
    with torch.cuda.stream(stream):
        answer = plan.run()
        try:
            graph, logits = _graph_of(plan)
        except Exception as error:  # whatever the driver raises; this step's answer is there
            _raise_the_users(error)
            plan.layers.not_captured = f"its step could not be captured: {first_line(error)}"
            warnings.warn(f"this model decodes without CUDA graphs, {plan.layers.not_captured}", stacklevel=2)
            here.wait_stream(stream)
            answer.record_stream(here)
            return answer
        logits.copy_(answer)
    here.wait_stream(stream)
    plan.graph = graph
    plan.counters.captured(time.perf_counter() - began)
    return logits


def _graph_of(plan: Plan) -> tuple[Any, Tensor]:
    """A pass as a graph, and where its logits will be."""
    graph, collecting = torch.cuda.CUDAGraph(), gc.isenabled()
    gc.disable()  # what is freed inside a capture must be its own
    try:
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            return graph, plan.run(captured=True)
        finally:
            graph.capture_end()
    finally:
        if collecting:
            gc.enable()


def _raise_the_users(error: Exception) -> None:
    """Raise what a user raised inside a step: an error, or one that torch has wrapped."""
    raised = raised_by_user(error)
    if raised is not None:
        raise raised


def raised_by_user(error: BaseException) -> BaseException | None:
    """The exception by which somebody wanted to stop a step, where that is what ended it: a signal handler's, also one
    that torch has wrapped; one of a class of the user's own; one of Python's raised in code of the user's own. None for
    failures of the step itself: torch's errors, such as of what a capture does not permit, wherever they are raised."""
    handlers = {_code(h) for h in map(signal.getsignal, signal.valid_signals()) if callable(h)} - {None}
    inner: BaseException | None = error
    seen: set[int] = set()
    while inner is not None and id(inner) not in seen:
        seen.add(id(inner))
        if handlers.intersection(frame.f_code for frame in _frames(inner)):
            return inner
        inner = inner.__cause__ or inner.__context__
    frames, kind = _frames(error), type(error).__module__.partition(".")[0]
    ours = not frames or str(frames[-1].f_globals.get("__name__", "")).partition(".")[0] in PACKAGES
    if isinstance(error, SparseKVError | OSError):
        return error
    return None if kind in PACKAGES or (kind == "builtins" and ours) else error


def _code(handler: Any) -> Any:
    """Of a function, a method, or an object that is called; None of what is not written in Python."""
    found = getattr(handler, "func", handler)
    return getattr(found, "__code__", None) or getattr(getattr(type(found), "__call__", None), "__code__", None)  # noqa: B004


def _frames(error: BaseException) -> list[Any]:
    """From the outermost to the one that raised it."""
    trace, found = error.__traceback__, []
    while trace is not None:
        found.append(trace.tb_frame)
        trace = trace.tb_next
    return found
