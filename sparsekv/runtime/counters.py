"""What an attachment counted: calls, share of the cache read, error against full attention, how steps ran."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparsekv.core.offline import relative_error


class Mean:
    """A running mean that stays on its device until it is asked for (no synchronisation in a decode step)."""

    def __init__(self) -> None:
        self.total: Tensor | float = 0.0
        self.count = 0

    def add(self, values: Tensor) -> None:
        self.add_sum(values.detach().sum(dtype=torch.float64), values.numel())

    def add_sum(self, total: Tensor | float, count: int) -> None:
        self.total = self.total + total
        self.count += count

    @property
    def value(self) -> float | None:
        return float(self.total) / self.count if self.count else None


class Counters:
    """Per-layer counts of one attachment."""

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self._shares: Tensor | None = None
        self.clear()

    def clear(self) -> None:
        """Begin anew. Steps that are captured go on to add to the same sums."""
        if self._shares is not None:
            self._shares.zero_()
        self.sparse_calls: dict[int, int] = defaultdict(int)
        self.dense_calls: dict[int, int] = defaultdict(int)
        self.loaded: dict[int, Mean] = defaultdict(Mean)
        self.sparse_loaded: dict[int, Mean] = defaultdict(Mean)
        self.bytes: dict[int, Mean] = defaultdict(Mean)
        self.error: dict[int, Mean] = defaultdict(Mean)
        self.statistics: dict[int, dict[str, float]] = {}
        self.index_seconds = 0.0
        self.replayed_steps = self.captures = 0
        self.capture_seconds = 0.0
        self.not_replayed: str | None = None

    def dense(self, layer: int, tokens: int) -> None:
        """A decode step through full attention: everything was read."""
        self.dense_calls[layer] += tokens
        self.loaded[layer].add_sum(float(tokens), tokens)

    def sparse(self, layer: int, shares: Tensor, steps: int) -> None:
        """So many sparse steps of a layer of every row, and the shares `[2, 1, Q]` they read
        (`core.cost.read_shares`)."""
        self._count(layer, steps, shares.shape[-1])
        self.add(shares, layer)

    def planned(self, rows: int, sparse: Sequence[int], dense: Sequence[int]) -> None:
        """A planned step of so many rows; the shares of its sparse layers were added by the step itself."""
        self.replayed_steps += 1
        for layer in sparse:
            self._count(layer, 1, rows)
        for layer in dense:
            self.dense(layer, 1)

    def add(self, shares: Tensor, where: Tensor | int) -> None:
        """Shares `[2, layers, Q]` of the tokens in sight that were read, and of their bytes, of the layers `where`, or
        of one: to their sums, on the device."""
        total = self._sums(shares.device)
        if isinstance(where, int):
            total[:, where] += shares.detach().sum((1, 2)).to(total.device)
        else:
            total.index_add_(1, where, shares.sum(-1))

    def _count(self, layer: int, steps: int, queries: int) -> None:
        self.sparse_calls[layer] += steps
        for means in (self.loaded, self.sparse_loaded, self.bytes):
            means[layer].count += queries

    def _sums(self, device: torch.device) -> Tensor:
        """`[2, layers]` float64: what sparse steps add their shares to."""
        if self._shares is None:
            with torch.inference_mode(False):  # steps inside and outside of inference mode add to it
                self._shares = torch.zeros(2, self.layers, dtype=torch.float64, device=device)
        return self._shares

    def captured(self, seconds: float) -> None:
        """A step was captured, which took so long [s]."""
        self.captures += 1
        self.capture_seconds += seconds

    def compare(self, layer: int, out: Tensor, full: Tensor) -> None:
        """Relative L2 error of the heads' outputs `[B, Hq, T, d]`."""
        self.error[layer].add(relative_error(out.float(), full.float()))

    def report(self) -> dict[str, Any]:
        """Totals and per-layer values; None where nothing was measured."""
        if self._shares is not None:
            for layer, (tokens, size) in enumerate(self._shares.T.tolist()):
                if tokens:
                    self.loaded[layer].add_sum(tokens, 0)
                    self.sparse_loaded[layer].add_sum(tokens, 0)
                    self.bytes[layer].add_sum(size, 0)
            self._shares.zero_()
        layers = sorted(set(self.sparse_calls) | set(self.dense_calls))
        return {
            "sparse_calls": sum(self.sparse_calls.values()),
            "dense_calls": sum(self.dense_calls.values()),
            "selectivity": _mean(self.loaded),
            "selectivity_sparse": _mean(self.sparse_loaded),
            "bytes_share": _mean(self.bytes),
            "rel_err": _mean(self.error),
            "selector": self._selector_means(),
            "index_seconds": self.index_seconds,
            "replayed_steps": self.replayed_steps,
            "captures": self.captures,
            "capture_seconds": self.capture_seconds,
            "not_replayed": self.not_replayed,
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
