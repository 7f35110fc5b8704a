"""What the process keeps beside the objects of a call; nothing else of the runtime is process-wide but times of steps
(`crossing.py`) and which kernels are loaded (`warm.py`).

Of a model, for as long as it lives: who is attached to it, since a second attachment knows nothing of the first. Of a
thread: which attention comes next, since transformers hands an attention function its tensors and no cache.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass
class Known:
    """Of one model. seat: what it carries while attached (`hooks.Seat`)."""

    seat: Any = None


class Now(threading.local):
    """What this thread is doing. plan: the plan that runs; seen: attention module whose forward has begun, the model's
    seat, and the cache of the pass."""

    plan: Any = None
    seen: tuple[Any, Any, Any] | None = None


NOW = Now()
_MODELS: weakref.WeakKeyDictionary[nn.Module, Known] = weakref.WeakKeyDictionary()
_GATE = threading.RLock()


def known(model: nn.Module) -> Known:
    """What is known of a model."""
    with _GATE:
        return _MODELS.setdefault(model, Known())


def seat_for(model: nn.Module, make: Callable[[], Any]) -> Any:
    """The model's seat, made where it has none."""
    with _GATE:
        about = known(model)
        if about.seat is None:
            about.seat = make()
        return about.seat


def seats() -> list[Any]:
    """Of all models that are attached to."""
    with _GATE:
        return [k.seat for k in _MODELS.values() if k.seat is not None]
