"""Trained routers and feature maps against what they have to beat, on held-out text; and the time of training a layer.

    python benchmarks/training.py --model MODEL --text FILE.txt [--phi max_steps=10000 width=256] [--output FOLDER]
    python benchmarks/training.py --part routers --model MODEL --text FILE.txt [--router num_buckets=2048]
    python benchmarks/training.py --part speed

Quality: trains on the first 80 % of the file's characters, measures on its last 20 % and (`ood:` rows) on the embedded
corpus. Six layers, anchors 4 + 16, queries in the second half of 8192 tokens; relative L2 error of the heads' output
and share of the mid region's attention mass, means over heads and queries. Rows of single heads go to
`training-heads.json`. Routers: the untrained and the hybrid router alone on the same capture, no φ, into
`training-routers.json`. Speed: `train-router` and `train-phi` on one layer of an 8B-shaped model (8 KV heads, 32 query
heads, d = 128) and one prompt of 131 072 synthetic tokens.

`--phi`, `--router`, `--phi-128k` and `--router-128k` set any option of the trainers: `name=value`.
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
from benchmarks._training import Rivals, check, measure, measure_request, measure_routers
from sparsekv.artifacts.phi import PhiArtifact
from sparsekv.artifacts.router import RouterArtifact
from sparsekv.capture.run import CaptureConfig, run_capture
from sparsekv.hub import load_model, resolve_device
from sparsekv.store.store import MANIFEST, CaptureStore
from sparsekv.trainers.phi import PhiConfig, train_phi
from sparsekv.trainers.pool import split_documents
from sparsekv.trainers.router import RouterConfig, train_router

KINDS = ("mlp", "hybrid")
VALIDATION = 4
PHI = {"max_steps": 22000, "batch_size": 192, "keys_per_step": 4096, "documents_per_step": 2, "width": 256, "lr": 2e-3,
       "weight_decay": 0.01, "output_weight": 1.0, "position_shift": 64}
ROUTER = {"num_buckets": 4096, "hidden_size": 512, "max_steps": 3000, "long_range": 0, "key_space": "rot",
          "layer_group": 1}
# 10 000 steps of 1000 queries a query head: 40 000 steps of 1000 queries a KV head of four
ROUTER_128K = {"num_buckets": 1024, "hidden_size": 1024, "max_steps": 10000, "batch_size": 1000}
PER_HEAD = ("mass_ratio", "gap_p05", "gap_p50", "gap_p95")
UNITS = {"rel_err": "relative L2", "mass_share": "share of the mid mass", "mass_ratio": "estimated mass / mass"}
PHI_128K = {"max_steps": 20000, "batch_size": 128, "keys_per_step": 2048, "width": 128}


def overridden(defaults: dict[str, Any], words: list[str], config: type) -> dict[str, Any]:
    """Options of a trainer: the defaults, and `name=value` over them with the type of the option's own default."""
    known = {f.name: f.default for f in dataclasses.fields(config)}
    chosen = dict(defaults)
    for word in words:
        name, _, value = word.partition("=")
        if name not in known or not value:
            sys.exit(f"{word!r} is no option of {config.__name__}; write name=value, with one of {', '.join(known)}")
        kind = type(known[name])
        chosen[name] = value in ("True", "true", "1") if kind is bool else kind(value)
    return chosen


def words(chosen: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in chosen.items())


def capture(options: argparse.Namespace, folder: Path) -> dict[str, CaptureStore]:
    model, tokenizer = load_model(options.model, dtype="bfloat16", device=options.device)
    stores = {}
    held = options.heldout_documents
    written = options.generated_documents
    jobs = [("train", options.text, "train", options.documents + written, options.queries, written),
            ("heldout", options.text, "heldout", held, options.length, 0),
            ("ood", "embedded", "all", held, options.length, 0)]
    for name, corpus, split, count, queries, generated in jobs:
        manifest = folder / name / MANIFEST
        if manifest.is_file() and json.loads(manifest.read_text())["complete"]:
            stores[name] = CaptureStore.open(folder / name)
            continue
        stores[name] = run_capture(
            CaptureConfig(model=options.model, corpus=corpus, split=split, output=str(folder / name),
                          layers=options.layers, context_length=options.length, num_documents=count,
                          queries_per_document=queries, generated_documents=generated, seed=1),
            model=model, tokenizer=tokenizer)
    return stores


