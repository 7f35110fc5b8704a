"""Quest: pages of keys bounded by their channel-wise minimum and maximum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sparsekv.config import option
from sparsekv.runtime.regions import Regions
from sparsekv.runtime.selectors.base import LayerView, Queries, Selection, Selector, fold

INF = float("inf")


@dataclass(eq=False)
class Quest(Selector):
    """Reads whole pages with the largest upper bound `Σ_c max(q_c·min_c, q_c·max_c)` of their scores (Tang et al. 2024,
    §3.2). The heads of a group share pages by their largest bound; `token_budget` is rounded down to pages, at least
    one; the whole mid region is all pages."""

    name: ClassVar[str] = "quest"
    source: ClassVar[str] = "Quest (Tang et al. 2024) §3.2"
    row_state: ClassVar[tuple[str, ...]] = ("low", "high")

    page_size: int = option(16, help="Tokens of a page [tokens].", min=1)

    def build(self, view: LayerView) -> None:
        self.low, self.high = self._bounds(view, 0)

    def extend(self, view: LayerView, old: Regions) -> None:
        page = int(old.mid_last.min()) // self.page_size
        low, high = self._bounds(view, page)
        self.low = torch.cat([self.low[:, :, :page], low], dim=2)
        self.high = torch.cat([self.high[:, :, :page], high], dim=2)

    def _bounds(self, view: LayerView, page: int) -> tuple[Tensor, Tensor]:
        """Minimum and maximum of the mid keys of every page from `page` on, `[B, Hkv, P, d]`; empty pages are +-inf."""
        size, first, last = self.page_size, page * self.page_size, int(view.regions.mid_last.max())
        keys = view.keys[:, :, first:last].float()
        outside = ~view.regions.mid_mask()[:, None, first:last, None]
        bounds = []
        for sign in (1.0, -1.0):
            part = torch.nn.functional.pad((keys * sign).masked_fill(outside, INF), (0, 0, 0, -keys.shape[2] % size),
                                           value=INF)
            bounds.append(sign * part.unflatten(2, (-1, size)).amin(3))
        return bounds[0], bounds[1]

    def select(self, view: LayerView, queries: Queries) -> Selection:
        batch, heads_kv, pages, dim = self.low.shape
        count, group, size = queries.count, view.group, self.page_size
        q = queries.rot.float().reshape(batch, heads_kv, group * count, dim)
        used = torch.isfinite(self.low[..., 0])
        low, high = (torch.where(used[..., None], x, 0.0) for x in (self.low, self.high))
        bound = q.clamp(min=0) @ high.mT + q.clamp(max=0) @ low.mT
        bound = bound.reshape(batch, heads_kv, group, count, pages).amax(2).masked_fill(~used[:, :, None], -INF)
        budget = self.budget_tokens(view)
        wanted = torch.where(budget >= view.regions.mid_sizes, pages, (budget // size).clamp(min=1))
        widest = min(int(wanted.max()), pages)
        values, chosen = bound.topk(widest, dim=-1)
        keep = (torch.arange(widest, device=q.device) < wanted[:, None])[:, None, None] & ~torch.isneginf(values)
        tokens = chosen[..., None] * size + torch.arange(size, device=q.device)
        tokens = torch.where(keep[..., None], tokens, -1).flatten(-2).transpose(1, 2).flatten(0, 1)
        first, last = (fold(x, count)[:, None, None] for x in (view.regions.mid_first, view.regions.mid_last))
        return Selection(tokens=torch.where((tokens >= first) & (tokens < last), tokens, -1))
