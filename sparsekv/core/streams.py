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
    main = torch.cuda.current_stream(device)
    side = next(stream for stream in _streams(device) if stream != main)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        yield lambda: main.wait_stream(side)


@functools.cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Two, of which one is never the caller's: torch has 32 streams of a device and gives them out in turn, so that the
    stream of a capture may be any of them."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)
