"""Quest: pages of keys bounded by their channel-wise minimum and maximum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sparsekv.core.layer import LayerView, Queries, Selection
from sparsekv.core.regions import Regions
from sparsekv.core.selectors.base import Selector, Spends
from sparsekv.core.selectors.topk import top_tokens
from sparsekv.kernels import gather_rows
from sparsekv.util.config import option

INF = float("inf")


@dataclass(eq=False)
class Quest(Selector):
    """Reads pages with the largest upper bound `Σ_c max(q_c·min_c, q_c·max_c)` of their scores (Tang et al. 2024,
    §3.2). The heads of a group share pages by their largest bound. Of the last page that `token_budget` pays for only
    as much is read as it pays; the whole mid region is all pages."""

    name: ClassVar[str] = "quest"
    replayable: ClassVar[bool] = True
    spends: ClassVar[Spends] = Spends.AT_STEP
    row_state: ClassVar[tuple[str, ...]] = ("low", "high", "used")
    restorable: ClassVar[bool] = True

    page_size: int = option(16, help="Tokens of a page [tokens].", min=1, max=4096)
    dense_first: int = option(0, help="First layers that keep full attention; the paper's two are 2 [layers].", min=0)

    def serves(self, layer_idx: int) -> bool:
        return layer_idx >= self.dense_first

    def build(self, view: LayerView) -> None:
        self.low, self.high, self.used = self._bounds(view, 0)

    def extend(self, view: LayerView, old: Regions) -> None:
        page = int((old.mid_last - old.starts).min()) // self.page_size
        held = (self.low, self.high, self.used)
        self.low, self.high, self.used = (
            torch.cat([old_pages[:, :, :page], new], dim=2)
            for old_pages, new in zip(held, self._bounds(view, page), strict=True))

    def _bounds(self, view: LayerView, page: int) -> tuple[Tensor, Tensor, Tensor]:
        """Minimum and maximum of the mid keys of every page from `page` on, `[B, Hkv, P, d]`, 0 for empty pages; which
        pages are not empty `[B, Hkv, P]`. Pages are counted from a row's first real token on."""
        regions, size = view.regions, self.page_size
        first, last = page * size, int((regions.mid_last - regions.starts).max())
        places = regions.starts[:, None] + torch.arange(first, last, device=view.device)
        keys = view.keys[:, :, first:last]
        if bool(regions.starts.any()):
            index = places.clamp(max=view.keys.shape[2] - 1).to(view.keys.device)
            keys = gather_rows(view.keys, index[:, None].expand(-1, view.num_kv_heads, -1))
        keys = keys.to(torch.promote_types(view.keys.dtype, torch.float32))
        inside = (places >= regions.mid_first[:, None]) & (places < regions.mid_last[:, None])
        outside = ~inside[:, None, :, None].to(keys.device)
        bounds = []
        for sign in (1.0, -1.0):
            part = torch.nn.functional.pad((keys * sign).masked_fill(outside, INF), (0, 0, 0, -keys.shape[2] % size),
                                           value=INF)
            bounds.append(sign * part.unflatten(2, (-1, size)).amin(3))
        used = torch.isfinite(bounds[0][..., 0])
        return (*(b.masked_fill_(~used[..., None], 0.0) for b in bounds), used)

    def cost_bytes(self, view: LayerView) -> Tensor | float:
        """Two bounds of a key's size a page."""
        return 2.0 * self.low[0].numel() * view.keys.element_size()

    def select(self, view: LayerView, queries: Queries) -> Selection:
        batch, heads_kv, pages, dim = self.low.shape
        count, group, size = queries.count, view.group, self.page_size
        q = queries.rot.to(self.low.dtype).reshape(batch, heads_kv, group * count, dim)
        bound = q.clamp(min=0) @ self.high.mT + q.clamp(max=0) @ self.low.mT
        bound = bound.reshape(batch, heads_kv, group, count, pages).amax(2).masked_fill(~self.used[:, :, None], -INF)
        # two more: of the pages that sink and tail cut less than all is paid for
        chosen = top_tokens(bound, -(-self.budget // size) + 2, -(-self.widest // size) + 2, ordered=True)
        starts = queries.per_query(view.regions.starts)[:, None, None, None]
        tokens = starts + chosen[..., None] * size + torch.arange(size, device=q.device)
        tokens = torch.where(chosen[..., None] >= 0, tokens, -1).flatten(-2)
        first, last = (queries.per_query(x)[:, None, None] for x in (view.regions.mid_first, view.regions.mid_last))
        inside = (tokens >= first) & (tokens < last)
        paid = inside.cumsum(-1) <= queries.per_query(self.budget)[:, None, None]
        return Selection(tokens=torch.where(inside & paid, tokens, -1))
