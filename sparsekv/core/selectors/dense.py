"""Full attention through the same door: every mid token is selected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from sparsekv.core.layer import LayerView, Queries, Selection
from sparsekv.core.selectors.base import Selector, Spends


@dataclass(eq=False)
class Dense(Selector):
    """Reads everything: no layer decodes sparsely; `select` is what that means as a selection."""

    name: ClassVar[str] = "dense"
    spends: ClassVar[Spends] = Spends.NOTHING

    def serves(self, layer_idx: int) -> bool:
        return False

    def select(self, view: LayerView, queries: Queries) -> Selection:
        positions = torch.arange(view.length, device=view.device)
        tokens = torch.where(view.regions.mid_mask(), positions, -1)[:, None].expand(-1, view.num_kv_heads, -1)
        return Selection(tokens=queries.per_query(tokens))
