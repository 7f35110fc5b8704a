"""From an evaluation's cells to result rows with confidence intervals, paired by sample where methods are compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from sparsekv.core.registry import ESTIMATOR_ROWS, rivals, row_of
from sparsekv.evaluation.intervals import bootstrap
from sparsekv.evaluation.kl_rows import kl_rows
from sparsekv.evaluation.methods import plain
from sparsekv.evaluation.requests import OWN_TASKS
from sparsekv.evaluation.rows import row

BY_PROMPT = ("scores", "answers", "losses", "likeliest", "errors", "depths", "kl", "kl_same")
"""What a cell has of every prompt."""


def merge_cells(cells: Sequence[dict[str, Any]]) -> dict[tuple[str, str, float | None], dict[str, Any]]:
    """One entry a (case, method, budget): parts of one task joined, repeated samples counted once."""
    merged: dict[tuple[str, str, float | None], dict[str, Any]] = {}
    for cell in cells:
        entry = merged.setdefault((cell["case"], cell["method"], cell["budget"]),
                                  {**{name: {} for name in BY_PROMPT}, "parts": {}, "bytes": {}, "infeasible": False,
                                   "seconds": 0.0, "commits": set(), "origin": {**cell.get("origin", {}),
                                              **{k: cell[k] for k in ("router", "phi") if k in cell}}})
        entry["commits"].add(cell.get("origin", {}).get("commit"))
        if cell.get("infeasible"):
            entry["infeasible"] = True
            continue
        for name in BY_PROMPT:
            found = zip(cell["indices"], cell.get(name, ()), strict=False)
            entry[name] |= {i: x for i, x in found if x is not None}
        # results of versions that kept features count them too
        cache = (cell.get("cache_tokens", 0.0) + cell.get("feature_tokens", 0.0)) / cell["tokens"]
        entry["parts"][cell["indices"][0]] = (cell["read"], cell["read"] + cache, cell["tokens"])
        if "bytes" in cell:
            sparse = cell.get("sparse_layers", 1.0)
            entry["bytes"][cell["indices"][0]] = cell["bytes"], 1 - sparse + sparse * cell["bytes"]
        entry["seconds"] += cell["seconds"]
    return merged


def score_rows(
    cells: Sequence[dict[str, Any]], *, seed: int = 0, against: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Rows by metric; against: methods whose KL that of the others is divided by.

    - score (0 to 100): of every case, and of `ruler@L` (`babilong@L`), the mean of a length's tasks where all are in.
    - of those means also difference: points above the method named by `against`, on the same samples. Where full
      attention's answers are there, agreement: how much of its answer stands before the first difference; and
      same_answers: answers that are equal as far as both go [points of 100].
    - of texts that were continued: perplexity, perplexity_ratio (to full attention on the same texts), rel_err,
      selectivity, and same_tokens: tokens of 100 at which the likeliest is full attention's, the text before it given.
    - of needles also needle: the share found at a `depth`.
    - where the distance to full attention was measured, kl, kl_same and kl_ratio (`kl_rows`).

    A row has its task, length, budget and seed, its interval (`low`, `high`: bootstrap, 95 %), number of samples,
    `read`: share of the context read exactly, `read_worst`: the same with the completion's cache fetched for one token
    and the features kept beside what is retrieved, `bytes_share`: all that a step of a sparse layer reads over the
    bytes of its keys and values, and `bytes_share_model`: the same of all layers, the dense ones included; machine,
    command, commit (every one where cells are of several), hashes of weights, requests and artifacts say how to repeat
    it. Infeasible cells have no value.
    """
    merged = merge_cells(cells)
    tasks: dict[str, dict[str, None]] = {}
    for case, _, _ in merged:
        tasks.setdefault(mean_case(case), {})[case] = None
    rows = []
    names = list(dict.fromkeys(method for _, method, _ in merged))
    for (case, method, budget), entry in merged.items():
        entry["agreement"] = _agreement(entry, merged.get((case, "full", None)))
        made = _row(case, method, budget, [entry], seed)
        full = merged.get((case, "full", None))
        rows += _continued(made, entry, full, seed) if entry["losses"] else [made, *_depths(made, entry)]
    for mean, cases in tasks.items():
        if not mean or len(cases) < 2:
            continue
        for method, budget in dict.fromkeys((m, b) for _, m, b in merged):
            entries = [merged.get((case, method, budget)) for case in cases]
            if all(e is not None and (e["scores"] or e["infeasible"]) for e in entries):
                rows.append(_row(mean, method, budget, entries, seed))
                scored = rows[-1]
                agreed = [e["agreement"] for e in entries if e is not None]
                compared = [({"metric": "agreement"}, agreed),
                            ({"metric": "same_answers"}, [[100.0 * (x == 100.0) for x in group] for group in agreed])]
                compared += [({"metric": "difference", "against": rival},
                              [_differences(merged, case, (method, budget), rival) for case in cases])
                             for rival in _rivals(method, names)]
                for what, groups in compared:
                    if all(groups):
                        value, interval = _points(groups, seed)
                        rows.append({**scored, **what, "value": value, **interval})
    return rows + kl_rows(merged, tasks, against, seed)


