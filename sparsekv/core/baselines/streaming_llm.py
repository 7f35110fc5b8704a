"""StreamingLLM: the budget is the local window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from sparsekv.core.layer import LayerView, Queries, Selection
from sparsekv.core.selectors.base import Selector


@dataclass(eq=False)
class StreamingLLM(Selector):
    """The sink and the most recent tokens: `token_budget` tokens of the mid region next to the tail, so that the local
    window is as long as the other selectors' lists (Xiao et al. 2024; completion paper, appendix E). It slides where
    the decode window passes tokens on to the mid region."""

    name: ClassVar[str] = "streaming_llm"
    replayable: ClassVar[bool] = True
    row_state: ClassVar[tuple[str, ...]] = ("recent",)

    def build(self, view: LayerView) -> None:
        places = view.regions.mid_last[:, None] - 1 - torch.arange(self.widest, device=view.device)
        inside = torch.arange(self.widest, device=view.device) < self.budget[:, None]
        self.recent = torch.where(inside, places, -1)[:, None].expand(-1, view.num_kv_heads, -1)

    def select(self, view: LayerView, queries: Queries) -> Selection:
        return Selection(tokens=queries.per_query(self.recent))
