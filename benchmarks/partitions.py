"""The ceiling of any router is its partition: mass that an oracle and the untrained mean-key score reach on buckets of
keys, by what is clustered, number of buckets, context length and width of the local window.

    python benchmarks/partitions.py --model MODEL --text FILE.txt [--lengths 4096 8192 16384 32768] [--output FOLDER]

Buckets are found on windows of the first 80 % of the text and judged on its last 20 %; past the model's 8192 positions
with yarn. Partitions: `pre`, `rot`: spherical k-means of keys without and with RoPE, as by `train-router`; `own`:
k-means of the request's own rotated keys. Buckets that a request leaves empty restart, as they do at run time. Every
judged query is a request of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._rows import RESULTS, row, write_rows
from benchmarks._training import BUDGETS, spend
from sparsekv.artifacts.router import RouterLayer
from sparsekv.capture.run import CaptureConfig, run_capture
from sparsekv.core import offline
from sparsekv.core.buckets import imbalance, spherical_kmeans
from sparsekv.core.selectors.router import Router
from sparsekv.sources.hub import load_model, resolve_device
from sparsekv.store.store import CaptureStore
from sparsekv.trainers.calibrate import reader
from sparsekv.trainers.pool import Part, load_pool
from sparsekv.trainers.router import OneLayer

BUCKETS = (512, 1024, 2048, 4096)
TAILS = (16, 64, 256, 1024)
AT, MIDDLE = 0.05, 1024
SINK, NATIVE = 4, 8192
PARTITIONS = ("pre", "rot", "own")


def router(request: offline.Request, centroids: Tensor, space: str) -> Router:
    layer = RouterLayer(centroids, None, space, "mean_key")
    return request.build(Router(token_budget=max(BUDGETS), artifact=OneLayer(layer)), None)[0]


def judged(store: CaptureStore, document: int, count: int, tail: int, device: str) -> Iterator[offline.Request]:
    """Queries of the second half of a window, all layers side by side."""
    parts = [Part(layer, 0, store.num_kv_heads) for layer in store.layers]
    window = replace(load_pool(store, parts, [document], device=device).window(0), window_size=tail)
    yield from offline.requests(window, count, span=1, first=0.5)


def study(train: CaptureStore, heldout: CaptureStore, options: argparse.Namespace, device: str) -> dict[Any, float]:
    """(partition, C, tail, method, metric) -> mean over layers, heads, documents and queries."""
    sums: dict[Any, list[Tensor]] = {}
    length = train.context_length
    sizes = [c for c in options.buckets if c <= length // 2]
    parts = [Part(layer, 0, train.num_kv_heads) for layer in train.layers]
    pool = load_pool(train, parts, list(range(train.num_documents)), device=device, values=False)
    keys = {space: pool.keys_in(space).transpose(0, 1).flatten(1, 2) for space in ("pre", "rot")}
    centroids = {(space, c): spherical_kmeans(x, c, seed=options.seed) for space, x in keys.items() for c in sizes}
    del pool, keys
    for document in range(heldout.num_documents):
        for tail in (t for t in TAILS if t < length // 4):
            for number, request in enumerate(judged(heldout, document, options.queries, tail, device)):
                view, queries = request.view, request.queries
                attention = offline.mid_share(request)
                everywhere = offline.scores(view, queries).logsumexp(-1)
                among = (offline.mid_scores(request).logsumexp(-1) - everywhere).exp().mean()
                sums.setdefault(("topk", 0, tail, "none", "mid share of all attention"), []).append(among)
                for budget in BUDGETS:
                    exact = request.build(reader(budget), None)[0].select(view, queries)
                    sums.setdefault(("topk", 0, tail, "topk", f"mass_share@{budget}"), []).append(
                        offline.mass_read(attention, exact).mean())
                for name in PARTITIONS:
                    for c in sizes:
                        if name == "own":
                            first, last = int(view.regions.mid_first[0]), int(view.regions.mid_last[0])
                            found = spherical_kmeans(view.keys[0, :, first:last], c, seed=options.seed)
                        else:
                            found = centroids[name, c]
                        made = router(request, found, "pre" if name == "pre" else "rot")
                        if number == 0:
                            sums.setdefault((name, c, 0, "none", "imbalance"), []).append(
                                imbalance(made.counts[0]).mean())
                        for budget in BUDGETS if c == MIDDLE else (AT,):
                            reads = {"mean_key": spend(made, view, queries, budget),
                                     "oracle": offline.best_buckets(request, made, attention, budget)}
                            for method, selection in reads.items():
                                sums.setdefault((name, c, tail, method, f"mass_share@{budget}"), []).append(
                                    offline.mass_read(attention, selection).mean())
    return {key: float(torch.stack(v).mean()) for key, v in sums.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384, 32768])
    parser.add_argument("--buckets", type=int, nargs="+", default=list(BUCKETS))
    parser.add_argument("--layers", default="6,16,26")
    parser.add_argument("--tokens", type=int, default=131072, help="clustered, a layer and length")
    parser.add_argument("--heldout-documents", type=int, default=3)
    parser.add_argument("--queries", type=int, default=16, help="judged, a held-out window")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    device = resolve_device(options.device)
    rows = []
    for length in options.lengths:
        began = time.perf_counter()
        rope = yarn(length)
        model, tokenizer = load_model(options.model, dtype="bfloat16", device=options.device, rope_scaling=rope)
        with tempfile.TemporaryDirectory() as place:
            stores = [run_capture(
                CaptureConfig(model=options.model, corpus=options.text, split=split, output=str(Path(place) / split),
                              layers=options.layers, context_length=length, num_documents=count, rope_scaling=rope,
                              queries_per_document=4 * options.queries, seed=options.seed),
                model=model, tokenizer=tokenizer)
                for split, count in (("train", max(2, options.tokens // length)),
                                     ("heldout", options.heldout_documents))]
            del model
            means = study(*stores, options, device)
        for (name, buckets, tail, method, metric), value in means.items():
            rows.append(row(f"{length} tokens, {name}" + (f", C = {buckets}" if buckets else "")
                            + (f", tail {tail}" if tail else ""), method, metric, round(value, 4),
                            "C · Σ share²" if metric == "imbalance" else "share", length=length, partition=name,
                            buckets=buckets, tail=tail, seed=options.seed))
        print(f"{length} tokens in {time.perf_counter() - began:.0f} s", flush=True)
    print_table(rows)
    print(write_rows("partitions", rows, options.output))


def yarn(length: int) -> str | None:
    """Rope scaling of a context past the model's own positions."""
    return json.dumps({"rope_type": "yarn", "factor": float(-(-length // NATIVE))}) if length > NATIVE else None


def print_table(rows: list[dict[str, Any]]) -> None:
    values = {(r["length"], r["partition"], r["buckets"], r["tail"], r["method"], r["metric"]): r["value"]
              for r in rows}
    tails = sorted({r["tail"] for r in rows} - {0})
    print(f"share at 5 %: oracle/mean_key by tail\n{'length':>6} {'partition':14}{'C':>5}"
          + "".join(f"{t:>12}" for t in tails))
    for length, name, buckets in dict.fromkeys((r["length"], r["partition"], r["buckets"]) for r in rows):
        methods = ("topk",) if name == "topk" else ("oracle", "mean_key")
        cells = ["/".join(f"{values.get((length, name, buckets, t, m, f'mass_share@{AT}'), float('nan')):.3f}"
                          for m in methods) for t in tails]
        print(f"{length:>6} {name:14}{buckets:>5}" + "".join(f"{c:>12}" for c in cells))


if __name__ == "__main__":
    main()
