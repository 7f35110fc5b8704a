"""Every kernel against its twin in float64 on a CUDA device, and the one-call step, eager and in a CUDA graph."""

from __future__ import annotations

from typing import Any

import checks
import pytest
import torch

from sparsekv.kernels import (
    BucketMeans,
    PhiStep,
    QueryModel,
    gather_from_host,
    gather_rows,
    phi_query,
    route_tokens,
    routed_attention,
)
from sparsekv.kernels.attend import attend_buckets_reference, attend_tokens_reference

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]
DEVICE = "cuda"
DTYPES = pytest.mark.parametrize("dtype", list(checks.LIMITS), ids=str)
SHAPES = pytest.mark.parametrize("shape", [
    (4, 2, 64, 63, 4, 16, 0, 1), (3, 3, 80, 111, 1, 30, 7, 3), (16, 1, 96, 40, 4, 60, 0, 2),
    (6, 2, 128, 1, 4, 16, 0, 1), (32, 8, 128, 1000, 1, 111, 5, 1), (8, 8, 256, 300, 4, 16, 0, 5)], ids=str)


@DTYPES
@pytest.mark.parametrize("logits", [1.0, 1e4])
@SHAPES
def test_attention_and_completion(shape: tuple[int, ...], dtype: torch.dtype, logits: float) -> None:
    # a logit of 1e4 is exact to 1e-3 in float32: so are the weights of near ties
    checks.check_attention(shape, dtype, DEVICE, logits)


@DTYPES
@SHAPES
def test_what_is_left_where_nearly_all_is_read(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    checks.check_what_is_left(shape, dtype, DEVICE)


@DTYPES
@pytest.mark.parametrize("shape", [(6, 2, 24, 40, 37, 5, 3), (4, 4, 64, 100, 64, 64, 1), (16, 1, 16, 7, 9, 20, 5),
                                   (32, 8, 128, 1024, 1024, 32, 1), (16, 1, 64, 256, 4096, 100, 2)], ids=str)
def test_routing(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    checks.check_routing(shape, dtype, DEVICE)


@pytest.mark.parametrize("buckets", [1, 33, 1024, 4096])
def test_budget_rule(buckets: int) -> None:
    checks.check_budget_rule(buckets, DEVICE)


@DTYPES
@pytest.mark.parametrize("shape", [(2, 64, 16, 63), (3, 80, 48, 111), (1, 128, 128, 1000)], ids=str)
def test_cache_of_features(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    checks.check_cache(shape, dtype, DEVICE)


@DTYPES
@pytest.mark.parametrize("shape", [(4, 2, 64, 40, 16, 1), (6, 3, 80, 40, 48, 3), (8, 2, 128, 128, 128, 2)], ids=str)
def test_query_features(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    checks.check_query(shape, dtype, DEVICE)


@DTYPES
@pytest.mark.parametrize("shape", [(4, 2, 64, 63, 5, 3), (3, 3, 80, 111, 70, 1), (16, 1, 64, 1, 1, 2),
                                   (32, 8, 128, 1000, 130, 1)], ids=str)
def test_index_and_votes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    checks.check_index_and_votes(shape, dtype, DEVICE)


@pytest.mark.parametrize("shape", [(4, 2, 64, 150, 70, 7, 4, 16), (32, 8, 128, 1001, 130, 64, 1, 100)], ids=str)
def test_bucket_mass(shape: tuple[int, ...]) -> None:
    checks.check_bucket_mass(shape, DEVICE)


@pytest.mark.parametrize("shape", [(4, 2, 16, 150, 9, 4, 16), (3, 3, 80, 70, 66, 0, 5), (8, 2, 128, 5000, 70, 1, 111)],
                         ids=str)
def test_statistics(shape: tuple[int, ...]) -> None:
    checks.check_statistics(shape, DEVICE)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 1, 2), (2, 2, 3, 1, 37, 150), (2, 1, 4, 5, 33, 16),
                                   (1, 2, 9, 1, 17, 33), (2, 2, 2, 1, 0, 5)], ids=str)
def test_collisions(shape: tuple[int, ...]) -> None:
    checks.check_collisions(shape, DEVICE)


def test_rows_of_the_host() -> None:
    source = torch.randn(2, 3, 50, 80).pin_memory()
    index = torch.randint(0, 50, (4, 3, 19), device=DEVICE)
    assert torch.equal(gather_from_host(source, index).cpu(), gather_rows(source, index.cpu()))


@DTYPES
@pytest.mark.parametrize("scores", ["query model", "means"])
@pytest.mark.parametrize("rule", ["probes", "budget"])
@pytest.mark.parametrize("completed", [False, True])
@pytest.mark.parametrize("shape", [(32, 8, 128, 1000, 1, 111, 5, 1), (6, 2, 64, 300, 4, 16, 0, 3)], ids=str)
def test_one_call(shape: tuple[int, ...], completed: bool, rule: str, scores: str, dtype: torch.dtype) -> None:
    """The step against the twins on what it says it read, and its replay in a CUDA graph against itself."""
    s = checks.Step(shape, dtype, DEVICE)
    heads, dim = shape[1:3]

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, device=DEVICE).to(dtype)

    model = QueryModel(random(heads, dim, 40), random(heads, 40), random(heads, 40, s.buckets),
                       random(heads, s.buckets))
    by = model if scores == "query model" else BucketMeans(random(2, heads, s.buckets, dim), dim**-0.5)
    phi = PhiStep(*checks.random_phi(s, dtype, DEVICE)) if completed else None
    budget = torch.full((s.q.shape[0],), 60, device=DEVICE)
    how: dict[str, Any] = {"probes": 3} if rule == "probes" else {"budget": (budget, 60)}

    def step() -> tuple[torch.Tensor, ...]:
        return routed_attention(s.q, s.k, s.v, s.order, s.offsets, s.counts, by, **how, **s.regions, phi=phi)

    out, lse, read = step()
    completion = None if phi is None else checks.double(phi_query(s.q, *phi))
    if rule == "probes":
        truth = attend_buckets_reference(*s.wide(), s.order, s.offsets, read, **s.regions, completion=completion)
    else:
        assert torch.equal(read, route_tokens(s.q, by, s.order, s.offsets, budget, 60))
        truth = attend_tokens_reference(*s.wide(), read, **s.regions, completion=completion)
    checks.agree((out, lse), truth, 5 * checks.LIMITS[dtype], rule)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = step()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(again, (out, lse, read), strict=True))
