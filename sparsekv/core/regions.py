"""Which tokens are always read, which may be selected, and how many of them a budget pays for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from sparsekv.core.moments import edges_of
from sparsekv.util.errors import SparseKVError

ACCOUNTINGS = ("retrieved", "worst_case", "amortised")
AMORTISE_OVER = 256
"""Generated tokens that share the completion's cache when accounting is amortised."""
MOST_TOKENS = 2**31 - 1
"""Tokens that a list may name, by numbers of 32 bits."""


class TailRule(NamedTuple):
    """The rule by which the oldest tokens of a tail join the mid region [tokens]: `window_size` of them stay, and
    generated ones until there are more than `decode_window`; then all but half of those join."""

    window_size: int
    decode_window: int

    @property
    def longest(self) -> int:
        """Tokens of the longest tail."""
        return self.window_size + self.decode_window + 1

    def moved_to(self, past: int) -> int:
        """Return where the tail begins once its oldest tokens have joined, of a cache whose first `past` tokens may."""
        return past - self.window_size - self.decode_window // 2


@dataclass(frozen=True)
class Regions:
    """The regions of one layer's cache at one moment.

    Row `b` has real tokens in `[starts[b], length)` (left padding before). Sink `[starts, starts + sink_size)`; mid
    region `[mid_first, mid_last)`, the only part a selector chooses from; tail `[tail_starts, length)`: the local
    window at the end of the prefill and everything generated since. Sink and tail are the anchors, always read. All
    int64, `[B]`.
    """

    starts: Tensor
    tail_starts: Tensor
    length: int
    sink_size: int

    @classmethod
    def at_prefill_end(cls, starts: Tensor, length: int, sink_size: int, window_size: int) -> Regions:
        """Make those at the end of a prefill. starts: first token of every row `[B]` int64; length of the cache, sink
        and window [tokens]."""
        return cls(starts, torch.clamp(starts, min=length - window_size), length, sink_size)

    @classmethod
    def of_equal_rows(cls, starts: Tensor, length: int, sink_size: int, window_size: int) -> Regions:
        """Make those at the end of a prefill without padding, of which `edges` are known without a wait for the
        device."""
        regions = cls.at_prefill_end(starts, length, sink_size, window_size)
        last = max(length - window_size, 0)
        first = min(sink_size, last)
        regions.__dict__["edges"], regions.__dict__["spans"] = [first, first, last, last], [0, 0, last, last]
        return regions

    @property
    def sinks(self) -> int:
        """The sink's tokens where it may be longer than the cache: what is listed of it is never more than there is."""
        return min(self.sink_size, self.length)

    @property
    def mid_first(self) -> Tensor:
        return torch.minimum(self.starts + self.sink_size, self.tail_starts)

    @property
    def mid_last(self) -> Tensor:
        return self.tail_starts

    @property
    def mid_sizes(self) -> Tensor:
        return self.mid_last - self.mid_first

    @cached_property
    def edges(self) -> list[int]:
        """`edges_of` the mid region, read once for all layers that have these regions, so that what follows is queued
        without a wait."""
        return edges_of(self.mid_first, self.mid_last)

    @cached_property
    def spans(self) -> list[int]:
        """`edges_of` all from a row's first token to the end of its mid region, read once alike."""
        return edges_of(self.starts, self.mid_last)

    @property
    def equal(self) -> tuple[int, int] | None:
        """The mid region of every row, first and last + 1; None where rows differ. Waits for what `edges` waits for."""
        first, other, last, end = self.edges
        return (first, last) if first == other and last == end else None

    @property
    def context(self) -> Tensor:
        """Real tokens of every row, `[B]`."""
        return self.length - self.starts

    def mid_mask(self, first: int = 0, last: int | None = None, after: Tensor | None = None) -> Tensor:
        """`[B, last − first]`, true inside the mid region, and only from `after [B]` on where given; of the whole cache
        by default."""
        positions = torch.arange(first, self.length if last is None else last, device=self.starts.device)
        begin = self.mid_first if after is None else torch.maximum(self.mid_first, after)
        return (positions >= begin[:, None]) & (positions < self.mid_last[:, None])

    def grown(self, length: int) -> Regions:
        """Keep the mid region in a longer (or cropped) cache; what is known of it without a wait stays known."""
        known: dict[str, Any] = {name: self.__dict__[name] for name in ("edges", "spans") if name in self.__dict__}
        regions = self._once(("length", length), lambda: replace(self, length=length))
        regions.__dict__.update(known)
        return regions

    def moved(self, tail_start: int, full: int) -> Regions:
        """Let the mid region grow up to `tail_start` in rows whose tail is full: it begins at `full` or before. That of
        a row shorter than the window begins later."""
        regions = self._once(("tail", tail_start), lambda: replace(self, tail_starts=torch.where(
            self.tail_starts <= full, self.tail_starts.clamp(min=tail_start), self.tail_starts)))
        regions.__dict__["source"] = self  # which lives until the other layers have moved too
        return regions

    def _once(self, how: tuple[str, int], make: Callable[[], Regions]) -> Regions:
        """Share one object between all layers of a cache, whose borders are read from the device once, while they grow
        alike."""
        derived: WeakValueDictionary[tuple[str, int], Regions] = self.__dict__.setdefault(
            "derived", WeakValueDictionary())
        regions = derived.get(how)
        if regions is None:
            derived[how] = regions = make()
        return regions

    def take_rows(self, index: Tensor) -> Regions:
        """The regions of the chosen rows of the batch."""
        return replace(self, starts=self.starts[index], tail_starts=self.tail_starts[index])


