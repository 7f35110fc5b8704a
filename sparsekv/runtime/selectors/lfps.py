"""LFPS: candidates from where attention went before, by position and by distance; only they are scored."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sparsekv.config import option
from sparsekv.errors import SparseKVError
from sparsekv.runtime.regions import Regions
from sparsekv.runtime.rows import gather_rows
from sparsekv.runtime.selectors.base import LayerView, Queries, Selection, Selector
from sparsekv.runtime.selectors.lfps_table import ScoreTable

NEG_INF = float("-inf")
RECENT = 5


@dataclass(eq=False)
class LFPS(Selector):
    """Per query head a vertical table `V[i]` over positions and a slash table `S[t − i]` over distances (LFPS §4.2).

    A step: (1) heads whose sink takes more than `eta` of the attention are not searched, the mean key and value stand
    for the rest; (2) candidates `V[i] > thr_V or S[t − i] > thr_S`; (3) their neighbours at −1, 0, 1, 2 whose scores
    are above a table's mean; (4) exact scores of the candidates, the best `token_budget` are read, and both tables
    learn: `V ← γV + (1 − γ)·a/2`.
    The formula of the thresholds is lost in the paper's text; ours is `mean + α·std·(1 + 3/kurtosis)`: a sharper table
    gets a lower threshold, so a larger candidate set, as the paper says.
    """

    name: ClassVar[str] = "lfps"
    source: ClassVar[str] = "LFPS §4.2, appendix B"
    scores_keys: ClassVar[bool] = True

    alpha: float = option(0.3, help="Scale of the candidate thresholds; 0.1 to 0.4 trades budget for recall.", min=0)
    gamma: float = option(0.95, help="Decay of the score tables per step.")
    eta: float = option(0.85, help="Share of attention on the sink from which a head is not searched; 1 never.")
    prefill_rows: int = option(64, help="Last prompt tokens that fill the tables [tokens, at most 64].", min=1, max=64)

    def validate(self) -> None:
        super().validate()
        if not 0 < self.gamma < 1:
            raise SparseKVError(f"gamma must lie between 0 and 1, found {self.gamma}")

    def build(self, view: LayerView) -> None:
        batch, length = view.keys.shape[0], view.length
        rows = batch * view.num_query_heads
        self.vertical = ScoreTable(rows, length, view.keys.device)
        self.slash = ScoreTable(rows, length, view.keys.device, backwards=True)
        self.scored, self.steps = 0.0, 0
        self.variance_ratio: Tensor = self._fill(view)
        self.mean_key: Tensor
        self.mean_value: Tensor
        self._means(view)

    def extend(self, view: LayerView, old: Regions) -> None:
        self._means(view)

    def fork(self) -> LFPS:
        other = copy.copy(self)
        other.vertical, other.slash = self.vertical.clone(), self.slash.clone()
        return other

    def take_rows(self, index: Tensor) -> None:
        heads = self.variance_ratio.shape[1]
        rows = (index[:, None] * heads + torch.arange(heads, device=index.device)).flatten()
        for table in (self.vertical, self.slash):
            table.take_rows(rows)
        self.mean_key, self.mean_value = self.mean_key[index], self.mean_value[index]
        self.variance_ratio = self.variance_ratio[index]

    def select(self, view: LayerView, queries: Queries) -> Selection:
        parts = [self._step(view, queries.rot[:, :, t], view.length - queries.count + t) for t in range(queries.count)]
        if len(parts) == 1:
            return parts[0]
        batch = view.keys.shape[0]
        lists = [p.as_tokens() for p in parts]
        widest = max(x.shape[-1] for x in lists)
        tokens = [torch.nn.functional.pad(x, (0, widest - x.shape[-1]), value=-1) for x in lists]
        joined = Selection(tokens=torch.stack(tokens, 1).flatten(0, 1))
        extras = [p.extra for p in parts if p.extra is not None]
        joined.extra = (torch.stack([e[0] for e in extras], 1).reshape(batch * len(parts), view.num_query_heads, -1),
                        torch.stack([e[1] for e in extras], 1).reshape(batch * len(parts), -1))
        return joined

    def _step(self, view: LayerView, q: Tensor, t: int) -> Selection:
        """One token at position `t`: q `[B, Hq, d]`."""
        batch = q.shape[0]
        q = q.float()
        bypass, extra = self._sink(view, q, t)
        low, high = int(view.regions.mid_first.min()), int(view.regions.mid_last.max())
        k = self.budget_tokens(view)
        self.vertical.grow(t + 1)
        self.slash.grow(t + 1)
        mask = self._candidates(view, low, high, t, bypass)
        tokens, scores = self._best(view, q, mask, low, int(k.max()))
        if batch > 1:
            keep = torch.arange(tokens.shape[-1], device=q.device) < k[:, None]
            tokens = torch.where(keep[:, None], tokens, -1)
            scores = torch.where(keep[:, None], scores, NEG_INF)
        self._learn(tokens.flatten(0, 1), scores.flatten(0, 1), t, bypass.flatten())
        self.steps += 1
        return Selection(tokens=tokens, extra=extra)

    def _candidates(self, view: LayerView, low: int, high: int, t: int, bypass: Tensor) -> Tensor:
        """Steps 2 and 3: `[B·Hq, high − low]` bool."""
        v, s = self.vertical.window(low, high, t), self.slash.window(low, high, t)
        found = (v > self.vertical.threshold(self.alpha)) | (s > self.slash.threshold(self.alpha))
        near = found.clone()
        near[:, :-1] |= found[:, 1:]
        near[:, 1:] |= found[:, :-1]
        near[:, 2:] |= found[:, :-2]
        near &= (v > self.vertical.mean) | (s > self.slash.mean)
        if bool(bypass.any()):
            near &= ~bypass.flatten()[:, None]
        if view.keys.shape[0] > 1:
            mid = view.regions.mid_mask()[:, low:high]
            near &= mid.repeat_interleave(view.num_query_heads, dim=0)
        return near

    def _best(self, view: LayerView, q: Tensor, mask: Tensor, low: int, k: int) -> tuple[Tensor, Tensor]:
        """Step 4: the candidates' exact scores, the best `k`: tokens and scores `[B, Hq, K]`, -1 and -inf beyond."""
        batch, heads, dim = q.shape
        counts = mask.sum(1)
        width = int(counts.max()) if counts.numel() else 0
        self.scored += float(counts.float().mean()) / max(view.length, 1)
        row, column = mask.nonzero(as_tuple=True)
        slot = torch.arange(row.numel(), device=row.device) - (counts.cumsum(0) - counts)[row]
        tokens = torch.full((mask.shape[0], width), -1, dtype=torch.long, device=q.device)
        tokens[row, slot] = column + low
        index = tokens.clamp(min=0).view(batch, view.num_kv_heads, view.group * width)
        keys = gather_rows(view.keys, index).float().view(batch * heads, width, dim)
        scores = torch.bmm(keys, q.reshape(batch * heads, dim, 1))[..., 0] * view.scale
        scores = scores.masked_fill_(tokens < 0, NEG_INF)
        if width > k:
            scores, place = scores.topk(k, dim=-1, sorted=batch > 1)
            tokens = tokens.gather(-1, place)
        return tokens.view(batch, heads, -1), scores.view(batch, heads, -1)

    def _learn(self, tokens: Tensor, scores: Tensor, t: int, bypass: Tensor) -> None:
        """`table ← γ·table + (1 − γ)·a/2` with `a` the softmax over what was read; bypassed heads do not learn."""
        weights = scores.softmax(-1).nan_to_num(0.0) * ((1 - self.gamma) / 2)
        for table in (self.vertical, self.slash):
            table.decay(self.gamma, ~bypass)
            table.add(tokens, weights, t)

    def _sink(self, view: LayerView, q: Tensor, t: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Step 1: which heads to bypass `[B, Hq]`, and the mean token's partial attention for them (appendix B.1)."""
        regions, group = view.regions, view.group
        first = torch.arange(max(regions.sink_size, 1), device=q.device) + regions.starts[:, None]
        last = torch.arange(t + 1 - RECENT, t + 1, device=q.device).clamp(min=0).expand(q.shape[0], -1)
        near = torch.cat([first.clamp(max=t), last], dim=1)[:, None].expand(-1, view.num_kv_heads, -1)
        keys = gather_rows(view.keys, near).float().repeat_interleave(group, dim=1)
        scores = (keys @ q[..., None])[..., 0] * view.scale
        sink, recent = scores[..., :first.shape[1]].logsumexp(-1), scores[..., first.shape[1]:].logsumexp(-1)
        mean = (self.mean_key.repeat_interleave(group, dim=1) * q).sum(-1) * view.scale
        spread = self.variance_ratio * q.square().sum(-1)
        rest = mean + spread / 2 + regions.mid_sizes.clamp(min=1).log()[:, None]
        share = torch.softmax(torch.stack([sink, rest, recent]), dim=0)[0]
        bypass = share > self.eta
        value = self.mean_value.repeat_interleave(group, dim=1)
        return bypass, (value, rest.masked_fill(~bypass, NEG_INF))

    def _fill(self, view: LayerView) -> Tensor:
        """Tables from the last prefill rows: `V[i] = (1 − γ) Σ_u γ^{w−u} a_{u,i}`, `S[t_u − i]` likewise.
        Returns the variance of the last row's scores over its squared norm, `[B, Hq]`."""
        recent = view.recent_queries[:, :, -self.prefill_rows:]
        batch, heads, width, _ = recent.shape
        end = min(view.recent_end, view.length)
        mid = view.regions.mid_mask()[:, None]
        ratio = torch.zeros(batch, heads, device=recent.device)
        for head in range(view.num_kv_heads):
            own = slice(head * view.group, (head + 1) * view.group)
            keys = view.keys[:, head, None].float()
            for u in range(width):
                t = end - width + u
                q = recent[:, own, u].float()
                scores = (keys @ q[..., None])[..., 0] * view.scale
                seen = mid & (torch.arange(view.length, device=q.device) <= t)
                weights = scores.masked_fill(~seen, NEG_INF).softmax(-1).nan_to_num(0.0)
                weights = weights * ((1 - self.gamma) * self.gamma ** (width - 1 - u))
                rows = (torch.arange(batch, device=q.device)[:, None] * heads
                        + torch.arange(own.start, own.stop, device=q.device)).flatten()
                for table in (self.vertical, self.slash):
                    table.add_rows(rows, weights.flatten(0, 1), t)
                if u == width - 1:
                    count = seen.sum(-1).clamp(min=1)
                    mean = (scores * seen).sum(-1) / count
                    variance = ((scores - mean[..., None]).square() * seen).sum(-1) / count
                    ratio[:, own] = variance / q.square().sum(-1).clamp(min=1e-12)
        for table in (self.vertical, self.slash):
            table.recount()
        return ratio

    def _means(self, view: LayerView) -> None:
        """Mean key and value of the mid region, `[B, Hkv, d]` each."""
        inside = view.regions.mid_mask().float()[:, None, None]
        count = inside.sum(-1).clamp(min=1)
        self.mean_key, self.mean_value = (
            torch.cat([inside @ x[:, h:h + 1].float() for h in range(x.shape[1])], dim=1)[:, :, 0] / count
            for x in (view.keys, view.values))

    def statistics(self) -> dict[str, float]:
        """Share of the cache's keys that were scored, and of heads not searched."""
        return {"keys_scored": self.scored / self.steps} if self.steps else {}
