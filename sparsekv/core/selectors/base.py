"""What a selector is: options, `build`, `extend`, `select`. One selector is one file and one registry line."""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from torch import Tensor

from sparsekv.core.estimators.base import take_rows
from sparsekv.core.layer import LayerView, Queries, Selection
from sparsekv.core.regions import ACCOUNTINGS, Regions, check_budget, tokens_of_budget
from sparsekv.foundation.config import option
from sparsekv.foundation.errors import SparseKVError


@dataclass(eq=False)
class Selector:
    """Chooses the mid tokens a query reads exactly. The fields are the options; `build` makes one layer's state.

    State is held in attributes that are replaced, never changed in place, so that `fork` is a shallow copy. Attributes
    named in `row_state` have the batch as first dimension. What a selector needs of its surroundings it declares below.
    """

    name: ClassVar[str] = ""
    source: ClassVar[str] = ""
    row_state: ClassVar[tuple[str, ...]] = ()
    spends_budget: ClassVar[bool] = True
    """Whether `token_budget` decides how much is read."""
    needs_budget: ClassVar[bool] = True
    """Whether one that spends it cannot do without."""
    scores_keys: ClassVar[bool] = False
    """A step reads keys to choose among them: no use where they lie in CPU memory and the choice is the GPU's."""
    replayable: ClassVar[bool] = False
    """A step is the same work on the device every time: it decides nothing on the host and keeps nothing for the next,
    so that a CUDA graph can hold it."""
    budget_free: ClassVar[bool] = False
    """What `build` makes is the same for every budget, and no step changes it."""
    artifact_kind: ClassVar[str | None] = None
    """The artifact that its field `artifact` takes: `router`, or none."""

    token_budget: int | float | None = option(
        None, help="Mid tokens retrieved per query and KV head: an integer counts tokens, a float is a share of the "
                   "context [tokens].")
    accounting: str = option(
        "retrieved", help="What a budget pays for: retrieved (the retrieved tokens alone), worst_case (anchors and the "
                          "completion's cache too) or amortised (the same, the cache spread over 256 tokens).")

    def validate(self) -> None:
        """Refuse impossible options. `prepare` calls it; before that, to fail early. Raises SparseKVError."""
        if self.accounting not in ACCOUNTINGS:
            raise SparseKVError(f"unknown accounting {self.accounting!r}: expected one of {', '.join(ACCOUNTINGS)}")
        if self.spends_budget and self.needs_budget and self.token_budget is None:
            raise SparseKVError(f"selector {self.name} needs token_budget: tokens (an integer) or a share of the "
                                "context (a float)")
        check_budget(self.token_budget)

    def serves(self, layer_idx: int) -> bool:
        """Whether a layer decodes sparsely with it; the others keep full attention."""
        return True

    def to(self, device: Any) -> Self:
        """The same with its artifact on a device."""
        return self

    @property
    def contiguous(self) -> bool:
        """Whether the keys that are read get contiguous positions (length extrapolation)."""
        return False

    @property
    def chunk(self) -> int:
        """Tokens of a prompt that are read sparsely together, by what `choose` lists; 0: prompts are read densely."""
        return 0

    def choose(self, view: LayerView, q: Tensor) -> Tensor:
        """The mid tokens that a chunk of the prompt reads, `[B, 1, K]` padded with -1: q `[B, Hq, 1, d]`, the chunk's
        mean query. Only asked where `chunk` is not 0."""
        raise NotImplementedError

    def prepare(self, view: LayerView) -> None:
        """Called before `build` and `extend`: check the options and work out the budget of the mid region as it now is.
        `budget [B]` int64 and `widest`, the largest of it, stay until the mid region grows, so that a step waits for
        no device. Raises SparseKVError."""
        self.validate()
        tokens = tokens_of_budget(self.token_budget, view.regions, accounting=self.accounting,
                                  completion_tokens=view.completion_tokens, feature_tokens=view.feature_tokens)
        self.budget = self.layer_budget(view, tokens).clamp(max=view.regions.mid_sizes)
        self.widest = int(self.budget.max()) if self.budget.numel() else 0

    def layer_budget(self, view: LayerView, tokens: Tensor) -> Tensor:
        """This layer's budget `[B]` where the budget is `tokens [B]`."""
        return tokens

    def build(self, view: LayerView) -> None:
        """Prepare for the mid region of `view`, at the end of the prefill."""

    def extend(self, view: LayerView, old: Regions) -> None:
        """The mid region grew from `old` to `view.regions`; the default builds again."""
        self.build(view)

    def select(self, view: LayerView, queries: Queries) -> Selection:
        """The mid tokens to read for each query."""
        raise NotImplementedError

    def partial(self, view: LayerView, queries: Queries, selection: Selection) -> tuple[Tensor, Tensor] | None:
        """A selector's own stand-in for what it did not read, where no estimator is used: `(out [Q, Hq, d],
        lse [Q, Hq])`, or None."""
        return None

    def read_share(self, view: LayerView) -> float:
        """About the share of the context that a step reads beside the anchors. Waits for no device."""
        budget = self.token_budget or 0.0
        return float(budget) if isinstance(budget, float) else min(1.0, budget / max(1, view.length))

    def cost_bytes(self, view: LayerView) -> Tensor | float:
        """Bytes that a step of a layer reads to choose, of one row: one number, or one a row `[B]`. In the precision of
        the keys, whatever the arithmetic's. Waits for no device."""
        return 0.0

    def fork(self) -> Self:
        """An independent copy that shares tensors."""
        return copy.copy(self)

    def take_rows(self, index: Tensor) -> None:
        """Keep the chosen rows of the batch, in that order."""
        for name in ("budget", *self.row_state):
            setattr(self, name, take_rows(getattr(self, name), index))

    def statistics(self) -> dict[str, float]:
        """Numbers of this layer for the report."""
        return {}

    @classmethod
    def option_names(cls) -> list[str]:
        return [f.name for f in fields(cls) if f.metadata]

    def options(self) -> dict[str, Any]:
        """The options as a plain dict."""
        return {name: getattr(self, name) for name in self.option_names()}
