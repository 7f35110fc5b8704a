"""Tables of result rows, for pages, reports and the terminal. No figure is ever typed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparsekv.core.registry import ESTIMATOR_ROWS, FULL, SELECTOR_ROWS, rivals, row_of
from sparsekv.evaluation.methods import label, percent, plain
from sparsekv.evaluation.report import Table
from sparsekv.evaluation.requests import OWN_TASKS
from sparsekv.evaluation.scores import is_mean

SCORES = ("Points of 100 ± half the 95 % bootstrap interval, by budget: share of the context a query may retrieve. –: "
          "the budget cannot pay for what is always read.")
BYTES = "All that a step of a sparse layer reads, index and completion included, of its keys' and values' bytes."
KL = ("KL(full ‖ method) of the next token [nats a token], every method led along full attention's answer, or the "
      "text, one decode step a token: mean over prompts with its 95 % bootstrap interval. same token: likeliest tokens "
      "that are full attention's. Ratios are of means over the same prompts, drawn again together.")
GAINS = "Points above the same selector without completion, paired by sample: ± half the 95 % bootstrap interval."


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
        lines.append([method, *(cell_text(free or known.get((method, b))) for b in budgets)])
    return ["method", *map(percent, budgets)], lines


def in_order(found: set[str], wanted: Sequence[str]) -> list[str]:
    """The methods found that are wanted, in that order; those with options after the one without."""
    return [m for name in dict.fromkeys(wanted) for m in sorted(found) if plain(m) == name]


def cell_text(found: dict[str, Any] | None, sign: str = "") -> str:
    if found is None or found["value"] is None:
        return "–"
    return f"{found['value']:{sign}.1f} ± {(found['high'] - found['low']) / 2:.1f}"


def measured(found: dict[str, Any] | None, form: str, name: str = "value") -> str:
    return "–" if found is None or found.get(name) is None else form.format(found[name])


def hits(needles: dict[str, Any] | None) -> str:
    """Needles that were found, of how many."""
    if needles is None or needles["value"] is None:
        return "–"
    return f"{needles['value'] * needles['samples'] / 100:.0f} of {needles['samples']}"


def gains(rows: Sequence[dict[str, Any]], case: str) -> tuple[list[str], list[list[str]]]:
    """Return what completion adds to a selector, paired by sample: header and lines, `+1.6 ± 1.2`."""
    known = {(r["method"], r["budget"]): r for r in rows if r["case"] == case and r["metric"] == "difference"
             and r["method"].startswith(f"{r['against']}+")}
    budgets = sorted({b for _, b in known if b is not None})
    methods = dict.fromkeys(m for m, _ in known)
    shown = [[m, *(cell_text(known.get((m, b)), "+") for b in budgets)] for m in methods]
    return ["gain of", *map(percent, budgets)], shown


def bytes_read(rows: Sequence[dict[str, Any]], case: str) -> tuple[list[str], list[list[str]]]:
    """Return what a step of a sparse layer reads of the cache's bytes: header and lines, a line a method."""
    known = {(r["method"], r["budget"]): f"{100 * r['bytes_share']:.1f} %" for r in rows
             if r["case"] == case and r["metric"] == "score" and r.get("bytes_share") is not None}
    budgets = sorted({b for _, b in known if b is not None})
    methods = in_order({m for m, _ in known}, every_method(rows))
    return ["method", *map(percent, budgets)], [
        [m, *(known.get((m, None)) or known.get((m, b), "–") for b in budgets)] for m in methods if m != "full"]


SUMMARY = ["read exactly", "needles found", "perplexity", "attention error", "selectivity"]


