"""A plan's steps: replayed from a CUDA graph, captured into one, or run as they are."""

from __future__ import annotations

import time
import traceback
import warnings

import torch
from torch import Tensor

from sparsekv.core.streams import record, recording_stream
from sparsekv.runtime.hf.plan import Plan
from sparsekv.util.errors import SparseKVError, first_line

PACKAGES = ("torch", "triton", "transformers", "transformers_modules", "sparsekv")
"""Whose errors are failures of a step, and not what a user raised in it."""


def take_step(plan: Plan, ids: Tensor, positions: Tensor | None) -> Tensor:
    """Take a step of one token of every row. On a CUDA device a plan is captured once nothing is moved between steps.

    Args:
        plan: of all layers.
        ids: `[B, 1]`.
        positions: `[B, 1]`; None: the next of the cache.

    Returns:
        Logits `[B, 1, V]`, overwritten by the next step.
    """
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
    here, stream = torch.cuda.current_stream(plan.device), recording_stream(plan.device, len(plan.ids))
    stream.wait_stream(here)
    with torch.cuda.stream(stream):
        answer = plan.run()
        try:
            graph, logits = record(lambda: plan.run(captured=True))
        except Exception as error:  # whatever the driver raises; this step's answer is there
            if raised_by_user(error):
                raise
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


def raised_by_user(error: BaseException) -> bool:
    """Return whether somebody wanted to stop a step with an error: an error of a class of their own, or one of Python's
    raised in code of their own, a signal handler's too. Torch's errors, such as of what a capture does not permit, are
    failures of the step, wherever they are raised."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    module, kind = ((frames[-1].f_globals.get("__name__") or "") if frames else "torch"), type(error).__module__
    if isinstance(error, SparseKVError | OSError):
        return True
    return (module if kind == "builtins" else kind).partition(".")[0] not in PACKAGES
