"""What a sketch must hold: share of exact top-k's attention mass that is read, by bytes of a code, channels of 8 bits,
candidates and whose basis it is. An ablation on captured text: buckets, then sketches, then their fit to the request.

    sparsekv capture --model M --corpus TEXT --output train ...
    sparsekv train-router --capture train --output router
    sparsekv capture --model M --corpus OTHER --output heldout --queries-per-document N --layers 1,6,11 ...
    python benchmarks/sketch.py --capture train --router router --heldout heldout [--heldout ...] [--output FOLDER]
    python benchmarks/sketch.py --step 131072

The held-out stores need the queries of every position (`--queries-per-document` = the context length), for the fit
reads the last 64 of a prefill. Every request is a prefill past the first third of a window and four queries after it.
--step times a decode step of a 32/8-head layer (d = 128, float32) on the CPU against torch's attention, on keys that
are made up: rows of metric `step_ms` in sketch.json, which keeps the others.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._rows import RESULTS, add_rows, row
from sparsekv.artifacts.router import RouterArtifact, RouterLayer
from sparsekv.core.layer import OBSERVED, LayerView, Queries
from sparsekv.core.offline import mass_read, mid_share, requests
from sparsekv.core.regions import Regions
from sparsekv.core.selectors import SELECTORS
from sparsekv.core.sketch import fit_sketch, second_moment
from sparsekv.core.step import LayerState
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
    parser.add_argument("--step", type=int, help="only time a step over so many tokens")
    parser.add_argument("--requests", type=int, default=2, help="of a window")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.step:
        return write_step(step_times(options.step), options.output)
    if not (options.capture and options.router and options.heldout):
        parser.error("expected --capture, --router and --heldout, or --step")
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


HEADS, HEADS_KV, DIM, BUCKETS = 32, 8, 128, 1024
ROUNDS = 9


def step_times(length: int) -> list[dict[str, Any]]:
    """Milliseconds of a step by torch's attention and by sketches, 1 % of the tokens from 10 % candidates; the methods
    take turns, and the least of the rounds counts, so that other work on the machine hurts all alike."""
    draw = torch.Generator().manual_seed(0)
    topics = 3 * torch.randn(HEADS_KV, BUCKETS, DIM, generator=draw)

    def near(count: int, heads: int) -> torch.Tensor:
        which = torch.randint(BUCKETS, (heads, count), generator=draw)
        picked = topics.repeat_interleave(heads // HEADS_KV, 0).gather(1, which[..., None].expand(-1, -1, DIM))
        return picked + torch.randn(picked.shape, generator=draw)

    keys, values = near(length, HEADS_KV)[None], torch.randn(1, HEADS_KV, length, DIM, generator=draw)
    recent, asked = near(OBSERVED, HEADS)[None], near(1, HEADS)[None]
    regions = Regions.at_prefill_end(torch.zeros(1, dtype=torch.long), length, 4, 16)
    view = LayerView(keys, values, regions, DIM**-0.5, HEADS, 0, 1, None, recent, length)
    queries = Queries(asked, torch.tensor([length]), None)
    sample = keys[0, :, ::16]
    away = sample - sample.mean(1, keepdim=True)
    trained = fit_sketch(second_moment(recent, HEADS_KV)[0], sample.mean(1), away.mT @ away / sample.shape[1],
                         DIM // 4, DIM // 32)
    artifact = OneLayer(RouterLayer(torch.nn.functional.normalize(topics, dim=-1), None, "rot", "mean_key", trained,
                                    DIM // 4))
    folded = asked.view(1, HEADS_KV, HEADS // HEADS_KV, DIM)  # on a CPU many times as fast as `enable_gqa`
    steps: dict[str, Any] = {"torch": lambda: torch.nn.functional.scaled_dot_product_attention(folded, keys, values)}
    for kind, given in (("router", {}), ("sketch", {"fit": "fixed"}), ("sketch", {"fit": "fitted"})):
        selector = SELECTORS[kind](token_budget=0.01, artifact=artifact, **given)
        selector.validate()
        state = LayerState(view, selector, None, window_size=16, decode_window=256)
        steps[" ".join([kind, *given.values()])] = lambda state=state: state.step(queries)
    times: dict[str, list[float]] = {}
    with torch.inference_mode():
        for _ in range(ROUNDS):
            for name, step in steps.items():
                began = time.perf_counter()
                step()
                times.setdefault(name, []).append(1000 * (time.perf_counter() - began))
    return [row(f"{length} tokens, {HEADS}/{HEADS_KV} heads, d = {DIM}, float32", name, "step_ms", round(min(found), 2),
                "ms, least of the rounds", rounds=ROUNDS, median=round(statistics.median(found), 2),
                times_faster=round(min(times["torch"]) / min(found), 2)) for name, found in times.items()]


def write_step(rows: list[dict[str, Any]], folder: Path) -> None:
    for r in rows:
        print(f"{r['method']:<14} {r['value']:8.2f} ms  {r['times_faster']:.2f} x")
    add_rows("sketch", rows, folder)


def print_table(rows: list[dict[str, Any]]) -> None:
    values = {(r["case"], r["method"], r["budget"]): r["value"] for r in rows}
    places = list(dict.fromkeys(r["case"] for r in rows))
    print("| | " + " | ".join(f"{place}, {b:.0%}" for place in places for b in BUDGETS) + " |")
    for name in dict.fromkeys(r["method"] for r in rows):
        print(f"| {name} | " + " | ".join(f"{values[p, name, b]:.3f}" for p in places for b in BUDGETS) + " |")


if __name__ == "__main__":
    main()
