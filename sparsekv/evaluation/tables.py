"""From the cells of a sweep to result rows with confidence intervals, and to tables. No figure is ever typed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparsekv.evaluation.rows import row

LANE_A = ("topk", "topk+centroid", "topk+moments", "topk+sampling", "topk+phi", "router", "router+phi")
LANE_B = ("streaming", "snapkv", "token_select", "lfps", "quest", "magicpig", "router", "router+phi", "topk",
          "topk+phi")
BASELINES = LANE_B[:6]
RESAMPLES = 2000
GAINS = "Points above the same selector without completion, paired by sample: ± half the 95 % bootstrap interval."


def bootstrap(groups: Sequence[Sequence[float]], *, seed: int = 0, level: float = 0.95) -> tuple[float, float]:
    """Percentile interval of the mean of the groups' means, each group resampled on its own."""
    import numpy as np

    rng = np.random.default_rng(seed)
    means = np.zeros(RESAMPLES)
    for scores in groups:
        x = np.asarray(scores, dtype=float)
        means += x[rng.integers(0, len(x), (RESAMPLES, len(x)))].mean(1) / len(groups)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def merge_cells(cells: Sequence[dict[str, Any]]) -> dict[tuple[str, str, float | None], dict[str, Any]]:
    """One entry a (case, method, budget): parts of one task joined, repeated samples counted once."""
    merged: dict[tuple[str, str, float | None], dict[str, Any]] = {}
    for cell in cells:
        entry = merged.setdefault((cell["case"], cell["method"], cell["budget"]),
                                  {"scores": {}, "answers": {}, "infeasible": False, "read": [], "seconds": 0.0,
                                   "tokens": [],
                                   "origin": {**cell.get("origin", {}),
                                              **{k: cell[k] for k in ("router", "phi") if k in cell}}})
        if cell.get("infeasible"):
            entry["infeasible"] = True
            continue
        entry["scores"] |= {i: s for i, s in zip(cell["indices"], cell["scores"], strict=True) if s is not None}
        entry["answers"] |= dict(zip(cell["indices"], cell.get("answers", ()), strict=False))
        entry["read"].append(cell["read"])
        entry["tokens"].append(cell["tokens"])
        entry["seconds"] += cell["seconds"]
        entry["cache_tokens"] = cell.get("cache_tokens", 0.0)
    return merged


def score_rows(cells: Sequence[dict[str, Any]], *, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of metric `score` (0 to 100): every case, and `ruler@L` (`babilong@L`), the mean of a length's tasks where
    all are there. For those means also rows of metric `agreement`, where full attention's answers are there to compare
    with, and of metric `difference`: points above the method named by `against`, on the same samples.

    A row has its task, length, budget and seed, its interval (`low`, `high`: bootstrap, 95 %), number of samples,
    `read`: share of the context read exactly, and `read_worst`: the same with the completion's cache fetched for one
    token; machine, command, commit, hashes of weights, requests and artifacts say how to repeat it. Infeasible cells
    have no value.
    """
    merged = merge_cells(cells)
    tasks: dict[str, dict[str, None]] = {}
    for case, _, _ in merged:
        tasks.setdefault(mean_case(case), {})[case] = None
    rows = []
    names = list(dict.fromkeys(method for _, method, _ in merged))
    for (case, method, budget), entry in merged.items():
        entry["agreement"] = _agreement(entry, merged.get((case, "full", None)))
        rows.append(_row(case, method, budget, [entry], seed))
    for mean, cases in tasks.items():
        if not mean or len(cases) < 2:
            continue
        for method, budget in dict.fromkeys((m, b) for _, m, b in merged):
            entries = [merged.get((case, method, budget)) for case in cases]
            if all(e is not None and (e["scores"] or e["infeasible"]) for e in entries):
                rows.append(_row(mean, method, budget, entries, seed))
                scored = rows[-1]
                compared = [({"metric": "agreement"}, [e["agreement"] for e in entries if e is not None])]
                compared += [({"metric": "difference", "against": rival},
                              [_differences(merged, case, (method, budget), rival) for case in cases])
                             for rival in _rivals(method, names)]
                for what, groups in compared:
                    if all(groups):
                        value, interval = _points(groups, seed)
                        rows.append({**scored, **what, "value": value, **interval})
    return rows


def plain(method: str) -> str:
    """A method's name without its selector's options: `lfps:alpha=0.03` -> `lfps`."""
    words, plus, completion = method.partition("+")
    return words.partition(":")[0] + plus + completion


def _rivals(method: str, names: Sequence[str]) -> list[str]:
    """Whom a method is compared with: the same selector uncompleted, and router + φ with full attention and Lane B."""
    selector, _, completion = method.partition("+")
    systems = ("full", *BASELINES) if plain(method) == "router+phi" else ()
    return [n for n in names if (completion and n == selector) or plain(n) in systems]


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
    """The mean that the case of a task enters; empty for tasks without a length."""
    task, _, length = case.partition("@")
    return f"{'babilong' if task.startswith('babilong') else 'ruler'}@{length}" if length else ""


def is_mean(case: str) -> bool:
    """Whether a case is the mean of a length's tasks."""
    return case.startswith(("ruler@", "babilong@"))


def _row(case: str, method: str, budget: float | None, entries: Sequence[Any], seed: int) -> dict[str, Any]:
    task, _, length = case.partition("@")
    extra: dict[str, Any] = {"task": task, "length": int(length) if length else None, "budget": budget, "seed": seed,
                             **entries[0]["origin"]}
    if any(e["infeasible"] or not e["scores"] for e in entries):
        infeasible = any(e["infeasible"] for e in entries)
        return row(case, method, "score", None, "points of 100", **extra, infeasible=infeasible)
    groups = [[100 * s for s in e["scores"].values()] for e in entries]
    value, interval = _points(groups, seed)
    read = _mean([x for e in entries for x in e["read"]])
    worst = _mean([r + e["cache_tokens"] / t for e in entries for r, t in zip(e["read"], e["tokens"], strict=True)])
    tokens = _mean([t for e in entries for t in e["tokens"]])
    return row(case, method, "score", value, "points of 100", **extra, **interval, read=round(read, 4),
               read_worst=round(min(worst, 1.0), 4), context_tokens=round(tokens),
               seconds=round(sum(e["seconds"] for e in entries), 2))


def _points(groups: Sequence[Sequence[float]], seed: int) -> tuple[float, dict[str, Any]]:
    """Mean of the groups' means, and its interval with the number of samples, as a row has them."""
    low, high = bootstrap(groups, seed=seed)
    return round(_mean([_mean(g) for g in groups]), 2), {
        "low": round(low, 2), "high": round(high, 2), "samples": sum(map(len, groups))}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def table(
    rows: Sequence[dict[str, Any]], case: str, methods: Sequence[str], metric: str = "score",
) -> tuple[list[str], list[list[str]]]:
    """Header and lines of one case: a line a method, a column a budget; `62.1 ± 3.9` is half the interval's width.

    "–": the budget cannot pay for what is always read, or nothing was measured.
    """
    known = {(r["method"], r["budget"]): r for r in rows if r["case"] == case and r["metric"] == metric}
    budgets = sorted({b for _, b in known if b is not None})
    lines = []
    for method in in_order({m for m, _ in known}, ("full", *methods)):
        free = known.get((method, None))
        lines.append([method, *(_cell(free or known.get((method, b))) for b in budgets)])
    return ["method", *(_budget(b) for b in budgets)], lines


def in_order(found: set[str], wanted: Sequence[str]) -> list[str]:
    """The methods found that are wanted, in that order; those with options after the one without."""
    return [m for name in wanted for m in sorted(found) if plain(m) == name]


def _budget(budget: float) -> str:
    return f"{budget:.3g}" if budget >= 1 else f"{100 * budget:g} %"


def _cell(found: dict[str, Any] | None, sign: str = "") -> str:
    if found is None or found["value"] is None:
        return "–"
    return f"{found['value']:{sign}.1f} ± {(found['high'] - found['low']) / 2:.1f}"


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """The same as Markdown."""
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *lines))


