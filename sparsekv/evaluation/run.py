"""`sparsekv eval`: what a model keeps under sparse decoding, and what it reads."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sparsekv.config import option
from sparsekv.errors import SparseKVError
from sparsekv.progress import progress

OWN_TASKS = "needle,perplexity"
OWN_CELLS = "own-tasks.jsonl"
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
    tasks: str = option(OWN_TASKS, help="What is measured, separated by commas: needle, perplexity, ruler, "
                                        "ruler-offline (the tasks without downloads), babilong (QA1 to QA5), "
                                        "infinitebench, or any generation task or group of lm-eval, such "
                                        "as longbench.")
    completions: str | None = option(None, help="What estimates the rest in the tasks, separated by commas: none, "
                                                "phi, centroid, moments, sampling (the untrained ones at the bytes of "
                                                "φ's cache); without it none, and phi if --phi is given.")
    lengths: str = option("4096", help="Lengths of RULER's and BABILong's prompts, separated by commas [tokens].")
    samples: int = option(100, help="Prompts of every task and length [prompts].", min=1)
    accounting: str = option("retrieved", help="What a budget of the tasks pays for: retrieved (the retrieved tokens "
                                               "alone), worst_case (anchors and the completion's cache too) or "
                                               "amortised (the same, the cache spread over 256 tokens).")
    save_requests: Path | None = option(None, help="Write the tasks' prompts and targets to this file (.jsonl or "
                                                   ".jsonl.gz) and stop; needs lm-eval.")
    requests: Path | None = option(None, help="Answer the prompts of such a file instead of making them; needs no "
                                              "lm-eval.")
    skip_missing: bool = option(False, help="Leave out tasks whose data cannot be fetched here, or whose packages are "
                                            "not installed.")
    resume: bool = option(False, help="Go on with an interrupted sweep: finished cells are kept.")
    time_limit: float | None = option(None, help="Begin no new method after this time [seconds].", min=0)
    max_new_tokens: int | None = option(None, help="Longest answer; without it what the task needs [tokens].", min=1)
    batch_tokens: int = option(2_500_000, help="Prompt tokens held at once while tasks are answered [tokens].", min=1)
    corpus: str = option("embedded", help="Text: embedded, a file, a folder or glob, or a Hugging Face dataset.")
    split: str = option("heldout", help="Part of the corpus: all, train or heldout.")
    context_length: int = option(2048, help="Length of every prompt [tokens].", min=256)
    num_documents: int = option(4, help="Windows continued for perplexity and attention error [windows].", min=1)
    num_needles: int = option(5, help="Needle prompts of every length, at evenly spread depths; with --needle-depths "
                                      "of every length and depth [prompts].", min=1)
    needle_depths: str | None = option(None, help="Depths of the needle, separated by commas: 0 is the start of the "
                                                  "text, 1 its end; without it --num-needles evenly spread ones.")
    needle_lengths: str | None = option(None, help="Lengths of the needle prompts, separated by commas: with several "
                                                   "the report has a map of depth and length; without it "
                                                   "--context-length [tokens].")
    diagnostics: Path | None = option(None, help="diagnostics.json of `sparsekv eval diagnostics`: its figures "
                                                 "join the report.")
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


class Checked(NamedTuple):
    """The options of a run, checked and parsed; `public` are tasks of lm-eval, `own` this project's."""

    own: list[str]
    public: list[str]
    selectors: list[str]
    completions: list[str]
    budgets: list[float]
    router: Any
    phi: Any
    diagnostics: Any = None


