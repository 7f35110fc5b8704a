"""Options of a stage: a frozen dataclass whose fields carry their own help, from which the CLI is derived."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

from sparsekv.util.errors import SparseKVError

SEEDS = {"min": 0, "max": 2**32 - 1}
"""What every random generator in use takes."""
MOST = 2**31 - 1
"""The largest count that is taken anywhere."""
MOST_FLOAT = sys.float_info.max
MOST_STEPS = 10**9
"""Training steps that end."""


def option(
    default: Any = dataclasses.MISSING, *, help: str | Callable[[], str], group: str | None = None, **extra: Any,
) -> Any:
    """A dataclass field that is also a command-line option.

    `help` says what the option does and in which unit, or makes those words when they are shown; the CLI appends the
    default. A field without a default is a required option. `group` is its heading in `--help`; `extra` is passed on
    to `typer.Option` (for example `min=1`).
    """
    metadata = {"help": help, "typer": {"rich_help_panel": group, **extra} if group else extra}
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def check_ranges(options: Any) -> None:
    """Raises SparseKVError for a number among a config's options that is of another type than its field says, no finite
    number, or out of the field's range; a count is at most MOST where it has none."""
    hints = get_type_hints(type(options))
    for field in dataclasses.fields(options):
        kinds, value = get_args(hints[field.name]) or (hints[field.name],), getattr(options, field.name)
        kind = float if float in kinds else int if int in kinds else None
        if kind is None or value is None or "typer" not in field.metadata:
            continue
        about = field.metadata["typer"]
        low, high = about.get("min"), about.get("max", MOST if kind is int else None)
        number = type(value) is int or (kind is float and type(value) is float)
        if not number or not -MOST_FLOAT <= value <= MOST_FLOAT or not (
                (low is None or low <= value) and (high is None or value <= high)):
            what = "a whole number" if kind is int else "a finite number"
            bounds = "" if low is None else f" from {low:g} on" if high is None else f" from {low} to {high}"
            raise SparseKVError(f"--{field.name.replace('_', '-')} must be {what}{bounds}, found {repr(value)[:40]}")
