"""Attention step and index build of every selector against dense attention.

`python benchmarks/runtime.py` measures on the CPU, on one core with --threads 1; keys in CPU memory beside a GPU are
`offload.py`'s. Every selector is checked first: where it may read everything its output must be dense attention's.
Keys are drawn from a mixture of 512 directions; queries follow a few of them for a while, as in a model, so that
attention is peaked and what was read before is worth reading again.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._rows import RESULTS, row, take_over
from sparsekv.core.cost import read_shares
from sparsekv.core.estimators import Estimator
from sparsekv.core.index import RouterLayer
from sparsekv.core.layer import LayerView, Queries
from sparsekv.core.regions import Regions
from sparsekv.core.selectors import SELECTORS, Selector
from sparsekv.core.sketch import fit_sketch, second_moment
from sparsekv.core.step import build, sparse_step
from sparsekv.kernels import QueryModel, dense_attention

BUDGET, BUCKETS, HIDDEN = 0.02, 1024, 1024
SHAPES = {"smollm2-135m": (9, 3, 64), "8b": (32, 8, 128)}


class Layer(NamedTuple):
    keys: torch.Tensor
    values: torch.Tensor
    queries: torch.Tensor
    recent: torch.Tensor


def make_layer(shape: str, length: int, steps: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Layer:
    heads_q, heads_kv, dim = SHAPES[shape]
    generator = torch.Generator(device=device).manual_seed(0)
    options: dict[str, Any] = {"generator": generator, "device": device}
    centers = torch.randn(heads_kv, 512, dim, **options)
    which = torch.randint(0, 512, (1, heads_kv, length), **options)
    keys = centers[torch.arange(heads_kv, device=device)[:, None], which].to(dtype)
    keys += torch.randn(keys.shape, **options).to(dtype) * 0.7
    values = torch.randn(keys.shape, **options).to(dtype)

    def queries(count: int) -> torch.Tensor:
        picked = centers[:, torch.randint(0, 8, (count,), **options)]
        q = picked.repeat_interleave(heads_q // heads_kv, 0)[None]
        return (q * 1.2 + 0.5 * torch.randn(q.shape, **options)).to(dtype)

    return Layer(keys, values, queries(steps), queries(64))


def view_of(layer: Layer, length: int) -> LayerView:
    heads_q = layer.queries.shape[1]
    starts = torch.zeros(1, dtype=torch.long, device=layer.keys.device)
    regions = Regions.at_prefill_end(starts, length - 1, 4, 64).grown(length)
    return LayerView(layer.keys, layer.values, regions=regions, scale=layer.keys.shape[-1] ** -0.5,
                     num_query_heads=heads_q, layer_idx=1, num_layers=30,
                     recent_queries=layer.recent, recent_end=length - 1)


def bench_router(layer: Layer, scores: str = "mlp") -> RouterLayer:
    """A router of the paper's size with random weights, whose time does not depend on what it learned, and sketches of
    the keys."""
    heads, dim = layer.keys.shape[1], layer.keys.shape[-1]
    device = layer.keys.device
    some = layer.keys[0][:, torch.randperm(layer.keys.shape[2])[:BUCKETS].to(device)].float()
    weights = QueryModel(*(torch.randn(heads, *s, device=device) * 0.05 for s in (
        (dim, HIDDEN), (HIDDEN,), (HIDDEN, BUCKETS), (BUCKETS,))))
    middle = some.mean(1)
    away = some - middle[:, None]
    sketch = fit_sketch(second_moment(layer.recent.float(), heads)[0], middle, away.mT @ away / BUCKETS, dim // 4,
                        dim // 32)
    return RouterLayer(torch.nn.functional.normalize(some, dim=-1), weights, "rot", scores, sketch, dim // 4)


def selectors(layer: Layer, wanted: list[str] | None) -> dict[str, Selector]:
    made: dict[str, Selector] = {}
    for name, cls in SELECTORS.items():
        if name == "dense" or (name == "faiss" and importlib.util.find_spec("faiss") is None):
            continue
        selector = cls()
        if name != "streaming":
            selector.token_budget = BUDGET
        if name == "router":
            for label, scores in (("router", "mlp"), ("router-mean_key", "mean_key")):
                made[label] = cls(token_budget=BUDGET, layer=bench_router(layer, scores))
            continue
        if name == "sketch":
            for label, share, fit in (("sketch-1%", 0.01, "fitted"), ("sketch", BUDGET, "fitted"),
                                      ("sketch-fixed", BUDGET, "fixed")):
                made[label] = cls(token_budget=share, layer=bench_router(layer, "mean_key"), fit=fit)
            continue
        if name == "faiss":
            for kind in ("flat", "ivf", "hnsw"):
                made[f"faiss-{kind}"] = cls(token_budget=BUDGET, factory=kind)
            continue
        made[name] = selector
        if name == "lfps":
            made["lfps-equal"] = cls(token_budget=BUDGET, fills=True)
    return {k: v for k, v in made.items() if wanted is None or k in wanted}


@torch.inference_mode()
def check() -> None:
    """Selectors that may read all of 2048 keys give dense attention's output; nothing is measured before."""
    layer = make_layer("smollm2-135m", 2048, 1)
    view = view_of(layer, 2048)
    truth = dense_step(layer, view, 0)
    for name, selector in selectors(layer, None).items():
        if name in ("streaming", "magicpig", "lfps", "lfps-equal", "faiss-hnsw"):
            continue
        selector.token_budget = 1.0
        if name in ("quest", "pyramidkv"):
            selector.token_budget = 10_000
        if name == "pyramidkv":
            selector.beta = 1.0  # type: ignore[attr-defined]
        build(view, selector, None)
        error = float((step(layer, view, selector, [], 0) - truth).norm() / truth.norm())
        assert error < 1e-3, f"{name} reads everything and differs by {error}"


