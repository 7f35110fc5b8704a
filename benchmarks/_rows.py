"""Rows of results: where a benchmark writes them, one compressed file a subject, and how a page gets them back."""

from __future__ import annotations

import fcntl
import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sparsekv.evaluation.rows import row, with_origin

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
SUFFIX = ".jsonl.gz"

__all__ = ["RESULTS", "add_rows", "filled", "load", "read_rows", "row", "take_over", "write_rows"]


def load(name: str, folder: Path = RESULTS) -> list[dict[str, Any]]:
    """The rows of a subject; none where nothing has been measured."""
    path = folder / f"{name}{SUFFIX}"
    return read_rows(path) if path.is_file() else []


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file: a line a row, compressed, or a JSON array as `sparsekv eval` writes it."""
    if path.suffix != ".gz":
        return json.loads(path.read_text(encoding="utf-8"))
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


def write_rows(name: str, rows: Iterable[dict[str, Any]], folder: Path = RESULTS) -> Path:
    """Write `<folder>/<name>.jsonl.gz`, the same bytes for the same rows. Machine, command and commit are added to a
    row that lacks them."""
    folder.mkdir(parents=True, exist_ok=True)
    path, origin = folder / f"{name}{SUFFIX}", with_origin([{}])[0]
    text = "".join(json.dumps({**r, **origin, **r}) + "\n" for r in rows)
    path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    return path


def add_rows(name: str, rows: list[dict[str, Any]], folder: Path = RESULTS) -> Path:
    """Add rows to a subject. A row replaces the one of its case, method, metric, budget, `against` and machine; any
    other follows the last row of its case. Processes wait for each other."""

    def place(r: dict[str, Any]) -> tuple[Any, ...]:
        return r["case"], r["method"], r["metric"], r.get("budget"), r.get("against"), r["machine"]

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept = load(name, folder)
        for new in with_origin(rows):
            same = [i for i, r in enumerate(kept) if place(r) == place(new)]
            behind = [i + 1 for i, r in enumerate(kept) if r["case"] == new["case"]] or [len(kept)]
            kept[slice(same[0], same[0] + 1) if same else slice(behind[-1], behind[-1])] = [new]
        return write_rows(name, kept, folder)


def take_over(name: str, rows: list[dict[str, Any]], folder: Path = RESULTS) -> list[dict[str, Any]]:
    """Replace the rows of the same cases and methods by these. Returns all rows of the subject."""
    new = {(r["case"], r["method"]) for r in rows}
    kept = [r for r in load(name, folder) if (r["case"], r["method"]) not in new]
    return read_rows(write_rows(name, kept + rows, folder))


def filled(text: str, lines: list[str], name: str) -> str:
    """A page's text with these lines between its two markers of that name. Raises ValueError where it has none."""
    first, last = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, start, rest = text.partition(first)
    _, end, after = rest.partition(last)
    if not start or not end:
        raise ValueError(f"no place for the table {name!r}; expected {first} and {last}")
    return "\n".join([f"{before}{first}", *lines, f"{last}{after}"])
