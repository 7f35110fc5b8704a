"""The index that a prompt ends with, of all layers: at once and layer by layer, and its kernels.

    python benchmarks/experiments/index_parts.py [--shapes coder-30k-b1 ...] [--repeats 5] [--kernels] [--output FOLDER]

Keys, values and buckets are drawn, so that half of the buckets begin empty or nearly so. First what layers built at
once choose is compared with what each chooses that is built by itself. Milliseconds, medians; to index-parts.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks._profile import print_kernels
from benchmarks._rows import RESULTS, add_rows, row
from sparsekv.artifacts.router import RouterLayer
from sparsekv.core import stacked
from sparsekv.core.layer import LayerView, Queries
from sparsekv.core.regions import Regions
from sparsekv.core.selectors import SELECTORS
from sparsekv.core.step import build_layers
from sparsekv.kernels import Sketch

SHAPES = {"coder-30k-b1": (27, 1, 12, 2, 128, 30_000), "coder-30k-b8": (27, 8, 12, 2, 128, 30_000),
          "8b-32k-b1": (31, 1, 32, 8, 128, 32_768), "8b-128k-b1": (31, 1, 32, 8, 128, 131_072),
          "tiny": (3, 2, 4, 2, 16, 9000)}
"""Layers, rows, query heads, KV heads, head dimension, tokens."""
BUCKETS, BYTES, WIDE, SINK, WINDOW, BUDGET = 1024, 32, 4, 1, 2047, 0.01


def layers_of(shape: tuple[int, ...], device: str) -> tuple[list[LayerView], list[RouterLayer]]:
    count, rows, heads_q, heads, dim, length = shape
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device=device, dtype=dtype)

    regions = Regions.at_prefill_end(torch.zeros(rows, dtype=torch.long, device=device), length, SINK, WINDOW)
    width = min(BYTES, dim // 2)
    views, trained = [], []
    for i in range(count):
        views.append(LayerView(draw(rows, heads, length, dim), draw(rows, heads, length, dim), regions, dim**-0.5,
                               heads_q, i, count, None, draw(rows, heads_q, 64, dim), length))
        rank = 2 * width - WIDE
        sketch = Sketch(*(draw(heads, *n).float() * dim**-0.5 for n in ((dim, rank), (rank,), (dim, rank))))
        centroids = torch.nn.functional.normalize(draw(heads, BUCKETS, dim).float(), dim=-1)
        trained.append(RouterLayer(centroids, None, "rot", "mean_key", sketch, width))
    return views, trained


def made(views: list[LayerView], trained: list[RouterLayer], name: str, at_once: bool) -> list[Any]:
    selectors = [SELECTORS[name](token_budget=BUDGET, layer=layer) for layer in trained]
    if at_once:
        build_layers(views, selectors, [None] * len(views))
    else:
        for view, selector in zip(views, selectors, strict=True):
            build_layers([view], [selector], [None])
    return selectors


def synchronized() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def milliseconds(work: Any, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began = synchronized()
        work()
        times.append(1e3 * (synchronized() - began))
    return statistics.median(times)


def compare(views: list[LayerView], trained: list[RouterLayer], name: str) -> float:
    """The share of chosen tokens that layers built at once choose and layers built by themselves do not."""
    other, all_of = 0, 0
    both = (made(views, trained, name, at_once) for at_once in (True, False))
    for view, one, alone in zip(views, *both, strict=True):
        query = torch.randn(view.keys.shape[0], view.num_query_heads, 1, view.keys.shape[3], device=view.device,
                            dtype=view.keys.dtype)
        found, wanted = (x.select(view, Queries.last(query, view.length)).as_tokens() for x in (one, alone))
        for a, b in zip(found.flatten(0, 1), wanted.flatten(0, 1), strict=True):
            other += int((~torch.isin(a[a >= 0], b)).sum())
            all_of += int((b >= 0).sum())
    return other / max(1, all_of)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=[s for s in SHAPES if s != "tiny"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kernels", action="store_true", help="print the kernels of every shape's index at once")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    device, rows, lines = "cuda" if torch.cuda.is_available() else "cpu", [], []
    for shape in options.shapes:
        views, trained = layers_of(SHAPES[shape], device)
        for name in ("sketch", "router"):
            apart = compare(views, trained, name)
            if apart > 0.02:  # products of other sizes round elsewhere, and a key between two buckets goes to the other
                sys.exit(f"{shape} {name}: {apart:.1%} of the tokens are chosen otherwise by layers built at once")
            ways = {way: milliseconds(lambda way=way, name=name, views=views, trained=trained: made(
                views, trained, name, way == "at once"), options.repeats) for way in ("at once", "layer by layer")}
            lines.append(f"{shape:14} {name:8}" + "".join(f"  {way} {ms:8.2f} ms" for way, ms in ways.items())
                         + f"  chosen otherwise {apart:.2%}")
            rows += [row(shape, f"{name}, {way}", "index_ms", round(ms, 3), "milliseconds") for way, ms in ways.items()]
            if options.kernels and device == "cuda":
                print(lines[-1])
                print_kernels(lambda name=name, views=views, trained=trained: made(views, trained, name, True), 2)
        groups = [len(g) for g in stacked.alike(views, [SELECTORS["sketch"](token_budget=BUDGET, layer=t)
                                                        for t in trained],
                                                stacked.STACKED_BYTES)]
        lines.append(f"{shape:14} groups of {groups} layers")
        del views, trained
    add_rows("index-parts", rows, options.output)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
