"""Rows of a benchmark: one schema, one JSON file a benchmark, from which tables and figures are drawn."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"


def machine() -> str:
    """The device a number was measured on, in words that mean something elsewhere."""
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads, torch {torch.__version__}"


def commit() -> str:
    """The short hash of the code that ran, with `+` where the tree had changes; `unknown` outside a checkout."""
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=True,
                              cwd=RESULTS.parent).stdout.strip()
    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def row(case: str, method: str, metric: str, value: float | None, unit: str, **extra: Any) -> dict[str, Any]:
    """One measured number."""
    return {"case": case, "method": method, "metric": metric, "value": value, "unit": unit, **extra}


def write_rows(name: str, rows: list[dict[str, Any]], folder: Path = RESULTS) -> Path:
    """Write `<folder>/<name>.json`, adding machine, command and commit to every row."""
    common = {"machine": machine(), "command": " ".join(["python", *sys.argv]), "commit": commit()}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps([{**common, **r} for r in rows], indent=1) + "\n")
    return path
