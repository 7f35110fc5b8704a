"""`sparsekv eval`: what a model keeps under sparse decoding, and what it reads."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from sparsekv.core.registry import ESTIMATOR_ROWS, SELECTOR_ROWS, method_names
from sparsekv.evaluation.cells import FORMAT as CELLS
from sparsekv.evaluation.cells import collect, read_cells, write_cells
from sparsekv.evaluation.requests import FORMAT as REQUESTS
from sparsekv.evaluation.requests import (
    OWN_TASKS,
    check_names,
    head_of,
    load_requests,
    make_requests,
    save_requests,
    score_answers,
    task_names,
)
from sparsekv.runtime.config import SparseConfig
from sparsekv.util.config import MOST, ROPE_SCALING, SEEDS, check_ranges, option
from sparsekv.util.disk import TEMPORARIES, only_writer, write_text
from sparsekv.util.errors import SparseKVError, as_markdown, check_choice
from sparsekv.util.memory import check_memory
from sparsekv.util.output import OutputKind, files_below
from sparsekv.util.progress import progress

METHODS, PROMPTS, RUNNING = "Methods", "Prompts", "Running"
METRICS = ("score", "kl")
OWN = "needle,perplexity"
REPORTED = ("results.json", "table.md", "report.html")


def of_methods(value: Any = None) -> Any:
    """A field that methods have, or that the evaluation decides."""
    return field(default=value, init=False)


@dataclass(frozen=True, kw_only=True)
class EvalConfig(SparseConfig):
    """What all methods share is as in `SparseConfig`."""

    selector: None = of_methods()
    token_budget: None = of_methods()
    probes: None = of_methods()
    dense_below: int = of_methods(0)

    model: str = option(help="Frozen model: Hugging Face name, folder, .gguf file, or package:NAME.")
    output: Path = option(help="Folder for results.json, table.md and report.html.")
    tasks: str | None = option(None, help="What is measured, separated by commas: needle, perplexity (and attention "
                                          "error), ruler, ruler-offline (the tasks without downloads), babilong (QA1 "
                                          "to QA5), infinitebench, or any generation task or group of lm-eval, such as "
                                          "longbench; without it needle,perplexity, or all of --requests.")
    methods: str | None = option(None, group=METHODS, help=lambda: (
        f"Methods to measure beside full attention, separated by commas: a selector ({', '.join(method_names()[1:])}), "
        f"with {' or '.join(f'+{name}' for name in ESTIMATOR_ROWS)} what completes it, options as lfps:alpha=0.03; "
        f"without it {', '.join(r.name for r in SELECTOR_ROWS.values() if r.usual)} as far as --router has what they "
        "need, each also with +phi if --phi is given."))
    completion: str | None = option(None, group=METHODS, help=lambda: (
        f"What completes the methods that do not say: {', '.join(ESTIMATOR_ROWS)}; without it nothing."))
    candidates: float | None = option(None, group=METHODS, help=(
        "Tokens whose sketches are scored, a share of the context, of the methods with sketches that do not say; "
        "without it the selector's own."))
    budgets: str = option("0.01,0.05", group=METHODS, help="Tokens retrieved per query and KV head, as fractions of "
                                                           "the context, separated by commas.")
    accounting: str = option("retrieved", group=METHODS, help=(
        "What a budget pays for: retrieved (the retrieved tokens alone), worst_case (sink, tail and the completion's "
        "cache too) or amortised (the same, the cache spread over 256 tokens)."))

    metric: str = option("score", group=METHODS, help=(
        "score: what the tasks give; kl: beside it the distance to full attention, KL(full || method) of the next "
        "token [nats a token], every method led along the first 64 tokens of full attention's greedy answer, or of the "
        "text, one decode step a token. Dozens of prompts tell methods apart that hundreds of scores do not."))
    against: str | None = option(None, group=METHODS, help="Methods whose KL that of every other is divided by, prompt "
                                                           "by prompt, separated by commas; without it the first "
                                                           "measured.")

    lengths: str = option("2048", group=PROMPTS, help="Lengths of the prompts, separated by commas [tokens].")
    samples: int = option(10, group=PROMPTS, min=1, help="Prompts of every task and length; with --needle-depths of "
                                                         "every depth [prompts].")
    corpus: str = option("embedded", group=PROMPTS, help="Text of needle and perplexity: embedded, embedded-prose, a "
                                                         "file, a folder or glob, or a Hugging Face dataset.")
    split: str = option("heldout", group=PROMPTS, help="Part of the corpus: all, train or heldout.")
    needle_depths: str | None = option(None, group=PROMPTS, help="Depths of the needle, separated by commas: 0 is the "
                                                                 "start of the text, 1 its end; without it evenly "
                                                                 "spread ones.")
    save_requests: Path | None = option(None, group=PROMPTS, help="Write the tasks' prompts and targets to this file "
                                                                  "(.jsonl or .jsonl.gz) and stop; without it they are "
                                                                  "answered.")
    requests: Path | None = option(None, group=PROMPTS, help="Answer the prompts of such a file, which needs no "
                                                             "lm-eval; without it those of --tasks are made.")
    skip_missing: bool = option(False, group=PROMPTS, help="Leave out tasks whose data cannot be fetched here, or "
                                                           "whose packages are not installed.")
    seed: int = option(0, group=PROMPTS, help="Seed of prompts and intervals.", **SEEDS)

    resume: bool = option(False, group=RUNNING, help="Go on after an interruption: finished cells are kept.")
    overwrite: bool = option(False, group=RUNNING, help="Replace existing results.")
    rope_scaling: str | None = option(None, group=RUNNING, help=ROPE_SCALING)
    dtype: str = option("auto", group=RUNNING, help="Arithmetic: auto, float32, bfloat16 or float16.")
    device: str = option("auto", group=RUNNING, help="auto, cpu, cuda, or balanced (spread over all GPUs).")


class EvalResult(NamedTuple):
    """The measured rows and the folder they were written to."""

    rows: list[dict[str, Any]]
    table: str
    output: Path

    def summary(self) -> str:
        return f"\n{self.table}\n\nresults: {self.output}"


class Checked(NamedTuple):
    """The options of a run, checked and parsed; no tasks: all of the file of requests."""

    tasks: list[str]
    methods: list[Any]
    config: SparseConfig
    lengths: list[int]
    depths: list[float] | None
    router: Any
    phi: Any
    against: list[str]


def run_eval(config: EvalConfig) -> EvalResult:
    """Measure full attention and every method at every budget on the same prompts; write rows, table and report.

    Raises SparseKVError for unknown methods or tasks, bad budgets, and whatever model, corpus or artifacts do wrong.
    """
    from sparsekv.artifacts.hub.models import load_model

    if config.save_requests is not None:
        checked = _check(config)
        tokenizer = load_model(config.model, dtype=config.dtype, device="cpu")[1]
        saved = save_requests(config.save_requests, _requests(config, checked, tokenizer), _said(config, checked))
        return EvalResult([], f"requests of {', '.join(checked.tasks)}", saved)
    with only_writer(config.output):
        return _run(config, _check(config), Path(config.output))


def _run(config: EvalConfig, checked: Checked, output: Path) -> EvalResult:
    from sparsekv.artifacts.hub.models import cache_bytes, load_config, load_model, resolve_device
    from sparsekv.artifacts.hub.rotary import beyond_positions
    from sparsekv.evaluation.evaluator import Evaluator
    from sparsekv.evaluation.rows import as_text, with_origin
    from sparsekv.evaluation.scores import score_rows

    if config.requests is None:
        check_memory(cache_bytes(load_config(config.model), max(checked.lengths)), resolve_device(config.device),
                     f"keys and values of a prompt of {max(checked.lengths)} tokens", "use shorter --lengths")
        model, tokenizer = load_model(config.model, dtype=config.dtype, device=config.device,
                                      rope_scaling=config.rope_scaling)
        requests = _requests(config, checked, tokenizer)
    else:
        requests = [r for r in load_requests(config.requests) if not checked.tasks or any(
            r.task == t or r.task.startswith(f"{t}_") for t in checked.tasks)]
        if not requests:
            raise SparseKVError(f"{str(config.requests)!r} has no requests of {', '.join(checked.tasks)}")
        model, tokenizer = load_model(config.model, dtype=config.dtype, device=config.device,
                                      rope_scaling=config.rope_scaling)
    for artifact in (checked.router, checked.phi):
        if artifact is not None:
            artifact.check(model)
    beyond = beyond_positions(model.config, max(r.length + r.answer_tokens for r in requests))
    if beyond is not None:
        print(beyond, file=sys.stderr)
    kind = _kind(output)
    if config.overwrite and _own(output, "cells*.jsonl", CELLS):
        requests_there = _own(output, "*.jsonl*", REQUESTS)
        kind.prepare(output, True, keep=requests_there)
    evaluator = Evaluator(model, tokenizer, requests, output=output, router=checked.router, phi=checked.phi,
                          accounting=config.accounting, resume=config.resume, config=checked.config,
                          kl="steps" if config.metric == "kl" else None,
                          header={"corpus": config.corpus, "split": config.split} if config.requests is None else None)
    with progress("eval", len(requests) * len(checked.methods), "answers") as advance:
        evaluator.run(checked.methods, advance)
    if any(r.metric == "lm-eval" for r in requests):
        _rescore(output, requests)
    rows = with_origin(score_rows(collect(output), seed=config.seed, against=checked.against))
    write_text(output / "results.json", as_text(rows))
    made = EvalResult(rows, _write_report(output, rows), output)
    kind.done(output)
    return made


def _requests(config: EvalConfig, checked: Checked, tokenizer: Any) -> list[Any]:
    """Requests of the tasks, sized by this model's tokenizer."""
    from sparsekv.evaluation.own_tasks import own_requests

    made = own_requests(checked.tasks, tokenizer, corpus=config.corpus, split=config.split, lengths=checked.lengths,
                        samples=config.samples, depths=checked.depths, seed=config.seed)
    public = [t for t in checked.tasks if t not in OWN_TASKS]
    if public:
        with tempfile.TemporaryDirectory() as folder, progress("requests", len(public), "tasks") as advance:
            tokenizer.save_pretrained(folder)
            made += make_requests(public, folder, checked.lengths, config.samples, seed=config.seed,
                                  skip_missing=config.skip_missing, advance=advance)
    return made


