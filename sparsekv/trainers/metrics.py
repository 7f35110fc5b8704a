"""`metrics.csv` beside an artifact: a row a block of steps."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparsekv.util.disk import placed
from sparsekv.util.errors import SparseKVError, first_line

FILE = "metrics.csv"


def read_metrics(path: Path) -> dict[str, list[float]]:
    """The columns of a `metrics.csv`, NaN where a row has no value. Raises SparseKVError where it is damaged."""
    rows = read_rows(path)
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [float(r.get(name, math.nan)) for r in rows] for name in names}


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows as they were written, of every row the columns that have a value. Raises SparseKVError where it is
    damaged."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = [{name: text for name, text in row.items() if text != ""}
                    for row in csv.DictReader(file, strict=True)]
        for row in rows:
            int(float(row["group"])), int(float(row["step"])), [float(text) for text in row.values()]
    except (OSError, ValueError, TypeError, KeyError, OverflowError, csv.Error) as error:
        raise SparseKVError(f"{str(path)!r} is damaged ({type(error).__name__}: {first_line(error)}); delete it: a "
                            "training that is resumed goes on without its earlier rows") from error
    return rows


def write_metrics(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    with placed(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
