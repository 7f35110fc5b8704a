"""Where a benchmark writes its rows: one JSON file each, from which tables and figures are drawn."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

from sparsekv.evaluation.rows import machine, row, with_origin

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"

__all__ = ["RESULTS", "add_rows", "machine", "row", "write_rows"]


def write_rows(name: str, rows: list[dict[str, Any]], folder: Path = RESULTS) -> Path:
    """Write `<folder>/<name>.json`, adding machine, command and commit to every row that has none yet."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    origin = with_origin([{}])[0]
    path.write_text(json.dumps([{**r, **origin, **r} for r in rows], indent=1) + "\n")
    return path


def add_rows(name: str, rows: list[dict[str, Any]], folder: Path = RESULTS) -> Path:
    """Write them into `<folder>/<name>.json` in place of those of the same case, method, metric, budget and machine;
    the others stay. Processes wait for each other."""
    folder.mkdir(parents=True, exist_ok=True)
    here = machine()

    def place(r: dict[str, Any]) -> tuple[Any, ...]:
        return r["case"], r["method"], r["metric"], r.get("budget"), r.get("machine", here)

    with (folder / f"{name}.json").open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        earlier, replaced = json.loads(file.read() or "[]"), {place(r) for r in rows}
        return write_rows(name, [*(r for r in earlier if place(r) not in replaced), *rows], folder)
