"""How long something takes on the device at hand, and what was timed, kept on disk between processes: one JSON file a
subject in the user's cache folder (`$XDG_CACHE_HOME/sparsekv`, else `~/.cache/sparsekv`). Where that cannot be written
it is timed again."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import sparsekv
from sparsekv.core.streams import record, recording_stream
from sparsekv.util.errors import SparseKVError
from sparsekv.util.records import write_json

FLUSH_BYTES, REPEATS, CALLS = 1 << 28, 5, 8
"""What is read between two calls, so that none finds what it reads in a cache of the device; runs, and calls of each.
Read, not written: a cache full of what was written makes a call wait until that is in memory, the longer the more the
call itself reads."""


class Kept:
    """Times of a subject, by all that they depend on, in words: for this process, and in a JSON file of the user's
    cache folder. read: makes what is used of what the file has; None for what something else wrote."""

    def __init__(self, name: str, read: Callable[[Any], Any]):
        self.name, self.read = name, read
        self.known: dict[str, Any] = {}

    def file(self) -> Path:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sparsekv" / self.name

    def get(self, key: str, take: Callable[[], Any]) -> Any:
        """Return what is known of a key, else what `take` times."""
        if key not in self.known:
            times = self.read(self._entries().get(key))
            if times is None:
                times = take()
                self._put(key, times)
            self.known[key] = times
        return self.known[key]

    def _put(self, key: str, value: Any) -> None:
        with contextlib.suppress(OSError, RuntimeError, SparseKVError):
            self.file().parent.mkdir(parents=True, exist_ok=True)
            write_json(self.file(), {**self._entries(), key: value})

    def _entries(self) -> dict[str, Any]:
        try:
            entries = json.loads(self.file().read_text(encoding="utf-8"))
        except (OSError, ValueError, RuntimeError):  # no home is a RuntimeError
            return {}
        return entries if isinstance(entries, dict) else {}


def _pair(entry: Any) -> list[float] | None:
    """Two times as they are kept; None for anything else."""
    return entry if isinstance(entry, list) and len(entry) == 2 and all(isinstance(x, float) for x in entry) else None


PRODUCTS = Kept("products.json", _pair)


def device_words(device: torch.device) -> str:
    """Name what every time depends on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else (
        f"cpu with {torch.get_num_threads()} threads")
    return f"sparsekv {sparsekv.__version__}, torch {torch.__version__}, {name}"


def quicker(key: str, ours: Callable[[], Any], own: Callable[[], Any], device: torch.device) -> bool:
    """Return whether the kernels of `ours` take less time than those of `own`; kept in `products.json` by key. Where
    there is no memory to time them, not."""
    try:
        times = PRODUCTS.get(key, lambda: [microseconds(work, device, True) for work in (ours, own)])
    except torch.OutOfMemoryError:
        return False
    return bool(times[0] < times[1])


def microseconds(work: Callable[[], Any], device: torch.device, captured: bool, rows: int = 1) -> float:
    """Time a call of `work`: median of some runs, on a CUDA device with cold caches; captured: as the kernels of a CUDA
    graph, without what the host does between them; rows: of a step."""
    work()
    if device.type != "cuda":
        return _median([_seconds(work) for _ in range(REPEATS)]) * 1e6
    other = torch.zeros(FLUSH_BYTES // 8, dtype=torch.int64, device=device)
    clean, both = (_run_of(f, device, captured, rows) for f in (other.sum, lambda: (other.sum(), work())))
    spent = [[_device_seconds(run, device) for run in (clean, both)] for _ in range(REPEATS)]
    return max(0.0, _median([b for _, b in spent]) - _median([a for a, _ in spent])) / CALLS * 1e6


def _run_of(work: Callable[[], Any], device: torch.device, captured: bool, rows: int) -> Callable[[], Any]:
    """`CALLS` calls, as a graph if asked for."""
    def calls() -> None:
        for _ in range(CALLS):
            work()

    if not captured:
        return calls
    stream = recording_stream(device, rows)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        work()
        graph, _ = record(calls)
    torch.cuda.current_stream(device).wait_stream(stream)
    return graph.replay


def _device_seconds(run: Callable[[], Any], device: torch.device) -> float:
    torch.cuda.synchronize(device)
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record(torch.cuda.current_stream(device))
    run()
    ended.record(torch.cuda.current_stream(device))
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3


def _seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
