"""What a sketch must hold: share of exact top-k's attention mass that is read, by bytes of a code, channels of 8 bits,
candidates and whose basis it is. An ablation on captured text: buckets, then sketches, then their fit to the request.

    sparsekv capture --model M --corpus TEXT --output train ...
    sparsekv train-router --capture train --output router
    sparsekv capture --model M --corpus OTHER --output heldout --queries-per-document N --layers 1,6,11 ...
    python benchmarks/sketch.py --capture train --router router --heldout heldout [--heldout ...] [--output FOLDER]

The held-out stores need the queries of every position (`--queries-per-document` = the context length), for the fit
reads the last 64 of a prefill. Every request is a prefill past the first third of a window and four queries after it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._rows import RESULTS, add_rows, row
from sparsekv.artifacts.router import RouterArtifact, RouterLayer
from sparsekv.core.offline import mass_read, mid_share, requests
from sparsekv.core.selectors import SELECTORS
from sparsekv.store.store import CaptureStore
from sparsekv.trainers.pool import Part, load_pool
from sparsekv.trainers.router import OneLayer
from sparsekv.trainers.sketch import closed_form

BUDGETS = (0.01, 0.02, 0.05)
SPAN = 4


def cases(dim: int) -> dict[str, tuple[str, tuple[int, int], dict[str, Any]]]:
    """Selector, bytes and channels of 8 bits of a code, and options, by the name of the row."""
    plain, half = (dim // 4, dim // 32), (3 * dim // 8, 3 * dim // 64)
    found: dict[str, Any] = {
        "topk": ("topk", plain, {}), "router, buckets as trained": ("router", plain, {"adapt": False}),
        "router": ("router", plain, {}), f"buckets as trained, fitted, {plain[0]} bytes, {plain[1]} of 8 bits, 10%":
        ("sketch", plain, {"fit": "fitted", "candidates": 0.1, "adapt": False})}
    for width, wide in (plain, (dim // 4, 0), half):
        for fit in ("fixed", "fitted"):
            for candidates in (1.0,) if wide == 0 else (0.1, 0.2, 1.0):
                name = f"{fit}, {width} bytes, {wide} of 8 bits, {'all' if candidates == 1 else f'{candidates:.0%}'}"
                found[name] = ("sketch", (width, wide), {"fit": fit, "candidates": candidates})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capture", help="what the router was trained on")
    parser.add_argument("--router")
    parser.add_argument("--heldout", action="append", default=[])
    parser.add_argument("--requests", type=int, default=2, help="of a window")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not (options.capture and options.router and options.heldout):
        parser.error("expected --capture, --router and --heldout")
    train, router = CaptureStore.open(options.capture), RouterArtifact.load(options.router)
    rows = []
    for place in options.heldout:
        store = CaptureStore.open(place)
        parts = [Part(layer, 0, store.num_kv_heads) for layer in store.layers]
        pool = load_pool(train, parts, list(range(train.num_documents)), device=options.device, values=False)
        wanted = cases(store.head_dim)
        sizes = {size: closed_form(pool, *size) for _, size, _ in wanted.values()}
        del pool
        centroids = router.to(options.device).centroids[[router.config.layers.index(i) for i in store.layers]]
        found: dict[tuple[str, float], list[float]] = {}
        for document in range(store.num_documents):
            window = load_pool(store, parts, [document], device=options.device).window(0)
            for request in requests(window, options.requests, span=SPAN):
                share = mid_share(request)
                for name, (kind, size, given) in wanted.items():
                    layer = RouterLayer(centroids.flatten(0, 1), None, router.config.key_space, "mean_key",
                                        sizes[size], size[0])
                    more = {"artifact": OneLayer(layer)} if SELECTORS[kind].artifact_kind else {}
                    selector = SELECTORS[kind](token_budget=max(BUDGETS), **more, **given)
                    selector.validate()
                    request.build(selector, None)
                    for budget in BUDGETS:
                        selector.token_budget = budget
                        selector.prepare(request.prefill)
                        read = mass_read(share, selector.select(request.view, request.queries))
                        found.setdefault((name, budget), []).append(float(read.mean()))
        case = f"{Path(str(store.config['corpus'])).name}, {store.context_length} tokens"
        for (name, budget), values in found.items():
            best = statistics.mean(found["topk", budget])
            rows.append(row(case, name, f"mass_share@{budget}", round(statistics.mean(values) / best, 4),
                            "of exact top-k's", budget=budget, requests=len(values), layers=store.layers))
    print_table(rows)
    print(add_rows("sketch", rows, options.output))
    return None


def print_table(rows: list[dict[str, Any]]) -> None:
    values = {(r["case"], r["method"], r["budget"]): r["value"] for r in rows}
    places = list(dict.fromkeys(r["case"] for r in rows))
    print("| | " + " | ".join(f"{place}, {b:.0%}" for place in places for b in BUDGETS) + " |")
    for name in dict.fromkeys(r["method"] for r in rows):
        print(f"| {name} | " + " | ".join(f"{values[p, name, b]:.3f}" for p in places for b in BUDGETS) + " |")


if __name__ == "__main__":
    main()
