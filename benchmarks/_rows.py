"""Where a benchmark writes its rows: one JSON file each, from which tables and figures are drawn."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

from sparsekv.evaluation.rows import as_text, machine, row, with_origin

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"

__all__ = ["RESULTS", "add_rows", "machine", "row", "write_rows"]


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
