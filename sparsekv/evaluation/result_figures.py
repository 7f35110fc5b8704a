"""The figures of a report, from result rows: score by budget, selectivity by task, the map of needles."""

from __future__ import annotations

from typing import Any

from sparsekv.evaluation import figures as draw
from sparsekv.evaluation.methods import label
from sparsekv.evaluation.report import Figure
from sparsekv.evaluation.requests import OWN_TASKS
from sparsekv.evaluation.scores import is_mean, mean_case
from sparsekv.evaluation.tables import in_order, lanes

FEW = 6
LOOK = ("grey: full attention. The colour says what is read, the line what completes it: dashed nothing, solid φ; "
        "dotted: other options of its selector.")


def result_figures(rows: list[dict[str, Any]]) -> list[Figure]:
    """Score by budget of every mean and of what enters none, one figure a lane where there are many methods; and the
    others where there is data for them."""
    scored = [r for r in rows if r["metric"] == "score" and r["task"] not in OWN_TASKS]
    cases = list(dict.fromkeys(r["case"] for r in scored))
    made = []
    for case in cases:
        if not is_mean(case) and mean_case(case) in cases:
            continue
        methods = {r["method"] for r in scored if r["case"] == case} - {"full"}
        parts = {"": sorted(methods)} if len(methods) <= FEW else {
            f", {title.partition(':')[0].replace('Lane', 'lane')}": in_order(methods, names)
            for title, names in lanes(rows).items()}
        for part, names in parts.items():
            if not names:
                continue
            made.append(Figure(f"{case}: score by budget{part}", draw.score_by_budget(rows, case, ["full", *names]),
                               f"Mean score and its 95 % bootstrap interval; {LOOK}"))
            if any(r.get("bytes_share") is not None for r in scored if r["case"] == case and r["method"] in names):
                made.append(Figure(f"{case}: score by bytes{part}", draw.score_by_bytes(rows, case, ["full", *names]),
                                   "Mean score over all that a step reads, index and completion included, a mark a "
                                   f"budget; {LOOK}"))
    return made + _selectivity(scored) + _needles(rows)


def _selectivity(scored: list[dict[str, Any]]) -> list[Figure]:
    """What every selector read of each task, a figure a length, at the middle one of the budgets."""
    known = [r for r in scored if r.get("read") is not None and r["method"] != "full" and not is_mean(r["case"])]
    budgets = sorted({r["budget"] for r in known if r["budget"] is not None}) or [None]
    budget = budgets[len(budgets) // 2]
    made = []
    for length in dict.fromkeys(r["length"] for r in known):
        own = [r for r in known if r["length"] == length and r["budget"] in (None, budget)]
        # what completes a selection changes nothing of what is read
        read = {(r["task"], r["method"].partition("+")[0]): r["read"] for r in reversed(own)}
        tasks = list(dict.fromkeys(r["task"] for r in own))
        selectors = list(dict.fromkeys(r["method"].partition("+")[0] for r in own))
        made.append(Figure(
            "Selectivity by task" + (f", {length} tokens" if length else ""),
            draw.bars(tasks, {s: [read.get((t, s)) for t in tasks] for s in selectors}, "share of the context read",
                      percent=True),
            "What a sparse layer read exactly, sink and tail included"
            + ("." if budget is None else f", at a budget of {100 * budget:g} %.")))
    return made


def _needles(rows: list[dict[str, Any]]) -> list[Figure]:
    """The map of depth and length, a panel a method, where there is more than one length."""
    cells = [r for r in rows if r["metric"] == "needle"]
    lengths, depths = (sorted({r[k] for r in cells}) for k in ("length", "depth"))
    if len(lengths) < 2:
        return []
    panels: dict[str, list[list[float]]] = {}
    for r in cells:
        grid = panels.setdefault(label(r["method"], r["budget"]), [[float("nan")] * len(lengths) for _ in depths])
        grid[depths.index(r["depth"])][lengths.index(r["length"])] = r["value"]
    return [Figure("Needles by depth and length", draw.needle_map(lengths, depths, panels),
                   "Share of the needles that were found. Down: how deep the number was hidden; across: tokens of the "
                   "prompt.")]
