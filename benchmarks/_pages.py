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
    first, last = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, _, rest = page.read_text(encoding="utf-8").partition(first)
    _, _, after = rest.partition(last)
    page.write_text("\n".join([f"{before}{first}", *lines, f"{last}{after}"]), encoding="utf-8")