def run_eval(config: EvalConfig) -> EvalResult:
    """Measure full attention and every selector at every budget on the same prompts; write rows, table and report.

    Raises SparseKVError for unknown selectors or tasks, bad budgets, and whatever model, corpus or artifacts do wrong.
    """
    from sparsekv.evaluation.decode import HEADER, markdown_table, table_rows
    from sparsekv.evaluation.report import Table, write_pngs, write_report
    from sparsekv.evaluation.rows import provenance, with_origin
    from sparsekv.evaluation.suite import run_suite, suite_tables, write_requests
    from sparsekv.evaluation.tables import markdown
    from sparsekv.hub import load_model

    asked = _check(config)
    if config.save_requests is not None:
        tokenizer = load_model(config.model, dtype=config.dtype, device="cpu")[1]
        path = write_requests(config, asked.public, tokenizer)
        return EvalResult([], f"requests of {', '.join(asked.public)}", path)
    output = Path(config.output)
    model, tokenizer = load_model(config.model, dtype=config.dtype, device=config.device)
    for artifact in (asked.router, asked.phi):
        if artifact is not None:
            artifact.check(model)
    output.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    tables: list[Any] = []
    details: list[Any] = []
    text: list[str] = []
    complete = True
    if config.overwrite and not config.resume:
        for old in (*output.glob("cells*.jsonl"), output / OWN_CELLS):
            old.unlink(missing_ok=True)
    if asked.public or config.requests is not None:
        methods = ["full", *(s if c == "none" else f"{s}+{c}" for s in asked.selectors for c in asked.completions)]
        rows, complete = run_suite(config, asked.public, model, tokenizer, router=asked.router, phi=asked.phi,
                                   methods=methods, budgets=asked.budgets)
        tables, details = suite_tables(rows)
        text = [f"{t.title}\n\n{markdown(t.header, t.rows)}" for t in (*tables, *details)]
    if asked.own:
        lines = _methods(asked.selectors, asked.budgets, asked.phi is not None)
        measured = _own_tasks(config, asked, model, tokenizer, lines)
        rows = rows + measured
        text.append(markdown_table(lines, measured))
        tables.append(Table("What every method reads and what it costs", HEADER, table_rows(lines, measured)))
    rows = with_origin(rows)
    (output / "results.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    unscored = sorted({r["task"] for r in rows if r["metric"] == "score" and r["value"] is None
                       and not r.get("infeasible")})
    if unscored:
        text.append(f"No scores yet of {', '.join(unscored)}: lm-eval scores them and is not installed here. Run `pip "
                    "install 'sparsekv[eval]'` and the same command with --resume; no answer is lost.")
    if not complete:
        text.append("The time limit came first: the same command with --resume goes on.")
    (output / "table.md").write_text("\n\n".join(text) + "\n", encoding="utf-8")
    figures = suite_figures(rows)
    if asked.diagnostics is not None:
        from sparsekv.evaluation.diagnostic_figures import diagnostic_figures

        figures += diagnostic_figures(asked.diagnostics)
    write_report(output / "report.html", "sparsekv eval", provenance(), tables, figures, details)
    write_pngs(output, figures)
    return EvalResult(rows, "\n\n".join(text), output)


def _check(config: EvalConfig) -> Checked:
    """Refuse what cannot work before a model is loaded."""
    from sparsekv.artifacts.phi import PhiArtifact
    from sparsekv.artifacts.router import RouterArtifact
    from sparsekv.core.selectors import SELECTORS
    from sparsekv.core.selectors.base import ACCOUNTINGS
    from sparsekv.evaluation.diagnostics import Diagnostics
    from sparsekv.evaluation.requests import check_names, task_names
    from sparsekv.evaluation.suite import lengths_of
    from sparsekv.runtime.plan import COMPLETIONS

    names = [] if config.requests is not None and config.tasks == OWN_TASKS else task_names(config.tasks)
    own, public = ([n for n in names if (n in ("needle", "perplexity")) == mine] for mine in (True, False))
    if not names and config.requests is None:
        raise SparseKVError(f"no tasks in {config.tasks!r}: expected needle, perplexity, ruler or tasks of lm-eval")
    if public and config.requests is None:
        check_names(public)
    if config.save_requests is not None and not public:
        raise SparseKVError("--save-requests writes prompts of lm-eval's tasks; add --tasks ruler-offline")
    lengths_of(config.lengths)
    _depths(config.needle_depths)
    if min(lengths_of(config.needle_lengths or "256")) < 128:
        raise SparseKVError(f"needle lengths are from 128 tokens on, found {config.needle_lengths!r}")
    _known("accounting", [config.accounting], ACCOUNTINGS)
    selectors = [s.strip() for s in config.selectors.split(",") if s.strip()]
    _known("selector", selectors, SELECTORS)
    if "router" in selectors and config.router is None:
        raise SparseKVError("selector 'router' needs a router artifact; add --router")
    if config.router is not None and "router" not in selectors:
        selectors.append("router")
    budgets = _budgets(config.budgets)
    output = Path(config.output)
    if output.exists() and any(output.iterdir()) and not (config.overwrite or config.resume or config.save_requests):
        raise SparseKVError(f"the output {str(output)!r} already exists; add --overwrite to replace its results, or "
                            "--resume to go on with a sweep")
    router = None if config.router is None else RouterArtifact.load(config.router)
    phi = None if config.phi is None else PhiArtifact.load(config.phi)
    completions = ["none", "phi"] if phi is not None else ["none"]
    if config.completions is not None:
        completions = [c.strip() for c in config.completions.split(",") if c.strip()]
        _known("completion", completions, COMPLETIONS)
        if "phi" in completions and phi is None:
            raise SparseKVError("completion 'phi' needs feature maps; add --phi")
    return Checked(own, public, [s for s in selectors if s != "dense"], completions, budgets, router, phi,
                   None if config.diagnostics is None else Diagnostics.load(config.diagnostics))


