"""`sparsekv eval`: what a model keeps under sparse decoding, and what it reads."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sparsekv.config import option
from sparsekv.errors import SparseKVError
from sparsekv.progress import progress

SELECTOR_NAMES = {"streaming": "sink + tail", "topk": "exact top-k", "router": "router"}


@dataclass(frozen=True)
class EvalConfig:
    model: str = option(help="Frozen model: Hugging Face name, folder, .gguf file, or package:NAME.")
    output: Path = option(help="Folder for results.json, table.md and report.html.")
    router: Path | None = option(None, help="Router artifact (folder); adds the selector router.")
    phi: Path | None = option(None, help="Feature-map artifact (folder); every selector is measured with and without.")
    selectors: str = option("streaming,topk", help="Selectors to measure, separated by commas; full attention is "
                                                   "always measured.")
    budgets: str = option("0.01,0.05", help="Tokens retrieved per query and KV head, as fractions of the context, "
                                            "separated by commas.")
    tasks: str = option("needle,perplexity", help="What is measured: needle, perplexity, or both.")
    corpus: str = option("embedded", help="Text: embedded, a file, a folder or glob, or a Hugging Face dataset.")
    split: str = option("heldout", help="Part of the corpus: all, train or heldout.")
    context_length: int = option(2048, help="Length of every prompt [tokens].", min=256)
    num_documents: int = option(4, help="Windows continued for perplexity and attention error [windows].", min=1)
    num_needles: int = option(5, help="Needle prompts, at evenly spread depths [prompts].", min=1)
    continuation: int = option(64, help="Tokens continued at the end of every window [tokens].", min=8)
    dtype: str = option("auto", help="Arithmetic: auto, float32, bfloat16 or float16.")
    device: str = option("auto", help="auto, cpu, cuda, or balanced (spread over all GPUs).")
    seed: int = option(0, help="Seed of windows and needles.")
    overwrite: bool = option(False, help="Replace existing results.")


class EvalResult(NamedTuple):
    """The measured rows and the folder they were written to."""

    rows: list[dict[str, Any]]
    table: str
    output: Path

    def summary(self) -> str:
        return f"\n{self.table}\n\nresults: {self.output}"


def run_eval(config: EvalConfig) -> EvalResult:
    """Measure full attention and every selector at every budget on the same prompts; write rows, table and report.

    Raises SparseKVError for unknown selectors or tasks, bad budgets, and whatever model, corpus or artifacts do wrong.
    """
    import torch

    from sparsekv.artifacts.phi import PhiArtifact
    from sparsekv.artifacts.router import RouterArtifact
    from sparsekv.capture.corpus import make_windows, read_documents
    from sparsekv.evaluation.decode import HEADER, Method, decode, markdown_table, table_rows
    from sparsekv.evaluation.needle import make_needles
    from sparsekv.evaluation.report import Table, write_report
    from sparsekv.evaluation.rows import with_origin
    from sparsekv.hub import load_model
    from sparsekv.runtime.selectors import SELECTORS

    tasks = {t.strip() for t in config.tasks.split(",")}
    if not tasks or tasks - {"needle", "perplexity"}:
        raise SparseKVError(f"unknown tasks {config.tasks!r}: expected needle, perplexity, or both")
    selectors = [s.strip() for s in config.selectors.split(",") if s.strip()]
    unknown = sorted(set(selectors) - set(SELECTORS))
    if unknown:
        raise SparseKVError(f"unknown selector {unknown[0]!r}: expected some of {', '.join(SELECTORS)}")
    if "router" in selectors and config.router is None:
        raise SparseKVError("selector 'router' needs a router artifact; add --router")
    if config.router is not None and "router" not in selectors:
        selectors.append("router")
    budgets = _budgets(config.budgets)
    output = Path(config.output)
    if output.exists() and any(output.iterdir()) and not config.overwrite:
        raise SparseKVError(f"the output {str(output)!r} already exists; add --overwrite to replace its results")
    router = None if config.router is None else RouterArtifact.load(config.router)
    phi = None if config.phi is None else PhiArtifact.load(config.phi)
    methods = [Method("full attention", "full", "dense", None, False)]
    for name in (s for s in selectors if s != "dense"):
        for budget in budgets if SELECTORS[name].needs_budget or name == "router" else (None,):
            label = SELECTOR_NAMES.get(name, name) + ("" if budget is None else f", {budget:.3g}")
            case = "sink_tail" if name == "streaming" else name if budget is None else f"{name}@{budget}"
            methods += [Method(label + (" + φ" if p else ""), case, name, budget, p)
                        for p in (False, True) if phi is not None or not p]
    model, tokenizer = load_model(config.model, dtype=config.dtype, device=config.device)
    for artifact in (router, phi):
        if artifact is not None:
            artifact.check(model)
    windows = [torch.tensor(w.tokens) for w in make_windows(
        read_documents(config.corpus, split=config.split), tokenizer, length=config.context_length,
        count=config.num_documents, seed=config.seed)]
    needles = make_needles(tokenizer, [t for w in windows for t in w.tolist()], length=config.context_length,
                           count=config.num_needles, seed=config.seed) if "needle" in tasks else []
    windows = windows if "perplexity" in tasks else []
    with progress("eval", (len(windows) + len(needles)) * len(methods), "runs") as advance:
        scores = decode(model, tokenizer, methods, windows, needles, router=router, phi=phi,
                        continuation=config.continuation, advance=advance)
    rows = with_origin([row for method in methods for row in scores[method].rows(method)])
    output.mkdir(parents=True, exist_ok=True)
    table = markdown_table(methods, rows)
    (output / "results.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    (output / "table.md").write_text(table + "\n", encoding="utf-8")
    write_report(output / "report.html", "sparsekv eval", f"{config.model}, corpus {config.corpus} ({config.split}), "
                 f"{config.context_length} tokens of context.",
                 [Table("What every method reads and what it costs", HEADER, table_rows(methods, rows))], [])
    return EvalResult(rows, table, output)


def _budgets(text: str) -> list[float]:
    try:
        budgets = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise SparseKVError(f"budgets {text!r} not understood; expected fractions such as 0.01,0.05") from error
    if not all(0 < b <= 1 for b in budgets):
        raise SparseKVError(f"budgets are fractions of the context above 0 and up to 1, found {text!r}")
    return budgets