def _continued(
    made: dict[str, Any], entry: dict[str, Any], full: dict[str, Any] | None, seed: int,
) -> list[dict[str, Any]]:
    """The rows of texts that were continued; the last, where full attention continued the same, is paired with it."""
    rows = []
    metrics: list[tuple[str, str, list[float], Callable[[float], float]]] = [
        ("rel_err", "relative L2", list(entry["errors"].values()), float),
        ("perplexity", "per token", list(entry["losses"].values()), math.exp),
        ("selectivity", "share of the context", [read for read, *_ in entry["parts"].values()], float)]
    known = {} if full is None or full is entry else full["losses"]
    more = [loss - known[i] for i, loss in entry["losses"].items() if i in known]
    if more:
        metrics.append(("perplexity_ratio", "times full attention's", more, math.exp))
        theirs = full["likeliest"] if full is not None else {}
        same = [100 * _mean([float(x == y) for x, y in zip(mine, theirs[i], strict=True)])
                for i, mine in entry["likeliest"].items() if i in theirs]
        if same:
            metrics.append(("same_tokens", "of 100 tokens", same, float))
    for metric, unit, samples, scale in metrics:
        low, high = bootstrap([samples], seed=seed)
        rows.append({**made, "metric": metric, "value": scale(_mean(samples)), "unit": unit,
                     "low": round(scale(low), 5), "high": round(scale(high), 5), "samples": len(samples)})
    return rows


def _depths(made: dict[str, Any], entry: dict[str, Any]) -> list[dict[str, Any]]:
    """A row a depth at which needles lay."""
    found: dict[float, list[float]] = {}
    for index, depth in entry["depths"].items():
        found.setdefault(depth, []).append(entry["scores"][index])
    return [{**{k: v for k, v in made.items() if k not in ("low", "high")}, "metric": "needle", "value": _mean(hits),
             "unit": "share", "depth": depth, "samples": len(hits)} for depth, hits in found.items()]


def _rivals(method: str, names: Sequence[str]) -> list[str]:
    """Whom a method is compared with: full attention, the same selector uncompleted, completed otherwise, and untrained
    (`sketch:untrained`); this project's own + φ with the systems of Lane B."""
    selector, _, completion = method.partition("+")
    own, estimator = row_of(selector.partition(":")[0]), ESTIMATOR_ROWS.get(completion)
    whole = own is not None and own.lane == "own" and estimator is not None and estimator.usual
    systems = rivals() if whole else ()
    alike = (f"{selector.partition(':')[0]}:untrained", "full")
    return [n for n in names if n != method and (n in alike or (completion and n.partition("+")[0] == selector)
                                                 or plain(n) in systems)]


def _differences(merged: dict[Any, Any], case: str, one: tuple[str, float | None], rival: str) -> list[float]:
    """Points a sample between two methods at one budget (full attention and streaming have none)."""
    mine = merged.get((case, *one))
    other = merged.get((case, rival, None)) or merged.get((case, rival, one[1]))
    if mine is None or other is None:
        return []
    return [100 * (score - other["scores"][i]) for i, score in mine["scores"].items() if i in other["scores"]]


def _agreement(entry: dict[str, Any], full: dict[str, Any] | None) -> list[float]:
    """How much of full attention's answer stands before the first character that differs, 0 to 100 a sample. Answers
    that were cut because their score was certain are compared as far as both go. Empty without full attention."""
    if full is None or full is entry:
        return []
    found = []
    for index, answer in entry["answers"].items():
        if (right := full["answers"].get(index)) is not None:
            both = min(len(answer), len(right))
            same = next((i for i in range(both) if answer[i] != right[i]), both)
            found.append(100.0 if same == both and (both or answer == right) else 100.0 * same / max(len(right), 1))
    return found


def mean_case(case: str) -> str:
    """The mean that the case of a task enters; empty for this project's own and for tasks without a length."""
    task, _, length = case.partition("@")
    if not length or task.split("_")[0] in OWN_TASKS:
        return ""
    return f"{'babilong' if task.startswith('babilong') else 'ruler'}@{length}"


def is_mean(case: str) -> bool:
    """Return whether a case is the mean of a length's tasks."""
    return case.startswith(("ruler@", "babilong@"))


def _row(case: str, method: str, budget: float | None, entries: Sequence[Any], seed: int) -> dict[str, Any]:
    task, _, length = case.partition("@")
    extra: dict[str, Any] = {"task": task, "length": int(length) if length else None, "budget": budget, "seed": seed,
                             **entries[0]["origin"]}
    commits = sorted({c for e in entries for c in e["commits"] if c})
    if len(commits) > 1:
        extra["commit"] = " and ".join(commits)
    if any(e["infeasible"] or not (e["scores"] or e["losses"]) for e in entries):
        infeasible = any(e["infeasible"] for e in entries)
        return row(case, method, "score", None, "points of 100", **extra, infeasible=infeasible)
    value: float | None = None
    interval: dict[str, Any] = {}
    if all(e["scores"] for e in entries):
        value, interval = _points([[100 * s for s in e["scores"].values()] for e in entries], seed)
    read, worst, tokens = map(_mean, zip(*(part for e in entries for part in e["parts"].values()), strict=True))
    shares = list(zip(*(share for e in entries for share in e["bytes"].values()), strict=True))
    bytes_share = {name: round(_mean(found), 4) for name, found in zip(
        ("bytes_share", "bytes_share_model"), shares, strict=False)}
    return row(case, method, "score", value, "points of 100", **extra, **interval, read=round(read, 4),
               read_worst=round(min(worst, 1.0), 4), **bytes_share, context_tokens=round(tokens),
               seconds=round(sum(e["seconds"] for e in entries), 2))


def _points(groups: Sequence[Sequence[float]], seed: int) -> tuple[float, dict[str, Any]]:
    """Mean of the groups' means, and its interval with the number of samples, as a row has them."""
    low, high = bootstrap(groups, seed=seed)
    return round(_mean([_mean(g) for g in groups]), 2), {
        "low": round(low, 2), "high": round(high, 2), "samples": sum(map(len, groups))}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
