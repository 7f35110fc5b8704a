"""A completed step over pages on a CUDA device: what the CPU's is, without a wait, in a graph that lives on while
requests grow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from paged import HEADS, LONGEST, PAGE, SCALE, SINK, maps, router, selector, tokens

from sparsekv.core.layer import Queries, Selection
from sparsekv.core.regions import Regions
from sparsekv.kernels import slots_at
from sparsekv.runtime.vllm.index import LayerIndex, Room, build_seat, extend_seat
from sparsekv.runtime.vllm.paged import DecodeMetadata, PagedView, Scales, UncodedSlots

LENGTHS, WINDOW, GROWN = (150, 121, 90), 16, 20
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Served:
    """Two requests in seats 1 and 0, and one that has none and reads all."""

    def __init__(self, device: str, scales: Scales | None = None):
        self.device, blocks = device, 40
        self.table = (torch.randperm(blocks - 1, generator=torch.Generator().manual_seed(2)).int() + 1).reshape(3, -1)
        made = [tokens(200, seed) for seed in range(3)]
        pool = torch.zeros(blocks, PAGE, HEADS, 2 * made[0][1].shape[-1])
        for row, (_, k, v) in enumerate(made):
            ks, vs = scales or Scales()
            pool.flatten(0, 1)[self._slots(row, 200)] = torch.cat([k / ks, v / vs], -1)
        if scales is not None:
            pool = pool.to(torch.float8_e4m3fn).view(torch.uint8)
        # scores differ by so little that what is not read has weight
        self.q = torch.stack([q[n - 1] for (q, _, _), n in zip(made, LENGTHS, strict=True)]) / 8
        self.index = LayerIndex(selector(router(), 12, 0.5), pool.to(device).transpose(1, 2), Room(2, LONGEST),
                                UncodedSlots(blocks * PAGE, torch.device(device)), scale=SCALE, maps=maps(),
                                kind=torch.float32, scales=scales)
        self.regions = [Regions.at_prefill_end(torch.zeros(1, dtype=torch.long, device=device), n - GROWN, SINK, WINDOW)
                        for n in LENGTHS[:2]]
        for row, regions in enumerate(self.regions):
            build_seat([self.index], 1 - row, self._slots(row, int(regions.mid_last)).to(device), regions)

    def grow(self, row: int) -> None:
        old, length = self.regions[row], LENGTHS[row]
        self.regions[row] = new = old.grown(length).moved(length - WINDOW, length)
        extend_seat([self.index], 1 - row, self._slots(row, int(new.mid_last)).to(self.device), old, new)

    def lanes(self) -> DecodeMetadata:
        """Of all rows as they are now."""
        anchors, used = torch.full((3, 64), -1, dtype=torch.int32), torch.zeros(3, dtype=torch.long)
        for row, regions in enumerate(self.regions):
            slots = self._slots(row, LENGTHS[row])
            own = torch.cat([slots[:SINK], slots[int(regions.tail_starts):]])
            anchors[row, :len(own)], used[row] = own.int(), len(own)
        lengths = torch.tensor(LENGTHS)
        return DecodeMetadata(*(x.to(self.device) for x in (
            torch.tensor([True, True, False]), torch.tensor([1, 0, 2]), anchors, lengths - 1,
            torch.where(torch.arange(3) == 2, lengths, 0).int(), used)))

    def inputs(self) -> tuple[Any, ...]:
        return self.q.to(self.device), self.lanes(), self.table.to(self.device)

    def attend(
        self, q: torch.Tensor, chosen: torch.Tensor, lanes: DecodeMetadata, table: torch.Tensor,
    ) -> list[torch.Tensor]:
        """Attention over chosen tokens, completed and not."""
        found, index = [], self.index
        for completes in (index.completes, None):
            out = torch.empty_like(q)
            view = PagedView(pages=index.pages, regions=index.none, scale=SCALE, num_query_heads=q.shape[1],
                             metadata=lanes, table=table, out=out)
            queries = Queries(q.transpose(0, 1)[None], lanes.anchored, seats=lanes.seat)
            view.attend(queries, Selection(chosen), completes and completes.query(view, queries))
            found.append(out)
        return found

    def choose(self, q: torch.Tensor, lanes: DecodeMetadata) -> torch.Tensor:
        """The slots that the budget buys."""
        queries = Queries(q.transpose(0, 1)[None], lanes.anchored, seats=lanes.seat)
        return self.index.by_seat.select(self.index.request(None, self.index.none), queries).tokens

    def _slots(self, row: int, count: int) -> torch.Tensor:
        return slots_at(self.table[row:row + 1], torch.arange(count)[None], PAGE)[0]


def captured(step: Callable[[], Any], device: str) -> Callable[[], Any]:
    """A graph of a step, which waits for nothing; the step itself on a CPU."""
    if device == "cpu":
        return step
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


@pytest.mark.parametrize("scales", [None, Scales(0.3, 0.07)])
@pytest.mark.parametrize("device", DEVICES)
def test_a_step_in_a_graph_reads_what_lies_in_the_seats(device: str, scales: Scales | None) -> None:
    there, here = Served(device, scales), Served("cpu", scales)
    q, lanes, table = there.inputs()
    out = torch.empty_like(q)
    replay = captured(lambda: there.index.step(q, lanes, table, out), device)
    for grows in (None, 1, 0):
        if grows is not None:
            there.grow(grows)
            here.grow(grows)
            for kept, new in zip(lanes, there.lanes(), strict=True):
                kept.copy_(new)
        out.fill_(float("nan"))
        replay()
        chosen = there.choose(q, lanes)
        torch.testing.assert_close(out, there.attend(q, chosen, lanes, table)[0], rtol=1e-5, atol=1e-5)
        own, mine, pages = here.inputs()
        expected, plain = here.attend(own, chosen.cpu(), mine, pages)
        torch.testing.assert_close(out.cpu(), expected, rtol=1e-3, atol=1e-3)
        assert (plain - expected)[:2].abs().amax((1, 2)).min() > 0.05, "completion makes no difference"
        assert torch.equal(plain[2], expected[2])
