"""A method: what is read exactly, what estimates the rest, how much may be retrieved. It has one name everywhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sparsekv.foundation.errors import SparseKVError

WORDS = {"full": "full attention", "streaming": "sink + tail", "topk": "exact top-k"}
"""What some selectors are called where there is room for words."""


@dataclass(frozen=True)
class Method:
    """A selector (`full` is full attention), what completes it (none, phi, centroid) and the share of the context it
    may retrieve. options: the selector's own that are not its defaults."""

    selector: str
    completion: str = "none"
    budget: float | None = None
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """As in tables and result rows: `full`, `topk`, `topk+phi`, `lfps:alpha=0.03`."""
        shown = self.selector + "".join(f":{name}={value if isinstance(value, str) else json.dumps(value)}"
                                        for name, value in self.options)
        return shown if self.completion == "none" else f"{shown}+{self.completion}"

    def alike(self, other: Method | None) -> bool:
        """Whether the other differs in its budget alone, and what is built over a prompt serves both."""
        return other is not None and self.budget is not None and replace(self, budget=None) == replace(
            other, budget=None) and _selector(self.selector).budget_free

    @property
    def artifacts(self) -> list[str]:
        """Which trained artifacts it needs: `router`, `phi`."""
        kinds = (_selector(self.selector).artifact_kind, "phi" if self.completion == "phi" else None)
        return [kind for kind in kinds if kind is not None]


def parse_methods(names: Sequence[str], budgets: Sequence[float]) -> list[Method]:
    """`topk+phi`, or with options of the selector `magicpig:bits=8:tables=100`, at every budget; methods without a
    budget (`full`, `streaming`) once. Raises SparseKVError."""
    from sparsekv.core.selectors import Selector
    from sparsekv.runtime.decoding import COMPLETIONS

    shared = Selector.option_names()  # the evaluation's own: budget and accounting
    methods: list[Method] = []
    for name in names:
        words, _, completion = name.partition("+")
        selector, *given = words.split(":")
        found = _selector(selector)
        if (completion or "none") not in COMPLETIONS:
            raise SparseKVError(f"unknown completion {completion!r} in {name!r}: expected one of "
                                f"{', '.join(COMPLETIONS)}")
        own = [n for n in found.option_names() if n not in shared]
        options = tuple(_option(word, selector, own) for word in given)
        methods += [Method(selector, completion or "none", b, options)
                    for b in (budgets if found.spends_budget else (None,))]
    return list(dict.fromkeys(methods))


def check_methods(methods: Sequence[Method], router: Any) -> None:
    """Refuse options that their selector does not take, before a model is loaded. Raises SparseKVError."""
    from sparsekv.runtime.decoding import choose_selector

    for method in methods:
        choose_selector("dense" if method.selector == "full" else method.selector, router, method.budget,
                        dict(method.options))


def label(name: str, budget: float | None = None) -> str:
    """A method's name for readers: `exact top-k, 1 % + φ`."""
    words, _, completion = name.partition("+")
    selector, colon, options = words.partition(":")
    parts = [WORDS.get(selector, selector), *([options] if colon else []), *([percent(budget)] if budget else [])]
    return ", ".join(parts) + (f" + {completion.replace('phi', 'φ')}" if completion else "")


def percent(budget: float) -> str:
    """A budget for readers: a share of the context, or a number of tokens."""
    return f"{budget:.3g}" if budget >= 1 else f"{100 * budget:g} %"


def plain(name: str) -> str:
    """A method's name without its selector's options: `lfps:alpha=0.03` -> `lfps`."""
    words, plus, completion = name.partition("+")
    return words.partition(":")[0] + plus + completion


def _selector(name: str) -> Any:
    from sparsekv.core.selectors import SELECTORS

    known = {"full": SELECTORS["dense"], **{n: s for n, s in SELECTORS.items() if n != "dense"}}
    if name not in known:
        raise SparseKVError(f"unknown selector {name!r}: expected some of {', '.join(known)}")
    return known[name]


def _option(word: str, selector: str, names: Sequence[str]) -> tuple[str, Any]:
    """`alpha=0.03` as name and value, one of the names."""
    name, equals, value = word.partition("=")
    if not equals or name not in names:
        raise SparseKVError(f"{word!r} is no option of selector {selector} in a method: expected name=value with one "
                            f"of {', '.join(names) or 'none'}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
