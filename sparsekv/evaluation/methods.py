"""A method: what is read exactly, what estimates the rest, how much may be retrieved. It has one name everywhere."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sparsekv.core.registry import ESTIMATOR_ROWS, FULL, NONE, SELECTOR_ROWS, method_names, row_of
from sparsekv.runtime.config import SparseConfig
from sparsekv.util.errors import SparseKVError, check_choice


@dataclass(frozen=True)
class Method:
    """A selector (`full` is full attention), what completes it (none or an estimator) and the share of the context it
    may retrieve. options: the selector's own that are not its defaults."""

    selector: str
    completion: str = NONE
    budget: float | None = None
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """Name the method as tables and rows do: `full`, `topk`, `topk+phi`, `lfps:alpha=0.03`."""
        shown = self.selector + "".join(f":{name}={value if isinstance(value, str) else json.dumps(value)}"
                                        for name, value in self.options)
        return shown if self.completion == NONE else f"{shown}+{self.completion}"

    def config(self, base: SparseConfig) -> SparseConfig:
        """The options that it decodes with. base: those that all methods share; full attention has only the regions."""
        budget = None if self.budget is None else float(self.budget)
        if self.selector == FULL:
            kept = ("sink_size", "window_size", "dense_below")
            return SparseConfig(selector="dense", **{name: getattr(base, name) for name in kept})
        return replace(base, selector=self.selector, token_budget=budget, completion=self.completion, candidates=None,
                       options=dict(self.options))

    def alike(self, other: Method | None) -> bool:
        """Return whether the other differs in its budget alone, and what is built over a prompt serves both."""
        return other is not None and self.budget is not None and replace(self, budget=None) == replace(
            other, budget=None) and _selector(self.selector).spends.name == "AT_STEP"

    @property
    def artifacts(self) -> list[str]:
        """List the trained artifacts it needs: `router`, `phi`."""
        row = row_of(self.selector)
        return [kind for kind in self.uses if kind != "router" or row is None or not row.untrained]

    @property
    def uses(self) -> list[str]:
        """List which of `router` and `phi` it decodes with where they are there."""
        rows = (row_of(self.selector), ESTIMATOR_ROWS.get(self.completion))
        return [kind for row in rows if row is not None for kind in row.needs if kind != "sketches"]


def parse_methods(
    names: Sequence[str], budgets: Sequence[float], base: SparseConfig | None = None,
) -> list[Method]:
    """`topk+phi`, or with options of the selector `magicpig:bits=8:tables=100`, at every budget; methods without a
    budget (`full`, `streaming`, `router:probes=32`) once. base: its completion and candidates are those of the methods
    that name none and can have them. Raises SparseKVError."""
    from sparsekv.core.selectors import Selector

    shared = Selector.option_names()  # the evaluation's own: budget and accounting
    candidates = None if base is None else base.candidates
    methods: list[Method] = []
    for name in names:
        words, _, completion = name.partition("+")
        selector, *given = words.split(":")
        found = _selector(selector)
        if base is not None and selector != FULL:
            completion = completion or base.completion or NONE
        check_choice("completion", completion or NONE, (*ESTIMATOR_ROWS, NONE))
        own = [n for n in found.option_names() if n not in shared]
        options = [_option(word, selector, own) for word in given]
        if candidates is not None and "candidates" in own and "candidates" not in dict(options):
            options.append(("candidates", candidates))
        once = found.spends.name == "NOTHING" or "probes" in dict(options)
        methods += [Method(selector, completion or NONE, b, tuple(options)) for b in ((None,) if once else budgets)]
    if candidates is not None and not any("candidates" in dict(m.options) for m in methods):
        raise SparseKVError("--candidates is an option of selector sketch, and no method has it; leave it out")
    return list(dict.fromkeys(methods))


def usual_methods(trained: Collection[str]) -> list[str]:
    """Return what is measured where no methods are named. trained: what there is, of `router`, `sketches` and `phi`."""
    completions = ["", *(f"+{row.name}" for row in ESTIMATOR_ROWS.values()
                         if row.usual and set(row.needs) <= set(trained))]
    return [row.name + completion for row in SELECTOR_ROWS.values() if row.usual and set(row.needs) <= set(trained)
            for completion in completions]


def check_methods(methods: Sequence[Method], router: Any, base: SparseConfig) -> None:
    """Refuse options that their selector does not take, before a model is loaded. Raises SparseKVError."""
    from sparsekv.runtime.decoding import choose_selector

    for method in methods:
        choose_selector(method.config(base), router)


def label(name: str, budget: float | None = None) -> str:
    """A method's name for readers: `exact top-k, 1 % + φ`."""
    words, _, completion = name.partition("+")
    selector, colon, options = words.partition(":")
    row, estimator = row_of(selector), ESTIMATOR_ROWS.get(completion)
    shown = row.label if row is not None and row.label else selector
    symbol = estimator.symbol if estimator is not None and estimator.symbol else completion
    parts = [shown, *([options] if colon else []), *([percent(budget)] if budget else [])]
    return ", ".join(parts) + (f" + {symbol}" if symbol else "")


def percent(budget: float) -> str:
    """A budget for readers: a share of the context, or a number of tokens."""
    return f"{budget:.3g}" if budget > 1 or isinstance(budget, int) else f"{100 * budget:g} %"


def plain(name: str) -> str:
    """A method's name without its selector's options: `lfps:alpha=0.03` -> `lfps`."""
    words, plus, completion = name.partition("+")
    return words.partition(":")[0] + plus + completion


def _selector(name: str) -> Any:
    from sparsekv.core.selectors import SELECTORS

    check_choice("selector", name, method_names())
    return SELECTORS["dense" if name == FULL else name]


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
