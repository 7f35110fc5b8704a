"""What a selector is: options, `build`, `extend`, `select`, and what choosing costs in bytes. One selector is one file
and one row of the methods."""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol, Self

from torch import Tensor

from sparsekv.core.layer import LayerView, Queries, RowState, Selection
from sparsekv.core.regions import ACCOUNTINGS, Regions, check_budget, tokens_of_budget
from sparsekv.util.config import option
from sparsekv.util.errors import SparseKVError, check_choice


class Spends(enum.Enum):
    """The use of `token_budget` by a selector."""

    NOTHING = "reads what it reads, whatever the budget"
    AT_BUILD = "what `build` makes depends on it, or steps change what is kept"
    AT_STEP = "`select` alone reads it: another budget needs no new build"


@dataclass(eq=False)
class Selector(RowState):
    """Chooses the mid tokens that a query reads exactly. The fields are the options; `build` makes one layer's state.

    A class that is trained has a field `layer`: what an artifact has of the layer (`core/index.py: RouterLayer`). A
    class declares `row_state` and the three things below and overrides `validate`, `build`, `extend`, `select` and
    `cost_bytes`.
    """

    name: ClassVar[str] = ""

    spends: ClassVar[Spends] = Spends.AT_BUILD
    replayable: ClassVar[bool] = False
    """A step is the same work on the device every time: it decides nothing on the host and keeps nothing for the next,
    so that a CUDA graph can hold it."""
    scores_keys: ClassVar[bool] = False
    """A step reads keys to choose among them: no use where they lie in CPU memory and the choice is the GPU's."""

    token_budget: int | float | None = option(
        None, help="Mid tokens retrieved per query and KV head: an integer counts tokens, a float is a share of the "
                   "context [tokens].")
    accounting: str = option(
        "retrieved", help="What a budget pays for: retrieved (the retrieved tokens alone), worst_case (anchors and the "
                          "completion's cache too) or amortised (the same, the cache spread over 256 tokens).")

    def validate(self) -> None:
        """Refuse impossible options; changes nothing. Raises SparseKVError."""
        check_choice("accounting", self.accounting, ACCOUNTINGS)
        if self.spends is not Spends.NOTHING and self.spent_budget is None and not self.reads_without_budget:
            raise SparseKVError(f"selector {self.name} needs a token budget: a count of tokens, or below 1 a share of "
                                "the context")
        check_budget(self.token_budget)

    def extend(self, view: Any, old: Regions) -> None:
        """The mid region grew from `old` to `view.regions`; the default builds again."""
        self.build(view)

    def select(self, view: Any, queries: Queries) -> Selection:
        """The mid tokens to read for each query."""
        raise NotImplementedError

    def cost_bytes(self, view: Any) -> Tensor | float:
        """Bytes that a step of a layer reads to choose, of one row: one number, or one a row `[B]`. In the precision of
        the keys, whatever the arithmetic's. Waits for no device."""
        return 0.0

    @property
    def spent_budget(self) -> int | float | None:
        """The budget that is spent: `token_budget`, or what stands for it where none is given."""
        return self.token_budget

    @property
    def reads_without_budget(self) -> bool:
        """True where other options say how much is read."""
        return False

    def serves(self, layer_idx: int) -> bool:
        """Return whether a layer decodes sparsely with these options; the others keep full attention."""
        return True

    def prepare(self, view: Any) -> None:
        """Check the options and work out the budget of the mid region as it now is. `budget [B]` int64 and `widest`,
        the largest of it, stay until the mid region grows, so that a step waits for no device. Raises SparseKVError."""
        self.validate()
        tokens = tokens_of_budget(self.spent_budget, view.regions, accounting=self.accounting,
                                  completion_tokens=view.completion_tokens, clamped=False)
        self.budget = self.layer_budget(view, tokens).clamp(max=view.regions.mid_sizes)
        self.widest = int(self.budget.max()) if self.budget.numel() else 0

    def take_heads(self, whole: Self, state: dict[str, Any]) -> None:
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        self.__dict__.update(whole.__dict__ | own | state)

    def layer_budget(self, view: Any, tokens: Tensor) -> Tensor:
        """This layer's budget `[B]` where the budget is `tokens [B]`."""
        return tokens

    def read_share(self, view: Any) -> float | Tensor:
        """About the share of the context that a step reads beside the anchors: one number, or one a row `[B]` float64,
        where a count of tokens is another share of every row's context. Waits for no device."""
        budget = self.spent_budget or 0.0
        if isinstance(budget, float):
            return budget
        return (budget / view.regions.context.clamp(min=1).double()).clamp(max=1.0)

    def take_rows(self, index: Tensor) -> None:
        super().take_rows(index)
        self.budget = self.budget[index]

    def reader(self, sink: int, window: int) -> ReadsPrompts | None:
        """Return the reader of prompts with this sink and this local window [tokens]; None: they are read densely."""
        return None

    def statistics(self) -> dict[str, float]:
        """Numbers of this layer for the report."""
        return {}

    @classmethod
    def option_names(cls) -> list[str]:
        return [f.name for f in fields(cls) if f.metadata]

    @classmethod
    def is_trained(cls) -> bool:
        """Return whether it takes a layer of a router artifact."""
        return any(f.name == "layer" for f in fields(cls))


class ReadsPrompts(Protocol):
    """A reader of sparse prompts. shortest: the tokens of the shortest prompt that is read so."""

    @property
    def shortest(self) -> int: ...

    def read(self, view: LayerView, query: Tensor, *, after: int = 0) -> Tensor:
        """Attention of the last T tokens of a view: query `[B, Hq, T, d]` -> as query. after: tokens of the prompt that
        come after them. Of `view.regions` only the rows' starts count."""