def check_budget(budget: int | float | None) -> None:
    """A budget is a count of tokens (int from 0 to 2³¹ − 1) or a share of the context (float in [0, 1]). Raises
    SparseKVError."""
    if budget is None:
        return
    if isinstance(budget, bool) or not isinstance(budget, int | float):
        raise SparseKVError(f"token_budget must be a number of tokens or a share of the context, found {budget!r}")
    if isinstance(budget, float) and not 0 <= budget <= 1:
        raise SparseKVError(f"a float token_budget is a share of the context between 0 and 1, found {budget}; "
                            "give an integer for a number of tokens")
    if budget < 0:
        raise SparseKVError(f"token_budget must not be negative, found {budget}")
    if budget > MOST_TOKENS:
        raise SparseKVError(f"token_budget is at most {MOST_TOKENS} tokens, found {budget}; a share of 1.0 reads all")


def tokens_of_budget(
    budget: int | float | None, regions: Regions, *, accounting: str = "retrieved", completion_tokens: float = 0.0,
    clamped: bool = True,
) -> Tensor:
    """Compute the mid tokens to retrieve for each row (completion paper, appendix D).

    Args:
        budget: tokens (int) or a share ρ of the context (float); None: none.
        regions: of B rows.
        accounting: `retrieved`: an int as it is, a share `⌈ρN⌉`, on top of the anchors. `worst_case` and `amortised`:
            the budget (int, or ρN) also pays for the anchors and for the completion's cache, `⌈ρN − |A| − cache⌉`, the
            cache spread over `AMORTISE_OVER` tokens in the latter.
        completion_tokens: size of the completion's cache [tokens].
        clamped: never more than there are.

    Returns:
        `[B]` int64 [tokens].

    Raises:
        SparseKVError: the budget pays for less than nothing.
    """
    context = regions.context
    if budget is None:
        return torch.zeros_like(context)
    total = torch.full_like(context, budget).double() if isinstance(budget, int) else budget * context.double()
    if accounting != "retrieved":
        cache = completion_tokens / (AMORTISE_OVER if accounting == "amortised" else 1)
        total = total - (context - regions.mid_sizes) - cache
        if bool((total < 0).any()):
            short = math.ceil(float((-total).max()))
            raise SparseKVError(f"token_budget {budget} is infeasible here: with accounting {accounting!r} the anchors "
                                f"and the completion's cache alone cost {short} tokens more; raise the budget or "
                                "shrink sink_size and window_size")
    wanted = torch.ceil(total - 1e-9).long()
    return torch.minimum(wanted, regions.mid_sizes) if clamped else wanted
