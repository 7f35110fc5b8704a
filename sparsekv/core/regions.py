"""Which tokens are always read, which may be selected: sink, mid, tail and decode window of every row of a batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Regions:
    """The regions of one layer's cache at one moment (METHODS, notation).

    Row `b` holds real tokens in `[starts[b], length)` (left padding before). Sink `[starts, starts + sink_size)`;
    mid region `[mid_first, mid_last)`, the only part a selector chooses from; tail `[tail_starts, length)`: the dense
    window at the end of the prefill and everything generated since, always read. All int64, `[B]`.
    """

    starts: Tensor
    tail_starts: Tensor
    length: int
    sink_size: int

    @classmethod
    def at_prefill_end(cls, starts: Tensor, length: int, sink_size: int, window_size: int) -> Regions:
        return cls(starts, torch.clamp(starts, min=length - window_size), length, sink_size)

    @property
    def mid_first(self) -> Tensor:
        return torch.minimum(self.starts + self.sink_size, self.tail_starts)

    @property
    def mid_last(self) -> Tensor:
        return self.tail_starts

    @property
    def mid_sizes(self) -> Tensor:
        return self.mid_last - self.mid_first

    @property
    def context(self) -> Tensor:
        """Real tokens of every row, `[B]`."""
        return self.length - self.starts

    def mid_mask(self) -> Tensor:
        """`[B, length]`, true inside the mid region."""
        positions = torch.arange(self.length, device=self.starts.device)
        return (positions >= self.mid_first[:, None]) & (positions < self.mid_last[:, None])

    def anchor_sizes(self, lengths: Tensor | None = None) -> Tensor:
        """Tokens always read, `[B]`; `lengths [B]` (default: the whole row) counts for a query inside a chunk."""
        end = self.length if lengths is None else lengths
        return end - self.starts - self.mid_sizes

    def grown(self, length: int) -> Regions:
        """The same mid region in a longer (or cropped) cache."""
        return replace(self, length=length)

    def moved(self, tail_start: int) -> Regions:
        """Let the mid region grow up to `tail_start`."""
        return replace(self, tail_starts=torch.clamp(self.tail_starts, min=tail_start))

    def rows(self, index: Tensor) -> Regions:
        """The regions of the chosen rows of the batch."""
        return replace(self, starts=self.starts[index], tail_starts=self.tail_starts[index])

    def per_query(self, queries: int) -> tuple[Tensor, Tensor, Tensor]:
        """`(starts, tail_starts, lengths)`, each `[B·T]`, for the last `queries` tokens of every row: token `t` sees
        the keys up to itself. Row-major: all queries of row 0 first."""
        if queries == 1:
            return self.starts, self.tail_starts, torch.full_like(self.starts, self.length)
        starts = self.starts.repeat_interleave(queries)
        tails = self.tail_starts.repeat_interleave(queries)
        ends = torch.arange(self.length - queries + 1, self.length + 1, device=starts.device)
        return starts, tails, ends.repeat(self.starts.shape[0])
