"""Two more completions without training: bucket means with second moments, and a fixed sample of the keys."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from sparsekv.core.estimators.centroid import CentroidCompletion
from sparsekv.core.estimators.phi import Completion
from sparsekv.core.regions import Regions
from sparsekv.core.rows import gather_rows
from sparsekv.core.selectors.base import LayerView, Queries, Selection, fold

BLOCK = 8192


class MomentsCompletion(CentroidCompletion):
    """Bucket means and the spread along ρ directions, one basis a KV head: `Z_c ≈ n_c · exp(q·mean k_c·scale +
    ½ scale² Σ_ρ q_ρ² var_c(k_ρ))`, the mean of `exp` under a Gaussian bucket. The directions are the leading ones of
    the keys' spread within their buckets, at the end of the prefill."""

    row_state: ClassVar[tuple[str, ...]] = (*CentroidCompletion.row_state, "basis")

    def __init__(self, num_buckets: int = 256, iterations: int = 5, tokens: float | None = None, rank: int = 4):
        super().__init__(num_buckets, iterations, tokens)
        self.wanted = self.rank = rank
        self.basis: Any = None

    def _sum(self, view: LayerView) -> None:
        self.rank = 0
        super()._sum(view)
        self.rank = min(self.wanted, view.keys.shape[-1])
        self.basis = torch.linalg.eigh(self._scatter_matrix(view)).eigenvectors[..., -self.rank:]
        super()._sum(view)

    def _scatter_matrix(self, view: LayerView) -> Tensor:
        """`Σ k kᵀ` of the mid keys minus that of their buckets' means, `[B, Hkv, d, d]`."""
        dim, mask = view.keys.shape[-1], view.regions.mid_mask()
        means = self.sums[..., :dim] / self.counts.clamp(min=1)[..., None]
        total = -(means * self.counts[..., None]).mT @ means
        for a in range(0, mask.shape[1], BLOCK):
            keys = view.keys[:, :, a:a + BLOCK].float() * mask[:, None, a:a + BLOCK, None]
            total = total + keys.mT @ keys
        return total

    def _summed(self, keys: Tensor, values: Tensor) -> Tensor:
        both = super()._summed(keys, values)
        if not self.rank:
            return both
        along = keys.float() @ self._basis(keys.shape[0], keys.shape[1])
        return torch.cat([both, along * along], dim=-1)

    def _spread(self, q: Tensor, means: Tensor) -> Tensor:
        basis, dim = self._basis(q.shape[0], q.shape[1]), q.shape[-1]
        variance = (means[..., 2 * dim:] - (means[..., :dim] @ basis).square()).clamp(min=0)
        return 0.5 * (q @ basis).square() @ variance.mT

    def _basis(self, rows: int, heads: int) -> Tensor:
        """The basis for B·T queries and several lists a KV head, `[Q, H, d, ρ]`."""
        basis = fold(self.basis, rows // self.basis.shape[0])
        return basis.repeat_interleave(heads // basis.shape[1], dim=1)


class SamplingCompletion(Completion):
    """A stratified random sample of the mid keys stands for all of them: one key of each of S equal stretches, drawn
    once a request and kept. The sampled keys that were not read share the count of all keys not read:
    `Z ≈ |U| / |S ∩ U| · Σ_{S ∩ U} exp(s_i)`."""

    row_state: ClassVar[tuple[str, ...]] = ("drawn", "keys", "values")

    def __init__(self, samples: int = 256, tokens: float | None = None):
        self.samples = samples if tokens is None else max(1, round(tokens))
        self.drawn: Any = None
        self.keys: Any = None
        self.values: Any = None

    def build(self, view: LayerView) -> None:
        regions, device = view.regions, view.keys.device
        shape = (view.num_kv_heads, self.samples)
        generator = torch.Generator().manual_seed(view.layer_idx)
        inside = (torch.arange(self.samples) + torch.rand(shape, generator=generator)) / self.samples
        first, size = (x.to(device)[:, None, None] for x in (regions.mid_first, regions.mid_sizes))
        drawn = first + (inside.to(device) * size).long().clamp(max=size - 1)
        # a stretch shorter than one key draws its neighbour's again: counted once
        again = torch.zeros_like(drawn, dtype=torch.bool)
        again[..., 1:] = drawn[..., 1:] == drawn[..., :-1]
        self.drawn = torch.where(again | (size < 1), -1, drawn)
        index = self.drawn.clamp(min=0)
        self.keys, self.values = gather_rows(view.keys, index), gather_rows(view.values, index)

    def extend(self, view: LayerView, old: Regions) -> None:
        self.build(view)

    def partial(self, view: LayerView, queries: Queries, selection: Selection) -> tuple[Tensor, Tensor]:
        tokens = selection.as_tokens()
        rows, heads, _ = tokens.shape
        lists = heads // view.num_kv_heads
        drawn, keys, values = (fold(x, queries.count).repeat_interleave(lists, dim=1)
                               for x in (self.drawn, self.keys, self.values))
        ranked = tokens.sort(-1).values.contiguous()
        place = torch.searchsorted(ranked, drawn.to(ranked.dtype).contiguous())
        place = place.clamp(max=max(ranked.shape[-1] - 1, 0))
        read = (ranked.gather(-1, place) == drawn) if ranked.shape[-1] else torch.zeros_like(drawn, dtype=torch.bool)
        left = (drawn >= 0) & ~read
        unread = fold(view.regions.mid_sizes, queries.count)[:, None] - (tokens >= 0).sum(-1)
        weight = unread.clamp(min=0) / left.sum(-1).clamp(min=1)
        q = queries.folded(queries.rot).float().reshape(rows, heads, -1, view.keys.shape[-1])
        logits = (q @ keys.float().mT) * view.scale + weight.log()[..., None, None]
        logits = logits.masked_fill(~left[:, :, None], float("-inf"))
        lse = logits.logsumexp(-1)
        weights = torch.exp(logits - torch.where(torch.isinf(lse), 0.0, lse)[..., None])
        return (weights @ values.float()).reshape(rows, -1, values.shape[-1]), lse.reshape(rows, -1)

    def cost_tokens(self, view: LayerView) -> float:
        return float(self.samples)
