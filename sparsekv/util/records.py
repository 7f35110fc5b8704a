"""JSON files that a person can read: a key of the object a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sparsekv.util.disk import write_text


def write_json(path: Path, content: dict[str, Any]) -> None:
    """A file in this form, whole or not at all. Raises SparseKVError."""
    write_text(path, as_json(content))


def as_json(content: dict[str, Any], *, sort_keys: bool = False) -> str:
    """The JSON of an object, a key a line."""
    lines = (f" {json.dumps({key: value}, sort_keys=sort_keys)[1:-1]}"
             for key, value in (sorted(content.items()) if sort_keys else content.items()))
    return "{\n" + ",\n".join(lines) + "\n}\n"
