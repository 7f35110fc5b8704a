"""Which options of `train-phi` serve best: one change at a time from the base, on held-out text.

    python benchmarks/phi_sweep.py --model MODEL --text FILE.txt [--steps N] [--seconds S] [--output FOLDER]

Trains on the first 80 % of the file's characters, shifts on its last windows of those, measures on the last 20 %: mean
relative output error over heads with every head completed (gates forced on), for sink + tail, top-k 1 % and top-k 5 %.
Settings run in the order below until `--seconds` are used up; what did not run has no row.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._rows import RESULTS, row, write_rows
from sparsekv.capture.run import CaptureConfig, run_capture
from sparsekv.hub import load_model, resolve_device
from sparsekv.trainers.calibrate import calibrate
from sparsekv.trainers.phi import PhiConfig, train_maps
from sparsekv.trainers.pool import Part, Pool, load_pool, split_documents

CASES = ("sink_tail", "topk@0.01", "topk@0.05")
SETTINGS: tuple[dict[str, Any], ...] = (
    {}, {"output_weight": 1.0}, {"output_weight": 3.0}, {"output_weight": 10.0},
    {"ema": 0.99}, {"ema": 0.998}, {"documents_per_step": 4}, {"weight_decay": 0.1}, {"random_windows": 0.5},
    {"temperature": 2.0}, {"top_weight": 0.0}, {"top_weight": 0.5}, {"far_weight": 0.0}, {"far_weight": 0.5},
    {"partition_weight": 0.0}, {"partition_weight": 1.0}, {"under_weight": 0.0}, {"under_weight": 1.0},
    {"under_weight": 1.0, "partition_weight": 1.0}, {"band": 1.5}, {"band": 6.0, "far": 12.0}, {"lr": 1e-3},
    {"lr": 6e-3}, {"gradient_clip": 0.1}, {"keys_per_step": 1024}, {"batch_size": 64}, {"num_features": 128},
    {"seed": 1}, {"seed": 2},
)


def pools(options: argparse.Namespace, folder: Path, device: str) -> tuple[list[Part], tuple[Pool, Pool, Pool]]:
    """Training, validation and test windows of the chosen layers."""
    model, tokenizer = load_model(options.model, dtype="auto", device=device)
    stores = [run_capture(
        CaptureConfig(model=options.model, corpus=options.text, split=split, output=str(folder / split),
                      layers=options.layers, context_length=options.length, num_documents=count,
                      queries_per_document=options.queries, seed=1), model=model, tokenizer=tokenizer)
        for split, count in (("train", options.documents), ("heldout", options.heldout_documents))]
    train, validation = split_documents(stores[0], 2)
    parts = [Part(layer, 0, stores[0].num_kv_heads) for layer in stores[0].layers]
    return parts, (load_pool(stores[0], parts, train, device=device),
                   load_pool(stores[0], parts, validation, device=device),
                   load_pool(stores[1], parts, list(range(options.heldout_documents)), device=device))


def measure(config: PhiConfig, parts: list[Part], of: tuple[Pool, Pool, Pool], device: str) -> dict[str, float]:
    maps, _ = train_maps(config, of[0], of[1], parts, Path(config.output), device, quiet=True)
    validation, heldout = (calibrate(pool, maps, shift=True) for pool in of[1:])
    found: dict[str, float] = {}
    for case in CASES:
        best = validation[f"{case} table"].flatten(1).argmin(1, keepdim=True)
        found[case] = float(heldout[f"{case} table"].flatten(1).gather(1, best).mean())
    return {**found, "none": float(heldout["sink_tail error"].mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--documents", type=int, default=60)
    parser.add_argument("--heldout-documents", type=int, default=4)
    parser.add_argument("--queries", type=int, default=384)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--layers", default="6,16,26")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    device = resolve_device(options.device)
    rows, table = [], []
    with tempfile.TemporaryDirectory() as place:
        folder, began = Path(place), time.perf_counter()
        parts, of = pools(options, folder, device)
        print(f"captured in {time.perf_counter() - began:.0f} s", flush=True)
        base = PhiConfig(capture=str(folder / "train"), output=str(folder), max_steps=options.steps, batch_size=128,
                         keys_per_step=2048, width=128, lr=2e-3, checkpoint_every=0, device=device)
        for setting in SETTINGS:
            if time.perf_counter() - began > options.seconds:
                print(f"time is up: {len(table)} of {len(SETTINGS)} settings ran")
                break
            name, started = ", ".join(f"{k}={v}" for k, v in setting.items()) or "base", time.perf_counter()
            found = measure(replace(base, **setting), parts, of, device)
            took = time.perf_counter() - started
            table.append((name, found, took))
            rows += [row(case, name, "rel_err", round(found[case], 4), "relative L2", seed=setting.get("seed", 0),
                         options=f"steps={options.steps} batch_size=128 keys_per_step=2048 width=128 lr=0.002 "
                                 f"documents={options.documents} length={options.length} layers={options.layers}")
                     for case in CASES]
    print(f"{'setting':36}" + "".join(f"{c:>12}" for c in CASES) + f"{'seconds':>10}")
    for name, found, took in table:
        print(f"{name:36}" + "".join(f"{found[c]:12.4f}" for c in CASES) + f"{took:10.1f}")
    print(f"sink + tail alone {table[0][1]['none']:.4f}")
    print(write_rows("phi-sweep", rows, options.output))


if __name__ == "__main__":
    main()
