"""A score table of LFPS: decays as one number, knows its moments without being read, grows with the context."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

ROOM = 1024
FLOOR = 0.8
"""Entries are kept in sight from this part of a threshold on."""
SMALLEST = 1e-12
SLOPE = 2.2
"""Ours. With it α = 0.3 has 3 to 6 % of the keys scored at 4096 tokens, a list a head or a group; the paper 4.8 %."""


class ScoreTable:
    """`[rows, n]` scores over positions, or over distances when `backwards`.

    What is stored is `score / scale` with one `scale` a row, so that `decay` touches no entry; thresholds are in the
    stored unit too (mean, std and kurtosis all follow the scale). The four power sums behind them are kept up to date
    by `add`. A backwards table holds distance `j` at column `origin − j`, so that `S[t − i]` for consecutive positions
    `i` is a slice. `missing [rows]` entries are a row's left padding and count in no moment.

    A stored entry never falls, so those above a floor are known without reading the table: `seen` has their places.
    """

    def __init__(self, rows: int, length: int, device: torch.device, backwards: bool = False,
                 missing: Tensor | None = None):
        self.backwards, self.length = backwards, length
        self.missing = torch.zeros(rows, 1, device=device, dtype=torch.long) if missing is None else missing[:, None]
        self.origin = length + ROOM - 1
        self.data = torch.zeros(rows, length + ROOM, device=device)
        self.scale = torch.ones(rows, 1, device=device)
        self.sums = torch.zeros(4, rows, 1, device=device, dtype=torch.float64)
        self.seen: Tensor | None = None
        """Places in the flat table of all entries above `floor [rows, 1]`; None where the table is to be read."""
        self.floor: Tensor
        self.most = 0

    def column(self, positions: Tensor, t: int) -> Tensor:
        """Where the scores of `positions` stand for a query at `t`."""
        return positions + (self.origin - t) if self.backwards else positions

    def window(self, low: int, high: int, t: int) -> Tensor:
        """Stored scores of positions `low..high` for a query at `t`, a view `[rows, high − low]`."""
        shift = self.origin - t if self.backwards else 0
        return self.data[:, low + shift:high + shift]

    def at(self, rows: Tensor, positions: Tensor, t: int) -> Tensor:
        """Stored scores of `positions` in `rows`, which broadcast, for a query at `t`."""
        return torch.take(self.data, rows * self.data.shape[1] + self.column(positions, t))

    def above(self, cut: Tensor, t: int) -> tuple[Tensor, Tensor]:
        """Rows and positions, for a query at `t`, of the entries above `cut [rows, 1]`, in no order. The table is read
        where a cut has fallen below the floor, or twice as many entries are in sight."""
        if self.seen is None or len(self.seen) > self.most or bool((cut < self.floor).any()):
            self.floor = FLOOR * cut
            self.seen = (self.data > self.floor).flatten().nonzero()[:, 0]
            self.most = 2 * len(self.seen) + ROOM
        row = self.seen // self.data.shape[1]
        passed = torch.take(self.data, self.seen) > cut[row, 0]
        row, column = row[passed], self.seen[passed] - row[passed] * self.data.shape[1]
        return row, column - (self.origin - t) if self.backwards else column

    def grow(self, length: int) -> None:
        """Make room for `length` positions or distances."""
        self.length = max(self.length, length)
        if length <= self.data.shape[1]:
            return
        more = max(ROOM, self.data.shape[1] // 8)
        self.data = torch.nn.functional.pad(self.data, (more, 0) if self.backwards else (0, more))
        self.origin += more if self.backwards else 0
        self.seen = None

    def decay(self, gamma: float, rows: Tensor) -> None:
        """Multiply the scores of the chosen rows by `gamma`."""
        self.scale = torch.where(rows[:, None], self.scale * gamma, self.scale)
        if float(self.scale.min()) < SMALLEST:
            self.data.mul_(self.scale)
            self.scale = torch.ones_like(self.scale)
            self.seen = None
            self.recount()

    def add(self, positions: Tensor, weights: Tensor, t: int) -> None:
        """Add `weights [rows, K]` at `positions [rows, K]` (-1 = none, no position twice)."""
        column = self.column(positions.clamp(min=0), t)
        old = self.data.gather(1, column)
        change = weights / self.scale
        change = torch.where(positions >= 0, change, 0.0)
        self.data.scatter_add_(1, column, change)
        new = old + change
        if self.seen is not None:
            rose = ((old <= self.floor) & (new > self.floor)).nonzero()
            places = rose[:, 0] * self.data.shape[1] + column[rose[:, 0], rose[:, 1]]
            self.seen = torch.cat([self.seen, places])
        a, b = (one, other) = old.double(), new.double()
        for power in range(4):
            self.sums[power] += (other - one).sum(1, keepdim=True)
            one, other = one * a, other * b

    def add_observed(self, rows: Tensor, weights: Tensor, low: int, t: int) -> None:
        """Add `weights [n, w, m]` over positions `low..low + m` for the w queries up to the one at `t` to the chosen
        rows; a query's weights beyond itself are 0, and `recount` must follow."""
        if self.backwards:
            # query u of w stands r = w − 1 − u before t: its distances lie r columns further on
            count, width, length = weights.shape
            skewed = torch.nn.functional.pad(weights.flip(1), (0, width)).flatten(1)[:, :width * (length + width - 1)]
            new, start = skewed.view(count, width, -1).sum(1), self.origin - t + low
        else:
            new, start = weights.sum(1), low
        end = min(start + new.shape[1], self.data.shape[1])
        self.data[rows, start:end] += new[:, :end - start]

    def recount(self) -> None:
        """The power sums from the entries."""
        for power in range(4):
            self.sums[power] = (self.data ** (power + 1)).sum(1, keepdim=True, dtype=torch.float64)

    @property
    def mean(self) -> Tensor:
        """`[rows, 1]`, in the stored unit."""
        return (self.sums[0] / (self.length - self.missing)).float()

    def threshold(self, alpha: float) -> Tensor:
        """`mean + α·SLOPE·std·√(n/kurtosis)`, `[rows, 1]`, in the stored unit.

        `n/kurtosis` counts peaks: a table of p equal ones over nothing has p. Few peaks lower the threshold and many
        raise it; a table without any has none above it (LFPS §4.2; the formula itself is lost in its text)."""
        m1, m2, m3, m4 = self.sums / (self.length - self.missing)
        variance = (m2 - m1 ** 2).clamp(min=0)
        fourth = (m4 - 4 * m1 * m3 + 6 * m1 ** 2 * m2 - 3 * m1 ** 4).clamp(min=0)
        count = self.length - self.missing
        return (m1 + alpha * SLOPE * (count * variance**3 / fourth.clamp(min=1e-300)).sqrt()).float()

    def clone(self) -> ScoreTable:
        other = copy.copy(self)
        other.data, other.scale, other.sums = self.data.clone(), self.scale.clone(), self.sums.clone()
        return other

    def take_rows(self, index: Tensor) -> None:
        self.data, self.scale, self.sums = self.data[index], self.scale[index], self.sums[:, index]
        self.missing, self.seen = self.missing[index], None
