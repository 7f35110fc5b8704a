"""The tables of `sparsekv eval diagnostics`, and their file."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from sparsekv.util.disk import write_text

FORMAT, FORMAT_VERSION = "sparsekv-diagnostics", 2
GAP_EDGES = [round(-8 + 0.5 * i, 1) for i in range(33)]


@dataclass
class Diagnostics:
    """All tables of one store. `[L, Hq]` or `[L, Hq, B]` for `budgets` (shares of a query's context, 0 is sink and tail
    alone); the outer key of errors is the method (`topk+phi`).

    errors: mean relative L2 error of the head's output. mass: share of the head's attention that is read exactly,
    anchors included; read: share of the context. completion: of the attention, what φ puts where exact top-k reads
    nothing. recall: mid mass the router's buckets reach over what the best buckets reach, and the share of exact
    top-k's keys among the router's. heads: entropy of the mid region (0..1), cover75 and cover95 (fewest keys with that
    mass), mass_mid, imbalance of the router's buckets (`C Σ n² / (Σ n)²`), gap_mean and gap_std of `ŝ − s` [nats].
    curves: share of the mid mass in the best `fractions` of the mid keys, `[L, Hq, P]`. gaps: counts of `ŝ − s` between
    GAP_EDGES. scatter: pairs (s, ŝ), both minus the query's largest s. tasks: means by layer of every capture.
    """

    model: dict[str, Any]
    layers: list[int]
    budgets: list[float]
    context_length: int
    sink_size: int
    window_size: int
    cache_tokens: float
    router: str | None = None
    phi: str | None = None
    errors: dict[str, Tensor] = field(default_factory=dict)
    mass: dict[str, Tensor] = field(default_factory=dict)
    read: dict[str, Tensor] = field(default_factory=dict)
    recall: dict[str, Tensor] = field(default_factory=dict)
    completion: dict[str, Tensor] = field(default_factory=dict)
    heads: dict[str, Tensor] = field(default_factory=dict)
    fractions: list[float] = field(default_factory=list)
    curves: dict[str, Tensor] = field(default_factory=dict)
    gaps: list[int] = field(default_factory=list)
    scatter: list[list[float]] = field(default_factory=list)
    tasks: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def save(self, path: Path) -> Path:
        raw: dict[str, Any] = {"format": FORMAT, "format_version": FORMAT_VERSION}
        for name, value in ((f.name, getattr(self, f.name)) for f in fields(self)):
            if name in ("router", "phi") and value is not None:
                value = Path(os.path.relpath(value, path.parent)).as_posix()
            raw[name] = {k: _numbers(v) for k, v in value.items()} if name in TABLES else value
        write_text(path, json.dumps(raw) + "\n")
        return path

TABLES = ("errors", "mass", "read", "recall", "completion", "heads", "curves")


def _numbers(table: Tensor) -> Any:
    """Nested lists of four digits; NaN is null."""
    return json.loads(json.dumps(table.double().tolist()), parse_float=lambda x: float(f"{float(x):.4g}"),
                      parse_constant=lambda _: None)