def train(options: argparse.Namespace, stores: dict[str, CaptureStore], folder: Path, chosen: dict[str, Any],
          ) -> tuple[dict[str, RouterArtifact], PhiArtifact]:
    """Routers and φ from windows of the text and of what the model wrote."""
    common: dict[str, Any] = {"capture": str(stores["train"].path), "validation_documents": VALIDATION,
                              "device": options.device, "seed": options.seed}
    routers = {}
    for kind in KINDS:
        began = time.perf_counter()
        routers[kind] = router_of(RouterConfig(**common, **chosen["router"], output=str(folder / kind), scores=kind))
        print(f"{kind} in {time.perf_counter() - began:.0f} s", flush=True)
    routers["mean_key"] = without_training(routers["hybrid"])
    began = time.perf_counter()
    phi = train_phi(PhiConfig(**common, **chosen["phi"], output=str(folder / "phi"), overwrite=True))
    print(f"phi in {time.perf_counter() - began:.0f} s", flush=True)
    return routers, phi


def router_of(config: RouterConfig) -> RouterArtifact:
    """Trained now, unless an earlier run left it in its folder."""
    found = (Path(config.output) / "config.json").is_file()
    return RouterArtifact.load(config.output) if found else train_router(config)


def without_training(hybrid: RouterArtifact) -> RouterArtifact:
    """The same buckets without the residual."""
    return RouterArtifact(dataclasses.replace(hybrid.config, scores="mean_key"), hybrid.centroids, None)


def folder_of(options: argparse.Namespace) -> contextlib.AbstractContextManager[str]:
    """Where stores and artifacts lie: a temporary folder, or one that stays."""
    return contextlib.nullcontext(options.keep) if options.keep else tempfile.TemporaryDirectory()


def quality(options: argparse.Namespace, device: str) -> None:
    chosen = {"router": overridden(ROUTER, options.router, RouterConfig),
              "phi": overridden(PHI, options.phi, PhiConfig)}
    with folder_of(options) as place:
        folder, began = Path(place), time.perf_counter()
        stores = capture(options, folder)
        print(f"captured in {time.perf_counter() - began:.0f} s", flush=True)
        _, validation = split_documents(stores["train"], VALIDATION)
        dim = stores["train"].head_dim
        rivals = Rivals(chosen["phi"].get("num_features") or dim, dim, options.seed)
        rivals.fit(stores["train"], validation[:2], device)
        check(stores["heldout"], rivals, device)
        routers, phi = train(options, stores, folder, chosen)
        phi = phi.to(device)
        # the best is chosen by what the trainer saw of its own validation windows
        best = max(KINDS, key=lambda kind: routers[kind].config.quality["mass_share@0.05"])
        tokens = rivals.reads()
        sizes = {"documents": options.documents, "generated_documents": options.generated_documents,
                 "queries": options.queries, "length": options.length}
        about = f"phi: {words(chosen['phi'])}; router ({best} is best): {words(chosen['router'])}; {words(sizes)}"
        shared = {"seed": options.seed, "options": about}
        rows, head_rows, began = [], [], time.perf_counter()
        for prefix, name in (("", "heldout"), ("ood:", "ood")):
            means, per_head = measure(stores[name], phi, routers, best, rivals, device)
            for (case, method, metric), value in means.items():
                cost = {"tokens": round(tokens[method], 1)} if method in tokens else {}
                rows.append(row(prefix + case, method, metric, round(value, 4), UNITS.get(metric, "nats"),
                                **cost, **shared))
            for metric in PER_HEAD:
                head_rows += [row(f"{prefix}layer {layer}, head {head}", "phi", metric, round(value, 3),
                                  UNITS.get(metric, "nats"))
                              for layer, line in zip(stores[name].layers, per_head[metric].tolist(), strict=True)
                              for head, value in enumerate(line)]
            for (case, method, metric), value in measure_request(stores[name], phi, rivals, device).items():
                rows.append(row(f"request:{prefix}{case}", method, metric, round(value, 4), UNITS[metric], **shared))
            print(f"{name} measured in {time.perf_counter() - began:.0f} s", flush=True)
    print_table(rows)
    print(write_rows("training", [*rows, *kept(options.output, "seconds")], options.output))
    print(write_rows("training-heads", head_rows, options.output))


