"""What a selector is: options, `build`, `extend`, `select`. One selector is one file and one registry line."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparsekv.config import option
from sparsekv.core.index import bucket_counts, bucket_tokens
from sparsekv.core.regions import Regions
from sparsekv.errors import SparseKVError

FUSED_DEVICES = ["cuda"]
ACCOUNTINGS = ("retrieved", "worst_case", "amortised")


@dataclass
class LayerView:
    """What a selector or a completion may read of one layer. `keys, values: [B, Hkv, N, d]`, keys with RoPE."""

    keys: Tensor
    values: Tensor
    regions: Regions
    scale: float
    num_query_heads: int
    layer_idx: int
    num_layers: int
    unrotate: Callable[[Tensor, int, int], Tensor]
    turn: Callable[[Tensor, Tensor, Tensor], Tensor]
    """`turn(x, old, new)`: move x `[B, H, n, d]` from positions `old` to `new`, each `[n]`-shaped or broadcastable."""
    recent_queries: Tensor
    """The last queries of the prefill `[B, Hq, w, d]`, with RoPE; `w` may be 0 and is at most 64."""
    recent_end: int
    """Position after the last of `recent_queries`."""
    saved: dict[str, Tensor] | None = None
    """What was built over a prefix loaded from disk."""
    resident: Any = None
    """With keys in CPU memory: the anchors on the device (`offload.Resident`); regions are on the device too."""
    completion_tokens: float = 0.0
    """What the completion's cache costs, in tokens; the worst-case accounting takes it from the budget."""

    @property
    def device(self) -> torch.device:
        """Where decoding happens; keys and values may lie elsewhere."""
        return self.regions.starts.device

    @property
    def num_kv_heads(self) -> int:
        return self.keys.shape[1]

    @property
    def group(self) -> int:
        return self.num_query_heads // self.keys.shape[1]

    @property
    def length(self) -> int:
        return self.regions.length

    def keys_pre(self, first: int, last: int) -> Tensor:
        """Keys `first..last` with RoPE removed, `[B, Hkv, last − first, d]`."""
        return self.unrotate(self.keys[:, :, first:last], first, last)


@dataclass
class Queries:
    """The queries of one step. `rot: [B, Hq, T, d]` with RoPE; they are the last T tokens of the cache."""

    rot: Tensor
    make_pre: Callable[[], Tensor]
    _pre: Tensor | None = None

    @property
    def pre(self) -> Tensor:
        """The same with RoPE removed."""
        if self._pre is None:
            self._pre = self.make_pre()
        return self._pre

    @property
    def count(self) -> int:
        return self.rot.shape[2]

    def folded(self, x: Tensor) -> Tensor:
        """`[B, H, T, n] -> [B·T, H, n]`."""
        return x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3])

    def one(self, t: int) -> Queries:
        """The query of token `t` alone."""
        return Queries(self.rot[:, :, t:t + 1], lambda: self.pre[:, :, t:t + 1])


@dataclass
class Selection:
    """The mid tokens R to read for each of Q = B·T queries: a list of tokens, or buckets of an index.

    tokens: `[Q, H, K]`, `H` = 1 (shared by all heads), `Hkv` (by the group) or `Hq`; -1 = none, no token twice, all in
    the mid region.
    buckets: `[Q, Hkv, L]` with `order [B, Hkv, M]`, `offsets [B, Hkv, C + 1]`, the CSR of the index.
    log_weights: `[Q, H, K]`, added to the scores of `tokens` (sampling estimators).
    contiguous: the keys read get contiguous positions (length extrapolation).
    extra: one more partial attention `(out [Q, Hq, d], lse [Q, Hq])` that stands for the rest where lse > -inf; a
    completion takes its place.
    rows: keys and values of `tokens` `[Q, Hkv, K·H/Hkv, d]` where they were fetched already.
    """

    tokens: Tensor | None = None
    buckets: Tensor | None = None
    order: Tensor | None = None
    offsets: Tensor | None = None
    log_weights: Tensor | None = None
    contiguous: bool = False
    extra: tuple[Tensor, Tensor] | None = None
    rows: tuple[Tensor, Tensor] | None = None

    def as_tokens(self) -> Tensor:
        """The tokens read, `[Q, H, K]`."""
        if self.tokens is None:
            assert self.order is not None and self.offsets is not None and self.buckets is not None
            self.tokens = bucket_tokens(self.order, self.offsets, self.buckets)
        return self.tokens

    def counts(self) -> Tensor:
        """Tokens read per query and head, `[Q, H]` int64."""
        if self.tokens is None and self.buckets is not None and self.offsets is not None:
            return bucket_counts(self.offsets, self.buckets)
        return (self.as_tokens() >= 0).sum(-1)


