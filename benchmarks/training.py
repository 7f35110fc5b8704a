"""Trained routers and feature maps against what they have to beat, on held-out text; and the time of training a layer.

    python benchmarks/training.py --model MODEL --text FILE.txt [--phi max_steps=10000] [--output FOLDER]
    python benchmarks/training.py --part speed

Quality: trains on the first 80 % of the file's characters, measures on its last 20 % and (`ood:` rows) on the embedded
corpus. Six layers, anchors 4 + 16, queries in the second half of 8192 tokens, each right after its own prefill;
relative L2 error of the heads' output and share of the mid region's attention mass, means over heads and queries. Rows
of single heads go to `training-heads.json`. Speed: `train-router` and `train-phi` on one layer of an 8B-shaped model (8
KV heads, 32 query heads, d = 128) and one prompt of 131 072 synthetic tokens.

The trainers' own defaults are what is measured; `--phi`, `--router`, `--phi-128k` and `--router-128k` set any of their
options over that: `name=value`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._rows import RESULTS, row, write_rows
from benchmarks._synthetic import synthetic_store
from benchmarks._training import MEASURED_QUERIES, check, measure
from sparsekv.artifacts.phi import PhiArtifact
from sparsekv.artifacts.router import RouterArtifact
from sparsekv.capture.run import CaptureConfig, run_capture
from sparsekv.sources.hub import load_model, resolve_device
from sparsekv.store.manifest import MANIFEST
from sparsekv.store.store import CaptureStore
from sparsekv.trainers.phi import PhiConfig, PhiRecipe, train_phi
from sparsekv.trainers.router import RouterConfig, RouterRecipe, train_router

KINDS = ("mean_key", "mlp")
VALIDATION = 4
PHI: dict[str, Any] = {}
ROUTER = {"num_buckets": 4096, "key_space": "rot"}
# 10 000 steps of 1000 queries a query head: 40 000 steps of 1000 queries a KV head of four
ROUTER_128K = {"scores": "mlp", "max_steps": 10000, "batch_size": 1000}
PHI_128K = {"max_steps": 20000, "batch_size": 128, "keys_per_step": 2048, "width": 128}
PER_HEAD = ("mass_ratio", "gap_p05", "gap_p50", "gap_p95")
UNITS = {"rel_err": "relative L2", "mass_share": "share of the mid mass", "mass_ratio": "estimated mass / mass"}


def overridden(sizes: dict[str, Any], words: list[str], recipe: type) -> dict[str, Any]:
    """Options of a trainer: the sizes, and `name=value` over them with the type of the recipe's own default."""
    known = {f.name: f.default for f in dataclasses.fields(recipe)}
    chosen = dict(sizes)
    for word in words:
        name, _, value = word.partition("=")
        if name not in known or not value:
            sys.exit(f"{word!r} is no option; write name=value, with one of {', '.join(known)}")
        kind = type(known[name])
        chosen[name] = value in ("True", "true", "1") if kind is bool else kind(value)
    return chosen


def words(chosen: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in chosen.items())


def capture(options: argparse.Namespace, folder: Path) -> dict[str, CaptureStore]:
    model, tokenizer = load_model(options.model, dtype="bfloat16", device=options.device)
    stores = {}
    count, written = options.heldout_documents, options.generated_documents
    jobs = [("train", options.text, "train", options.documents + written, written),
            ("heldout", options.text, "heldout", count, 0), ("ood", "embedded", "all", count, 0)]
    for name, corpus, split, windows, generated in jobs:
        manifest = folder / name / MANIFEST
        if manifest.is_file() and json.loads(manifest.read_text())["complete"]:
            stores[name] = CaptureStore.open(folder / name)
            continue
        stores[name] = run_capture(
            CaptureConfig(model=options.model, corpus=corpus, split=split, output=str(folder / name),
                          layers=options.layers, context_length=options.length, num_documents=windows,
                          queries_per_document=options.queries, generated_documents=generated, seed=1),
            model=model, tokenizer=tokenizer)
    return stores


def train_routers(options: argparse.Namespace, store: CaptureStore, folder: Path, chosen: dict[str, Any],
                  ) -> dict[str, RouterArtifact]:
    """The untrained router and the paper's, on the same buckets."""
    common: dict[str, Any] = {"capture": str(store.path), "validation_documents": VALIDATION, "layer_group": 1,
                              "device": options.device, "seed": options.seed}
    routers = {}
    for kind in KINDS:
        began, place = time.perf_counter(), folder / kind
        trained = (place / "config.json").is_file()  # by an earlier run
        routers[kind] = RouterArtifact.load(place) if trained else train_router(
            RouterConfig(**common, output=str(place), resume=place.exists()),
            RouterRecipe(**{**chosen, "scores": kind}))
        print(f"{kind} in {time.perf_counter() - began:.0f} s", flush=True)
    return {kind: router.to(options.device) for kind, router in routers.items()}


def train_maps(options: argparse.Namespace, store: CaptureStore, folder: Path, chosen: dict[str, Any]) -> PhiArtifact:
    """The feature maps; those of an earlier run, or the rest of its training."""
    began, place = time.perf_counter(), folder / "phi"
    if (place / "config.json").is_file():
        return PhiArtifact.load(place)
    made = train_phi(PhiConfig(capture=str(store.path), output=str(place), validation_documents=VALIDATION,
                               device=options.device, seed=options.seed, resume=place.exists(), **chosen))
    print(f"phi in {time.perf_counter() - began:.0f} s", flush=True)
    return made


