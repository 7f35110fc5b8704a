"""What a trained router reads of held-out attention, beside its controls: rows of `partition`.

    python benchmarks/partition.py --capture CAPTURE --router ROUTER --name coder-1.5b [--documents 4]

Mass: the share of the mid region's attention that is read at a budget, by the query model, by the mean keys of its
buckets (as they were trained, and moved to the request), by buckets that begin at random and are moved, and by exact
top-k; of a group's queries together, and of every query head apart. KL: of the query model's buckets from the true
ones, beside that of the mean keys of the same buckets. The held-out windows are those that the training kept.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._rows import RESULTS, add_rows, row
from sparsekv.artifacts.router import RouterArtifact
from sparsekv.capture.store.store import CaptureStore
from sparsekv.core.index import RouterLayer
from sparsekv.core.offline import Window, mass_read, mid_share, requests
from sparsekv.core.selectors import SELECTORS
from sparsekv.kernels import assign_buckets, bucket_sums
from sparsekv.models.losses import bucket_kl
from sparsekv.trainers.pool import Part, Pool, load_pool, split_documents
from sparsekv.trainers.router import targets

BUDGETS, REQUESTS = (0.01, 0.02, 0.05), 4


def apart(window: Window, layer: RouterLayer) -> tuple[Window, RouterLayer]:
    """Every query head with keys, buckets and a query model of its own."""
    group = len(window.queries) // len(window.keys)
    keys, values = (x.repeat_interleave(group, 0) for x in (window.keys, window.values))
    weights = None if layer.weights is None else type(layer.weights)(
        *(w.repeat_interleave(group, 0) for w in layer.weights))
    return replace(window, keys=keys, values=values), layer._replace(
        centroids=layer.centroids.repeat_interleave(group, 0), weights=weights)


def methods(layer: RouterLayer) -> dict[str, Any]:
    random = torch.randn(layer.centroids.shape, generator=torch.Generator().manual_seed(0)).to(layer.centroids)
    untrained = layer._replace(centroids=torch.nn.functional.normalize(random, dim=-1), weights=None)
    router = SELECTORS["router"]
    found = {"exact top-k": SELECTORS["topk"](),
             "mean keys, moved to the request": router(layer=layer, scores="mean_key"),
             "mean keys as trained": router(layer=layer, scores="mean_key", adapt=False),
             "untrained buckets, moved": router(layer=untrained, scores="mean_key")}
    return found if layer.weights is None else {"query model": router(layer=layer, scores="mlp"), **found}


def masses(window: Window, layer: RouterLayer, found: dict[tuple[str, float], list[float]]) -> None:
    for request in requests(window, REQUESTS):
        share = mid_share(request)
        for name, selector in methods(layer).items():
            selector.token_budget = max(BUDGETS)
            request.build(selector, None)
            for budget in BUDGETS:
                selector.token_budget = budget
                selector.prepare(request.prefill)
                read = selector.select(request.view, request.queries)
                found[name, budget].append(float(mass_read(share, read).mean()))


def kl(pool: Pool, layer: RouterLayer) -> dict[str, float]:
    """Of the attention mass of buckets, by the query model and by the mean keys of the same buckets, per query head."""
    true = targets(pool, layer.centroids, layer.key_space, lambda _: None).float()
    keys, found = pool.keys_in(layer.key_space), defaultdict(list)
    for document in range(pool.documents):
        bucket = assign_buckets(keys[document:document + 1], layer.centroids)
        counts, sums = (x[0] for x in bucket_sums(keys[document:document + 1].float(), bucket, None,
                                                  layer.centroids.shape[1]))
        q = pool.queries_in(layer.key_space)[document].float().unflatten(0, (pool.heads_kv, -1)).flatten(1, 2)
        target = true[document].unflatten(0, (pool.heads_kv, -1)).flatten(1, 2)
        target = target / target.sum(-1, keepdim=True).clamp(min=1e-6)
        means = sums / counts.clamp(min=1)[..., None]
        size = counts[:, None].float().log().clamp(min=-1e4)  # an empty bucket has no mass, and 0 · -inf is NaN
        logits = {"mean keys as trained": q @ means.mT * pool.scale + size}
        if layer.weights is not None:
            w_in, b_in, w_out, b_out = (w.float() for w in layer.weights)
            logits["query model"] = (q @ w_in + b_in[:, None]).relu() @ w_out + b_out[:, None]
        for name, x in logits.items():
            found[name].append(float(bucket_kl(x, target).mean()))
    return {name: sum(x) / len(x) for name, x in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capture", required=True)
    parser.add_argument("--router", type=Path, required=True)
    parser.add_argument("--name", default="coder-1.5b", help="of the model")
    parser.add_argument("--documents", type=int, default=4, help="held-out windows at most")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    store, artifact = CaptureStore.open(options.capture), RouterArtifact.load(options.router).to(device)
    held = split_documents(store, 0)[1][:options.documents]
    together: dict[tuple[str, float], list[float]] = defaultdict(list)
    alone: dict[tuple[str, float], list[float]] = defaultdict(list)
    distance: dict[str, list[float]] = defaultdict(list)
    with torch.no_grad():
        for number in store.layers:
            layer = artifact.layer(number)
            assert layer is not None
            pool: Any = load_pool(store, [Part(number, 0, layer.centroids.shape[0])], held, device=device)
            pool = replace(pool, sink_size=artifact.config.sink_size, window_size=artifact.config.window_size)
            for document in range(pool.documents):
                window = pool.window(document)
                masses(window, layer, together)
                masses(*apart(window, layer), alone)
            for name, value in kl(pool, layer).items():
                distance[name].append(value)
            print(f"layer {number}", flush=True)

    def mean(values: list[float]) -> float:
        return round(float(Tensor(values).mean()), 4)

    case, layers = f"partition, {options.name}, {store.context_length} tokens", list(store.layers)
    rows = [row(case, name + more, "mass", mean(x), "share of the mid attention", budget=b, layers=layers,
                samples=len(x)) for more, some in (("", together), (", heads apart", alone)) for (name, b), x in
            some.items()]
    rows += [row(case, name, "bucket_kl", mean(x), "nats", layers=layers) for name, x in distance.items()]
    for r in rows:
        print(r["method"], r.get("budget", ""), r["metric"], r["value"])
    print(add_rows("partition", rows, options.output))


if __name__ == "__main__":
    main()