def one_launch(view: LayerView, queries: Queries) -> bool:
    """Whether a step can be left to the kernels whole: one query a row, keys on a device that has them."""
    return queries.rot.device.type in FUSED_DEVICES and queries.count == 1 and view.resident is None


def fold(x: Tensor, queries: int) -> Tensor:
    """`[B, ...] -> [B·T, ...]`: every row once a query; a view where B = 1 or T = 1."""
    if queries == 1:
        return x
    if x.shape[0] == 1:
        return x.expand(queries, *x.shape[1:])
    return x.repeat_interleave(queries, dim=0)


@dataclass(eq=False)
class Selector:
    """Chooses the mid tokens a query reads exactly. The fields are the options; `build` makes one layer's state.

    State is held in attributes that are replaced, never changed in place, so that `fork` is a shallow copy. Attributes
    named in `row_state` have the batch as first dimension.
    """

    name: ClassVar[str] = ""
    source: ClassVar[str] = ""
    row_state: ClassVar[tuple[str, ...]] = ()
    needs_budget: ClassVar[bool] = True
    scores_keys: ClassVar[bool] = False
    """A step reads keys to choose among them: no use in CPU memory with the choice on the GPU."""

    token_budget: int | float | None = option(
        None, help="Mid tokens retrieved per query and KV head: an integer counts tokens, a float is a fraction of the "
                   "context [tokens].")
    accounting: str = option(
        "retrieved", help="What a fractional budget pays for: retrieved (the retrieved tokens alone), worst_case "
                          "(anchors and the completion's cache too), amortised (the same, the cache spread over "
                          "amortise_over tokens).")
    amortise_over: int = option(256, help="Generated tokens that share the completion's cache when accounting is "
                                          "amortised [tokens].", min=1)

    def validate(self) -> None:
        """Refuse impossible options before any work. Raises SparseKVError."""
        if self.accounting not in ACCOUNTINGS:
            raise SparseKVError(f"unknown accounting {self.accounting!r}: expected one of {', '.join(ACCOUNTINGS)}")
        if self.needs_budget and self.token_budget is None:
            raise SparseKVError(f"selector {self.name} needs token_budget: tokens (an integer) or a fraction of the "
                                "context (a float)")
        check_budget(self.token_budget)

    def build(self, view: LayerView) -> None:
        """Prepare for the mid region of `view`, at the end of the prefill."""

    def extend(self, view: LayerView, old: Regions) -> None:
        """The mid region grew from `old` to `view.regions`; the default builds again."""
        self.build(view)

    def routed(self, view: LayerView, queries: Queries, phi: Any) -> tuple[Tensor, Selection] | None:
        """Selection, attention and completion `phi` (`PhiCompletion.fused`) in one call of the kernels: the output
        `[B, Hq, d]` and what was read. None: `select` and the caller's own attention."""
        return None

    def select(self, view: LayerView, queries: Queries) -> Selection:
        """The mid tokens to read for each query."""
        raise NotImplementedError

    def observe(self, view: LayerView, queries: Queries, selection: Selection) -> None:
        """Called after attention with what was read; selectors that learn from the past override it."""

    def fork(self) -> Selector:
        """An independent copy that shares tensors."""
        return copy.copy(self)

    def take_rows(self, index: Tensor) -> None:
        """Keep the chosen rows of the batch, in that order."""
        for name in self.row_state:
            value = getattr(self, name, None)
            if value is not None:
                setattr(self, name, value[index.to(value.device)])

    def statistics(self) -> dict[str, float]:
        """Numbers of this layer for the report."""
        return {}

    def budget_tokens(self, view: LayerView) -> Tensor:
        """Mid tokens a query may read, per row `[B]` int64, never more than there are. A fraction is of the context
        when the mid region last grew, so that a step waits for no device."""
        return self._budget(view)[0]

    def read_share(self, view: LayerView) -> float:
        """About the share of the context that a step reads beside sink and tail. Waits for no device."""
        budget = self.token_budget or 0.0
        return float(budget) if isinstance(budget, float) else min(1.0, budget / max(1, view.length))

    def widest_budget(self, view: LayerView) -> int:
        """The largest of `budget_tokens`."""
        return self._budget(view)[1]

    def _budget(self, view: LayerView) -> tuple[Tensor, int]:
        held = self.__dict__.get("_held_budget")
        if held is None or held[0] is not view.regions.tail_starts:
            budget = self._fresh_budget(view)
            held = self.__dict__["_held_budget"] = (view.regions.tail_starts, budget,
                                                    int(budget.max()) if budget.numel() else 0)
        return held[1], held[2]

    def _fresh_budget(self, view: LayerView) -> Tensor:
        budget = tokens_of_budget(
            self.token_budget, view.regions, accounting=self.accounting,
            completion_tokens=view.completion_tokens / (self.amortise_over if self.accounting == "amortised" else 1))
        return torch.minimum(budget, view.regions.mid_sizes)

    def keep_budget(self, regions: Regions, index: Tensor) -> None:
        """The budget of the chosen rows stays what it was when the mid region last grew."""
        held = self.__dict__.get("_held_budget")
        if held is not None and index.numel():
            budget = held[1][index.to(held[1].device)]
            self.__dict__["_held_budget"] = (regions.tail_starts, budget, int(budget.max()))

    @classmethod
    def option_names(cls) -> list[str]:
        return [f.name for f in fields(cls) if f.metadata]