def _known(what: str, found: list[str], allowed: Iterable[str]) -> None:
    wrong = sorted(set(found) - set(allowed))
    if wrong:
        raise SparseKVError(f"unknown {what} {wrong[0]!r}: expected some of {', '.join(allowed)}")


def suite_figures(rows: list[dict[str, Any]]) -> list[Any]:
    """Score by budget, one figure a length and lane; selectivity by task; the map of needles."""
    from sparsekv.evaluation.figures import score_by_budget
    from sparsekv.evaluation.report import Figure
    from sparsekv.evaluation.tables import LANE_A, LANE_B, in_order, is_mean, mean_case

    found = [r for r in rows if r["metric"] == "score"]
    cases = list(dict.fromkeys(r["case"] for r in found))
    figures = []
    for case in cases:
        if not is_mean(case) and mean_case(case) in cases:
            continue
        methods = {r["method"] for r in found if r["case"] == case} - {"full"}
        lanes = {"": sorted(methods)} if len(methods) <= 6 else {
            ", lane A": in_order(methods, LANE_A), ", lane B": in_order(methods, LANE_B)}
        figures += [Figure(f"{case}: score by budget{lane}", score_by_budget(rows, case, ["full", *names]),
                           "Mean score and its 95 % bootstrap interval; grey: full attention. The colour says what is "
                           "read, the line what completes it: dashed nothing, solid φ.")
                    for lane, names in lanes.items() if names]
    return figures + _selectivity_figures(found) + _needle_figures(rows)


