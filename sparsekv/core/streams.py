"""Work on CUDA streams: beside other work, and recorded as a graph."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

T = TypeVar("T")


@contextlib.contextmanager
def beside(device: torch.device) -> Iterator[Callable[[], None]]:
    """Run what is launched inside beside what follows, until the function that the block yields is called.

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


def recording_stream(device: torch.device, rows: int) -> torch.cuda.Stream:
    """Make the stream on which a step of so many rows is recorded. The kernels of one row get the processors before
    those of `beside`'s streams: the scores of all its codes would wait for the estimate's kernels. A step of 24 rows
    was 6 % slower by it (docs/log/decode.md)."""
    return torch.cuda.Stream(device, priority=-1 if rows == 1 else 0)


@functools.cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Two, of which one is never the caller's: torch has 32 streams of a device and gives them out in turn, so that the
    stream of a capture may be any of them."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


def record(work: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """Record what a call launches on the current stream, without running it.

    Returns:
        The graph, and what the call returned: tensors that hold something once the graph was replayed.

    Raises whatever the call raises, and the driver for what a graph cannot hold.
    """
    graph, collecting = torch.cuda.CUDAGraph(), gc.isenabled()
    gc.disable()  # what is freed inside a capture must be its own
    try:
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            return graph, work()
        finally:
            graph.capture_end()
    finally:
        if collecting:
            gc.enable()