def check_budget(budget: int | float | None) -> None:
    """A budget is a count of tokens (int ≥ 0) or a fraction of the context (float in [0, 1])."""
    if budget is None:
        return
    if isinstance(budget, bool) or not isinstance(budget, int | float):
        raise SparseKVError(f"token_budget must be a number of tokens or a fraction, found {budget!r}")
    if isinstance(budget, float) and not 0 <= budget <= 1:
        raise SparseKVError(f"a float token_budget is a fraction of the context between 0 and 1, found {budget}; "
                            "give an integer for a number of tokens")
    if budget < 0:
        raise SparseKVError(f"token_budget must not be negative, found {budget}")


def tokens_of_budget(
    budget: int | float | None, regions: Regions, *, accounting: str = "retrieved", completion_tokens: float = 0.0,
) -> Tensor:
    """Mid tokens to retrieve for each row, `[B]` int64 (METHODS, budget accounting).

    `retrieved`: an int as it is, a fraction `⌈ρN⌉`, on top of the anchors. `worst_case` and `amortised`: the budget
    (int, or ρN) also pays for the anchors and `completion_tokens`: `⌈ρN − |A| − cache⌉`.
    Raises SparseKVError when that leaves less than nothing.
    """
    context = regions.context
    if budget is None:
        return torch.zeros_like(context)
    if isinstance(budget, int):
        total = torch.full_like(context, budget).double()
    else:
        total = budget * context.double()
    if accounting != "retrieved":
        total = total - regions.anchor_sizes() - completion_tokens
        if bool((total < 0).any()):
            short = math.ceil(float((-total).max()))
            raise SparseKVError(f"token_budget {budget} is infeasible here: with accounting {accounting!r} the anchors "
                                f"and the completion's cache alone cost {short} tokens more; raise the budget or "
                                "shrink sink_size and window_size")
    return torch.ceil(total - 1e-9).long()


def options_of(selector: Selector) -> dict[str, Any]:
    """The options of a selector as a plain dict."""
    return {name: getattr(selector, name) for name in selector.option_names()}
