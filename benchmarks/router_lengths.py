"""Where the paper's router (`mlp`) passes the untrained score (`mean_key`): share of the mid region's attention mass by
context length, width of the dense tail, and the keys that are clustered (`pre`: without RoPE, `rot`: with it).

    python benchmarks/router_lengths.py --model MODEL --text FILE.txt [--lengths 8192 16384 32768] [--tails 16 256 1024]
    python benchmarks/router_lengths.py --model MODEL --text FILE.txt --lengths 32768 --output FOLDER

Every cell is captured and trained anew, on windows of the first 80 % of the text; it is judged on the last 20 % and,
out of domain, on Python's documentation, by queries of the second half of a window; past the model's 8192 positions
with yarn. From 8192 tokens on, all lengths train on as many tokens and as many queries. `mean_key` scores the same
buckets without training, and `oracle` knows their mass.

Rows are written after every cell. Those that an earlier run with the same settings left in the output folder stay
beside them, so that a long table can be measured in several commands.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._rows import RESULTS, row, write_rows
from benchmarks._training import measure_routers
from benchmarks.partitions import NATIVE, SINK, yarn
from sparsekv.artifacts.router import RouterArtifact
from sparsekv.capture.run import CaptureConfig, run_capture
from sparsekv.sources.hub import load_model, resolve_device
from sparsekv.store.store import CaptureStore
from sparsekv.trainers.router import RouterConfig, train_router

SPACES = ("pre", "rot")
DOMAINS = ("heldout", "ood")
AT = "mass_share@0.05"
SETTINGS = ("layers", "tokens", "validation", "queries", "buckets", "hidden", "steps", "heldout_documents", "seed")


def settings(options: argparse.Namespace) -> str:
    """What every row of a table must have in common."""
    names = {"model": Path(options.model).name, "text": Path(options.text).name}
    return " ".join(f"{k}={v}" for k, v in (names | {name: getattr(options, name) for name in SETTINGS}).items())


def capture(options: argparse.Namespace, length: int, tail: int, loaded: tuple[Any, Any], folder: Path,
            ) -> dict[str, CaptureStore]:
    """The windows to train on, and those of either domain to judge on."""
    train = max(4, options.tokens // length) + options.validation
    # a long window gives as many more queries: otherwise long contexts would train on fewer
    queries = options.queries * max(length, NATIVE) // NATIVE
    jobs = (("train", options.text, "train", train, queries),
            ("heldout", options.text, "heldout", options.heldout_documents, options.queries),
            ("ood", "embedded", "all", options.heldout_documents, options.queries))
    return {name: run_capture(
        CaptureConfig(model=options.model, corpus=corpus, split=split, output=str(folder / name), layers=options.layers,
                      context_length=length, num_documents=count, queries_per_document=captured, sink_size=SINK,
                      window_size=tail, rope_scaling=yarn(length), seed=options.seed),
        model=loaded[0], tokenizer=loaded[1]) for name, corpus, split, count, captured in jobs}


def train(options: argparse.Namespace, store: CaptureStore, space: str, folder: Path, device: str,
          ) -> dict[str, RouterArtifact]:
    """The trained router of one key space, and `mean_key` on its buckets."""
    mlp = train_router(RouterConfig(
        capture=str(store.path), output=str(folder / space), scores="mlp", key_space=space, num_buckets=options.buckets,
        hidden_size=options.hidden, max_steps=options.steps, layer_group=options.layer_group,
        validation_documents=options.validation, device=device, seed=options.seed)).to(device)
    return {"mlp": mlp, "mean_key": RouterArtifact(replace(mlp.config, scores="mean_key"), mlp.centroids, None)}


def study(options: argparse.Namespace, length: int, tail: int, loaded: tuple[Any, Any], device: str,
          ) -> list[dict[str, Any]]:
    """The rows of one cell."""
    rows = []
    with tempfile.TemporaryDirectory() as place:
        folder, began = Path(place), time.perf_counter()
        stores = capture(options, length, tail, loaded, folder)
        print(f"{length} tokens, tail {tail}: captured in {time.perf_counter() - began:.0f} s", flush=True)
        for space in SPACES:
            began = time.perf_counter()
            routers = train(options, stores["train"], space, folder, device)
            trained = time.perf_counter()
            for domain in DOMAINS:
                for (case, _, metric), value in measure_routers(stores[domain], routers, device).items():
                    method, _, budget = case.removeprefix("router_").partition("@")
                    if metric == "mass_share":
                        rows.append(row(f"{length} tokens, tail {tail}, {space}, {domain}", method,
                                        f"{metric}@{budget}", round(value, 4), "share", length=length, tail=tail,
                                        space=space, domain=domain, seed=options.seed, options=settings(options)))
            print(f"{length} tokens, tail {tail}, {space}: trained in {trained - began:.0f} s, measured in "
                  f"{time.perf_counter() - trained:.0f} s", flush=True)
    return rows


def earlier(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows with the same settings that an earlier run left in the output folder."""
    file = options.output / "router_lengths.json"
    found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
    return [r for r in found if r.get("options") == settings(options)]


def print_table(rows: list[dict[str, Any]]) -> None:
    values = {(r["length"], r["tail"], r["space"], r["method"]): r["value"] for r in rows
              if r["metric"] == AT and r["domain"] == "heldout"}
    columns = [(s, m) for s in SPACES for m in ("mlp", "mean_key", "oracle")
               if any(key[2:] == (s, m) for key in values)]
    print("held-out share at 5 %\n length  tail" + "".join(f"{f'{s} {m}':>14}" for s, m in columns))
    for length, tail in sorted({key[:2] for key in values}):
        print(f"{length:>7}{tail:>6}" + "".join(
            f"{values.get((length, tail, *column), float('nan')):14.4f}" for column in columns))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 16384, 32768])
    parser.add_argument("--tails", type=int, nargs="+", default=[16, 256, 1024])
    parser.add_argument("--layers", default="1,6,11,16,21,26")
    parser.add_argument("--tokens", type=int, default=524288, help="trained on, a layer and cell (4 windows at least)")
    parser.add_argument("--validation", type=int, default=2, help="windows of the trainer's own, beside these")
    parser.add_argument("--heldout-documents", type=int, default=3, help="windows judged on, of either domain")
    parser.add_argument("--queries", type=int, default=256, help="a window of up to 8192 tokens; longer training "
                                                                 "windows have as many more")
    parser.add_argument("--buckets", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--layer-group", type=int, default=0, help="layers trained at once; 0: all")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if 2 * max(options.tails) >= min(options.lengths):
        parser.error("a tail of half the length or more leaves the measured queries no mid region")
    device = resolve_device(options.device)
    rows: list[dict[str, Any]] = []
    for length in options.lengths:
        began = time.perf_counter()
        loaded = load_model(options.model, dtype="bfloat16", device=options.device, rope_scaling=yarn(length))
        for tail in options.tails:
            rows += study(options, length, tail, loaded, device)
            measured = {(r["length"], r["tail"]) for r in rows}
            kept = [r for r in earlier(options) if (r["length"], r["tail"]) not in measured]
            path = write_rows("router_lengths", [*kept, *rows], options.output)
        del loaded
        print(f"{length} tokens in {time.perf_counter() - began:.0f} s", flush=True)
    print_table([*kept, *rows])
    print(path)


if __name__ == "__main__":
    main()
