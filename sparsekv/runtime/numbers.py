"""What a number among the arguments of `attach` may be; a selector's options, by the types of its fields."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from sparsekv.artifacts.checks import brief
from sparsekv.core.selectors import Selector
from sparsekv.util.config import MOST
from sparsekv.util.errors import SparseKVError

WORDS = {int: "a whole number", float: "a number", bool: "True or False", str: "a word", type(None): "None"}


def whole(name: str, value: Any, least: int = 0, most: int = MOST) -> None:
    """Raises SparseKVError for anything but a whole number from `least` to `most`."""
    if type(value) is not int or not least <= value <= most:
        raise SparseKVError(f"{name} must be a whole number from {least} to {most}, found {brief(value)}")


def layer_numbers(value: Any) -> None:
    """Raises SparseKVError for anything but layers by number."""
    if isinstance(value, str) or not hasattr(value, "__iter__") or any(type(x) is not int for x in value):
        raise SparseKVError(f"dense_layers must be layer numbers such as (0, 1), found {brief(value)}")


def check_selector(selector: Selector) -> None:
    """Raises SparseKVError for an option that is not of its field's type, that the selector refuses, or that is out of
    the range that the field says."""
    hints, options = get_type_hints(type(selector)), [f for f in fields(selector) if f.metadata]
    for field in options:
        value = getattr(selector, field.name)
        kinds = get_args(hints[field.name]) or (hints[field.name],)
        number = type(value) in (int, float)
        fits = type(value) in kinds or (number and float in kinds) or (str in kinds and isinstance(value, Path))
        if not fits or (number and not abs(value) <= MOST) or "\0" in str(value):
            expected = " or ".join(WORDS.get(kind, kind.__name__) for kind in kinds)
            raise SparseKVError(f"{field.name} of selector {selector.name} must be {expected}, found {brief(value)}")
    selector.validate()
    for field in options:
        value, about = getattr(selector, field.name), field.metadata.get("typer", {})
        low, high = about.get("min", 0), about.get("max", MOST)
        if type(value) in (int, float) and not low <= value <= high:
            raise SparseKVError(f"{field.name} of selector {selector.name} must be a number from {low} to {high}, "
                                f"found {brief(value)}")
