"""Uniform samples as an estimator: without training, some unread tokens stand for all of them."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsekv.core.estimators.base import Estimator
from sparsekv.core.layer import CacheLayer, Queries, Selection
from sparsekv.kernels import attend_gathered

SAMPLES = 256
MIXES = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
"""The multipliers of SplitMix64 (Steele, Lea and Flood, 2014), as signed numbers."""


class UniformEstimator(Estimator):
    """`samples` tokens drawn with replacement from the mid region, the same for all heads of a group and anew for every
    query; of those that are not read each stands for as many unread tokens as there are to one (vAttention's
    residual: best tokens and anchors exactly, the rest by a uniform sample). Draws depend on the query's position, its
    layer, KV head and nothing else, so that a step is the same in every batch."""

    def __init__(self, samples: int = SAMPLES):
        self.samples = samples

    def build(self, view: CacheLayer) -> None:
        """Nothing is kept."""

    def drawn(self, view: CacheLayer, queries: Queries) -> Tensor:
        """The tokens drawn, `[Q, Hkv, samples]` int64; 0 where the mid region is empty."""
        first, sizes = (queries.per_query(x)[:, None, None] for x in (view.regions.mid_first, view.regions.mid_sizes))
        positions = queries.lengths - queries.per_query(view.regions.starts)
        heads, samples = (torch.arange(n, device=view.device) for n in (view.num_kv_heads, self.samples))
        of_head = (positions[:, None, None] * 1024 + view.layer_idx) * view.num_kv_heads + heads[:, None]
        share = (mixed(of_head * 2**20 + samples) & (2**24 - 1)).double() / 2**24
        return torch.where(sizes > 0, first + (share * sizes).long(), 0)

    def partial(self, view: CacheLayer, queries: Queries, selection: Selection) -> tuple[Tensor, Tensor]:
        listed = view.listed(selection).long()
        lists = listed.shape[1]
        tokens = self.drawn(view, queries).repeat_interleave(lists // view.num_kv_heads, dim=1)
        read = torch.zeros(*listed.shape[:2], view.length + 1, dtype=torch.bool, device=tokens.device)
        read.scatter_(-1, torch.where(listed < 0, view.length, listed), True)
        sizes = queries.per_query(view.regions.mid_sizes)[:, None]
        unread = ~read.gather(-1, tokens) & (sizes > 0)[..., None]
        left, kept = sizes - (listed >= 0).sum(-1), unread.sum(-1)
        each = (left.double() / kept.clamp(min=1)).log().to(torch.promote_types(view.dtype, torch.float32))
        return attend_gathered(queries.folded, *view.gather(tokens), unread, view.scale,
                               each[..., None].expand(tokens.shape))

    def cost_tokens(self, view: CacheLayer) -> float:
        return float(self.samples)


def mixed(x: Tensor) -> Tensor:
    """Numbers that look random, of int64 numbers: the finaliser of SplitMix64."""
    for shift, factor in zip((30, 27), MIXES, strict=True):
        x = (x ^ ((x >> shift) & (2**(64 - shift) - 1))) * factor
    return x ^ ((x >> 31) & (2**33 - 1))
