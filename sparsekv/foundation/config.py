"""Options of a stage: a frozen dataclass whose fields carry their own help, from which the CLI is derived."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

SEEDS = {"min": 0, "max": 2**32 - 1}
"""What every random generator in use takes."""


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