def median_us(run: Any, count: int, sync: Any = lambda: None) -> float:
    for i in range(2):
        run(i)
    times = []
    for i in range(count):
        sync()
        start = time.perf_counter()
        run(i)
        sync()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


@torch.inference_mode()
def cpu(lengths: list[int], shapes: list[str], wanted: list[str] | None, steps: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        for length in lengths:
            case = f"cpu-{length // 1024}k" if shape == "smollm2-135m" else f"cpu-{length // 1024}k-{shape}"
            case += "-1core" if torch.get_num_threads() == 1 else ""
            layer = make_layer(shape, length, steps + 2)
            view = view_of(layer, length)
            dense = median_us(functools.partial(dense_step, layer, view), steps)
            rows += [row(case, "sdpa", "us", dense, "µs/layer step"),
                     row(case, "sdpa", "selectivity", 1.0, "share of the cache read")]
            print(f"{case:>14} {'sdpa':>16} {dense:>10.0f} µs", flush=True)
            for name, selector in selectors(layer, wanted).items():
                start = time.perf_counter()
                build(view, selector, None)
                seconds = time.perf_counter() - start
                read: list[float] = []
                us = median_us(functools.partial(step, layer, view, selector, read), 5 if name == "magicpig" else steps)
                rows += [row(case, name, "us", us, "µs/layer step"),
                         row(case, name, "speedup", dense / us, "times SDPA"),
                         row(case, name, "selectivity", statistics.mean(read), "share of the cache read"),
                         row(case, name, "build_seconds", seconds * 100_000 / length, "s per 100k tokens and layer")]
                print(f"{case:>14} {name:>16} {us:>10.0f} µs {dense / us:>7.1f}x  read {statistics.mean(read):.2%}  "
                      f"build {seconds * 100_000 / length:.2f} s/100k {selector.statistics()}", flush=True)
    return rows


def dense_step(layer: Layer, view: LayerView, i: int) -> torch.Tensor:
    return dense_attention(layer.queries[:, :, i:i + 1], layer.keys, layer.values, scale=view.scale)


def step(
    layer: Layer, view: LayerView, selector: Selector, read: list[float], i: int, estimator: Estimator | None = None,
) -> torch.Tensor:
    queries = Queries.last(layer.queries[:, :, i % layer.queries.shape[2], None], view.length)
    done = sparse_step(view, queries, selector, estimator)
    if not done.out.is_cuda:
        read.append(float(read_shares(view, queries, [done.selection], torch.zeros(1, 1))[0].mean()))
    return done.out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768, 131072], help="keys [tokens]")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--selectors", nargs="+", default=None)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--threads", type=int, default=None, help="cores; without it all")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the rows")
    parser.add_argument("--dry", action="store_true", help="print only")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    check()
    rows = cpu(options.lengths, options.shapes, options.selectors, options.steps)
    if not options.dry:
        take_over("runtime", rows, options.output)


if __name__ == "__main__":
    main()
