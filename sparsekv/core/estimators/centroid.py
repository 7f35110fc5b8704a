"""Completion without training: buckets of keys stand for their members."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from sparsekv.core.estimators.phi import Completion
from sparsekv.core.kmeans import spherical_kmeans
from sparsekv.core.regions import Regions
from sparsekv.core.rows import gather_rows
from sparsekv.core.selectors.base import LayerView, Queries, Selection, fold
from sparsekv.models.estimators import equal_buckets

BLOCK = 8192


class CentroidCompletion(Completion):
    """The untrained rival of φ: `Z_c ≈ n_c · exp(q·mean k_c · scale)`, numerator `Z_c · mean v_c`, over k-means buckets
    of this request's rotated keys (the estimation zone of a known peer). What is retrieved is taken out of its
    bucket's count and sums. tokens: what the summaries may cost to fetch, instead of num_buckets."""

    row_state: ClassVar[tuple[str, ...]] = ("centroids", "assignment", "counts", "sums")
    rank = 0

    def __init__(self, num_buckets: int = 256, iterations: int = 5, tokens: float | None = None):
        self.num_buckets, self.iterations, self.tokens = num_buckets, iterations, tokens
        self.centroids: Any = None
        self.assignment: Any = None
        self.counts: Any = None
        self.sums: Any = None

    def build(self, view: LayerView) -> None:
        regions = view.regions
        if self.tokens is not None:
            self.num_buckets = equal_buckets(self.tokens, view.keys.shape[-1], self.rank)
        self.centroids = torch.stack([
            spherical_kmeans(view.keys[b, :, int(regions.mid_first[b]):int(regions.mid_last[b])], self.num_buckets,
                             self.iterations) for b in range(view.keys.shape[0])])
        self._sum(view)

    def _sum(self, view: LayerView) -> None:
        """Assign and sum the whole mid region."""
        batch, heads, _, dim = view.keys.shape
        self.assignment = view.keys.new_zeros(batch, heads, 0, dtype=torch.long)
        self.counts = torch.zeros(batch, heads, self.num_buckets, device=view.keys.device)
        self.sums = torch.zeros(batch, heads, self.num_buckets, 2 * dim + self.rank, device=view.keys.device)
        self._add(view, view.regions.mid_first)

    def extend(self, view: LayerView, old: Regions) -> None:
        self._add(view, torch.maximum(old.mid_last, view.regions.mid_first))

    def _add(self, view: LayerView, first: Tensor) -> None:
        """Assign the keys not yet assigned; count those from `first[b]` on."""
        have, end = self.assignment.shape[-1], int(view.regions.mid_last.max())
        scores = [(view.keys[:, :, a:min(a + BLOCK, end)].float() @ self.centroids.mT).argmax(-1)
                  for a in range(have, end, BLOCK)]
        self.assignment = torch.cat([self.assignment, *scores], dim=-1)
        low = int(first.min())
        positions = torch.arange(low, end, device=first.device)
        joined = (positions >= first[:, None]) & (positions < view.regions.mid_last[:, None])
        counts, sums = self.counts.clone(), self.sums.clone()
        for a in range(low, end, BLOCK):
            b = min(a + BLOCK, end)
            weight = joined[:, None, a - low:b - low].expand(-1, view.num_kv_heads, -1).float()
            rows = self._summed(view.keys[:, :, a:b], view.values[:, :, a:b])
            self._scatter(counts, sums, self.assignment[..., a:b], weight, rows)
        self.counts, self.sums = counts, sums

    def _summed(self, keys: Tensor, values: Tensor) -> Tensor:
        """What is summed over a bucket, float32: keys and values `[Q, H, n, d]`, of B rows or of B·T queries and of
        KV heads or of several lists a head."""
        return torch.cat([keys, values], dim=-1).float()

    def _spread(self, q: Tensor, means: Tensor) -> Tensor | float:
        """Added to the logits: q `[Q, H, G, d]` times the scale, means `[Q, H, C, 2d + rank]`."""
        return 0.0

    @staticmethod
    def _scatter(counts: Tensor, sums: Tensor, bucket: Tensor, weight: Tensor, rows: Tensor) -> None:
        """Add `weight` times the rows to their buckets, in place."""
        counts.scatter_add_(-1, bucket, weight)
        rows = rows * weight[..., None]
        sums.scatter_add_(-2, bucket[..., None].expand_as(rows), rows)

    def partial(self, view: LayerView, queries: Queries, selection: Selection) -> tuple[Tensor, Tensor]:
        tokens = selection.as_tokens()
        rows, heads, width = tokens.shape
        lists, dim = heads // view.num_kv_heads, view.keys.shape[-1]
        counts, sums = (fold(x, queries.count).repeat_interleave(lists, dim=1) for x in (self.counts, self.sums))
        if width:
            index = tokens.clamp(min=0).reshape(rows, view.num_kv_heads, lists * width)
            read = selection.rows or (gather_rows(view.keys, index), gather_rows(view.values, index))
            keys, values = (x.reshape(rows, heads, width, dim) for x in read)
            bucket = gather_rows(self.assignment[..., None], index).reshape(rows, heads, width)
            counts, sums = counts.clone(), sums.clone()
            self._scatter(counts, sums, bucket, -(tokens >= 0).float(), self._summed(keys, values))
        live = counts > 0.5
        means = sums / torch.where(live, counts, 1.0)[..., None]
        q = queries.folded(queries.rot).float().reshape(rows, heads, -1, dim)
        logits = (q @ means[..., :dim].mT) * view.scale + torch.where(live, counts, 0.0).log()[:, :, None]
        logits = logits + self._spread(q * view.scale, means)
        lse = logits.logsumexp(-1)
        weights = torch.exp(logits - torch.where(torch.isinf(lse), 0.0, lse)[..., None])
        return (weights @ means[..., dim:2 * dim]).reshape(rows, -1, dim), lse.reshape(rows, -1)

    def cost_tokens(self, view: LayerView) -> float:
        return self.num_buckets * (1 + (1 + self.rank) / (2 * view.keys.shape[-1]))
