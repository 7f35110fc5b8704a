"""The quality card of an artifact: means over heads, a table a quantity `[layers][heads]`, and which heads are best
left dense. Its page draws it: `artifacts/hub/quality.py`."""

from __future__ import annotations

from typing import Any

from sparsekv.util.config import is_number

DENSE_BELOW = 0.5
DENSE_ABOVE = 0.5
JUDGED = "mass_share@0.05"


def sound(quality: dict[str, Any], layers: int) -> dict[str, Any]:
    """Return what of a card is one: finite means, and tables of numbers with a row a layer. A file may say anything."""
    def table(rows: Any) -> bool:
        return isinstance(rows, list) and len(rows) == layers and all(
            isinstance(row, list) and row and all(map(is_number, row)) for row in rows)

    heads = quality.get("per_head")
    tables = {k: rows for k, rows in heads.items() if table(rows)} if isinstance(heads, dict) else {}
    return {**{k: float(v) for k, v in quality.items() if is_number(v)}, **({"per_head": tables} if tables else {})}


def describe(quality: dict[str, Any]) -> list[str]:
    """The means, one a line."""
    return [f"  {name}: {value:.3f}" for name, value in quality.items() if isinstance(value, float)]


def heads_best_dense(kind: str, layers: list[int], quality: dict[str, Any]) -> dict[int, list[int]]:
    """Query heads, by layer, that the artifact serves badly.

    router: at 5 % of the context it reaches less than half of the mid region's attention. phi: with sink and tail alone
    the completed output is still further off than half of its length, or completion is off and the error without it is.
    """
    tables = sound(quality, len(layers)).get("per_head", {})
    table = tables.get(JUDGED if kind == "router" else "sink_tail + phi error", [])
    found = {}
    for layer, row in zip(layers, table, strict=False):
        bad = [h for h, v in enumerate(row) if (v < DENSE_BELOW if kind == "router" else v > DENSE_ABOVE)]
        if bad:
            found[layer] = bad
    return found
