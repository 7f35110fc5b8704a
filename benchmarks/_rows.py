"""Where a benchmark writes its rows: one JSON file each, from which tables and figures are drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sparsekv.evaluation.rows import machine, row, with_origin

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"

__all__ = ["RESULTS", "machine", "row", "write_rows"]


def write_rows(name: str, rows: list[dict[str, Any]], folder: Path = RESULTS) -> Path:
    """Write `<folder>/<name>.json`, adding machine, command and commit to every row that has none yet."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    origin = with_origin([{}])[0]
    path.write_text(json.dumps([{**r, **origin, **r} for r in rows], indent=1) + "\n")
    return path