def _said(config: EvalConfig, checked: Checked) -> dict[str, Any]:
    """How requests were made, for the head of their file."""
    return {"tasks": checked.tasks, "lengths": checked.lengths, "samples": config.samples, "seed": config.seed,
            "model": config.model, "corpus": config.corpus, "split": config.split}


def _rescore(folder: Path, requests: list[Any]) -> None:
    """Score the answers that only lm-eval can score; where it is not installed their scores stay empty."""
    import importlib.util

    if importlib.util.find_spec("lm_eval") is None:
        return
    known = {(r.case, r.index): r for r in requests}
    for path in sorted(folder.glob("cells*.jsonl")):
        header, cells = read_cells(path)
        for cell in cells:
            if None in cell.get("scores", ()):
                cell["scores"] = score_answers([known[cell["case"], i] for i in cell["indices"]], cell["answers"])
        write_cells(path, header, cells)


def _write_report(output: Path, rows: list[dict[str, Any]]) -> str:
    """table.md, report.html and its figures; returns what stands in table.md."""
    from sparsekv.evaluation.report import write_pngs, write_report
    from sparsekv.evaluation.result_figures import result_figures
    from sparsekv.evaluation.rows import origin_line
    from sparsekv.evaluation.tables import methods_table, report_tables

    tables, details = report_tables(rows)
    text = [f"{t.title}\n\n{t.text()}" for t in (*tables, *details)]
    unscored = sorted({r["task"] for r in rows if r["metric"] == "score" and r["value"] is None
                       and not r.get("infeasible")})
    if unscored:
        text.append(f"No scores yet of {', '.join(unscored)}: lm-eval scores them and is not installed here. Run `pip "
                    "install 'sparsekv[eval]'` and the same command with --resume; no answer is lost.")
    write_text(output / "table.md", as_markdown("\n\n".join(text) + "\n"))
    figures = result_figures(rows)
    write_report(output / "report.html", "sparsekv eval", origin_line(), tables, figures,
                 [*details, methods_table(rows)])
    write_pngs(output, figures)
    return "\n\n".join(text)


