"""How long requests' indices took, without a wait: on a CUDA device between two events."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator

import torch

LAST = 64
"""Requests whose times are kept."""


class Clock:
    """Times of the last requests on one device."""

    def __init__(self, device: torch.device):
        self.device = device
        self._times: deque[float | tuple[torch.cuda.Event, torch.cuda.Event]] = deque(maxlen=LAST)

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """What is launched inside is one request's."""
        if self.device.type != "cuda":
            began = time.perf_counter()
            yield
            self._times.append(time.perf_counter() - began)
            return
        began_at, ended_at = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began_at.record()
        yield
        ended_at.record()
        self._times.append((began_at, ended_at))

    def clear(self) -> None:
        """Forget the times so far."""
        self._times.clear()

    def seconds(self) -> list[float]:
        """The times [s], the oldest first. Waits for the device."""
        found = []
        for one in self._times:
            if isinstance(one, tuple):
                one[1].synchronize()
                found.append(one[0].elapsed_time(one[1]) / 1e3)
            else:
                found.append(one)
        return found
