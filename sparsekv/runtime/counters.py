"""What an attachment counted: calls, share of the cache read, error against full attention, how steps ran."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsekv.core.cost import read_shares
from sparsekv.core.layer import CacheLayer, Queries, Selection
from sparsekv.core.offline import relative_error

NOTHING_RAN = "no pass of this model ran while it was attached"
PROMPTS_ALONE = "prompts were read, and no token decoded after them"


class Counters:
    """Per-layer counts of one attachment. What steps read stays on the device until it is asked for."""

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self._shares: Tensor | None = None
        self._fetched: dict[tuple[int, torch.device], tuple[Tensor, int]] = {}
        """Rows that steps listed and rows that came over the bus, `[2]` int64, and the bytes of a row, by layer in CPU
        memory and device."""
        self.clear()

    def clear(self) -> None:
        """Begin anew. Steps that are captured go on to add to the same sums."""
        if self._shares is not None:
            self._shares.zero_()
        for counts, _ in self._fetched.values():
            counts.zero_()
        self.sparse_calls: dict[int, int] = defaultdict(int)
        self.dense_calls: dict[int, int] = defaultdict(int)
        self._queries: dict[int, int] = defaultdict(int)
        self._dense: dict[int, int] = defaultdict(int)
        """Sparse steps and dense ones, a row's each."""
        self._errors: dict[int, list[Any]] = defaultdict(lambda: [0.0, 0])
        self.statistics: dict[int, dict[str, float]] = {}
        self.index_seconds = 0.0
        self.replayed_steps = self.captures = 0
        self.capture_seconds = 0.0
        self.not_replayed: str | None = None
        self.sparse_prompts = self.passes = self.chunks = self.uncached = 0
        """Layers that read prompts sparsely; passes, those of several tokens on a filled cache, those without a cache.
        """

    def took(self, sparse: Iterable[int], dense: Iterable[int], steps: int, rows: int) -> None:
        """Count so many decode steps of `rows` rows, in these layers; dense ones read everything."""
        for layer in sparse:
            self.sparse_calls[layer] += steps
            self._queries[layer] += steps * rows
        for layer in dense:
            self.dense_calls[layer] += steps
            self._dense[layer] += steps * rows

    def read(self, view: CacheLayer, queries: Queries, selections: Sequence[Selection], more: Tensor,
             where: Tensor | int) -> None:
        """Add what sparse steps read (`core.cost.read_shares`) to the sums of the layers `where`, or of one."""
        shares = read_shares(view, queries, selections, more).detach().sum(-1)
        if self._shares is None:
            with torch.inference_mode(False):  # steps inside and outside of inference mode add to it
                self._shares = torch.zeros(2, self.layers, dtype=torch.float64, device=shares.device)
        if isinstance(where, int):
            self._shares[:, where:where + 1] += shares.to(self._shares.device)
        else:
            self._shares.index_add_(1, where, shares)

    def fetches(self, layer: int, row: int, device: torch.device) -> Tensor:
        """Return what steps add to that fetch rows of so many bytes from CPU memory: listed and copied, `[2]`."""
        if (layer, device) not in self._fetched:
            with torch.inference_mode(False):  # as above
                self._fetched[layer, device] = torch.zeros(2, dtype=torch.long, device=device), row
        return self._fetched[layer, device][0]

    def captured(self, seconds: float) -> None:
        """A step was captured, which took so long [s]."""
        self.captures += 1
        self.capture_seconds += seconds

    def compare(self, layer: int, out: Tensor, full: Tensor) -> None:
        """Relative L2 error of the heads' outputs `[B, Hq, T, d]`."""
        error = relative_error(out.float(), full.float())
        self._errors[layer][0] += error.detach().sum(dtype=torch.float64)
        self._errors[layer][1] += error.numel()

    def not_in_force(self, decoding: Any) -> str | None:
        """Say why nothing was decoded sparsely so far; None where something was."""
        if any(self.sparse_calls.values()) or self.sparse_prompts:
            return None
        if decoding.first_sparse is None:
            return "no layer decodes sparsely with these options"
        if any(self.dense_calls.values()):
            return f"caches were too short ({decoding.why()}); dense_below=0 decodes all sparsely"
        if self.chunks:
            return ("tokens after a prompt came several at a time, which are read as prompts are; give run=RunOptions("
                    "sparse_chunks=True)")
        if self.uncached:
            return "passes kept no cache (use_cache=False, or gradient checkpointing)"
        return PROMPTS_ALONE if self.passes else NOTHING_RAN

    def report(self) -> dict[str, Any]:
        """Totals and per-layer values; None where nothing was measured."""
        shares = [[0.0, 0.0]] * self.layers if self._shares is None else self._shares.T.tolist()
        rows: dict[int, dict[str, Any]] = {}
        for i in sorted(set(self.sparse_calls) | set(self.dense_calls)):
            (tokens, size), queries, dense = shares[i], self._queries[i], self._dense[i]
            rows[i] = {"sparse_calls": self.sparse_calls[i], "dense_calls": self.dense_calls[i],
                       "selectivity": _over(tokens + dense, queries + dense), "bytes_share": _over(size, queries),
                       "rel_err": _over(float(self._errors[i][0]), self._errors[i][1]),
                       "selectivity_sparse": _over(tokens, queries)}
        means = {name: _mean(row[name] for row in rows.values())
                 for name in ("selectivity", "selectivity_sparse", "bytes_share", "rel_err")}
        for row in rows.values():
            del row["selectivity_sparse"]
        listed, copied, moved = 0, 0, 0
        for counts, size in self._fetched.values():
            wanted, fetched = counts.tolist()
            listed, copied, moved = listed + wanted, copied + fetched, moved + fetched * size
        names = sorted({name for layer in self.statistics.values() for name in layer})
        return {
            "sparse_calls": sum(self.sparse_calls.values()),
            "dense_calls": sum(self.dense_calls.values()),
            **means,
            "selector": {name: _mean(layer.get(name) for layer in self.statistics.values()) for name in names},
            "bus_bytes": moved,
            "hit_rate": _over(listed - copied, listed),
            "index_seconds": self.index_seconds,
            "replayed_steps": self.replayed_steps,
            "captures": self.captures,
            "capture_seconds": self.capture_seconds,
            "not_replayed": self.not_replayed,
            "layers": rows,
        }


def _over(total: float, count: int) -> float | None:
    return total / count if count else None


def _mean(values: Iterable[float | None]) -> float | None:
    """Mean of the values that are known; None where none is."""
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None
