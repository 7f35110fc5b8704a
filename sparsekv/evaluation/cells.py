"""Cells of an evaluation: one line a finished (task, method, batch of prompts), on disk at once, so that a run goes on
where it was interrupted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sparsekv.util.disk import disk_error, write_text
from sparsekv.util.errors import SparseKVError

FORMAT, FORMAT_VERSION = "sparsekv-sweep", 1
SHARED = ("accounting", "weights", "dtype", "requests", "corpus", "split", "decoding")
"""What a header says that belongs to every row."""


def artifact_digest(artifact: Any) -> str:
    """A hash of the artifact's config, which says from which capture it was trained and how, and how good it became."""
    return hashlib.sha256(json.dumps(asdict(artifact.config), sort_keys=True, default=str).encode()).hexdigest()[:12]


def open_cells(path: Path, header: dict[str, Any], artifacts: dict[str, str], resume: bool) -> list[dict[str, Any]]:
    """Begin a file of cells, or read what an interrupted run finished.

    artifacts: digest of the router and of the feature maps. Raises SparseKVError where there is a file and `resume` is
    off, where it was measured with another header (a key that the file does not have is not compared), and where a cell
    comes from another artifact.
    """
    header = {"format": FORMAT, "format_version": FORMAT_VERSION, **header}
    if not path.exists() or not path.stat().st_size:
        write_text(path, json.dumps(header) + "\n")
        return []
    if not resume:
        raise SparseKVError(f"{str(path)!r} holds cells already; add --resume to go on, or choose another --output")
    known, cells = read_cells(path)
    differ = [k for k in header if k != "origin" and known.get(k, header[k]) != header[k]]
    if differ:
        raise SparseKVError(f"{str(path)!r} was measured with other {', '.join(differ)} "
                            f"({', '.join(str(known[k]) for k in differ)}); choose another --output, or --overwrite "
                            "without --resume")
    for kind, digest in artifacts.items():
        others = {c[kind] for c in cells if kind in c} - {digest}
        if others:
            raise SparseKVError(f"{str(path)!r} was measured with another {kind} artifact ({others.pop()}, this one is "
                                f"{digest}); choose another --output")
    write_cells(path, known, cells)  # without a last line that was cut off
    return cells


def add_cell(path: Path, cell: dict[str, Any]) -> None:
    """One more line, on disk when this returns."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(cell) + "\n")
    except OSError as error:
        raise disk_error(error, path) from error


def write_cells(path: Path, header: dict[str, Any], cells: Sequence[dict[str, Any]]) -> None:
    """The whole file anew, or not at all."""
    write_text(path, "".join(json.dumps(x) + "\n" for x in (header, *cells)))


def read_cells(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Header and finished cells; a last line cut off by an interruption is passed over.

    Raises SparseKVError for a file of another kind or version.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
        header = json.loads(lines[0])
        if header.get("format") != FORMAT:
            raise ValueError("no header")
    except (ValueError, AttributeError, RecursionError) as error:
        raise SparseKVError(f"{str(path)!r} holds no cells; expected the cells.jsonl of `sparsekv eval`") from error
    if header.get("format_version") != FORMAT_VERSION:
        raise SparseKVError(f"{str(path)!r} has format {header.get('format_version')}, this version reads "
                            f"{FORMAT_VERSION}; measure again into another --output")
    cells = []
    for number, line in enumerate(lines[1:], start=2):
        if not line:
            continue
        try:
            cell = json.loads(line)
            if not isinstance(cell, dict):
                raise TypeError
            cells.append(cell)
        except (ValueError, TypeError, RecursionError) as error:
            if number < len(lines):
                raise SparseKVError(f"line {number} of {str(path)!r} is damaged; remove it and resume") from error
    return header, cells


def collect(folder: Path) -> list[dict[str, Any]]:
    """All cells of a folder, those of shards included, each with its `origin`: machine, command, commit, and what the
    header says of prompts, model and accounting. Raises SparseKVError without any."""
    files = sorted(folder.glob("cells*.jsonl"))
    if not files:
        raise SparseKVError(f"no cells.jsonl in {str(folder)!r}; expected the output of `sparsekv eval`")
    return [{**cell, "origin": {**header["origin"], **{k: header[k] for k in SHARED if k in header}}}
            for header, cells in map(read_cells, files) for cell in cells]
