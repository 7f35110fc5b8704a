"""Measured rows taken over into docs/results, and tables drawn from them into a page between its two markers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks._rows import RESULTS, write_rows


def take_over(name: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`docs/results/<name>.json` with these rows in place of those of the same cases and methods; returns all."""
    path = RESULTS / f"{name}.json"
    new = {(r["case"], r["method"]) for r in rows}
    held = json.loads(path.read_text()) if path.exists() else []
    write_rows(name, [r for r in held if (r["case"], r["method"]) not in new] + rows)
    return json.loads(path.read_text())


def fill(page: Path, lines: list[str], name: str = "tables") -> None:
    """Replace what stands between the two markers of that name in a page."""
    page.write_text(filled(page.read_text(encoding="utf-8"), lines, name), encoding="utf-8")


def filled(text: str, lines: list[str], name: str = "tables") -> str:
    """A page's text with these lines between its two markers of that name. Raises ValueError where it has none."""
    first, last = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, start, rest = text.partition(first)
    _, end, after = rest.partition(last)
    if not start or not end:
        raise ValueError(f"no place for the table {name!r}; expected {first} and {last}")
    return "\n".join([f"{before}{first}", *lines, f"{last}{after}"])
