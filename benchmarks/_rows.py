"""Where a benchmark writes its rows: one JSON file each, from which tables and figures are drawn."""

from __future__ import annotations

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
    """Write rows into `<folder>/<name>.json` beside those that are there: one of the same case, method and metric gives
    way to the new one, others follow the last of their case."""
    path = folder / f"{name}.json"
    kept = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    for new in rows:
        same = [i for i, r in enumerate(kept) if all(r[k] == new[k] for k in ("case", "method", "metric"))]
        behind = [i + 1 for i, r in enumerate(kept) if r["case"] == new["case"]] or [len(kept)]
        place = slice(same[0], same[0] + 1) if same else slice(behind[-1], behind[-1])
        kept[place] = with_origin([new])
    return write_rows(name, kept, folder)
