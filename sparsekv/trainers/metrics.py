"""`metrics.csv` beside an artifact: a row a block of steps."""

from __future__ import annotations

import csv
import math
from pathlib import Path

from sparsekv.foundation.disk import placed

FILE = "metrics.csv"


def read_metrics(path: Path) -> dict[str, list[float]]:
    """The columns of a `metrics.csv`, NaN where a row has no value."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return {name: [float(r[name] or math.nan) for r in rows] for name in (rows[0] if rows else ())}


def write_metrics(path: Path, rows: list[dict[str, float]]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    with placed(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
