"""Rows of the distance to full attention: KL of the next token, and its ratio to another method's on the same
prompts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from sparsekv.core.registry import FULL
from sparsekv.evaluation.intervals import bootstrap_ratio
from sparsekv.evaluation.rows import row

TEXTS = "perplexity_"
Prompts = dict[tuple[str, int], float]
"""Values by case and number of a prompt."""


def kl_rows(
    merged: Mapping[tuple[str, str, float | None], dict[str, Any]], groups: Mapping[str, Iterable[str]],
    against: Sequence[str], seed: int,
) -> list[dict[str, Any]]:
    """`kl` [nats a token], `kl_same` [of 100 tokens] and, against every method of `against` at the same budget,
    `kl_ratio`, of every case and of the prompts of several together, all weighing alike. merged: cells as `merge_cells`
    joins them; groups: the cases of every mean; against: without any the first method that is not full attention."""
    measured = {key: entry for key, entry in merged.items() if entry["kl"]}
    names = list(dict.fromkeys(method for _, method, _ in measured))
    rivals = list(against) or [m for m in names if m != FULL][:1]
    rows = []
    for case, parts in _cases(measured, groups):
        for method, budget in dict.fromkeys((m, b) for c, m, b in measured if c in parts):
            mine = _prompts(measured, parts, method, budget, "kl")
            entries = [measured[c, method, budget] for c in parts if (c, method, budget) in measured]
            task, _, length = case.partition("@")
            about: dict[str, Any] = {"task": task, "length": int(length) if length else None, "budget": budget,
                                     "seed": seed, **entries[0]["origin"]}

            def add(metric: str, values: Sequence[float], others: Sequence[float] | None, unit: str,
                    case: str = case, method: str = method, about: dict[str, Any] = about, **more: Any) -> None:
                value, low, high = bootstrap_ratio(values, others, seed=seed)
                rows.append(row(case, method, metric, value, unit, **about, low=low, high=high, samples=len(values),
                                **more))

            add("kl", list(mine.values()), None, "nats a token")
            same = _prompts(measured, parts, method, budget, "kl_same")
            add("kl_same", [100 * x for x in same.values()], None, "of 100 tokens")
            for rival in rivals:
                if method in (FULL, rival):
                    continue
                theirs = (_prompts(measured, parts, rival, budget, "kl")
                          or _prompts(measured, parts, rival, None, "kl"))
                both = [key for key in mine if key in theirs]
                if both and all(theirs[key] > 0 for key in both):
                    add("kl_ratio", [mine[k] for k in both], [theirs[k] for k in both], "times the other's",
                        against=rival)
    return rows


def _cases(measured: Mapping[tuple[str, str, Any], Any], groups: Mapping[str, Iterable[str]],
           ) -> Iterator[tuple[str, list[str]]]:
    """Every case with itself, the means with theirs, and `text@L` with texts of one length, where they are several."""
    cases = list(dict.fromkeys(case for case, _, _ in measured))
    joined = {name: [c for c in parts if c in cases] for name, parts in groups.items() if name}
    for case in cases:
        if case.startswith(TEXTS):
            joined.setdefault(f"text@{case.rpartition('@')[2]}", []).append(case)
    yield from ((name, parts) for name, parts in joined.items() if len(parts) > 1)
    yield from ((case, [case]) for case in cases)


def _prompts(measured: Mapping[tuple[str, str, Any], Any], cases: Sequence[str], method: str, budget: float | None,
             column: str) -> Prompts:
    return {(c, i): x for c in cases if (c, method, budget) in measured
            for i, x in measured[c, method, budget][column].items()}
