"""LFPS: candidates from where attention went before, by position and by distance; only they are scored."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sparsekv.core.baselines.lfps_table import ScoreTable
from sparsekv.core.layer import LayerView, Queries, Selection
from sparsekv.core.regions import Regions
from sparsekv.core.selectors.base import Selector
from sparsekv.kernels import gather_rows
from sparsekv.util.config import option

NEG_INF = float("-inf")
TINY = 1e-30
RECENT = 5
GAMMA = 0.95
"""Decay of the score tables per step (the paper's)."""
OBSERVED = 64
"""Last prompt tokens that fill the tables."""


@dataclass(eq=False)
class LFPS(Selector):
    """Per query head a vertical table `V[i]` over positions and a slash table `S[t − i]` over distances (LFPS §4.2).

    A step: (1) heads whose sink takes more than `eta` of the attention are not searched, the mean key and value stand
    for the rest; (2) candidates `V[i] > thr_V or S[t − i] > thr_S`; (3) their neighbours at −1, 0, 1, 2 whose scores
    are above a table's mean; (4) exact scores of the candidates, the best `token_budget` are read, and both tables
    learn: `V ← γV + (1 − γ)·a/2`. They begin as what that would have made of the prompt's last rows.
    The heads of a group share one list unless `per_query_head`; a shared list is searched unless all its heads bypass.
    The formula of the thresholds (equation 8) is lost in the paper's text, which says that they rise with α and that a
    higher kurtosis brings more candidates. Ours is in `ScoreTable.threshold`.
    In the paper α alone decides how much is read. With `fills` the thresholds fall where fewer than `token_budget`
    tokens pass, to compare with others at one budget (ours).
    """

    name: ClassVar[str] = "lfps"
    scores_keys: ClassVar[bool] = True

    alpha: float = option(0.3, help="Scale of the candidate thresholds; 0.1 to 0.4 trades budget for recall.", min=0)
    eta: float = option(0.85, help="Share of the attention on the sink from which a head is not searched.",
                        min=0, max=1)
    per_query_head: bool = option(False, help="Every query head has its own candidates and list, as in the paper; "
                                              "otherwise the heads of a group share one and token_budget counts it.")
    fills: bool = option(False, help="Lower the thresholds until token_budget is used, where alpha would read less.")

    def build(self, view: LayerView) -> None:
        batch, length = view.keys.shape[0], view.length
        rows = batch * view.num_query_heads
        missing = view.regions.starts.repeat_interleave(view.num_query_heads)
        self.vertical = ScoreTable(rows, length, view.keys.device, missing=missing)
        self.slash = ScoreTable(rows, length, view.keys.device, backwards=True, missing=missing)
        self.scored, self.skipped, self.steps = 0.0, 0.0, 0
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
        super().take_rows(index)
        heads = self.variance_ratio.shape[1]
        rows = (index[:, None] * heads + torch.arange(heads, device=index.device)).flatten()
        for table in (self.vertical, self.slash):
            table.take_rows(rows)
        self.mean_key, self.mean_value = self.mean_key[index], self.mean_value[index]
        self.variance_ratio = self.variance_ratio[index]

    def cost_bytes(self, view: LayerView) -> Tensor | float:
        """Both tables of every query head, and the keys of the candidates so far."""
        lists = view.num_query_heads if self.per_query_head else view.num_kv_heads
        scored = self.scored / max(1, self.steps) * view.length * lists
        return (2.0 * view.num_query_heads * view.length + scored * view.keys.shape[-1]) * view.keys.element_size()

    def select(self, view: LayerView, queries: Queries) -> Selection:
        columns = (queries.lengths[:queries.count] - 1).tolist()
        parts = [self._step(view, queries.rot[:, :, t], column) for t, column in enumerate(columns)]
        widest = max(tokens.shape[-1] for tokens, _, _ in parts)
        padded = [(torch.nn.functional.pad(tokens, (0, widest - tokens.shape[-1]), value=-1), *bypass)
                  for tokens, *bypass in parts]
        # all queries of a row one after another
        listed, *bypassed = (torch.stack(x, 1).flatten(0, 1) for x in zip(*padded, strict=True))
        # of heads that were not searched, the mean value with the estimated mass of all but the anchors
        return Selection(tokens=listed, rest=(bypassed[0], bypassed[1]))

    def _step(self, view: LayerView, q: Tensor, t: int) -> tuple[Tensor, Tensor, Tensor]:
        """One token at position `t`: q `[B, Hq, d]` -> the list `[B, lists, K]`, and for every query head the mean
        value and the log mass of what a bypass stands for, -inf where it was searched."""
        batch, lists = q.shape[0], view.num_query_heads if self.per_query_head else view.num_kv_heads
        q = q.float()
        bypass, value, rest = self._sink(view, q, t)
        for table in (self.vertical, self.slash):
            table.grow(t + 1)
        row, token = self._candidates(view, lists, t, bypass)
        tokens, scores = self._best(view, q, lists, row, token)
        self._learn(tokens, scores, t, ~bypass.flatten())
        self.steps += 1
        self.skipped += float(bypass.float().mean())
        skipped = bypass.view(batch, lists, -1).all(-1, keepdim=True).expand(-1, -1, q.shape[1] // lists)
        return tokens, value, rest.masked_fill(~skipped.reshape(rest.shape), NEG_INF)

    def _candidates(self, view: LayerView, lists: int, t: int, bypass: Tensor) -> tuple[Tensor, Tensor]:
        """Steps 2 and 3: list and position of every candidate, lists in order, positions ascending, `[n]` each. A list
        shared by a group has what any of its heads proposes."""
        low, high = int(view.regions.mid_first.min()), int(view.regions.mid_last.max())
        group, size, asked = view.num_query_heads // lists, high - low, ~bypass.flatten()
        cuts = [table.threshold(self.alpha) for table in (self.vertical, self.slash)]
        found = torch.zeros(len(asked) // group, size, dtype=torch.bool, device=asked.device)
        for table, cut in zip((self.vertical, self.slash), cuts, strict=True):
            row, token = table.above(cut, t)
            inside = (token >= low) & (token < high) & asked[row]
            found.view(-1)[row[inside] // group * size + token[inside] - low] = True
        if self.fills and self.widest and size:
            height = torch.maximum(*(table.window(low, high, t) / cut.clamp(min=TINY)
                                     for table, cut in zip((self.vertical, self.slash), cuts, strict=True)))
            highest = self._highest(view, height, low, high) & asked[:, None]
            found |= highest.view(-1, group, size).any(1)
        near = found.clone()
        near[:, :-1] |= found[:, 1:]
        near[:, 1:] |= found[:, :-1]
        near[:, 2:] |= found[:, :-2]
        if view.keys.shape[0] > 1:
            inside = view.regions.mid_mask(low, high).repeat_interleave(lists, dim=0)
            near, found = near & inside, found & inside
        # what is above a threshold is above its mean
        others = (near ^ found).view(-1).nonzero()[:, 0]
        row, token = others // size, others % size + low
        for table in (self.vertical, self.slash):
            place = (row * group)[:, None] + torch.arange(group, device=row.device)
            above = (table.at(place, token[:, None], t) > table.mean[:, 0][place]).any(1)
            found.view(-1)[others[above]] = True
            others, row, token = (x[~above] for x in (others, row, token))
        row, column = found.nonzero(as_tuple=True)
        return row, column + low

    def _highest(self, view: LayerView, height: Tensor, low: int, high: int) -> Tensor:
        """Where the largest of every query head's row are, as many as its budget, `[B·Hq, high − low]`."""
        inside = view.regions.mid_mask(low, high).repeat_interleave(view.num_query_heads, dim=0)
        best = height.masked_fill(~inside, -1.0).topk(min(self.widest, high - low), dim=-1).indices
        budget = self.budget.repeat_interleave(view.num_query_heads)[:, None]
        paid = torch.arange(best.shape[1], device=best.device) < budget
        return torch.zeros_like(inside).scatter_(1, best, paid) & inside

    def _best(
        self, view: LayerView, q: Tensor, lists: int, row: Tensor, token: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Step 4: exact scores of the candidates, the best `k [B]` of every list: tokens `[B, lists, K]` with -1
        beyond, and every head's scores of them `[B, lists, G, K]`."""
        batch, heads, dim = q.shape
        counts = torch.bincount(row, minlength=batch * lists)
        width = int(counts.max())
        self.scored += float(counts.float().mean()) / max(view.length, 1)
        slot = torch.arange(row.numel(), device=row.device) - (counts.cumsum(0) - counts)[row]
        tokens = torch.full((batch * lists, width), -1, dtype=torch.long, device=q.device)
        tokens[row, slot] = token
        index = tokens.clamp(min=0).view(batch, view.num_kv_heads, -1)
        keys = gather_rows(view.keys, index).float().view(batch * lists, width, dim)
        scores = torch.bmm(q.reshape(batch * lists, heads // lists, dim), keys.mT).mul_(view.scale)
        scores.masked_fill_((tokens < 0)[:, None], NEG_INF)
        k, widest = self.budget, min(self.widest, width)
        if width <= int(k.min()):
            return tokens.view(batch, lists, width), scores.unflatten(0, (batch, lists))
        total = scores[:, 0] if heads == lists else scores.softmax(-1).nan_to_num_(0.0).sum(1)
        total = total.masked_fill(tokens < 0, NEG_INF)
        place = total.topk(widest, dim=-1, sorted=batch > 1).indices
        tokens = tokens.gather(-1, place).view(batch, lists, widest)
        scores = scores.gather(-1, place[:, None].expand(-1, scores.shape[1], -1)).unflatten(0, (batch, lists))
        if batch > 1:
            keep = (torch.arange(widest, device=q.device) < k[:, None])[:, None]
            tokens = torch.where(keep, tokens, -1)
            scores = scores.masked_fill(~keep[:, :, None], NEG_INF)
        return tokens, scores

    def _learn(self, tokens: Tensor, scores: Tensor, t: int, learning: Tensor) -> None:
        """`table ← γ·table + (1 − γ)·a/2` with `a` a head's softmax over what was read; bypassed heads do not learn."""
        weights = scores.softmax(-1).nan_to_num(0.0).flatten(0, 2) * ((1 - GAMMA) / 2) * learning[:, None]
        positions = tokens[:, :, None].expand(scores.shape).reshape(weights.shape)
        for table in (self.vertical, self.slash):
            table.decay(GAMMA, learning)
            table.add(positions, weights, t)

    def _sink(self, view: LayerView, q: Tensor, t: int) -> tuple[Tensor, Tensor, Tensor]:
        """Step 1: which heads to bypass `[B, Hq]`; the mean value `[B, Hq, d]` and the estimated mass of everything but
        the anchors, its logarithm `[B, Hq]` (appendix B.1)."""
        regions, group = view.regions, view.group
        first = torch.arange(max(regions.sinks, 1), device=q.device) + regions.starts[:, None]
        last = torch.arange(t + 1 - RECENT, t + 1, device=q.device).clamp(min=0).expand(q.shape[0], -1)
        near = torch.cat([first.clamp(max=t), last], dim=1)[:, None].expand(-1, view.num_kv_heads, -1)
        keys = gather_rows(view.keys, near).float().repeat_interleave(group, dim=1)
        scores = (keys @ q[..., None])[..., 0] * view.scale
        sink, recent = scores[..., :first.shape[1]].logsumexp(-1), scores[..., first.shape[1]:].logsumexp(-1)
        mean = (self.mean_key.repeat_interleave(group, dim=1) * q).sum(-1) * view.scale
        spread = self.variance_ratio * q.square().sum(-1)
        rest = mean + spread / 2 + regions.mid_sizes.clamp(min=1).log()[:, None]
        share = torch.softmax(torch.stack([sink, rest, recent]), dim=0)[0]
        return share > self.eta, self.mean_value.repeat_interleave(group, dim=1), rest

    def _fill(self, view: LayerView) -> Tensor:
        """Tables from the last prefill rows: `V[i] = (1 − γ) Σ_u γ^{w−u} a_{u,i}/2`, `S[t_u − i]` likewise.
        Returns the variance of the last row's scores over its squared norm, `[B, Hq]`."""
        assert view.recent_queries is not None
        recent = view.recent_queries[:, :, -OBSERVED:].float()
        batch, heads, width, _ = recent.shape
        end = min(view.recent_end, view.length)
        low, high = int(view.regions.mid_first.min()), int(view.regions.mid_last.max())
        last = torch.arange(end - width, end, device=recent.device)
        seen = torch.arange(low, high, device=recent.device) <= last[:, None]
        seen = seen & view.regions.mid_mask(low, high)[:, None]  # [B, w, M]
        decay = (1 - GAMMA) / 2 * GAMMA ** (end - 1 - last)
        ratio = torch.zeros(batch, heads, device=recent.device)
        for head in range(heads):
            keys = view.keys[:, head // view.group, low:high].float()
            scores = (recent[:, head] @ keys.mT) * view.scale
            weights = scores.masked_fill(~seen, NEG_INF).softmax(-1).nan_to_num_(0.0) * decay[:, None]
            rows = torch.arange(batch, device=recent.device) * heads + head
            if width:
                self.vertical.add_observed(rows, weights, low, end - 1)
                self.slash.add_observed(rows, weights, low, end - 1)
                count = seen[:, -1].sum(-1).clamp(min=1)
                final = scores[:, -1] * seen[:, -1]
                mean = final.sum(-1) / count
                variance = (final.square().sum(-1) / count - mean.square()).clamp(min=0)
                ratio[:, head] = variance / recent[:, head, -1].square().sum(-1).clamp(min=1e-12)
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
        if not self.steps:
            return {}
        return {"keys_scored": self.scored / self.steps, "heads_bypassed": self.skipped / self.steps}
