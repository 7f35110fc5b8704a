"""JSON files that a person can read: an object has a key a line, a list of numbers takes as few lines as it needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sparsekv.util.disk import write_text

WIDTH = 120
"""Characters of a line, where a list is broken."""


def write_json(path: Path, content: dict[str, Any]) -> None:
    """A file in this form, whole or not at all. Raises SparseKVError."""
    write_text(path, as_json(content))


def as_json(content: dict[str, Any], *, sort_keys: bool = False) -> str:
    """What `json.dumps` says of it, in other lines. A list stands on one line if it fits there. Otherwise values fill
    lines; of a list of lists every inner one begins a line, and objects are indented."""
    plain = json.loads(json.dumps(content, sort_keys=sort_keys))  # keys are text now, tuples are lists
    return _indented(plain, "", 0) + "\n"


def _indented(value: Any, indent: str, used: int) -> str:
    """used: characters before it on its first line."""
    if not value or not isinstance(value, dict | list):
        return json.dumps(value)
    deeper = indent + " "
    if isinstance(value, dict):
        keys = (f"{deeper}{json.dumps(key)}: " for key in value)
        lines = [key + _indented(x, deeper, len(key)) for key, x in zip(keys, value.values(), strict=True)]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if not _holds_objects(value) and used + len(line := json.dumps(value)) < WIDTH:
        return line
    if any(isinstance(x, dict | list) for x in value):
        lines = [deeper + _indented(x, deeper, len(deeper)) for x in value]
    else:
        lines = _filled(value, deeper)
    return "[\n" + ",\n".join(lines) + f"\n{indent}]"


def _holds_objects(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(map(_holds_objects, value)))


def _filled(values: list[Any], indent: str) -> list[str]:
    """Lines of these values, none of which is a list or an object."""
    lines: list[str] = []
    for word in json.dumps(values, separators=("\n", ":"))[1:-1].split("\n"):  # no word holds a raw line break
        if lines and len(lines[-1]) + len(word) + 3 <= WIDTH:
            lines[-1] += f", {word}"
        else:
            lines.append(indent + word)
    return lines
