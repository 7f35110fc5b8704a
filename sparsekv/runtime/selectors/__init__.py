"""Selectors by name. A new one is one file and one line here."""

from __future__ import annotations

from typing import Any

from sparsekv.errors import SparseKVError
from sparsekv.runtime.selectors.base import Selection, Selector
from sparsekv.runtime.selectors.dense import Dense
from sparsekv.runtime.selectors.router import Router
from sparsekv.runtime.selectors.streaming import Streaming
from sparsekv.runtime.selectors.topk import TopK

SELECTORS: dict[str, type[Selector]] = {
    "dense": Dense,
    "streaming": Streaming,
    "topk": TopK,
    "router": Router,
}

__all__ = ["SELECTORS", "Selection", "Selector", "make_selector"]


def make_selector(name: str, **options: Any) -> Selector:
    """A selector by name with its options (those left None are left out). Raises SparseKVError for an unknown name or
    an option the selector does not have."""
    kind = SELECTORS.get(name)
    if kind is None:
        raise SparseKVError(f"unknown selector {name!r}: expected one of {', '.join(SELECTORS)}")
    given = {k: v for k, v in options.items() if v is not None}
    foreign = sorted(set(given) - set(kind.option_names()))
    if foreign:
        raise SparseKVError(f"selector {name!r} has no option {', '.join(foreign)}; it has "
                            f"{', '.join(kind.option_names())}")
    selector = kind(**given)
    selector.validate()
    return selector