def _check(config: EvalConfig) -> Checked:
    """Refuse what cannot work before a model is loaded."""
    check_ranges(config)
    from sparsekv.capture.corpus import check_corpus
    from sparsekv.core.regions import ACCOUNTINGS
    from sparsekv.evaluation.methods import check_methods, parse_methods, usual_methods
    from sparsekv.evaluation.own_tasks import check_prompts
    from sparsekv.runtime.decoding import load_artifacts
    from sparsekv.util.disk import check_place

    tasks = task_names(config.tasks if config.tasks is not None else OWN if config.requests is None else "")
    if not tasks and config.requests is None:
        raise SparseKVError(f"no tasks in {config.tasks!r}: expected needle, perplexity, ruler or tasks of lm-eval")
    public = [t for t in tasks if t not in OWN_TASKS]
    if public and config.requests is None:
        check_names(public)
    lengths = numbers(config.lengths, int, lambda n: 128 <= n <= MOST, "lengths",
                      f"numbers of tokens from 128 to {MOST}, as 4096,8192")
    if config.requests is None:
        check_prompts(lengths, config.samples)
    depths = None if config.needle_depths is None else numbers(
        config.needle_depths, float, lambda x: 0 <= x <= 1, "depths of needles", "shares of the text from 0 to 1")
    budgets = numbers(config.budgets, float, lambda b: 0 < b <= 1, "budgets",
                      "fractions such as 0.01,0.05, above 0 and up to 1")
    check_choice("accounting", config.accounting, ACCOUNTINGS)
    names = _names(config.methods)
    router, phi = load_artifacts(config.artifacts, config.router, config.phi)
    if config.methods is None:
        sketches = router is not None and router.config.sketch_bytes
        there = {"router": router is not None, "sketches": sketches, "phi": phi is not None}
        names = usual_methods([kind for kind, found in there.items() if found])
    if config.resume and config.overwrite:
        raise SparseKVError("--resume goes on with what --output holds and --overwrite begins anew; give one of them")
    shared = SparseConfig.of(config)
    methods = parse_methods(["full", *names], budgets, shared)
    for kind, given in (("router", router), ("phi", phi)):
        needs = next((m.name for m in methods if kind in m.artifacts), None)
        if needs and given is None:
            raise SparseKVError(f"method {needs!r} needs a {kind} artifact; add --{kind}")
    shared = replace(shared, artifacts=None, router=None, phi=None, completion=None, candidates=None)
    check_methods(methods, router, shared)
    check_choice("metric", config.metric, METRICS)
    against = _names(config.against)
    if unknown := [n for n in against if n not in {m.name for m in methods[1:]}]:
        raise SparseKVError(f"--against {', '.join(unknown)} is not measured; expected some of "
                            f"{', '.join(dict.fromkeys(m.name for m in methods[1:]))}")
    if config.requests is None and set(tasks) & set(OWN_TASKS):
        check_corpus(config.corpus, split=config.split)
    if config.save_requests is not None:
        check_place(config.save_requests)
    output = Path(config.output)
    goes_on = config.resume and (bool(_own(output, "cells*.jsonl", CELLS)) or not any(
        (output / name).exists() for name in REPORTED))
    only_requests = set(files_below(output)) <= set(_own(output, "*.jsonl*", REQUESTS))
    if config.save_requests is None and (output.is_file() or not (goes_on or only_requests)):
        _kind(output).found(output, config.overwrite or config.resume, ", or --resume to go on after an interruption")
    return Checked(tasks, methods, shared, lengths, depths, router, phi, against)


def _names(text: str | None) -> list[str]:
    """Methods, separated by commas."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def _kind(output: Path) -> OutputKind:
    """Results of sparsekv eval in a folder: cells and requests are known by their first line."""
    own = (*_own(output, "cells*.jsonl", CELLS), *_own(output, "*.jsonl*", REQUESTS))
    return OutputKind("results of sparsekv eval", (*own, TEMPORARIES, "cells*.new", *REPORTED, "figures/*.png"),
                      lambda folder: bool(_own(folder, "cells*.jsonl", CELLS)))


def _own(folder: Path, pattern: str, written: str) -> list[str]:
    """Names of the files of this format in a folder."""
    def header(path: Path) -> Any:
        try:
            return json.loads(head_of(path))
        except (OSError, EOFError, ValueError, RecursionError):
            return None

    return [path.name for path in sorted(folder.glob(pattern))
            if isinstance(found := header(path), dict) and found.get("format") == written]


def numbers(text: str, kind: Callable[[str], Any], good: Callable[[Any], bool], what: str, expected: str) -> list[Any]:
    """Numbers separated by commas, all of them good. Raises SparseKVError."""
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(map(good, found)):
        raise SparseKVError(f"{what} {text!r} not understood; expected {expected}")
    return found
