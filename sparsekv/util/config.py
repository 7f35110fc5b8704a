"""Options: a frozen dataclass whose fields carry their own help, range and choices. The command line is derived from
it, and `check_ranges` is what refuses a value, wherever it came from."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from sparsekv.util.errors import SparseKVError, brief, check_choice

SEEDS: dict[str, Any] = {"min": 0, "max": 2**32 - 1}
"""What every random generator in use takes."""
MOST = 2**31 - 1
"""The largest count that is taken anywhere."""
MOST_FLOAT = sys.float_info.max
MOST_STEPS = 10**9
"""Training steps that end."""
ROPE_SCALING = ('Replace rotary parameters, as JSON: {"rope_type": "yarn", "factor": 4.0}; for contexts past the '
                'trained length; without it the model\'s own.')
"""Help of the option of every command that loads a model."""
WORDS = {int: "a whole number", float: "a finite number", bool: "True or False", str: "a name", Path: "a path",
         dict: "an object", list: "whole numbers such as [0, 1]", NoneType: "None"}


def option(
    default: Any = dataclasses.MISSING, *, help: str | Callable[[], str], group: str | None = None, flag: Any = ...,
    choices: Iterable[str] = (), objects: str = "", **extra: Any,
) -> Any:
    """A dataclass field that is also a command-line option.

    help: says what the option does and in which unit, or makes those words when they are shown; the CLI appends the
    default. A field without a default is a required option. group: its heading in `--help`. flag: its type on the
    command line where that is not the field's, None: no option there. choices: the words that it takes. objects: the
    class, by name, of which a Python caller may give an object. extra: passed on to `typer.Option` (for example
    `min=1`); `min` and `max` are the field's range.
    """
    metadata = {"help": help, "typer": {"rich_help_panel": group, **extra} if group else extra, "flag": flag,
                "choices": tuple(choices), "objects": objects}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def number_or_word(text: str) -> float | str:
    """The command line's text for a field that takes numbers and words."""
    try:
        return float(text)
    except ValueError:
        return text


def object_or_word(text: str) -> Any:
    """The command line's text for a field that takes a JSON object and words."""
    try:
        found = json.loads(text)
    except ValueError:
        return text
    return found if isinstance(found, dict) else text


def flag_of(name: str) -> str:
    """The command line's name of a field."""
    return f"--{name.replace('_', '-')}"


def check_ranges(options: Any, name: Callable[[str], str] = flag_of, *, least: float | None = None) -> None:
    """Refuse a value that is not of its field's type, no finite number, out of the field's range or none of its
    choices; a count is at most MOST where it has no maximum. name: how a sentence names a field. least: the minimum of
    numbers that have none. Raises SparseKVError."""
    hints = get_type_hints(type(options))
    for field in dataclasses.fields(options):
        if "typer" not in field.metadata:
            continue
        value, hint, about = getattr(options, field.name), hints[field.name], field.metadata["typer"]
        kinds = get_args(hint) if get_origin(hint) is UnionType else (hint,)
        other = field.metadata["objects"]
        if other and other in (kind.__name__ for kind in type(value).__mro__):
            continue
        low, high = about.get("min", least), about.get("max")
        number = float if float in kinds else int if int in kinds else None
        if number is int and high is None:
            high = MOST
        if not is_a(value, hint):
            words = [WORDS.get(get_origin(kind) or kind, str(kind)) for kind in kinds if kind is not NoneType]
            what = " or ".join([*(words if number is None else [WORDS[number]]), *([f"a {other}"] if other else [])])
        elif type(value) in (int, float) and not (
                (low is None or low <= value) and (high is None or value <= high)):
            what = WORDS[number or int]
        elif field.metadata["choices"] and isinstance(value, str) and value not in field.metadata["choices"]:
            if number is None:
                check_choice(name(field.name), value, field.metadata["choices"])
            what = WORDS[number or int]
        else:
            continue
        bounds = "" if number is None or low is None else f" from {low:g} on" if high is None else (
            f" from {low} to {high}")
        either = f", or {', '.join(field.metadata['choices'])}" if number and field.metadata["choices"] else ""
        raise SparseKVError(f"{name(field.name)} must be {what}{bounds}{either}, found {brief(value)}")


def whole(name: str, value: Any, least: int = 0, most: int = MOST) -> None:
    """Raises SparseKVError for anything but a whole number from `least` to `most`."""
    if type(value) is not int or not least <= value <= most:
        raise SparseKVError(f"{name} must be a whole number from {least} to {most}, found {brief(value)}")


def is_a(value: Any, hint: Any) -> bool:
    """Test a value for a field's type, as JSON, a command line or Python has it: a float is a finite number, a path or
    name has no null byte, a list is any sequence, and a dict's content is not looked at."""
    origin, inside = get_origin(hint) or hint, get_args(hint)
    if origin is UnionType:
        return any(is_a(value, part) for part in inside)
    if origin is list:
        return isinstance(value, Iterable) and not isinstance(value, str | dict) and all(
            is_a(x, inside[0]) for x in value)
    if origin is float:
        return is_number(value)
    if origin in (str, Path):
        return isinstance(value, str | Path) and "\0" not in str(value)
    if origin is dict:
        return isinstance(value, dict)
    return origin is Any or (value is None if origin is NoneType else type(value) is origin)


def is_number(value: Any) -> bool:
    """True for a number that a float can hold: JSON has larger integers, and NaN."""
    return type(value) in (int, float) and abs(value) <= MOST_FLOAT
