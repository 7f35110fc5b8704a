"""What codes keep: the share of exact top-k's attention mass that sketches read on captured text, by whose basis the
codes have and how many of them are scored.

    sparsekv train --model M --corpus TEXT --output DIR ...
    sparsekv capture --model M --corpus OTHER --output held --layers 1,6,11,16,21,26 --queries-per-document N ...
    python benchmarks/sketch.py --router DIR/router --heldout held [--heldout ...] --model NAME --trained "ON WHAT"

Held-out stores need the queries of every position (`--queries-per-document` is the context length): the basis of a
request comes from the last queries of its prefill. A request is a prefill past the first third of a window and the four
queries after it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._rows import RESULTS, add_rows, row
from benchmarks._training import layer_of
from sparsekv.artifacts.router import RouterArtifact, RouterLayer
from sparsekv.capture.store.store import CaptureStore
from sparsekv.core import offline
from sparsekv.core.selectors.base import Selector
from sparsekv.core.selectors.router import Router
from sparsekv.core.selectors.sketch import SketchRouter
from sparsekv.core.selectors.topk import TopK
from sparsekv.trainers.pool import Part, load_pool

BUDGETS = (0.01, 0.02, 0.05)
SPAN = 4


def readers(layer: RouterLayer) -> dict[str, Selector]:
    """What reads, by the name of its rows."""
    given: dict[str, Any] = {"token_budget": max(BUDGETS), "layer": layer}
    return {"topk": TopK(token_budget=max(BUDGETS)), "router": Router(**given),
            **{f"{fit}, {'all' if share == 1 else f'{share:.0%}'}": SketchRouter(**given, fit=fit, candidates=share)
               for fit in ("fixed", "fitted") for share in (0.1, 1.0)}}


def masses(store: CaptureStore, router: RouterArtifact, count: int) -> dict[tuple[str, float], list[float]]:
    """The mass that each reads of the mid region's, a mean over layers and heads for every request."""
    parts = [Part(layer, 0, store.num_kv_heads) for layer in store.layers]
    layer, found = layer_of(router, store.layers), dict[tuple[str, float], list[float]]()
    for document in range(store.num_documents):
        window = load_pool(store, parts, [document], device="cpu").window(0)
        for request in offline.requests(window, count, span=SPAN):
            share = offline.mid_share(request)
            for name, selector in readers(layer).items():
                request.build(selector, None)
                for budget in BUDGETS:
                    selector.token_budget = budget
                    selector.prepare(request.prefill)
                    read = offline.mass_read(share, selector.select(request.view, request.queries))
                    found.setdefault((name, budget), []).append(float(read.mean()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--router", required=True)
    parser.add_argument("--heldout", action="append", required=True)
    parser.add_argument("--model", required=True, help="its name in rows")
    parser.add_argument("--trained", required=True, help="what the router was trained on, in words")
    parser.add_argument("--requests", type=int, default=3, help="of a window")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    router = RouterArtifact.load(options.router)
    for place in options.heldout:
        store = CaptureStore.open(place)
        found = masses(store, router, options.requests)
        text = Path(str(store.config["corpus"])).stem
        said = {"model": options.model, "trained": options.trained, "text": text, "length": store.context_length,
                "windows": store.num_documents, "layers": store.layers, "bytes": router.config.sketch_bytes,
                "wide": router.config.sketch_wide}
        rows = []
        for (name, budget), values in found.items():
            best = statistics.mean(found["topk", budget])
            rows.append(row(f"{options.model}, {text}, {store.context_length} tokens", name, f"mass_share@{budget}",
                            round(statistics.mean(values) / best, 4), "of exact top-k's", budget=budget,
                            requests=len(values), **said))
            print(rows[-1]["case"], name, budget, rows[-1]["value"], flush=True)
        add_rows("sketch", rows, options.output)


if __name__ == "__main__":
    main()
