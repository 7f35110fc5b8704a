"""The papers' trained systems as published: rows of docs/results/papers.json, explained in docs/papers.md.

    python benchmarks/papers.py --part saap,completion --model MODEL --text FILE.txt [--length 8192] [--quick]

Parts that are named together share one capture. Rows of earlier runs stay in `--output`, but for those of the same
case, method, metric and machine; several processes may write there. Scripts of other rows are in the commits that those
name.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._rows import RESULTS, add_rows, row
from benchmarks._training import BUDGETS, errors, measured, nearest_centroids, router_of, side_by_side, spend, stores
from sparsekv.artifacts.hub.models import resolve_device
from sparsekv.artifacts.router import RouterArtifact
from sparsekv.capture.store.store import CaptureStore
from sparsekv.core.estimators import Estimator, PhiEstimator
from sparsekv.core.layer import Selection
from sparsekv.core.offline import best_buckets, mass_read, mid_share
from sparsekv.trainers.calibrate import reader
from sparsekv.trainers.phi import PhiConfig, train_phi
from sparsekv.trainers.router import RECIPES, RouterConfig, train_router

Rows = list[dict[str, Any]]
SAAP = RECIPES["saap"]


def captured(options: argparse.Namespace, names: tuple[str, ...]) -> dict[str, CaptureStore]:
    """The stores of these names in `--keep`, of a model that is stretched where that is asked for."""
    factor = -(-options.length // 8192) if options.yarn else 1
    scaling = {"rope_type": "yarn", "factor": float(factor)} if factor > 1 else None
    return stores(options, options.keep, names, rope_scaling=scaling)


def saap(options: argparse.Namespace) -> Rows:
    """Share of the mid region's attention that is read, by budget and by ℓ: the paper's query model on the paper's
    buckets, mean keys, nearest centroids, the oracle, exact top-k, and buckets of random directions (Reformer's
    hashing)."""
    device, held = resolve_device(options.device), captured(options, ("train", "heldout"))
    per_head = -(-1000 // held["train"].group)  # 1000 queries a step of every query model
    name, given = "as published", {"max_steps": options.steps, "lr": 1e-5}
    if options.quick:
        name, given = "shorter training", {"max_steps": 8000, "lr": 1e-4}
    case = f"saap, {name_of(options.model)}, {options.length} tokens"
    said = {"length": options.length, "options": f"layers={options.layers} documents={options.documents} "
            f"queries={options.queries} sink=1 window={options.tail} measured={options.measured} "
            f"queries_a_step={per_head * held['train'].group}"}
    given |= {"num_buckets": options.buckets, "hidden_size": options.hidden, "batch_size": per_head}
    with tempfile.TemporaryDirectory() as place:
        began = time.perf_counter()
        made = train_router(
            RouterConfig(capture=str(held["train"].path), output=place, preset="saap", validation_documents=1,
                         device=device, overwrite=True),
            replace(SAAP, window_size=options.tail, **given)).to(device)
        spent = round(time.perf_counter() - began, 1)
    rows = [row(case, name, "train_seconds", spent, "seconds", **said,
                training=" ".join(f"{k}={v}" for k, v in given.items()))]
    print(f"{case}: {name} in {spent} s", flush=True)
    found = saap_masses(held["heldout"], name, made, device, options)
    return rows + [row(case, method, metric, round(value, 4), "share", **said)
                   for (method, metric), value in found.items()]


def saap_masses(store: CaptureStore, name: str, artifact: RouterArtifact, device: str, options: argparse.Namespace,
                ) -> dict[tuple[str, str], float]:
    """Means over layers, heads and queries of the second half of held-out windows."""
    sums: dict[tuple[str, str], list[float]] = {}
    documents, buckets = list(range(store.num_documents)), artifact.config.num_buckets
    place = f"C = {buckets}, " + ("with RoPE" if artifact.config.key_space == "rot" else "without RoPE")
    generator = torch.Generator().manual_seed(1)
    directions = torch.randn(artifact.centroids.shape, generator=generator).to(artifact.centroids)
    hashing = RouterArtifact(artifact.config, torch.nn.functional.normalize(directions, dim=-1), artifact.weights)
    mean_key = RouterArtifact(replace(artifact.config, scores="mean_key"), artifact.centroids, None)
    # a capture's own sink and window are not the paper's
    for request in measured(store, documents, device, options.measured, artifact.config.sink_size,
                            artifact.config.window_size):
        share, view, queries = mid_share(request), request.view, request.queries

        def note(method: str, metric: str, selection: Selection) -> None:
            sums.setdefault((method, metric), []).append(float(mass_read(share, selection).mean()))  # noqa: B023

        for budget in BUDGETS:
            note("topk", f"mass_share@{budget}", request.build(reader(budget), None)[0].select(view, queries))
        model, untrained, hashed = (router_of(a, request) for a in (artifact, mean_key, hashing))
        for budget in BUDGETS:
            for what, selection in (
                    (name, spend(model, view, queries, budget)),
                    (f"mean_key, {place}", spend(untrained, view, queries, budget)),
                    (f"centroids, {place}", nearest_centroids(request, model, budget)),
                    (f"hashing, {place}", nearest_centroids(request, hashed, budget)),
                    (f"oracle, {place}", best_buckets(request, model, share, budget))):
                note(what, f"mass_share@{budget}", selection)
        model.token_budget = None
        for probes in (buckets // 128, buckets // 32, buckets // 8):
            model.probes = max(1, probes)
            whole = model.select(view, queries)
            note(name, f"mass_share@{model.probes} buckets", whole)
            sums.setdefault((name, f"selectivity@{model.probes} buckets"), []).append(
                float(whole.counts().float().mean()) / int(view.regions.mid_sizes[0]))
    return {key: statistics.mean(values) for key, values in sums.items()}


def completion(options: argparse.Namespace) -> Rows:
    """Relative error of the output with the paper's own maps (`phi_paper`) beside ours (`phi`), both trained on one
    capture for as many steps: sink and tail alone, and exact top-k by budget."""
    device, held, maps, rows = resolve_device(options.device), captured(options, ("train", "heldout", "ood")), {}, []
    case = f"completion, {name_of(options.model)}, {options.length} tokens"
    said = {"length": options.length, "options": f"layers={options.layers} documents={options.documents} "
            f"steps={options.phi_steps} measured={options.measured}"}
    for name, preset in (("phi_paper", "completion"), ("phi", "default")):
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as place:
            made = train_phi(PhiConfig(capture=str(held["train"].path), output=place, preset=preset, device=device,
                                       max_steps=options.phi_steps, validation_documents=options.heldout,
                                       overwrite=True))
        maps[name] = side_by_side(made.to(device), gated=False)
        rows.append(row(case, name, "train_seconds", round(time.perf_counter() - began, 1), "seconds", **said))
        print(f"{case}: {name} in {rows[-1]['value']} s", flush=True)
    for domain in ("heldout", "ood"):
        store, found = held[domain], dict[tuple[str, str], list[float]]()
        for request in measured(store, list(range(store.num_documents)), device, options.measured):
            estimators: dict[str, Estimator] = {name: PhiEstimator(layer) for name, layer in maps.items()}
            for estimator in estimators.values():
                estimator.build(request.prefill)
            for budget in (None, *BUDGETS):
                selection = request.build(reader(budget), None)[0].select(request.view, request.queries)
                for name, error in errors(request, selection, estimators, budget or 0.0).items():
                    what = "sink + tail" if budget is None else f"topk@{budget}"
                    found.setdefault((what, name), []).append(float(error))
        rows += [row(f"{case}, {domain}, {what}", name, "rel_err", round(statistics.mean(x), 4), "relative L2", **said)
                 for (what, name), x in found.items()]
    return rows


PARTS = {"saap": saap, "completion": completion}


def name_of(model: str) -> str:
    """What a model is called in rows."""
    return Path(model.removeprefix("package:")).name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=lambda text: text.split(","), required=True, help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--keep", type=Path, help="folder of the captures, which the next run finds there")
    parser.add_argument("--layers", default="6,16,26")
    parser.add_argument("--documents", type=int, default=32, help="windows to train on, those for validation with "
                                                                   "them")
    parser.add_argument("--heldout", type=int, default=2, help="windows to measure on, and as many to validate φ on")
    parser.add_argument("--queries", type=int, default=2048, help="captured of a window")
    parser.add_argument("--measured", type=int, default=24, help="queries measured of a held-out window")
    parser.add_argument("--yarn", action="store_true", help="stretch a model of 8192 positions to the length")
    parser.add_argument("--phi-steps", type=int, default=4000)
    parser.add_argument("--steps", type=int, default=40_000, help="of the query model as published")
    parser.add_argument("--quick", action="store_true", help="saap: 8000 steps at 1e-4 instead, for a CPU")
    parser.add_argument("--buckets", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--tail", type=int, default=2047, help="local window, whose tokens no target counts")
    options = parser.parse_args()
    for part in options.part:
        if part not in PARTS:
            parser.error(f"--part is some of {', '.join(PARTS)}, found {part!r}")
    with contextlib.ExitStack() as stack:
        options.keep = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for part in options.part:
            began = time.perf_counter()
            rows = PARTS[part](options)
            path = add_rows("papers", rows, options.output)
            print(f"{part}: {path}, {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
