"""Bucket centroids as an estimator: without training, buckets of keys stand for their members."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from sparsekv.core.buckets import spherical_kmeans
from sparsekv.core.estimators.base import Estimator
from sparsekv.core.layer import LayerView, Queries, Selection
from sparsekv.core.moments import BLOCK
from sparsekv.core.regions import Regions
from sparsekv.kernels import assign_buckets, bucket_sums, gather_rows
from sparsekv.kernels.launch import acc_dtype

ITERATIONS = 5


def equal_buckets(tokens: float, dim: int) -> int:
    """Buckets whose summaries (count, mean key, mean value) take the bytes of `tokens`."""
    return max(1, int(tokens * 2 * dim / (2 * dim + 1)))


class CentroidEstimator(Estimator):
    """The untrained rival of φ: `Z_c ≈ n_c · exp(q·mean k_c · scale)`, numerator `Z_c · mean v_c`, over k-means buckets
    of this request's rotated keys (the estimation zone of RetroInfer). What is read is taken out of its bucket's count
    and sums."""

    row_state: ClassVar[tuple[str, ...]] = ("centroids", "assignment", "counts", "sums")

    def __init__(self, num_buckets: int = 256):
        self.num_buckets = num_buckets
        self.centroids: Tensor
        self.assignment: Tensor
        self.counts: Tensor
        self.sums: Tensor

    def build(self, view: LayerView) -> None:
        regions = view.regions
        self.centroids = torch.stack([
            spherical_kmeans(view.keys[b, :, int(regions.mid_first[b]):int(regions.mid_last[b])], self.num_buckets,
                             iterations=ITERATIONS) for b in range(view.keys.shape[0])])
        shape = (*view.keys.shape[:2], self.num_buckets)
        kind = acc_dtype(view.keys)
        self.assignment = torch.zeros(*shape[:2], 0, dtype=torch.int32, device=view.keys.device)
        self.counts = torch.zeros(shape, dtype=kind, device=view.keys.device)
        self.sums = torch.zeros(*shape, 2 * view.keys.shape[-1], dtype=kind, device=view.keys.device)
        self._add(view, regions.mid_first)

    def extend(self, view: LayerView, old: Regions) -> None:
        self._add(view, torch.maximum(old.mid_last, view.regions.mid_first))

    def _add(self, view: LayerView, first: Tensor) -> None:
        """Assign the keys not yet assigned; sum those from `first[b]` on."""
        known, end = self.assignment.shape[-1], int(view.regions.mid_last.max())
        new = assign_buckets(view.keys[:, :, known:end], self.centroids)
        self.assignment = torch.cat([self.assignment, new], dim=-1)
        counts, sums = self.counts, self.sums
        for a in range(int(first.min()), end, BLOCK):
            places = torch.arange(a, min(a + BLOCK, end), device=first.device)
            joined = (places >= first[:, None]) & (places < view.regions.mid_last[:, None])
            both = torch.cat([x[:, :, places[0]:places[-1] + 1] for x in (view.keys, view.values)], dim=-1)
            count, total = bucket_sums(both.to(sums.dtype), self.assignment[..., places[0]:places[-1] + 1],
                                       joined[:, None], self.num_buckets)
            counts, sums = counts + count, sums + total
        self.counts, self.sums = counts, sums

    def partial(self, view: LayerView, queries: Queries, selection: Selection) -> tuple[Tensor, Tensor]:
        tokens = view.listed(selection)
        count, heads, width = tokens.shape
        lists, dim = heads // view.num_kv_heads, view.keys.shape[-1]
        counts, sums = (queries.per_query(x).repeat_interleave(lists, dim=1) for x in (self.counts, self.sums))
        if width:
            bucket = gather_rows(self.assignment[..., None], view.by_head(tokens)).reshape(tokens.shape)
            read = bucket_sums(torch.cat(view.gather(tokens), dim=-1).to(sums.dtype), bucket, tokens >= 0,
                               self.num_buckets)
            counts, sums = counts - read[0], sums - read[1]
        live = counts > 0.5
        means = sums / torch.where(live, counts, 1.0)[..., None]
        q = queries.folded.to(sums.dtype).reshape(count, heads, -1, dim)
        logits = (q @ means[..., :dim].mT) * view.scale + torch.where(live, counts, 0.0).log()[:, :, None]
        lse = logits.logsumexp(-1)
        weights = torch.exp(logits - torch.where(torch.isinf(lse), 0.0, lse)[..., None])
        return (weights @ means[..., dim:]).reshape(count, -1, dim), lse.reshape(count, -1)

    def cost_tokens(self, view: LayerView) -> float:
        return self.num_buckets * (1 + 1 / (2 * view.keys.shape[-1]))
