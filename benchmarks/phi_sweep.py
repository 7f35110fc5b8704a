"""Which options of `train-phi` serve best: one change at a time from the default, on held-out text.

    python benchmarks/phi_sweep.py --model MODEL --text FILE.txt [--steps N] [--seconds S] [--output FOLDER]

Trains on the first 80 % of the file's characters, calibrates on its last windows of those, measures on the last 20 %:
mean relative output error over heads with every head completed, for sink + tail, top-k 1 % and top-k 5 %. Settings run
in the order below until `--seconds` are used up; what did not run has no row.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._rows import RESULTS, row, write_rows
from benchmarks._training import measure
from sparsekv.capture.run import CaptureConfig, run_capture
from sparsekv.sources.hub import load_model, resolve_device
from sparsekv.store.store import CaptureStore
from sparsekv.trainers.phi import PhiConfig, train_phi

CASES = ("sink_tail", "topk@0.01", "topk@0.05")
SIZES = {"batch_size": 128, "keys_per_step": 2048, "width": 128}
SETTINGS: tuple[dict[str, Any], ...] = (
    {}, {"output_weight": 0.0}, {"output_weight": 3.0}, {"output_weight": 10.0}, {"optimizer": "adam"},
    {"centred": False}, {"lr": 1e-3}, {"lr": 6e-3}, {"keys_per_step": 1024}, {"batch_size": 64}, {"width": 256},
    {"preset": "completion"}, {"seed": 1}, {"seed": 2},
)


def capture(options: argparse.Namespace, folder: Path) -> dict[str, CaptureStore]:
    model, tokenizer = load_model(options.model, dtype="auto", device=options.device)
    return {split: run_capture(
        CaptureConfig(model=options.model, corpus=options.text, split=split, output=str(folder / split),
                      layers=options.layers, context_length=options.length, num_documents=count,
                      queries_per_document=options.queries, seed=1), model=model, tokenizer=tokenizer)
        for split, count in (("train", options.documents), ("heldout", options.heldout_documents))}


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
    options.device = resolve_device(options.device)
    about = " ".join(f"{k}={v}" for k, v in SIZES.items())
    rows: list[dict[str, Any]] = []
    print(f"{'setting':36}" + "".join(f"{c:>12}" for c in CASES) + f"{'seconds':>10}")
    with tempfile.TemporaryDirectory() as place:
        folder, began = Path(place), time.perf_counter()
        stores = capture(options, folder)
        for setting in SETTINGS:
            if time.perf_counter() - began > options.seconds:
                break
            name, started = ", ".join(f"{k}={v}" for k, v in setting.items()) or "base", time.perf_counter()
            phi = train_phi(PhiConfig(**{
                "capture": str(stores["train"].path), "output": str(folder / "phi"), "overwrite": True,
                "validation_documents": 2, "max_steps": options.steps, "device": options.device, **SIZES, **setting}))
            means, _, _ = measure(stores["heldout"], phi.to(options.device), {}, {}, options.device, only=("phi",))
            took = time.perf_counter() - started
            found = {case: means[case, "phi", "rel_err"] for case in CASES}
            print(f"{name:36}" + "".join(f"{found[c]:12.4f}" for c in CASES) + f"{took:10.1f}", flush=True)
            rows += [row(case, name, "rel_err", round(found[case], 4), "relative L2", seed=setting.get("seed", 0),
                         options=f"steps={options.steps} {about} documents={options.documents} "
                                 f"length={options.length} layers={options.layers}") for case in CASES]
    print(write_rows("phi-sweep", rows, options.output))


if __name__ == "__main__":
    main()
