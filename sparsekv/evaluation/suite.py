"""The part of `sparsekv eval` that runs public tasks: requests made, answered, scored, tabulated."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from sparsekv.errors import SparseKVError
from sparsekv.evaluation.requests import Request, load_requests, make_requests, save_requests, score_answers
from sparsekv.evaluation.sweep import Sweep, SweepOptions, collect, parse_methods, read_cells, write_cells
from sparsekv.evaluation.tables import GAINS, LANE_A, LANE_B, gains, is_mean, score_rows, table
from sparsekv.progress import progress


def build_requests(config: Any, tasks: list[str], tokenizer: Any) -> list[Request]:
    """Requests of the tasks at the asked lengths, sized by this model's tokenizer."""
    with tempfile.TemporaryDirectory() as folder, progress("requests", len(tasks), "tasks") as advance:
        tokenizer.save_pretrained(folder)
        return make_requests(tasks, folder, lengths_of(config.lengths), config.samples, seed=config.seed,
                             skip_missing=config.skip_missing, advance=advance)


def write_requests(config: Any, tasks: list[str], tokenizer: Any) -> Path:
    """For `--save-requests`: make them, write them, answer nothing."""
    from importlib.metadata import version

    requests = build_requests(config, tasks, tokenizer)
    return save_requests(config.save_requests, requests, {
        "tasks": tasks, "lengths": lengths_of(config.lengths), "samples": config.samples, "seed": config.seed,
        "model": config.model, "lm_eval": version("lm-eval")})


def run_suite(config: Any, tasks: list[str], model: Any, tokenizer: Any, *, router: Any, phi: Any,
              methods: list[str], budgets: list[float]) -> tuple[list[dict[str, Any]], bool]:
    """Answer the requests by every method; rows of all finished cells, and whether the sweep is complete."""
    requests = build_requests(config, tasks, tokenizer) if config.requests is None else load_requests(config.requests)
    if config.requests is not None and tasks:
        requests = [r for r in requests if any(r.task == t or r.task.startswith(f"{t}_") for t in tasks)]
        if not requests:
            raise SparseKVError(f"{str(config.requests)!r} has no requests of {', '.join(tasks)}")
    device = model.device
    router, phi = (None if a is None else a.to(device) for a in (router, phi))
    sweep = Sweep(model, tokenizer, requests, router=router, phi=phi, output=Path(config.output), resume=config.resume,
                  options=SweepOptions(accounting=config.accounting, batch_tokens=config.batch_tokens,
                                       time_limit=config.time_limit, max_new_tokens=config.max_new_tokens,
                                       seed=config.seed))
    chosen = parse_methods(methods, budgets)
    with progress("tasks", len(list(sweep.batches())) * len(chosen), "methods") as advance:
        complete = sweep.run(chosen, advance)
    unscored = [r for r in requests if r.metric == "lm-eval"]
    if unscored:
        rescore(Path(config.output), requests)
    return score_rows(collect(Path(config.output)), seed=config.seed), complete


def rescore(folder: Path, requests: list[Request]) -> bool:
    """Score the answers that only lm-eval can score; False where lm-eval is not installed (scores stay empty)."""
    import importlib.util

    if importlib.util.find_spec("lm_eval") is None:
        return False
    known = {(r.case, r.index): r for r in requests}
    for path in sorted(folder.glob("cells*.jsonl")):
        header, cells = read_cells(path)
        for cell in cells:
            if None in cell.get("scores", ()):
                asked = [known[cell["case"], i] for i in cell["indices"]]
                cell["scores"] = score_answers(asked, cell["answers"])
        write_cells(path, header, cells)
    return True


def suite_tables(rows: list[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
    """For the report: Lane A and Lane B of every length; then each task."""
    from sparsekv.evaluation.report import Table

    cases = list(dict.fromkeys(r["case"] for r in rows))
    means = [c for c in cases if is_mean(c)] or cases
    note = ("Points of 100 ± half the 95 % bootstrap interval, by budget: share of the context a query may retrieve. "
            "–: the budget cannot pay for what is always read.")
    made = []
    for case in means:
        for title, names in (("Lane A: aggregation at a fixed selector", LANE_A), ("Lane B: systems", LANE_B)):
            header, lines = table(rows, case, names)
            if len(lines) > 1:
                made.append(Table(f"{case}. {title}", header, lines, note))
        header, lines = gains(rows, case)
        if lines:
            made.append(Table(f"{case}. What completion adds", header, lines, GAINS))
    every = list(dict.fromkeys((*LANE_A, *LANE_B)))
    return made, [Table(c, *table(rows, c, every), note) for c in cases if c not in means]


def lengths_of(text: str) -> list[int]:
    """`4096,8192` -> numbers of tokens. Raises SparseKVError."""
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise SparseKVError(f"lengths {text!r} not understood; expected numbers of tokens such as 4096,8192") from error
    if min(lengths) < 1:
        raise SparseKVError(f"lengths are numbers of tokens from 1 on, found {text!r}")
    return lengths