def summary(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Under the header `SUMMARY` a line a method and budget: needles found and what continued texts cost and lost; "–"
    where nothing was measured. rows: of one length."""
    known = {(r["method"], r["budget"], r["metric"]): r for r in rows if r["task"] in OWN_TASKS}
    lines = []
    for method, budget in dict.fromkeys((m, b) for m, b, _ in known):
        needles, *others = (known.get((method, budget, m)) for m in ("score", "perplexity", "rel_err", "selectivity"))
        lines.append([label(method, budget), hits(needles), *map(measured, others, ("{:.2f}", "{:.3f}", "{:.1%}"))])
    return lines


def kl_tables(rows: Sequence[dict[str, Any]]) -> list[Table]:
    """The distance to full attention, a table a case, those of several tasks first: a line a method and budget, beside
    it the ratios and the task's own measure."""
    rivals = list(dict.fromkeys(r["against"] for r in rows if r["metric"] == "kl_ratio"))
    header = ["method", "KL to full attention", "same token", *(f"KL over {label(name)}'s" for name in rivals),
              "points", "perplexity"]
    known = {(r["case"], r["method"], r["budget"], r["metric"], r.get("against")): r for r in rows}
    made = []
    for case in dict.fromkeys(r["case"] for r in rows if r["metric"] == "kl"):
        lines = []
        for method, budget in dict.fromkeys((r["method"], r["budget"]) for r in rows if r["case"] == case
                                            and r["metric"] == "kl"):
            kl, same, points, loss = (known.get((case, method, budget, metric, None))
                                      for metric in ("kl", "kl_same", "score", "perplexity"))
            ratios = [known.get((case, method, budget, "kl_ratio", rival)) for rival in rivals]
            lines.append([label(method, budget), _kl_text(kl), measured(same, "{:.1f} %"),
                          *("–" if r is None else f"{r['value']:.2f} ({r['low']:.2f}–{r['high']:.2f})" for r in ratios),
                          cell_text(points), measured(loss, "{:.2f}")])
        kept = [i for i in range(len(header)) if i < 3 or any(line[i] != "–" for line in lines)]
        made.append(Table(f"{case}. Distance to full attention", [header[i] for i in kept],
                          [[line[i] for i in kept] for line in lines], KL))
    return made


def _kl_text(found: dict[str, Any] | None) -> str:
    """Mean and interval; zero for what is rounding."""
    if found is None:
        return "–"
    return "0" if found["value"] < 1e-6 else f"{found['value']:.3g} ({found['low']:.2g}–{found['high']:.2g})"


def report_tables(rows: Sequence[dict[str, Any]]) -> tuple[list[Table], list[Table]]:
    """Draw the report's tables: the distance to full attention where it was measured; a summary of the project's own
    tasks by length, Lane A (how attention is completed, selector fixed) and Lane B (systems) of every mean; then each
    task."""
    made = kl_tables(rows)
    for length in dict.fromkeys(r["length"] for r in rows if r["task"] in OWN_TASKS):
        lines = summary([r for r in rows if r["length"] == length])
        made.append(Table(f"What every method reads and what it costs, {length} tokens", SUMMARY, lines))
    means, single = cases_of(rows)
    for case in means:
        for title, names in lanes(rows).items():
            header, lines = table(rows, case, names)
            if len(lines) > 1:
                made.append(Table(f"{case}. {title}", header, lines, SCORES))
        for title, note, (header, lines) in (("What completion adds", GAINS, gains(rows, case)),
                                             ("Bytes read", BYTES, bytes_read(rows, case))):
            if lines:
                made.append(Table(f"{case}. {title}", header, lines, note))
    return made, [Table(c, *table(rows, c, every_method(rows)), SCORES) for c in single]


def methods_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return what the selectors of the rows read, and where they come from."""
    found = dict.fromkeys(plain(r["method"]).partition("+")[0] for r in rows)
    known = [(name, row) for name in found if (row := row_of(name)) is not None]
    return Table("Methods", ["method and what it reads", "source"],
                 [[f"{name}: {row.reads.replace('`', '')}", row.source] for name, row in known])


def lane_a() -> tuple[str, ...]:
    """List exact top-k and this project's own selectors with every estimator: how attention is completed."""
    completions = ("", *(f"+{name}" for name in ESTIMATOR_ROWS))
    return tuple(s + c for s in (*_of("exact"), *_of("own")) for c in completions)


def lane_b() -> tuple[str, ...]:
    """Systems: the rivals, this project's own, and exact top-k, which no system reaches cheaply."""
    completions = ("", *(f"+{row.name}" for row in ESTIMATOR_ROWS.values() if row.usual))
    return (*rivals(), *(s + c for s in (*_of("own"), *_of("exact")) for c in completions))


def _of(lane: str) -> list[str]:
    return [row.name for row in SELECTOR_ROWS.values() if row.lane == lane]


def every_method(rows: Sequence[dict[str, Any]]) -> list[str]:
    """All methods of the rows, those of the lanes first."""
    return list(dict.fromkeys((*lane_a(), *lane_b(), *(plain(r["method"]) for r in rows))))


def lanes(rows: Sequence[dict[str, Any]]) -> dict[str, Sequence[str]]:
    """The two comparisons: titles and the methods of each, in order."""
    others = [m for m in every_method(rows) if m not in (*lane_a(), *lane_b(), FULL)]
    return {"Lane A: aggregation at a fixed selector": lane_a(), "Lane B: systems": (*lane_b(), *others)}


def cases_of(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """The means of lm-eval's tasks, and their single tasks; where there is no mean, the tasks stand in its place."""
    cases = [c for c in dict.fromkeys(r["case"] for r in rows if r["metric"] == "score")
             if c.partition("@")[0] not in OWN_TASKS]
    means = [c for c in cases if is_mean(c)] or cases
    return means, [c for c in cases if c not in means]
