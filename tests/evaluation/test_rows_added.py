"""Rows of a benchmark's single case join the file that is there."""

import importlib.util
import json
from pathlib import Path

PATH = Path(__file__).parents[2] / "benchmarks" / "_rows.py"
spec = importlib.util.spec_from_file_location("_rows", PATH)
_rows = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_rows)


def test_a_row_takes_its_place_and_a_new_one_follows_its_case(tmp_path) -> None:
    first = [_rows.row(case, method, "ms", value, "milliseconds", commit="old")
             for value, (case, method) in enumerate([("a", "x"), ("a", "y"), ("b", "x")])]
    _rows.add_rows("t", first, tmp_path)
    new = [_rows.row("a", "x", "ms", 9, "milliseconds"), _rows.row("a", "z", "ms", 8, "milliseconds")]
    path = _rows.add_rows("t", new, tmp_path)
    rows = json.loads(path.read_text())
    assert [(r["case"], r["method"], r["value"]) for r in rows] == [
        ("a", "x", 9), ("a", "y", 1), ("a", "z", 8), ("b", "x", 2)]
    assert [r["commit"] == "old" for r in rows] == [False, True, False, True]
    assert all(r["machine"] for r in rows)
