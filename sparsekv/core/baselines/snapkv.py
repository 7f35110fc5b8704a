"""SnapKV: what the end of the prompt looked at is kept, once, for the whole generation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sparsekv.core.layer import LayerView, Queries, Selection
from sparsekv.core.regions import Regions
from sparsekv.core.selectors.base import Selector
from sparsekv.core.selectors.topk import top_tokens
from sparsekv.util.config import option
from sparsekv.util.errors import SparseKVError


def observed_attention(view: LayerView, count: int) -> Tensor:
    """Attention of the last `count` prefill queries, softmax over every key they see, kept on the mid region:
    `[B, Hkv, G, w, N]` float32. Computed one KV head at a time."""
    assert view.recent_queries is not None
    recent = view.recent_queries[:, :, -count:]
    batch, _, width, dim = recent.shape
    heads_kv, length = view.num_kv_heads, view.length
    end = min(view.recent_end, length)
    rows = torch.arange(end - width, end, device=recent.device)
    columns = torch.arange(length, device=recent.device)
    seen = (columns <= rows[:, None]) & (columns >= view.regions.starts[:, None, None])
    parts = []
    for head in range(heads_kv):
        keys = view.keys[:, head, None].to(torch.promote_types(view.keys.dtype, torch.float32))
        q = recent.reshape(batch, heads_kv, view.group, width, dim)[:, head].to(keys.dtype)
        scores = (q @ keys.mT) * view.scale
        weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1).nan_to_num(0.0)
        parts.append(weights * view.regions.mid_mask()[:, None, None])
    return torch.stack(parts, dim=1)


@dataclass(eq=False)
class SnapKV(Selector):
    """Votes of the observation window, smoothed over neighbours, summed over the group; the best stay, the rest of the
    mid region is never read again (Li et al. 2024, §4). Later tokens that leave the decode window are dropped."""

    name: ClassVar[str] = "snapkv"
    replayable: ClassVar[bool] = True
    row_state: ClassVar[tuple[str, ...]] = ("kept",)

    observation_window: int = option(32, help="Last prompt tokens that vote [tokens, at most 64].", min=1, max=64)
    kernel_size: int = option(7, help="Width of the pooling over neighbours, odd [tokens].", min=1, max=1023)
    pooling: str = option("max", help="Pooling over neighbours: max or avg.")

    def validate(self) -> None:
        super().validate()
        if self.kernel_size % 2 == 0 or self.pooling not in ("max", "avg"):
            raise SparseKVError(f"selector {self.name} pools over {self.kernel_size} tokens by {self.pooling!r}; "
                                "expected an odd kernel_size, and max or avg")

    def build(self, view: LayerView) -> None:
        votes = observed_attention(view, self.observation_window).sum((2, 3))
        pool = torch.nn.functional.max_pool1d if self.pooling == "max" else torch.nn.functional.avg_pool1d
        votes = pool(votes, self.kernel_size, stride=1, padding=self.kernel_size // 2)
        votes = votes.masked_fill(~view.regions.mid_mask()[:, None], float("-inf"))
        self.kept = top_tokens(votes[:, :, None], self.budget, self.widest, stable=True)

    def extend(self, view: LayerView, old: Regions) -> None:
        """Nothing joins: this is eviction."""

    def select(self, view: LayerView, queries: Queries) -> Selection:
        return Selection(tokens=queries.per_query(self.kept))
