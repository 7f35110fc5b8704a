"""A score table of LFPS: decays as one number, knows its moments without being read, grows with the context."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

ROOM = 1024
SMALLEST = 1e-12


class ScoreTable:
    """`[rows, n]` scores over positions, or over distances when `backwards`.

    What is stored is `score / scale` with one `scale` a row, so that `decay` touches no entry; thresholds are in the
    stored unit too (mean, std and kurtosis all follow the scale). The four power sums behind them are kept up to date
    by `add`. A backwards table holds distance `j` at column `origin − j`, so that `S[t − i]` for consecutive positions
    `i` is a slice.
    """

    def __init__(self, rows: int, length: int, device: torch.device, backwards: bool = False):
        self.backwards, self.length = backwards, length
        self.origin = length + ROOM - 1
        self.data = torch.zeros(rows, length + ROOM, device=device)
        self.scale = torch.ones(rows, 1, device=device)
        self.sums = torch.zeros(4, rows, 1, device=device, dtype=torch.float64)

    def column(self, positions: Tensor, t: int) -> Tensor:
        """Where the scores of `positions` stand for a query at `t`."""
        return positions + (self.origin - t) if self.backwards else positions

    def window(self, low: int, high: int, t: int) -> Tensor:
        """Stored scores of positions `low..high` for a query at `t`, a view `[rows, high − low]`."""
        shift = self.origin - t if self.backwards else 0
        return self.data[:, low + shift:high + shift]

    def grow(self, length: int) -> None:
        """Make room for `length` positions or distances."""
        self.length = max(self.length, length)
        if length <= self.data.shape[1]:
            return
        more = max(ROOM, self.data.shape[1] // 8)
        self.data = torch.nn.functional.pad(self.data, (more, 0) if self.backwards else (0, more))
        self.origin += more if self.backwards else 0

    def decay(self, gamma: float, rows: Tensor) -> None:
        """Multiply the scores of the chosen rows by `gamma`."""
        self.scale = torch.where(rows[:, None], self.scale * gamma, self.scale)
        if float(self.scale.min()) < SMALLEST:
            self.data.mul_(self.scale)
            self.scale = torch.ones_like(self.scale)
            self.recount()

    def add(self, positions: Tensor, weights: Tensor, t: int) -> None:
        """Add `weights [rows, K]` at `positions [rows, K]` (-1 = none, no position twice)."""
        column = self.column(positions.clamp(min=0), t)
        old = self.data.gather(1, column)
        change = weights / self.scale
        change = torch.where(positions >= 0, change, 0.0)
        self.data.scatter_add_(1, column, change)
        new = old + change
        a, b = old.double(), new.double()
        for power in range(4):
            self.sums[power] += (b ** (power + 1) - a ** (power + 1)).sum(1, keepdim=True)

    def add_rows(self, rows: Tensor, weights: Tensor, low: int, t: int) -> None:
        """Add `weights [n, m]` over positions `low..low + m` to the chosen rows; nothing lies beyond `t`, and `recount`
        must follow."""
        start = self.origin - t + low if self.backwards else low
        count = min(weights.shape[1], self.data.shape[1] - start)
        for row, new in zip(rows.tolist(), weights, strict=True):
            self.data[row, start:start + count] += new[:count]

    def recount(self) -> None:
        """The power sums from the entries."""
        for power in range(4):
            self.sums[power] = (self.data ** (power + 1)).sum(1, keepdim=True, dtype=torch.float64)

    @property
    def mean(self) -> Tensor:
        """`[rows, 1]`, in the stored unit."""
        return (self.sums[0] / self.length).float()

    def threshold(self, alpha: float) -> Tensor:
        """`mean + α·std·√kurtosis`, `[rows, 1]`, in the stored unit."""
        m1, m2, m3, m4 = self.sums / self.length
        variance = (m2 - m1 ** 2).clamp(min=0)
        fourth = (m4 - 4 * m1 * m3 + 6 * m1 ** 2 * m2 - 3 * m1 ** 4).clamp(min=0)
        return (m1 + alpha * (fourth / variance.clamp(min=1e-300)).sqrt()).float()

    def clone(self) -> ScoreTable:
        other = copy.copy(self)
        other.data, other.scale, other.sums = self.data.clone(), self.scale.clone(), self.sums.clone()
        return other

    def take_rows(self, index: Tensor) -> None:
        self.data, self.scale, self.sums = self.data[index], self.scale[index], self.sums[:, index]
