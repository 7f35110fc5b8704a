"""How much of a device's memory is not pages: what is foretold is what is held, and vLLM's workers leave it out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from paged import DIM, HEADS, LONGEST, PAGE, SCALE, maps, rope, router, selector, untrained

from sparsekv.artifacts.phi import PhiLayer
from sparsekv.core.index import RouterLayer, Untrained
from sparsekv.runtime.vllm.index import LayerIndex, Room
from sparsekv.runtime.vllm.own import OwnIndex
from sparsekv.runtime.vllm.paged import UncodedSlots
from sparsekv.runtime.vllm.share import Counted, MemoryPlan, count, count_in, memory_plan, seats_within
from sparsekv.runtime.vllm.summaries import OwnMeans
from sparsekv.util.errors import SparseKVError


@pytest.mark.parametrize("seats", [1, 5])
@pytest.mark.parametrize(("made", "completes"), [
    *((made, completes) for made in (router(), router("mlp", "pre"), router(sketched=False), untrained())
      for completes in (None, maps())), (untrained(), OwnMeans(HEADS, DIM))])
def test_what_a_layer_keeps_is_what_was_foretold(
    made: RouterLayer, completes: PhiLayer | OwnMeans | None, seats: int,
) -> None:
    own, blocks = isinstance(made, Untrained), 7
    pool = torch.zeros(blocks, PAGE, HEADS, 2 * made.centroids.shape[-1]).transpose(1, 2)
    layer = (OwnIndex if own else LayerIndex)(
        selector(made, 8, 0.5), pool, Room(seats, LONGEST), UncodedSlots(blocks * PAGE, pool.device), scale=SCALE,
        rope=rope(), maps=completes)
    kept = memory_plan([(selector(made, 8, 0.5), completes)], LONGEST, pool.dtype)
    expected = kept.of(blocks * PAGE + 1, seats)  # one more, of what has no slot
    counters = layer.spent.nbytes
    assert (kept.slot > 0) == (made.sketch is not None and not own)
    of_maps = isinstance(completes, PhiLayer)
    assert layer.nbytes - counters <= expected if of_maps else layer.nbytes - counters == expected


def test_as_many_seats_as_the_share_holds() -> None:
    kept = MemoryPlan(slot=3, once=1000, seat=500)
    assert [seats_within(kept, memory, 8) for memory in (0, 1999, 2000, 2999, 1e9)] == [1, 1, 2, 3, 8]
    assert kept.of(10, 2) == 2030


def test_what_a_prompt_needs_costs_pages_and_no_seats() -> None:
    """The share is of indices and summaries alone; a refusal says what prompts take."""
    kept = MemoryPlan(slot=3, once=1000, seat=500, prompts=700)
    assert seats_within(kept, 2999, 8) == 3
    assert kept.of(10, 2) == 2730
    assert count(kept, 5_000, 400, 4).pages == count(kept._replace(prompts=0), 4_300, 400, 4).pages
    with pytest.raises(SparseKVError, match=r"for sparse prompts, which prefill dense needs not"):
        count(kept, 3_000, 400, 4)


@pytest.mark.parametrize("available", [5_000, 123_457])
def test_pages_and_what_lies_beside_them_fit(available: int) -> None:
    kept = MemoryPlan(slot=24, once=1000, seat=500)
    found = count(kept, available, 400, 4)
    slots = found.pages // 400
    assert found.seats == 4 and slots * 400 + kept.of(slots, 4) <= available < (slots + 2) * 400 + kept.of(slots + 2, 4)
    with pytest.raises(SparseKVError, match=r"summaries of 8 requests .* lower requests or memory_share"):
        count(kept, 5_000, 400, 8)


def test_a_worker_leaves_it_out(caplog: pytest.LogCaptureFixture) -> None:
    class Worker:
        vllm_config = SimpleNamespace(name="config")

        def determine_available_memory(self) -> int:
            return 100

    class Own(Worker):
        pass

    asked: list[Any] = []

    def counted(config: Any, available: int) -> Counted | None:
        asked.append((config.name, available))
        return Counted(3, 60) if len(asked) == 1 else None

    for worker in (Worker, Worker, Own):
        count_in(worker, counted)
    assert [Own().determine_available_memory() for _ in range(2)] == [60, 100]
    assert asked == [("config", 100)] * 2, "counted once, whatever inherits"
    assert caplog.text.count("no layer of this model decodes sparsely") == 1
