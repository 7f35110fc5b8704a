"""A served layer through the Triton kernels, under their interpreter: the same step over the same pages."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from paged import DIM, HEADS, Engine, Request, maps, router, step, untrained

from sparsekv.kernels import attend, codes, completion, features, indexing, routing, sketch
from sparsekv.runtime.vllm.paged import Scales
from sparsekv.runtime.vllm.summaries import OwnMeans

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a CUDA device kernels take no tensors of a CPU")


SCALES = Scales(0.3, 0.07)
EVERY = [("mean_key", "rot", False, None), ("mlp", "pre", False, None), ("mean_key", "rot", True, None),
         ("mean_key", "rot", True, SCALES)]
ALWAYS: list[tuple[Any, str, Any]] = [(module, "on_device", lambda x: True) for module in (
    attend, codes, completion, features, indexing, routing, sketch, import_module("sparsekv.kernels.bucket_query"))]
ALWAYS.append((completion, "fits", lambda q, maps: True))  # which asks a GPU
FEW_PROGRAMS: list[tuple[Any, str, Any]] = [
    (attend, "PLAIN", attend.PLAIN._replace(programs=8)), (attend, "COMPLETED", attend.COMPLETED._replace(programs=8)),
    (features, "PROGRAMS", 18), (completion, "QUERY_PROGRAMS", 9)]


@pytest.mark.parametrize(("few", "scores", "space", "completed", "scales"), [
    (True, *EVERY[1]), (True, *EVERY[3]), *(pytest.param(False, *case, marks=pytest.mark.slow) for case in EVERY)])
def test_kernels_read_the_pages(
    few: bool, scores: str, space: str, completed: bool, scales: Scales | None, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three rows, two of them sparse; as many programs as on a device, or few, since they run one after another."""
    engine = Engine(seats=3, budget=12, candidates=0.4, made=router(scores, space), dense_below=60,
                    completes=maps() if completed else None, scales=scales)
    requests = [Request(seed, 200, [], flat=True, scales=scales) for seed in range(3)]
    for request, prompt in zip(requests, (90, 70, 30), strict=True):
        engine.step([(request, prompt)])
    engine.step([(r, 1) for r in requests])
    engine.step([(r, 1) for r in requests])
    assert engine.given is not None
    q, lanes, table = engine.given
    keys = torch.cat([r.k[:25] for r in requests])
    slots = torch.arange(75) + 16
    engine.uncoded.note(slots, decode=False)
    engine.index.pages.write(keys, slots)
    expected = step(engine.index, q, lanes, table)
    written = engine.index.pages.codes.clone()
    with monkeypatch.context() as kernels:
        for module, name, value in ALWAYS + FEW_PROGRAMS * few:
            kernels.setattr(module, name, value)
        engine.index.pages.codes[:, :, 16:91] = 99
        engine.index.pages.write(keys, slots)
        assert (written != engine.index.pages.codes).float().mean() < 1e-3, "a rounding at most"
        found = step(engine.index, q, lanes, table)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert lanes.sparse.tolist() == [True, True, False]


def test_kernels_read_what_was_fitted_to_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows by places, codes and bucket means of their own, and one that reads all."""
    completes = OwnMeans(HEADS, DIM)
    engine = Engine(seats=3, budget=12, candidates=0.4, made=untrained(), dense_below=60, completes=completes)
    requests = [Request(seed, 200, [], flat=True) for seed in range(3)]
    for request, prompt in zip(requests, (90, 70, 30), strict=True):
        engine.step([(request, prompt)])
    engine.step([(r, 1) for r in requests])
    assert engine.given is not None
    expected = step(engine.index, *engine.given)
    with monkeypatch.context() as kernels:
        for module, name, value in ALWAYS + FEW_PROGRAMS:
            kernels.setattr(module, name, value)
        found = step(engine.index, *engine.given)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert engine.given[1].sparse.tolist() == [True, True, False]
