"""A served layer through the Triton kernels, under their interpreter: the same step over the same pages."""

from __future__ import annotations

import pytest
import torch
from paged import Engine, Request, maps, router, step

from sparsekv.artifacts.phi import PhiLayer
from sparsekv.kernels import attend, codes, completion, features, indexing, routing, sketch
from sparsekv.runtime.vllm.index import Scales

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a CUDA device kernels take no tensors of a CPU")


@pytest.mark.parametrize(("scores", "space", "completes", "scales"), [
    ("mean_key", "rot", None, None), ("mlp", "pre", None, None), ("mean_key", "rot", maps(), None),
    ("mean_key", "rot", maps(), Scales(0.3, 0.07))])
def test_kernels_read_the_pages(
    scores: str, space: str, completes: PhiLayer | None, scales: Scales | None, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three rows, two of them sparse."""
    engine = Engine(seats=3, budget=12, candidates=0.4, made=router(scores, space), dense_below=60,
                    completes=completes, scales=scales)
    requests = [Request(seed, 200, [], flat=True, scales=scales) for seed in range(3)]
    for request, prompt in zip(requests, (90, 70, 30), strict=True):
        engine.step([(request, prompt)])
    engine.step([(r, 1) for r in requests])
    engine.step([(r, 1) for r in requests])
    assert engine.given is not None
    q, lanes, table = engine.given
    keys = torch.cat([r.k[:25] for r in requests])
    slots = torch.arange(75) + 16
    engine.unsorted.note(slots, decode=False)
    engine.index.write(keys, slots)
    expected = step(engine.index, q, lanes, table)
    written = engine.index.codes.clone()
    with monkeypatch.context() as kernels:
        for module in (attend, codes, completion, features, indexing, routing, sketch):
            kernels.setattr(module, "on_device", lambda x: True)
        kernels.setattr(completion, "fits", lambda q, maps: True)  # which asks a GPU
        engine.index.codes[:, :, 16:91] = 99
        engine.index.write(keys, slots)
        assert (written != engine.index.codes).float().mean() < 1e-3, "a rounding at most"
        found = step(engine.index, q, lanes, table)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert lanes.sparse.tolist() == [True, True, False]
