"""A request's layers that are made together have what each has that is made by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from paged import DIM, HEADS, LONGEST, PAGE, SCALE, SINK, WINDOW, maps, rope, router, selector, tokens
from torch.utils._python_dispatch import TorchDispatchMode

from sparsekv.artifacts.phi import PhiLayer
from sparsekv.core.regions import Regions
from sparsekv.kernels import slots_at
from sparsekv.runtime.vllm import index as served
from sparsekv.runtime.vllm.index import LayerIndex, Room, build_seat, extend_seat
from sparsekv.runtime.vllm.paged import Scales, UncodedSlots
from sparsekv.runtime.vllm.summaries import leaves

LAYERS, BLOCKS, LENGTH, MORE = 5, 24, 180, 200
WAITS = ("_local_scalar_dense", "nonzero", "_linalg_check_errors")


def layers_of(
    count: int, space: str, sketched: bool, completes: PhiLayer | None, *, rounded: bool, alike: bool = False,
) -> tuple[list[LayerIndex], torch.Tensor]:
    """Layers over pages in any order, and the slots of a request of MORE tokens."""
    table = torch.randperm(BLOCKS - 1, generator=torch.Generator().manual_seed(2))[None].int() + 1
    slots = slots_at(table, torch.arange(MORE)[None], PAGE)[0]
    uncoded, turned = UncodedSlots(BLOCKS * PAGE, torch.device("cpu")), rope()
    made = []
    for layer in range(count):
        scales = Scales(0.3 + layer / 10, 0.07) if rounded else Scales()
        _, k, v = tokens(MORE, seed=0 if alike else layer)
        pool = torch.zeros(BLOCKS, PAGE, HEADS, 2 * DIM)
        pool.flatten(0, 1)[slots] = torch.cat([k / scales.key, v / scales.value], -1)
        pool = pool.to(torch.float8_e4m3fn) if rounded else pool
        made.append(LayerIndex(
            selector(router("mean_key", space, sketched), 0.1, 0.5 if sketched else None), pool.transpose(1, 2),
            Room(2, LONGEST), uncoded, scale=SCALE, rope=turned, maps=completes, kind=torch.float32,
            scales=scales if rounded else None))
    return made, slots


def kept(index: LayerIndex) -> list[torch.Tensor]:
    """All that a step reads of a layer."""
    made = [index.by_seat.buckets, index.spent, index.pages.codes, index.by_seat.side]
    if index.completes is not None:
        made += [getattr(index.completes, name) for name in index.completes.row_state]
        made.append(index.completes.layer.offset)
    return leaves(tuple(made))


@pytest.mark.parametrize("completes", [None, maps()])
@pytest.mark.parametrize(("space", "sketched", "rounded"), [
    ("rot", True, False), ("pre", True, False), ("rot", False, False), ("rot", True, True)])
def test_layers_made_together_are_each_by_itself(
    space: str, sketched: bool, rounded: bool, completes: PhiLayer | None, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Made, and grown: bit for bit, in pieces of layers whose keys there is room for."""
    together, slots = layers_of(LAYERS, space, sketched, completes, rounded=rounded)
    alone, _ = layers_of(LAYERS, space, sketched, completes, rounded=rounded)
    old, new = (Regions.of_equal_rows(torch.zeros(1, dtype=torch.int64), n, SINK, WINDOW) for n in (LENGTH, MORE))
    first, last = slots[:LENGTH - WINDOW], slots[:MORE - WINDOW]
    monkeypatch.setattr(served, "at_once", lambda device: 3 * HEADS * len(first) * DIM * 4)
    builds: list[Any] = []
    kind, own = type(together[0].selector), type(together[0].selector).build
    monkeypatch.setattr(kind, "build", lambda self, view: (builds.append(view), own(self, view))[1])
    build_seat(together, 1, first, old)
    assert [view.num_kv_heads for view in builds] == [2 * HEADS, 3 * HEADS]
    for index in alone:
        build_seat([index], 1, first, old)
    for grows in (False, True):
        if grows:
            extend_seat(together, 1, last, old, new)
            for index in alone:
                extend_seat([index], 1, last, old, new)
        for one, other in zip(together, alone, strict=True):
            found, wanted = kept(one), kept(other)
            assert len(found) == len(wanted) and all(map(torch.equal, found, wanted))
            made = one.requests[1][0]
            assert made is not None and (made.codes is one.pages.codes if sketched else made.buckets is not None)
    assert any(bool((x != y).any()) for x, y in zip(kept(together[0]), kept(together[1]), strict=True))


class Waits(TorchDispatchMode):
    """Operations whose result the host waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in WAITS
        return func(*args, **(kwargs or {}))


def test_more_layers_are_not_more_waits() -> None:
    counts = []
    for count in (2, 6):
        layers, slots = layers_of(count, "rot", True, maps(), rounded=False, alike=True)
        regions = Regions.of_equal_rows(torch.zeros(1, dtype=torch.int64), LENGTH, SINK, WINDOW)
        with Waits() as waits:
            build_seat(layers, 0, slots[:LENGTH - WINDOW], regions)
        counts.append(waits.count)
    assert 0 < counts[0] == counts[1]
