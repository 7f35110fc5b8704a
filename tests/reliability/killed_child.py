"""Run by attacks.py in a process of its own: one command in forks that are killed at random moments.

Arguments: capture, phi, router or eval; an empty folder; kills; seed."""

import csv
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parents[1] / room) for room in ("capture", "trainers", "runtime")]

import torch
from capture_child import bytes_of, capture, run_forked, tiny
from test_families import captured
from tiny import save_model
from training_child import train

from sparsekv.evaluation.run import EvalConfig, run_eval
from sparsekv.trainers.work import MARK


def made_by(kind: str, folder: Path) -> tuple[Callable[[Path], Any], Callable[[Path], Any]]:
    """What makes an output, going on where it can; and what of it must be the same."""
    if kind == "capture":
        model = tiny()
        return lambda out: capture(model, str(out), 6), bytes_of
    if kind == "eval":
        save_model(folder / "model")
        return (lambda out: run_eval(EvalConfig(
            model=str(folder / "model"), output=out, tasks="needle", lengths="256", samples=3, device="cpu",
            methods="streaming,topk,quest", resume=out.exists())), _rows)
    store = str(captured(tiny(), folder / "store", num_documents=4, context_length=160, queries_per_document=32).path)
    return lambda out: train(kind, store, str(out), max_steps=150, layer_group=2, resume=True), _artifact


def _artifact(out: Path) -> Any:
    with (out / "metrics.csv").open(newline="") as file:  # as text, but for the times
        metrics = [[f"{k}={v}" for k, v in row.items() if k != "ms_per_step"] for row in csv.DictReader(file)]
    files = bytes_of(out)
    del files["metrics.csv"]
    config = json.loads((out / "config.json").read_text())
    del config["sha256"], files["config.json"]
    return files, metrics, config


def _rows(out: Path) -> Any:
    times = ("seconds", "commit", "command", "machine", "date", "time")
    rows = json.loads((out / "results.json").read_text())
    return [{k: v for k, v in row.items() if not any(t in k for t in times) and row["metric"] != "seconds"}
            for row in rows]


def main() -> None:
    kind, folder, kills, draw = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), random.Random(int(sys.argv[4]))
    torch.set_num_threads(1)
    make, of = made_by(kind, folder)
    run_forked(make, folder / "warm", None)
    _, took = run_forked(make, folder / "one", None)
    killed = rounds = 0
    while killed < kills:
        rounds += 1
        out, ended = folder / f"cut{rounds}", False
        finished = {"capture": lambda o: '"complete": true' in text(o / "manifest.json"),
                    "eval": lambda o: (o / "report.html").is_file()}.get(
                        kind, lambda o: (o / "config.json").is_file() and not (o / MARK).is_file())
        while not ended and not finished(out):
            ended, _ = run_forked(make, out, draw.uniform(0, 0.8 * took) if killed < kills else None)
            killed += not ended
        if of(out) != of(folder / "one"):
            sys.exit(f"{out} differs from {folder / 'one'}")
    print(f"{killed} kills survived")


def text(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


if __name__ == "__main__":
    main()
