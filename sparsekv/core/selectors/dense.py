"""Full attention through the same door: every mid token is selected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from sparsekv.core.selectors.base import LayerView, Queries, Selection, Selector, fold


@dataclass(eq=False)
class Dense(Selector):
    """Reads everything. `attach` recognises it and uses the dense path; `select` is there for completeness."""

    name: ClassVar[str] = "dense"
    source: ClassVar[str] = "baseline: full attention"
    needs_budget: ClassVar[bool] = False

    def select(self, view: LayerView, queries: Queries) -> Selection:
        positions = torch.arange(view.length, device=view.device)
        tokens = torch.where(view.regions.mid_mask(), positions, -1)[:, None].expand(-1, view.num_kv_heads, -1)
        return Selection(tokens=fold(tokens, queries.count))
