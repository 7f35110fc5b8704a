"""Every kernel against its twin in float64 on a CUDA device, and the one-call step, eager and in a CUDA graph."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import checks
import pytest
import torch

from sparsekv.artifacts.router import RouterLayer
from sparsekv.core.estimators import PhiEstimator
from sparsekv.core.index import Buckets
from sparsekv.core.layer import LayerView, Queries
from sparsekv.core.regions import Regions
from sparsekv.core.selectors.router import Router
from sparsekv.core.step import sparse_step
from sparsekv.kernels import (
    KeyMap,
    QueryModel,
    Sketch,
    gather_from_host,
    gather_rows,
    phi_query,
    round_means,
    sketch_tokens,
)
from sparsekv.kernels.attend import attend_buckets_reference, attend_tokens_reference

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]
DEVICE = "cuda"
DTYPES = pytest.mark.parametrize("dtype", list(checks.LIMITS), ids=str)
SHAPES = pytest.mark.parametrize("shape", [
    (4, 2, 64, 63, 4, 16, 0, 1), (3, 3, 80, 111, 1, 30, 7, 3), (16, 1, 96, 40, 4, 60, 0, 2),
    (6, 2, 128, 1, 4, 16, 0, 1), (32, 8, 128, 1000, 1, 111, 5, 1), (8, 8, 256, 300, 4, 16, 0, 5)], ids=str)


@DTYPES
@pytest.mark.parametrize("shape", [(32, 8, 128, 5120, 1280), (4, 4, 64, 0, 1024), (6, 2, 80, 1280, 640),
                                   (2, 1, 256, 256, 384)], ids=str)
def test_attention_by_blocks(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    checks.check_blocks(shape, dtype, DEVICE)


def test_lists_of_blocks() -> None:
    checks.check_block_lists(DEVICE)


@DTYPES
@pytest.mark.parametrize("shape", [(4, 2, 64, 3333, 1000, 777), (32, 8, 128, 6000, 2048, 1000),
                                   (7, 1, 80, 900, 1, 640), (2, 2, 256, 700, 700, 0)], ids=str)
def test_attention_of_a_chunk(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    checks.check_chunk_attention(shape, dtype, DEVICE)


@DTYPES
@pytest.mark.parametrize("shape", [(2, 3, 65, 80), (1, 32, 2048, 128)], ids=str)
def test_attention_added(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    checks.check_added(shape, dtype, DEVICE)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(4, 128, 128, 128, 20_001), (16, 64, 99, 40, 3001), (7, 80, 64, 192, 501)], ids=str)
def test_completed_attention(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    checks.check_completed(shape, dtype, DEVICE)


@pytest.mark.parametrize("shape", [(3, 24, 16), (1, 80, 5), (2, 7, 16), (8, 128, 16), (3, 256, 16)], ids=str)
def test_factors_of_a_covariance(shape: tuple[int, ...]) -> None:
    checks.check_factored(shape, DEVICE)


@DTYPES
@pytest.mark.parametrize("shape", [(6, 2, 24, 40, 37, 5, 3), (4, 4, 64, 100, 64, 64, 1), (16, 1, 16, 7, 9, 20, 5),
                                   (32, 8, 128, 1024, 1024, 32, 1), (16, 1, 64, 256, 4096, 100, 2)], ids=str)
def test_routing(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    checks.check_routing(shape, dtype, DEVICE)


@pytest.mark.parametrize("buckets", [1, 33, 1024, 4096])
def test_budget_rule(buckets: int) -> None:
    checks.check_budget_rule(buckets, DEVICE)


@DTYPES
@pytest.mark.parametrize("shape", [(2, 64, 24, 16, 63), (3, 80, 100, 48, 111), (1, 128, 128, 128, 1000),
                                   (2, 128, 96, 192, 5000)], ids=str)
def test_sums_and_features_of_keys(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    checks.check_sums_and_features(shape, dtype, DEVICE)


@DTYPES
@pytest.mark.parametrize("shape", [(4, 2, 64, 40, 16, 1), (6, 3, 80, 40, 48, 3), (8, 2, 128, 128, 128, 2)], ids=str)
def test_query_features(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    checks.check_query(shape, dtype, DEVICE)


@DTYPES
@pytest.mark.parametrize("shape", [(4, 2, 64, 63, 5, 3), (3, 3, 80, 111, 70, 1), (16, 1, 64, 1, 1, 2),
                                   (32, 8, 128, 1000, 130, 1), (4, 1, 256, 300, 130, 1)], ids=str)
def test_index_and_votes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    checks.check_index_and_votes(shape, dtype, DEVICE)


@pytest.mark.parametrize("shape", [(4, 2, 64, 150, 70, 7, 4, 16), (32, 8, 128, 1001, 130, 64, 1, 100)], ids=str)
def test_bucket_mass(shape: tuple[int, ...]) -> None:
    checks.check_bucket_mass(shape, DEVICE)


@pytest.mark.parametrize("shape", [(4, 2, 16, 150, 9, 4, 16), (3, 3, 80, 70, 66, 0, 5), (8, 2, 128, 5000, 70, 1, 111)],
                         ids=str)
def test_statistics(shape: tuple[int, ...]) -> None:
    checks.check_statistics(shape, DEVICE)


@DTYPES
@pytest.mark.parametrize("shape", [(6, 2, 24, 150, 3), (4, 1, 80, 63, 1), (32, 8, 128, 10_001, 2), (9, 3, 64, 777, 4)],
                         ids=str)
def test_a_step_on_storage_with_room(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    checks.check_decode(shape, dtype, DEVICE)


@DTYPES
@pytest.mark.parametrize("shape", [(2, 3, 71, 24, 9), (1, 2, 1, 80, 1), (1, 8, 20_000, 128, 1024)], ids=str)
def test_bucket_sums(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    checks.check_bucket_sums(shape, dtype, DEVICE)


@DTYPES
@pytest.mark.parametrize("shape", [(32, 8, 128, 60, 32, 1000, 111, 1), (3, 3, 64, 32, 16, 700, 700, 3),
                                   (16, 1, 96, 33, 19, 63, 20, 2), (8, 8, 256, 256, 256, 40, 1, 1)], ids=str)
def test_sketch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    checks.check_sketch(shape, dtype, DEVICE)


@pytest.mark.parametrize("width", [1, 1000, 5001, 300_001])
def test_best_tokens(width: int) -> None:
    checks.check_best_tokens(width, DEVICE)


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


@pytest.mark.parametrize("shape", [(2, 3, 5, 77, 16), (4, 3, 96, 2048, 64), (1, 2, 40, 8192, 128),
                                   (2, 1, 33, 500, 256)], ids=str)
def test_losses(shape: tuple[int, ...]) -> None:
    checks.check_losses(shape, DEVICE)


def test_rows_of_the_host() -> None:
    source = torch.randn(2, 3, 50, 80).pin_memory()
    index = torch.randint(0, 50, (4, 3, 19), device=DEVICE)
    assert torch.equal(gather_from_host(source, index).cpu(), gather_rows(source, index.cpu()))


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
    view = LayerView(s.k, s.v, regions, s.regions["scale"], s.q.shape[1])
    queries = Queries(s.q.unflatten(0, (rows, per_row)).transpose(1, 2), s.regions["lengths"])
    estimator, query = None, None
    if completed:
        maps, offset, state, keys = checks.random_phi(s, dtype, DEVICE)
        estimator = PhiEstimator(SimpleNamespace(query_map=maps, offset=offset))
        estimator.state, estimator.bias, estimator.in_place = state, keys.bias, True
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


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 63, 5), (2, 300, 33), (54, 30_001, 1024)], ids=str)
def test_places_by_bucket(shape: tuple[int, ...]) -> None:
    checks.check_sort(shape, DEVICE)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 3, 1, 8), (3, 4, 2, 40), (8, 32, 8, 128)], ids=str)
def test_norms_and_rotations(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    checks.check_between(shape, dtype, DEVICE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [
    (1, 40, 7), (2, 1032, 33), (1, 72, 5, 1, 3), (2, 136, 17, 17), (3, 40, 7), (5, 104, 65, 65), (8, 264, 70, 3, 9),
    (1, 4096, 4096, 1024, 1024), (8, 1536, 1536, 256, 256), (1, 1536, 151_936), (2, 8960, 1536),
    (4, 4096, 14_336, 14_336), (8, 1536, 151_936)], ids=str)
def test_products_of_a_few_rows(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    checks.check_few_rows(shape, dtype, DEVICE)
