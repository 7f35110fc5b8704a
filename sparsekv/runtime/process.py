"""What the process keeps beside the objects of a call, and nothing else of the runtime but what was timed and loaded
once: times (`timing.py`), loaded kernels (`warm.py`), and of the engine that a process serves
its settings, sizes and graphs (`vllm/parts.py`, `vllm/summaries.py`, `vllm/graphs.py`).

Of a model: who is attached to it, since a second attachment knows nothing of the first. Of a
thread: which attention comes next, since transformers hands an attention function its tensors and no cache. Of
somebody else's module: functions that are replaced while a model is attached to.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


class ThreadContext(threading.local):
    """The work of this thread. plan: the plan that runs; passing: the model (`AttachedModel`) whose pass runs; seen:
    attention module whose forward has begun, its model, and the cache of the pass; reached: layers whose attention was
    sparsekv's in the pass; answer: what `model.generate` writes."""

    plan: Any = None
    passing: Any = None
    reached: int = 0
    answer: Any = None
    seen: tuple[Any, Any, Any] | None = None


@dataclass
class Replaced:
    """A function of somebody else's module, ours in its place, and who wants it."""

    own: Callable[..., Any]
    ours: Callable[..., Any]
    users: set[int] = field(default_factory=set)


NOW = ThreadContext()
_MODELS: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
"""Models that are attached to -> what each carries (`hf/attached.py: AttachedModel`)."""
_REPLACED: dict[tuple[str, str], Replaced] = {}
_GATE = threading.RLock()


def attached(model: nn.Module, make: Callable[[], Any] | None = None) -> Any:
    """Return what a model that is attached to carries; None where it is not, or what `make` makes, from then on."""
    with _GATE:
        if make is not None and model not in _MODELS:
            _MODELS[model] = make()
        return _MODELS.get(model)


def detached(model: nn.Module, carried: Any) -> None:
    """Forget a model that all have left; any number of times."""
    with _GATE:
        if _MODELS.get(model) is carried:
            del _MODELS[model]


def attached_models() -> list[Any]:
    """Return what all models that are attached to carry."""
    with _GATE:
        return list(_MODELS.values())


def replace(module: Any, name: str, make: Callable[[Any], Any], user: object) -> None:
    """Put `make(own)` in the place of a module's function for as long as it has users; nothing where it has none of
    that name."""
    with _GATE:
        own, key = getattr(module, name, None), (module.__name__, name)
        if own is None:
            return
        _REPLACED.setdefault(key, Replaced(own, make(own))).users.add(id(user))
        setattr(module, name, _REPLACED[key].ours)


def give_back(module: Any, name: str, user: object) -> None:
    """The module's own function again, when its last user leaves; any number of times."""
    with _GATE:
        key = module.__name__, name
        replaced = _REPLACED.get(key)
        if replaced is None:
            return
        replaced.users.discard(id(user))
        if not replaced.users:
            if getattr(module, name, None) is replaced.ours:
                setattr(module, name, replaced.own)
            del _REPLACED[key]


@contextlib.contextmanager
def usual_defaults() -> Iterator[None]:
    """Tensors are made on the CPU and in float32 unless their code says otherwise, whatever the process's defaults."""
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    if dtype is torch.float32 and device.type == "cpu":
        yield
        return
    try:
        torch.set_default_dtype(torch.float32)
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)


def _forked() -> None:
    """Make locks anew in a child of `fork`, where the threads that held them are gone; what was attached stays."""
    global _GATE
    _GATE = threading.RLock()
    for carried in attached_models():
        carried.lock, carried.thread = threading.RLock(), threading.get_ident()
    NOW.plan = NOW.passing = NOW.seen = NOW.answer = None


os.register_at_fork(after_in_child=_forked)
