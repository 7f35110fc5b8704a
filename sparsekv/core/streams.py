"""Work beside other work: a second CUDA stream, nothing elsewhere."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch


@contextlib.contextmanager
def beside(device: torch.device) -> Iterator[Callable[[], None]]:
    """What is launched inside runs beside what follows, until the function that the block yields is called.

    The second stream waits for all that was launched before, so that memory given back meanwhile is reused in order.
    """
    if device.type != "cuda":
        yield lambda: None
        return
    main, side = torch.cuda.current_stream(device), _stream(device)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        yield lambda: main.wait_stream(side)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