def routers_alone(options: argparse.Namespace, device: str) -> None:
    chosen = overridden(ROUTER, options.router, RouterConfig)
    with folder_of(options) as place:
        folder, began = Path(place), time.perf_counter()
        stores = capture(options, folder)
        print(f"captured in {time.perf_counter() - began:.0f} s", flush=True)
        common: dict[str, Any] = {"capture": str(stores["train"].path), "validation_documents": VALIDATION,
                                  "device": options.device, "seed": options.seed, **chosen}
        began = time.perf_counter()
        hybrid = router_of(RouterConfig(**common, output=str(folder / "hybrid"), scores="hybrid"))
        print(f"hybrid in {time.perf_counter() - began:.0f} s", flush=True)
        routers = {"mean_key": without_training(hybrid), "hybrid": hybrid}
        about = (f"router: {words(chosen)} documents={options.documents} queries={options.queries} "
                 f"length={options.length} layers={options.layers}")
        rows = [row(prefix + case, method, metric, round(value, 4), UNITS[metric], seed=options.seed, options=about)
                for prefix, name in (("", "heldout"), ("ood:", "ood"))
                for (case, method, metric), value in measure_routers(stores[name], routers, device).items()]
    for found in rows:
        print(f"{found['case']:30}{found['metric']:12}{found['value']:8.4f}")
    print(write_rows("training-routers", rows, options.output))


def kept(folder: Path, metric: str) -> list[dict[str, Any]]:
    """Rows of the other part that an earlier run left in the folder: they keep their own origin."""
    file = folder / "training.json"
    if not file.is_file():
        return []
    return [r for r in json.loads(file.read_text()) if (r["metric"] == "seconds") == (metric == "seconds")]


def print_table(rows: list[dict[str, Any]]) -> None:
    values = {(r["case"], r["method"], r["metric"]): r["value"] for r in rows}
    methods = list(dict.fromkeys(r["method"] for r in rows if r["metric"] == "rel_err"))
    print(f"{'case':26}{'share':>7}" + "".join(f"{m[:10]:>11}" for m in methods))
    for case in dict.fromkeys(r["case"] for r in rows):
        if (case, "none", "rel_err") in values:
            share = values.get((case, "none", "mass_share"))
            print(f"{case:26}{'–' if share is None else f'{share:.3f}':>7}"
                  + "".join(f"{values.get((case, m, 'rel_err'), float('nan')):11.4f}" for m in methods))
    for (case, _, metric), value in values.items():
        if case.endswith("calibration"):
            print(f"{case:26}{metric:>14} {value:.3f}")


def speed(options: argparse.Namespace, device: str) -> None:
    router = overridden(ROUTER_128K, options.router_128k, RouterConfig)
    phi = overridden(PHI_128K, options.phi_128k, PhiConfig)
    rows = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        store = synthetic_store(folder / "store", length=options.speed_length, queries=options.speed_queries,
                                device=device, seed=options.seed)
        common: dict[str, Any] = {"capture": str(store.path), "device": options.device, "seed": options.seed}
        # a short run first: kernels compile, libraries load
        small = {"max_steps": 3, "overwrite": True}
        train_router(RouterConfig(**common, **{**router, **small}, output=str(folder / "router")))
        train_phi(PhiConfig(**common, **{**phi, **small}, output=str(folder / "phi")))
        jobs = (("router-layer-128k", router, lambda: train_router(
                    RouterConfig(**common, **{**router, "overwrite": True}, output=str(folder / "router")))),
                ("phi-layer-128k", phi, lambda: train_phi(
                    PhiConfig(**common, **{**phi, "overwrite": True}, output=str(folder / "phi")))))
        for case, chosen, job in jobs:
            _synchronize()
            began = time.perf_counter()
            job()
            _synchronize()
            seconds = time.perf_counter() - began
            rows.append(row(case, "all heads", "seconds", round(seconds, 2), "s", seed=options.seed,
                            options=f"{words(chosen)} length={options.speed_length} queries={options.speed_queries}"))
            print(f"{case:20} {seconds:8.1f} s", flush=True)
    print(write_rows("training", [*kept(options.output, "quality"), *rows], options.output))


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("quality", "routers", "speed"), default="quality")
    parser.add_argument("--model")
    parser.add_argument("--text")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--keep", help="folder in which stores and artifacts stay; another run goes on with its stores "
                                       "and routers and trains the maps anew")
    parser.add_argument("--documents", type=int, default=150)
    parser.add_argument("--generated-documents", type=int, default=64, help="beside these: the model's own text")
    parser.add_argument("--queries", type=int, default=768)
    parser.add_argument("--heldout-documents", type=int, default=8)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--layers", default="1,6,11,16,21,26")
    parser.add_argument("--speed-length", type=int, default=131072)
    parser.add_argument("--speed-queries", type=int, default=4096)
    for name in ("phi", "router", "phi-128k", "router-128k"):
        parser.add_argument(f"--{name}", nargs="*", default=[], metavar="NAME=VALUE")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    device = resolve_device(options.device)
    if options.part == "speed":
        speed(options, device)
        return
    if not options.model or not options.text:
        parser.error("--model and --text are needed to measure quality")
    (quality if options.part == "quality" else routers_alone)(options, device)


if __name__ == "__main__":
    main()
