"""Rows of results: one schema for every measured number of the project."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any


def machine() -> str:
    """The device a number was measured on, in words that mean something elsewhere."""
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads, torch {torch.__version__}"


def commit() -> str:
    """Return what the variable SPARSEKV_COMMIT says; without it the short hash of the code that ran, with `+` where the
    tree had changes, outside a checkout `unknown`."""
    if given := os.environ.get("SPARSEKV_COMMIT"):
        return given
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=True,
                              cwd=Path(__file__).parent).stdout.strip()
    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def row(case: str, method: str, metric: str, value: float | None, unit: str, **extra: Any) -> dict[str, Any]:
    """One measured number."""
    return {"case": case, "method": method, "metric": metric, "value": value, "unit": unit, **extra}


def origin() -> dict[str, str]:
    """Machine, command and commit of this process."""
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return {"machine": machine(), "command": command, "commit": commit()}


def origin_line() -> str:
    """Write the origin as a sentence, for a report's title."""
    here = origin()
    return f"{here['machine']}; commit {here['commit']}; {here['command']}"


def with_origin(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with the machine, the command and the commit they come from; rows that know theirs keep it."""
    here = origin()
    return [{**r, **{k: r.get(k, v) for k, v in here.items()}} for r in rows]


def as_text(rows: list[dict[str, Any]]) -> str:
    """The JSON file of these rows: an array, one row a line."""
    return "[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n" if rows else "[]\n"
