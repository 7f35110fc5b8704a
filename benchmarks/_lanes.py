"""The page of a quality run: both comparisons, what the project set out to reach, agreement with full attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparsekv.core.registry import SELECTOR_ROWS, rivals
from sparsekv.evaluation.methods import percent
from sparsekv.evaluation.tables import (
    BYTES,
    GAINS,
    bytes_read,
    cases_of,
    cell_text,
    every_method,
    gains,
    in_order,
    lanes,
    markdown,
    table,
)

AGREEMENT = ("How much of full attention's own answer is given before the first character that differs, points of 100: "
             "what a method changes, whether or not the model can do the task.")
SKETCHES = ((16384, "sketch+phi", 0.01, -2.0), (16384, "sketch+phi", 0.02, -0.7),
            (32768, "sketch+phi", 0.01, -3.5), (32768, "sketch+phi", 0.02, -2.0))
"""Length, method, budget, points to full attention at least, on the long-context model."""
AGREED = ((16384, 0.02, 93), (16384, 0.05, 97))
"""Length, budget, agreement with full attention's answers at least."""


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
            lines.append([f"{what} at {percent(budget)}", cell_text(found, "+"),
                          "yes" if found["value"] >= needed else "no"])

    for b in budgets:
        line("topk+phi is not below topk", "topk+phi", "topk", b, 0.0)
    line("router+phi is within 2 points of full attention", "router+phi", "full", 0.05, -2.0)
    for length, method, b, least in SKETCHES:
        if case == f"ruler@{length}":
            line(f"{method} is within {-least:g} points of full attention", method, "full", b, least)
    for length, b, least in AGREED:
        found = next((r for r in rows if r["case"] == case == f"ruler@{length}" and r["metric"] == "agreement"
                      and (r["method"], r["budget"]) == ("sketch+phi", b)), None)
        if found is not None:
            lines.append([f"sketch+phi agrees with full attention to {least} points at {percent(b)}", cell_text(found),
                          "yes" if found["value"] >= least else "no"])
    for system in (f"{row.name}+phi" for row in SELECTOR_ROWS.values() if row.lane == "own"):
        for name in in_order({rival for m, rival, _ in known if m == system}, rivals()):
            for b in budgets:
                line(f"{system} is above {name}", system, name, b, 1e-9)
    return ["target", "found", "reached"], lines


def lanes_markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Both lanes of every mean, the project's targets, the agreement with full attention; then each task."""
    means, single = cases_of(rows)
    parts = []
    for case in means:
        parts.append(f"## {case}")
        (lane_a, of_a), (lane_b, of_b) = lanes(rows).items()
        for title, note, (header, lines) in (
                (lane_a, "", table(rows, case, of_a)), ("What completion adds", GAINS, gains(rows, case)),
                (lane_b, "", table(rows, case, of_b)), ("Targets", "", targets(rows, case)),
                ("Agreement with full attention", AGREEMENT, table(rows, case, every_method(rows), "agreement")),
                ("Bytes read", BYTES, bytes_read(rows, case))):
            if lines:
                parts += [f"### {title}", *([note] if note else []), markdown(header, lines)]
    parts += ["## Each task"] if single else []
    for case in single:
        parts += [f"### {case}", markdown(*table(rows, case, every_method(rows)))]
    return "\n\n".join(parts) + "\n"
