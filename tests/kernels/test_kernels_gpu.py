"""Every kernel against its twin in float64 on a CUDA device, and the one-call step, eager and in a CUDA graph."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import checks
import pytest
import torch
from cases import Case, cases
from seating_traffic import empty_batch, usual_steps

from sparsekv.core.estimators import PhiEstimator
from sparsekv.core.index import Buckets, RouterLayer
from sparsekv.core.layer import LayerView, Queries
from sparsekv.core.regions import Regions
from sparsekv.core.selectors.router import Router
from sparsekv.core.step import sparse_step
from sparsekv.kernels import (
    KeyMap,
    QueryModel,
    Sketch,
    phi_query,
    round_means,
    sketch_tokens,
)
from sparsekv.kernels.attend import attend_buckets_reference, attend_tokens_reference

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]
DEVICE = "cuda"
DTYPES = pytest.mark.parametrize("dtype", list(checks.LIMITS), ids=str)


@pytest.mark.parametrize("case", cases("gpu"))
def test_kernels(case: Case, run: Any) -> None:
    run(case, DEVICE)


def test_best_tokens_of_a_replayed_graph() -> None:
    """Every replay starts its tickets and its histogram from zero; there are more blocks than the device runs at
    once."""
    length, widest = 400_000, 5000
    sketch = Sketch(torch.randn(8, 64, 16, device=DEVICE), torch.zeros(8, 16, device=DEVICE),
                    torch.randn(8, 64, 16, device=DEVICE) / 16)
    q = torch.randn(2, 32, 64, device=DEVICE).half()
    codes = torch.randint(-128, 128, (2, 8, length, 16), dtype=torch.int8, device=DEVICE)
    first, last, budget = (torch.full((2,), n, device=DEVICE) for n in (7, length - 9, widest - 1))

    def chosen() -> torch.Tensor:
        return sketch_tokens(q, sketch, codes, 0.1, budget, widest, None, first, last)

    expected = chosen()
    assert bool(((expected >= 0).sum(-1) == widest - 1).all())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [chosen() for _ in range(3)]
    for _ in range(20):
        graph.replay()
        assert all(torch.equal(x, expected) for x in found)


@DTYPES
@pytest.mark.parametrize("scores", ["query model", "means"])
@pytest.mark.parametrize("rule", ["probes", "budget"])
@pytest.mark.parametrize("completed", [False, True])
@pytest.mark.parametrize("shape", [(32, 8, 128, 1000, 1, 111, 5, 1), (6, 2, 64, 300, 4, 16, 0, 3)], ids=str)
def test_a_routed_step(shape: tuple[int, ...], completed: bool, rule: str, scores: str, dtype: torch.dtype) -> None:
    """The core's step against the twins on what it says it read, and its replay in a CUDA graph against itself."""
    s = checks.Step(shape, dtype, DEVICE)
    heads, dim = shape[1:3]

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, device=DEVICE).to(dtype)

    model = QueryModel(random(heads, dim, 40), random(heads, 40), random(heads, 40, s.buckets),
                       random(heads, s.buckets))
    router = Router(probes=3 if rule == "probes" else None,
                    layer=RouterLayer(random(heads, s.buckets, dim), model, "rot", "mlp"))
    router.weights = model if scores == "query model" else None
    means, steps = round_means(random(2, heads, s.buckets, dim).float(), s.offsets.diff(dim=-1))
    router.buckets = Buckets(random(2, heads, s.buckets, dim), s.order, s.offsets, means=means, steps=steps,
                             spread=torch.rand(2, heads, s.buckets, device=DEVICE))
    rows, count = s.k.shape[0], s.q.shape[0]
    router.budget, router.widest = torch.full((rows,), 60, device=DEVICE), 60
    per_row = count // rows
    regions = Regions(s.regions["starts"][::per_row], s.regions["tail_starts"][::per_row], s.k.shape[2],
                      s.regions["sink_size"])
    view = LayerView(s.k, s.v, regions=regions, scale=s.regions["scale"], num_query_heads=s.q.shape[1])
    queries = Queries(s.q.unflatten(0, (rows, per_row)).transpose(1, 2), s.regions["lengths"])
    estimator, query = None, None
    if completed:
        maps, offset, state, keys = checks.random_phi(s, dtype, DEVICE)
        estimator = PhiEstimator(SimpleNamespace(query_map=maps, offset=offset))
        estimator.state, estimator.bias, estimator.in_kernel = state, keys.bias, True
        estimator.key_map = KeyMap(keys.w_in, keys.bias[0], keys.w_in, keys.w_out, keys.b_out)
        query = checks.double(phi_query(s.q, maps, offset, state)._replace(keys=keys))

    def step() -> Any:
        return sparse_step(view, queries, router, estimator)

    found = step()
    out, read = found.out.transpose(1, 2).flatten(0, 1), found.selection
    if rule == "probes":
        truth = attend_buckets_reference(*s.wide(), s.order, s.offsets, read.buckets, **s.regions, completion=query)
    else:
        truth = attend_tokens_reference(*s.wide(), read.tokens, **s.regions, completion=query)
    checks.agree((out, found.lse), truth, 5 * checks.LIMITS[dtype], rule)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = step()
    graph.replay()
    assert torch.equal(again.out, found.out) and torch.equal(again.lse, found.lse)


def test_seats_of_a_batch_without_rows() -> None:
    empty_batch(DEVICE)


def test_a_usual_step_does_not_wait_for_the_device() -> None:
    """Neither when the host looks at what the step before left behind."""
    for step, (seats, batch) in enumerate(usual_steps()):
        torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")
        try:
            found = seats.serve(batch, seats.follow(batch, new=batch.slot_mapping, decode=True), [])
            lanes = seats.metadata(batch, found)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert lanes.sparse.tolist() == [True]