def gains(rows: Sequence[dict[str, Any]], case: str) -> tuple[list[str], list[list[str]]]:
    """What completion adds to a selector, paired by sample: header and lines, `+1.6 ± 1.2`."""
    known = {(r["method"], r["budget"]): r for r in rows if r["case"] == case and r["metric"] == "difference"
             and r["method"].startswith(f"{r['against']}+")}
    budgets = sorted({b for _, b in known if b is not None})
    methods = dict.fromkeys(m for m, _ in known)
    shown = [[m, *(_cell(known.get((m, b)), "+") for b in budgets)] for m in methods]
    return ["gain of", *(_budget(b) for b in budgets)], shown


def targets(rows: Sequence[dict[str, Any]], case: str) -> tuple[list[str], list[list[str]]]:
    """What the project set out to reach, and whether these rows do: header and lines. A target is judged by the mean
    difference; `-0.5 ± 1.0` is half the width of the interval of the difference, paired by sample."""
    known = {(r["method"], r["against"], r["budget"]): r for r in rows
             if r["case"] == case and r["metric"] == "difference"}
    budgets = sorted({b for _, _, b in known if b is not None})
    lines = []

    def line(what: str, method: str, rival: str, budget: float, needed: float) -> None:
        found = known.get((method, rival, budget))
        if found is not None:
            lines.append([f"{what} at {_budget(budget)}", _cell(found, "+"),
                          "yes" if found["value"] >= needed else "no"])

    for b in budgets:
        line("topk+phi is not below topk", "topk+phi", "topk", b, 0.0)
    line("router+phi is within 2 points of full attention", "router+phi", "full", 0.05, -2.0)
    for name in in_order({rival for _, rival, _ in known}, BASELINES):
        for b in budgets:
            line(f"router+phi is above {name}", "router+phi", name, b, 1e-9)
    return ["target", "difference", "reached"], lines


def lanes_markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Lane A (how attention is completed, selector fixed) and Lane B (systems) of every length, then each task."""
    parts = []
    cases = list(dict.fromkeys(r["case"] for r in rows if r["metric"] == "score"))
    means = [c for c in cases if is_mean(c)] or cases
    every = list(dict.fromkeys((*LANE_A, *LANE_B)))
    for case in means:
        parts.append(f"## {case}")
        parts += ["### Lane A: aggregation at a fixed selector", markdown(*table(rows, case, LANE_A))]
        for title, note, (header, lines) in (
                ("What completion adds", GAINS, gains(rows, case)),
                ("Lane B: systems", "", table(rows, case, LANE_B)),
                ("Targets", "", targets(rows, case))):
            if lines:
                parts += [f"### {title}", *([note] if note else []), markdown(header, lines)]
        header, lines = table(rows, case, every, "agreement")
        if lines:
            parts += ["### Agreement with full attention",
                      "How much of full attention's own answer is given before the first character that differs, "
                      "points of 100: what a method changes, whether or not the model can do the task.",
                      markdown(header, lines)]
    single = [c for c in cases if c not in means]
    if single:
        parts.append("## Each task")
        for case in single:
            parts += [f"### {case}", markdown(*table(rows, case, every))]
    return "\n\n".join(parts) + "\n"
