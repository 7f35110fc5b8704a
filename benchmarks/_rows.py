"""Where a benchmark writes its rows: one JSON file each, from which tables and figures are drawn; tables in pages."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

from sparsekv.evaluation.rows import as_text, row, with_origin

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"

__all__ = ["RESULTS", "add_rows", "fill", "filled", "row", "take_over", "write_rows"]


def write_rows(name: str, rows: list[dict[str, Any]], folder: Path = RESULTS) -> Path:
    """Write `<folder>/<name>.json`, adding machine, command and commit to every row that has none yet."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    origin = with_origin([{}])[0]
    path.write_text(as_text([{**r, **origin, **r} for r in rows]))
    return path


def add_rows(name: str, rows: list[dict[str, Any]], folder: Path = RESULTS) -> Path:
    """Write rows into `<folder>/<name>.json`: one of the same case, method, metric, budget and machine gives way to the
    new one, others follow the last of their case. Processes wait for each other."""

    def place(r: dict[str, Any]) -> tuple[Any, ...]:
        return r["case"], r["method"], r["metric"], r.get("budget"), r["machine"]

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.json").open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        kept = json.loads(file.read() or "[]")
        for new in with_origin(rows):
            same = [i for i, r in enumerate(kept) if place(r) == place(new)]
            behind = [i + 1 for i, r in enumerate(kept) if r["case"] == new["case"]] or [len(kept)]
            kept[slice(same[0], same[0] + 1) if same else slice(behind[-1], behind[-1])] = [new]
        return write_rows(name, kept, folder)


def take_over(name: str, rows: list[dict[str, Any]], folder: Path = RESULTS) -> list[dict[str, Any]]:
    """`<folder>/<name>.json` with these rows in place of those of the same cases and methods; returns all."""
    path = folder / f"{name}.json"
    new = {(r["case"], r["method"]) for r in rows}
    held = json.loads(path.read_text()) if path.exists() else []
    return json.loads(write_rows(name, [r for r in held if (r["case"], r["method"]) not in new] + rows,
                                 folder).read_text())


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
