"""Trained routers and feature maps against what they have to beat, on held-out text.

    python benchmarks/training.py --model MODEL --text FILE.txt [--phi max_steps=10000] [--output FOLDER]

Trains on the first 80 % of the file's characters, measures on its last 20 % and (`ood:` rows) on the embedded corpus.
Six layers, anchors 4 + 16, queries in the second half of 8192 tokens, each right after its own prefill; relative L2
error of the heads' output and share of the mid region's attention mass, means over heads and queries.

The trainers' own defaults are what is measured, but for more buckets; `--phi` and `--router` set any of their options
over that: `name=value`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._rows import RESULTS, row, take_over
from benchmarks._training import MEASURED_QUERIES, measure, stores
from sparsekv.artifacts.hub.models import resolve_device
from sparsekv.artifacts.phi import PhiArtifact
from sparsekv.artifacts.router import RouterArtifact
from sparsekv.capture.store.store import CaptureStore
from sparsekv.trainers.phi import PhiConfig, PhiRecipe, train_phi
from sparsekv.trainers.router import RouterConfig, RouterRecipe, train_router

KINDS = ("mean_key", "mlp")
VALIDATION = 4
ROUTER = {"num_buckets": 4096, "key_space": "rot"}
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
              "phi": overridden({}, options.phi, PhiRecipe)}
    with folder_of(options) as place:
        folder, began = Path(place), time.perf_counter()
        held = stores(options, folder, ("train", "heldout", "ood"), generated=options.generated_documents,
                      dtype="bfloat16")
        print(f"captured in {time.perf_counter() - began:.0f} s", flush=True)
        routers = train_routers(options, held["train"], folder, chosen["router"])
        phi = train_maps(options, held["train"], folder, chosen["phi"]).to(device)
        sizes = {name: getattr(options, name) for name in ("documents", "generated_documents", "queries", "length")}
        recipe = {name: phi.config.provenance["options"][name] for name in (f.name for f in dataclasses.fields(
            PhiRecipe))}
        about = f"phi: {words(recipe)}; router: {words(chosen['router'])}; {words(sizes)}"
        rows, began = [], time.perf_counter()
        for prefix, name in (("", "heldout"), ("ood:", "ood")):
            means, tokens = measure(held[name], phi, routers, device, count=options.measured_queries)
            for (case, method, metric), value in means.items():
                cost = {"tokens": round(tokens[method], 1)} if method in tokens else {}
                rows.append(row(prefix + case, method, metric, round(value, 4), UNITS.get(metric, "nats"),
                                **cost, seed=options.seed, options=about))
            print(f"{name} measured in {time.perf_counter() - began:.0f} s", flush=True)
    take_over("training", rows, options.output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--keep", help="folder in which stores and artifacts stay; another run goes on with them")
    parser.add_argument("--documents", type=int, default=150)
    parser.add_argument("--generated-documents", type=int, default=64, help="beside these: the model's own text")
    parser.add_argument("--queries", type=int, default=768)
    parser.add_argument("--heldout", type=int, default=8)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--measured-queries", type=int, default=MEASURED_QUERIES, help="a held-out window")
    parser.add_argument("--layers", default="1,6,11,16,21,26")
    for name in ("phi", "router"):
        parser.add_argument(f"--{name}", nargs="*", default=[], metavar="NAME=VALUE")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.device = resolve_device(options.device)
    quality(options)


if __name__ == "__main__":
    main()