def _selectivity_figures(rows: list[dict[str, Any]]) -> list[Any]:
    """What every selector read of each task, a figure a length, at the middle one of the budgets."""
    from sparsekv.evaluation.figures import bars
    from sparsekv.evaluation.report import Figure
    from sparsekv.evaluation.tables import is_mean

    scored = [r for r in rows if r.get("read") is not None and r["method"] != "full" and not is_mean(r["case"])]
    budgets = sorted({r["budget"] for r in scored if r["budget"] is not None}) or [None]
    budget = budgets[len(budgets) // 2]
    figures = []
    for length in dict.fromkeys(r["length"] for r in scored):
        own = [r for r in scored if r["length"] == length and r["budget"] in (None, budget)]
        # what completes the rest changes nothing of what is read
        read = {(r["task"], r["method"].partition("+")[0]): r["read"] for r in reversed(own)}
        tasks, selectors = (list(dict.fromkeys(x)) for x in ((r["task"] for r in own), (
            r["method"].partition("+")[0] for r in own)))
        figures.append(Figure(
            "Selectivity by task" + (f", {length} tokens" if length else ""),
            bars(tasks, {s: [read.get((t, s)) for t in tasks] for s in selectors}, "share of the context read",
                 percent=True),
            "What a sparse layer read exactly, sink and tail included"
            + ("." if budget is None else f", at a budget of {100 * budget:g} %.")))
    return figures


def _needle_figures(rows: list[dict[str, Any]]) -> list[Any]:
    """The map of depth and length, a panel a method, where more than one length was asked."""
    from sparsekv.evaluation.figures import needle_map
    from sparsekv.evaluation.report import Figure

    cells = [r for r in rows if r["metric"] == "needle"]
    lengths, depths = (sorted({r[k] for r in cells}) for k in ("length", "depth"))
    if len(lengths) < 2:
        return []
    panels: dict[str, list[list[float]]] = {}
    for r in cells:
        name, _, budget = r["case"].replace("sink_tail", "sink + tail").partition("@")
        name += (f", {100 * float(budget):g} %" if budget else "") + (" + φ" if r["method"] == "phi" else "")
        grid = panels.setdefault(name, [[float("nan")] * len(lengths) for _ in depths])
        grid[depths.index(r["depth"])][lengths.index(r["length"])] = r["value"]
    return [Figure("Needles by depth and length", needle_map(lengths, depths, panels),
                   "Share of the needles that were found. Down: how deep the number was hidden; across: tokens of the "
                   "prompt.")]


def _methods(selectors: list[str], budgets: list[float], phi: bool) -> list[Any]:
    """The lines of the table of needle and perplexity."""
    from sparsekv.core.selectors import SELECTORS
    from sparsekv.evaluation.decode import Method

    methods = [Method("full attention", "full", "dense", None, False)]
    for name in selectors:
        for budget in budgets if SELECTORS[name].needs_budget or name == "router" else (None,):
            label = SELECTOR_NAMES.get(name, name) + ("" if budget is None else f", {budget:.3g}")
            case = "sink_tail" if name == "streaming" else name if budget is None else f"{name}@{budget}"
            methods += [Method(label + (" + φ" if p else ""), case, name, budget, p)
                        for p in (False, True) if phi or not p]
    return methods


def _own_tasks(
    config: EvalConfig, asked: Checked, model: Any, tokenizer: Any, methods: list[Any],
) -> list[dict[str, Any]]:
    """Rows of needle and perplexity."""
    import torch

    from sparsekv.corpus import make_windows, read_documents
    from sparsekv.evaluation.decode import Kept, decode, prompts_digest
    from sparsekv.evaluation.needle import make_needles
    from sparsekv.evaluation.rows import origin
    from sparsekv.evaluation.suite import lengths_of
    from sparsekv.evaluation.sweep import FORMAT, FORMAT_VERSION, artifact_digest, identity

    windows = [torch.tensor(w.tokens) for w in make_windows(
        read_documents(config.corpus, split=config.split), tokenizer, length=config.context_length,
        count=config.num_documents, seed=config.seed)]
    text = [t for w in windows for t in w.tolist()]
    needles = []
    for length in lengths_of(config.needle_lengths or str(config.context_length)):
        if "needle" in asked.own:
            hay = text * (1 + length // len(text))
            needles += make_needles(tokenizer, hay, length=length, count=config.num_needles, seed=config.seed,
                                    depths=_depths(config.needle_depths))
    windows = windows if "perplexity" in asked.own else []
    said = {**identity(model), "prompts": prompts_digest(windows, needles), "continuation": config.continuation}
    artifacts = {k: a for k, a in (("router", asked.router), ("phi", asked.phi)) if a is not None}
    digests = {k: artifact_digest(a) for k, a in artifacts.items()}
    kept = Kept(Path(config.output) / OWN_CELLS, {"format": FORMAT, "format_version": FORMAT_VERSION, **said,
                                                  "origin": origin()}, config.resume, digests)
    with progress("eval", (len(windows) + len(needles)) * len(methods), "runs") as advance:
        scores = decode(model, tokenizer, methods, windows, needles, router=asked.router, phi=asked.phi,
                        continuation=config.continuation, advance=advance, kept=kept)
    said |= {"context_length": config.context_length, "corpus": config.corpus, "split": config.split,
             "seed": config.seed}
    return [row for method in methods for row in scores[method].rows(
        method, **said, **{k: v for k, v in digests.items() if method.selector == k or (k == "phi" and method.phi)})]


def _depths(text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        depths = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise SparseKVError(f"depths {text!r} not understood; expected shares of the text such as 0,0.5,1") from error
    if not all(0 <= d <= 1 for d in depths):
        raise SparseKVError(f"depths of needles are from 0 to 1, found {text!r}")
    return depths


def _budgets(text: str) -> list[float]:
    try:
        budgets = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise SparseKVError(f"budgets {text!r} not understood; expected fractions such as 0.01,0.05") from error
    if not all(0 < b <= 1 for b in budgets):
        raise SparseKVError(f"budgets are fractions of the context above 0 and up to 1, found {text!r}")
    return budgets