def folder_of(options: argparse.Namespace) -> contextlib.AbstractContextManager[str]:
    """Where stores and artifacts lie: a temporary folder, or one that stays."""
    return contextlib.nullcontext(options.keep) if options.keep else tempfile.TemporaryDirectory()


def quality(options: argparse.Namespace) -> None:
    device = options.device
    chosen = {"router": overridden(ROUTER, options.router, RouterRecipe),
              "phi": overridden(PHI, options.phi, PhiRecipe)}
    with folder_of(options) as place:
        folder, began = Path(place), time.perf_counter()
        stores = capture(options, folder)
        print(f"captured in {time.perf_counter() - began:.0f} s", flush=True)
        check(stores["heldout"], device)
        routers = train_routers(options, stores["train"], folder, chosen["router"])
        phi = train_maps(options, stores["train"], folder, chosen["phi"]).to(device)
        sizes = {name: getattr(options, name) for name in ("documents", "generated_documents", "queries", "length")}
        recipe = {name: phi.config.provenance["options"][name] for name in (f.name for f in dataclasses.fields(
            PhiRecipe))}
        about = f"phi: {words(recipe)}; router: {words(chosen['router'])}; {words(sizes)}"
        rows, head_rows, began = [], [], time.perf_counter()
        for prefix, name in (("", "heldout"), ("ood:", "ood")):
            means, per_head, tokens = measure(stores[name], phi, routers, device, count=options.measured_queries)
            for (case, method, metric), value in means.items():
                cost = {"tokens": round(tokens[method], 1)} if method in tokens else {}
                rows.append(row(prefix + case, method, metric, round(value, 4), UNITS.get(metric, "nats"),
                                **cost, seed=options.seed, options=about))
            for metric in PER_HEAD:
                head_rows += [row(f"{prefix}layer {layer}, head {head}", "phi", metric, round(value, 3),
                                  UNITS.get(metric, "nats"))
                              for layer, line in zip(stores[name].layers, per_head[metric].tolist(), strict=True)
                              for head, value in enumerate(line)]
            print(f"{name} measured in {time.perf_counter() - began:.0f} s", flush=True)
    print(write_rows("training", [*rows, *kept(options.output, rows)], options.output))
    print(write_rows("training-heads", head_rows, options.output))


def kept(folder: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of other cases and methods that an earlier run left in the folder: they keep their own origin."""
    file, new = folder / "training.json", {(r["case"], r["method"]) for r in rows}
    found = json.loads(file.read_text()) if file.is_file() else []
    return [r for r in found if (r["case"], r["method"]) not in new]


def speed(options: argparse.Namespace) -> None:
    router = overridden(ROUTER_128K, options.router_128k, RouterRecipe)
    phi = overridden(PHI_128K, options.phi_128k, PhiRecipe)
    rows = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        store = synthetic_store(folder / "store", length=options.speed_length, queries=options.speed_queries,
                                device=options.device, seed=options.seed)
        common: dict[str, Any] = {"capture": str(store.path), "device": options.device, "seed": options.seed,
                                  "overwrite": True}
        work = {"router": lambda given: train_router(RouterConfig(**common, output=str(folder / "router")),
                                                     RouterRecipe(**given)),
                "phi": lambda given: train_phi(PhiConfig(**common, output=str(folder / "phi"), **given))}
        for kind, chosen in (("router", router), ("phi", phi)):
            work[kind]({**chosen, "max_steps": 3})  # kernels compile, libraries load
            _synchronize()
            began = time.perf_counter()
            work[kind](chosen)
            _synchronize()
            seconds = time.perf_counter() - began
            rows.append(row(f"{kind}-layer-128k", "all heads", "seconds", round(seconds, 2), "s", seed=options.seed,
                            options=f"{words(chosen)} length={options.speed_length} queries={options.speed_queries}"))
            print(f"{kind:8} {seconds:8.1f} s", flush=True)
    print(write_rows("training", [*kept(options.output, rows), *rows], options.output))


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("quality", "speed"), default="quality")
    parser.add_argument("--model")
    parser.add_argument("--text")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--keep", help="folder in which stores and artifacts stay; another run goes on with them")
    parser.add_argument("--documents", type=int, default=150)
    parser.add_argument("--generated-documents", type=int, default=64, help="beside these: the model's own text")
    parser.add_argument("--queries", type=int, default=768)
    parser.add_argument("--heldout-documents", type=int, default=8)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--measured-queries", type=int, default=MEASURED_QUERIES, help="a held-out window")
    parser.add_argument("--layers", default="1,6,11,16,21,26")
    parser.add_argument("--speed-length", type=int, default=131072)
    parser.add_argument("--speed-queries", type=int, default=4096)
    for name in ("phi", "router", "phi-128k", "router-128k"):
        parser.add_argument(f"--{name}", nargs="*", default=[], metavar="NAME=VALUE")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.device = resolve_device(options.device)
    if options.part == "speed":
        speed(options)
        return
    if not options.model or not options.text:
        parser.error("--model and --text are needed to measure quality")
    quality(options)


if __name__ == "__main__":
    main()
