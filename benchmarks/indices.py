"""A vector database on a GPU beside the project's own selection: steps, builds and k-means of one layer of an 8B shape.

`python benchmarks/indices.py` needs faiss with GPU support; without a GPU it times Faiss's indices in CPU memory. Keys
are those of `runtime.py`. A budget is a number of tokens, of which an index on a GPU gives 2048 at most. IVF is judged
by the share of exact top-k's list that it finds.
"""

from __future__ import annotations

import argparse
import functools
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._rows import RESULTS, add_rows, row
from benchmarks.generate import make_room, synchronize
from benchmarks.runtime import BUCKETS, Layer, bench_router, dense_step, make_layer, median_us, step, view_of
from sparsekv.core.baselines.faiss import import_faiss
from sparsekv.core.buckets import spherical_kmeans
from sparsekv.core.layer import LayerView, Queries
from sparsekv.core.selectors import SELECTORS, Selector
from sparsekv.core.step import build

ITERATIONS = 10


def made(layer: Layer, budget: int) -> dict[str, Selector]:
    """Selectors by name, exact top-k first."""
    def new(name: str, **options: Any) -> Selector:
        return SELECTORS[name](token_budget=budget, **options)

    return {"topk": new("topk"), "faiss-flat": new("faiss", factory="flat"), "faiss-ivf": new("faiss", factory="ivf"),
            "sketch": new("sketch", layer=bench_router(layer, "mean_key"), fit="fitted"),
            "router": new("router", layer=bench_router(layer, "mean_key"))}


def found(view: LayerView, layer: Layer, selector: Selector) -> torch.Tensor:
    """Which tokens a step lists, `[Hkv, N]`, of the first query of every group that lists its own."""
    selection = selector.select(view, Queries.last(layer.queries[:, :, :1], view.length))
    tokens = selection.as_tokens()[0].long()
    marked = torch.zeros(len(tokens), view.keys.shape[2] + 1, dtype=torch.bool, device=tokens.device)
    return marked.scatter_(1, torch.where(tokens < 0, view.keys.shape[2], tokens), True)[:, :-1]


def kmeans(layer: Layer, device: str, count: int) -> dict[str, Callable[[], Any]]:
    """The same clustering of one head's keys by both."""
    faiss, keys = import_faiss(), layer.keys[:, 0, :BUCKETS * 256].float()
    buckets = min(BUCKETS, max(1, count // 64))

    def theirs() -> Any:
        work = faiss.Kmeans(keys.shape[-1], buckets, niter=ITERATIONS, spherical=True, gpu=device == "cuda",
                            min_points_per_centroid=1, max_points_per_centroid=512)
        return work.train(keys[0].cpu().numpy())

    return {"spherical_kmeans": lambda: spherical_kmeans(keys, buckets, iterations=ITERATIONS), "faiss-kmeans": theirs}


@torch.inference_mode()
def measure(length: int, budget: int, steps: int, device: str, names: list[str] | None) -> list[dict[str, Any]]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    layer = make_layer("8b", length, steps + 2, device, dtype)
    view, case = view_of(layer, length), f"indices-{length // 1024}k"
    sync = functools.partial(synchronize, layer.keys)
    dense = median_us(lambda i: dense_step(layer, view, i), steps, sync)
    rows = [row(case, "sdpa", "us", round(dense, 1), "µs/layer step")]
    print(f"{case} sdpa {dense:.0f} µs", flush=True)
    exact = None
    for name, selector in made(layer, budget).items():
        if names is not None and name not in (*names, "topk"):
            continue
        began = time.perf_counter()
        build(view, selector, None)
        sync()
        values = {"build_s": time.perf_counter() - began,
                  "us": median_us(lambda i: step(layer, view, selector, [], i), steps, sync)}  # noqa: B023
        listed = found(view, layer, selector)
        exact = listed if exact is None else exact
        values["found"] = float((listed & exact).sum() / exact.sum())
        units = {"build_s": "s/layer", "us": "µs/layer step", "found": "share of exact top-k's list"}
        on_gpu = getattr(selector, "resources", None) is not None
        rows += [row(case, name + ("-gpu" if on_gpu else ""), m, round(v, 4), units[m]) for m, v in values.items()]
        print(f"{case} {rows[-1]['method']} " + " ".join(f"{m} {v:.4g}" for m, v in values.items()), flush=True)
        gc.collect()
    for name, work in kmeans(layer, device, length).items():
        began = time.perf_counter()
        work()
        sync()
        work_s = time.perf_counter() - began
        rows.append(row(case, name, "seconds", round(work_s, 4), "s/head"))
        print(f"{case} {name} {work_s:.3f} s a head of {min(length, BUCKETS * 256)} keys", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[131_072, 1_048_576], help="keys [tokens]")
    parser.add_argument("--budget", type=int, default=1310, help="of a step, at most 2048 on a GPU [tokens]")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--selectors", nargs="+", help="only these, and exact top-k")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for length in options.lengths:
        add_rows("indices", measure(length, options.budget, options.steps, device, options.selectors), options.output)
        make_room(device)


if __name__ == "__main__":
    main()
