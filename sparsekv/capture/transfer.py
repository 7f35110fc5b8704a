"""Device to host to disk, behind the computation: pinned buffers, a copy stream a device, writer threads."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

SLOTS = 24
MAX_WORKERS = 16


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on a device, without waiting for what the device still has to do."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


class Transfer:
    """`send(tensors, then)` returns at once; a thread calls `then(host tensors)` when the copies have arrived.

    At most `SLOTS` batches are under way, which bounds the memory: `send` waits when the disk does not keep up. Jobs
    start in the order they were sent, so a job may wait for one that was sent before it.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(min(MAX_WORKERS, max(2, os.cpu_count() or 2)), "sparsekv-write")
        self._slots: queue.Queue[Tensor | None] = queue.Queue()
        for _ in range(SLOTS):
            self._slots.put(None)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def __enter__(self) -> Transfer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=kind is not None)

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """A thread does the work, after the jobs that were sent before have started."""
        return self._pool.submit(work)

    def send(
        self, tensors: list[Tensor], then: Callable[[list[Tensor]], Any], after: Callable[[], Any] | None = None,
    ) -> Future[Any]:
        """tensors: contiguous, all on one device, not changed afterwards. The host tensors belong to `then` only while
        it runs; `after` runs when they have been given back, and its result, where there is one, is the future's."""
        slot = self._slots.get()
        event: torch.cuda.Event | None = None
        if tensors[0].is_cuda:
            slot, host, event = self._copy(slot, tensors)
        else:
            host = tensors

        def job() -> Any:
            try:
                if event is not None:
                    event.synchronize()
                result = then(host)
            finally:
                self._slots.put(slot)
            return result if after is None else after()

        return self._pool.submit(job)

    def _copy(self, slot: Tensor | None, tensors: list[Tensor]) -> tuple[Tensor, list[Tensor], torch.cuda.Event]:
        device = tensors[0].device
        sizes = [-(-t.nbytes // 64) * 64 for t in tensors]
        if slot is None or slot.numel() < sum(sizes):
            slot = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        host, at = [], 0
        with torch.cuda.stream(stream):
            for tensor, size in zip(tensors, sizes, strict=True):
                view = slot[at:at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                view.copy_(tensor, non_blocking=True)
                tensor.record_stream(stream)
                host.append(view)
                at += size
            event = torch.cuda.Event(blocking=True)  # who waits for it leaves its core to others
            event.record(stream)
        return slot, host, event
