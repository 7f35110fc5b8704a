"""Sink and local window only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from sparsekv.core.layer import LayerView, Queries, Selection
from sparsekv.core.selectors.base import Selector, Spends


@dataclass(eq=False)
class Streaming(Selector):
    """Reads no mid token: the anchors alone (Saap's ℓ = 0, the completion paper's sink + tail). StreamingLLM with a
    budget of its own is `streaming_llm`."""

    name: ClassVar[str] = "streaming"
    replayable: ClassVar[bool] = True
    spends: ClassVar[Spends] = Spends.NOTHING

    def select(self, view: LayerView, queries: Queries) -> Selection:
        rows = queries.lengths.shape[0]
        return Selection(tokens=torch.empty(rows, view.num_kv_heads, 0, dtype=torch.long, device=view.device))
