"""What an attachment counted: calls, share of the cache read, error against full attention."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor


class Mean:
    """A running mean that stays on its device until it is asked for (no synchronisation in a decode step)."""

    def __init__(self) -> None:
        self.total: Tensor | float = 0.0
        self.count = 0

    def add(self, values: Tensor) -> None:
        self.add_sum(values.detach().sum(dtype=torch.float64), values.numel())

    def add_sum(self, total: Tensor, count: int) -> None:
        self.total = self.total + total
        self.count += count

    @property
    def value(self) -> float | None:
        return float(self.total) / self.count if self.count else None


class Counters:
    """Per-layer counts of one attachment."""

    def __init__(self) -> None:
        self.sparse_calls: dict[int, int] = defaultdict(int)
        self.dense_calls: dict[int, int] = defaultdict(int)
        self.loaded: dict[int, Mean] = defaultdict(Mean)
        self.sparse_loaded: dict[int, Mean] = defaultdict(Mean)
        self.bytes: dict[int, Mean] = defaultdict(Mean)
        self.error: dict[int, Mean] = defaultdict(Mean)
        self.statistics: dict[int, dict[str, float]] = {}

    def dense(self, layer: int, tokens: int) -> None:
        """A decode step through full attention: everything was read."""
        self.dense_calls[layer] += tokens
        self.loaded[layer].add(torch.ones(tokens))

    def sparse(self, layer: int, share: Tensor, bytes_share: Tensor) -> None:
        """`[B, T]` each: share of the tokens in sight that were read, mean over heads, and of the bytes
        (`core/cost.py`)."""
        self.sparse_calls[layer] += share.shape[1]
        total = share.detach().sum(dtype=torch.float64)
        for means in (self.loaded, self.sparse_loaded):
            means[layer].add_sum(total, share.numel())
        self.bytes[layer].add(bytes_share)

    def compare(self, layer: int, out: Tensor, full: Tensor) -> None:
        """Relative L2 error of the heads' outputs `[B, Hq, T, d]`."""
        out, full = out.float(), full.float()
        self.error[layer].add((out - full).norm(dim=-1) / full.norm(dim=-1).clamp(min=1e-12))

    def report(self) -> dict[str, Any]:
        """Totals and per-layer values; None where nothing was measured."""
        layers = sorted(set(self.sparse_calls) | set(self.dense_calls))
        return {
            "sparse_calls": sum(self.sparse_calls.values()),
            "dense_calls": sum(self.dense_calls.values()),
            "selectivity": _mean(self.loaded),
            "selectivity_sparse": _mean(self.sparse_loaded),
            "bytes_share": _mean(self.bytes),
            "rel_err": _mean(self.error),
            "selector": self._selector_means(),
            "layers": {i: {"sparse_calls": self.sparse_calls.get(i, 0), "dense_calls": self.dense_calls.get(i, 0),
                           "selectivity": self.loaded[i].value if i in self.loaded else None,
                           "bytes_share": self.bytes[i].value if i in self.bytes else None,
                           "rel_err": self.error[i].value if i in self.error else None} for i in layers},
        }

    def _selector_means(self) -> dict[str, float]:
        """The selectors' own numbers, averaged over layers."""
        names = {name for layer in self.statistics.values() for name in layer}
        return {name: sum(v) / len(v) for name in sorted(names)
                if (v := [layer[name] for layer in self.statistics.values() if name in layer])}


def _mean(means: dict[int, Mean]) -> float | None:
    """Mean over layers of the layers' means."""
    values = [m.value for m in means.values()]
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None
