"""A uniform sample of the mid region."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from sparsekv.core.layer import LayerView, Queries, Selection
from sparsekv.core.selectors.base import Selector
from sparsekv.core.selectors.topk import mask_mid, top_tokens
from sparsekv.util.config import option


@dataclass(eq=False)
class Random(Selector):
    """Tokens drawn without replacement, anew for every query and KV head: the floor any selector must beat (Saap's
    random buckets)."""

    name: ClassVar[str] = "random"

    seed: int = option(0, help="Seed of the sample.")

    def build(self, view: LayerView) -> None:
        self.drawn = 0
        self.layer_idx = view.layer_idx

    def select(self, view: LayerView, queries: Queries) -> Selection:
        generator = torch.Generator().manual_seed(self.seed + 1_000_003 * self.layer_idx + self.drawn)
        self.drawn += 1
        last = int(view.regions.mid_last.max())
        shape = (view.keys.shape[0], view.num_kv_heads, queries.count, last)
        scores = torch.rand(shape, generator=generator).to(view.device)
        return Selection(tokens=top_tokens(mask_mid(view, scores), self.budget, self.widest))
