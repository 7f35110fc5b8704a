"""Which share of a device's memory is not pages: codes by slot, indices and summaries by seat, and the feature maps are
taken from what vLLM has counted for its pages, before it makes them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import torch

from sparsekv.artifacts.phi import PhiLayer
from sparsekv.core.selectors.router import Router
from sparsekv.runtime.vllm import index, summaries
from sparsekv.util.errors import SparseKVError


class MemoryPlan(NamedTuple):
    """Bytes that all layers of a rank keep beside the pages: of a slot; of what is there once, nobody's seat and the
    feature maps at most; of a seat. prompts: what is needed while a prompt is read sparsely."""

    slot: int
    once: int
    seat: int
    prompts: int = 0

    def of(self, slots: int, seats: int) -> int:
        return self.slot * slots + self.once + self.prompts + self.seat * seats

    @property
    def of_prompts(self) -> str:
        """The part of prompts, in the words of a refusal."""
        if not self.prompts:
            return ""
        return f" ({self.prompts / 2**30:.2f} GiB of it for sparse prompts, which prefill dense needs not)"


class Counted(NamedTuple):
    """Requests that may decode sparsely at once, and the memory that is left to the pages [bytes]."""

    seats: int
    pages: int


def memory_plan(
    layers: Sequence[tuple[Router, PhiLayer | summaries.OwnMeans | None]], longest: int, dtype: torch.dtype,
) -> MemoryPlan:
    """Plan the memory of layers whose selectors and maps are these heads', requests of `longest` tokens and keys of
    `dtype`."""
    slot = once = seat = 0
    for selector, maps in layers:
        slot += index.bytes_by_slot(selector)
        rooms = [index.Room(n, longest) for n in (0, 1)]
        by_seats = [index.bytes_by_seat(selector, room, dtype) for room in rooms]
        if maps is not None:
            kept = [summaries.bytes_of(maps, room, dtype) for room in rooms]
            once += kept[0][0]
            by_seats = [a + b for a, (_, b) in zip(by_seats, kept, strict=True)]
        once += by_seats[0]
        seat += by_seats[1] - by_seats[0]
    return MemoryPlan(slot, once, seat)


def seats_within(kept: MemoryPlan, memory: float, most: int) -> int:
    """Count the seats that `memory` bytes hold, one at least and `most` at most."""
    return max(1, min(most, int((memory - kept.once) // max(1, kept.seat))))


def count(kept: MemoryPlan, available: int, page_bytes: int, seats: int) -> Counted:
    """Count what is left to the pages of `available` bytes, a slot of which takes `page_bytes` in all layers. Raises
    SparseKVError where seats and maps leave nothing."""
    rest = available - kept.of(0, seats)
    if rest <= 0:
        raise SparseKVError(
            f"indices and summaries of {seats} requests and the feature maps take {kept.of(0, seats) / 2**30:.2f} GiB"
            f"{kept.of_prompts} and vLLM has {available / 2**30:.2f} GiB for them and the pages; raise "
            "--gpu-memory-utilization, or lower requests or memory_share in the settings file")
    return Counted(seats, rest * page_bytes // (page_bytes + kept.slot))


def count_in(worker: type, counted: Callable[[Any, int], Counted | None]) -> None:
    """Let a class of vLLM's workers give the pages what is left of the memory that it finds for them. counted: of its
    configuration and that memory, None where no layer decodes sparsely."""
    if "counts_sparsekv_in" in vars(worker) or "determine_available_memory" not in vars(worker):
        return
    own: Callable[..., int] = vars(worker)["determine_available_memory"]

    @wraps(own)
    def determine_available_memory(self: Any, *args: Any, **kwargs: Any) -> int:
        available = own(self, *args, **kwargs)
        left = counted(self.vllm_config, available)
        log = logging.getLogger("vllm.sparsekv")
        if left is None:
            log.warning("sparsekv: no layer of this model decodes sparsely: all are in dense_layers, or of a kind that "
                        "is attended to fully (docs/serve.md)")
            return available
        log.info(
            "sparsekv: up to %d requests decode sparsely at once; of %.2f GiB for the cache %.2f GiB are pages, the "
            "others codes, indices, summaries and feature maps", left.seats, available / 2**30, left.pages / 2**30)
        return left.pages

    worker.determine_available_memory = determine_available_memory  # type: ignore[attr-defined]
    worker.counts_sparsekv_in = True  # type: ignore[attr-defined]
