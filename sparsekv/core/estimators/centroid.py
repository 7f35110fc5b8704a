"""Bucket means as an estimator: without training, buckets of the request's keys stand for their members."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from sparsekv.core.buckets import Moves, fit_buckets, own_centroids
from sparsekv.core.estimators.base import Estimator
from sparsekv.core.index import spaced_by
from sparsekv.core.layer import CacheLayer, Queries, Selection
from sparsekv.core.moments import BLOCK
from sparsekv.core.regions import Regions
from sparsekv.kernels import (
    BucketSums,
    CompletionQuery,
    KeyBuckets,
    assign_buckets,
    bucket_query,
    bucket_remainder,
    bucket_sums,
)
from sparsekv.kernels.launch import acc_dtype

MOVES = Moves(3, 64)
"""k-means from the request's own keys: iterations, and keys a bucket that they are on."""


def equal_buckets(tokens: float, dim: int) -> int:
    """Buckets whose summaries (count, mean key, mean value) take the bytes of `tokens`."""
    return max(1, int(tokens * 2 * dim / (2 * dim + 1)))


class CentroidEstimator(Estimator):
    """The untrained rival of φ: `Z_c ≈ n_c · exp(q·mean k_c · scale)`, numerator `Z_c · mean v_c`, over k-means buckets
    of this request's rotated keys (the estimation zone of RetroInfer). What is read is taken out at its bucket's
    estimate, in the attention kernel."""

    row_state: ClassVar[tuple[str, ...]] = ("centroids", "number", "means", "counts", "key_sums", "value_sums")
    restorable: ClassVar[bool] = True

    def __init__(self, num_buckets: int = 256):
        self.num_buckets = num_buckets
        self.centroids: Tensor
        self.number: Tensor
        """The bucket of every token by its number, `[B, Hkv, N]` int16."""
        self.means: Tensor
        self.counts: Tensor
        self.key_sums: Tensor
        self.value_sums: Tensor

    def stacks_by(self, view: CacheLayer) -> Hashable | None:
        return self.num_buckets

    def of_heads(self, others: Sequence[Any], views: Sequence[CacheLayer]) -> Self:
        return self.fork()

    def take_heads(self, whole: Self, state: dict[str, Any]) -> None:
        super().take_heads(whole, state)
        self.in_kernel = whole.in_kernel

    def build(self, view: CacheLayer) -> None:
        regions, heads = view.regions, view.num_kv_heads
        rows, end = regions.starts.shape[0], regions.edges[3]
        keys = view.keys_at(0, end)
        spaced = spaced_by(regions, lambda tokens: MOVES.stride(tokens, self.num_buckets))
        start = own_centroids(keys, regions.mid_first, regions.mid_last, self.num_buckets)
        # every row has its own buckets: its heads are heads of one long row
        some, used = spaced.take(keys), spaced.used(regions)
        moves = Moves(MOVES.iterations, max(1, some.shape[2]))
        self.centroids = fit_buckets(some.flatten(0, 1), start.flatten(0, 1), used.repeat_interleave(heads, dim=0),
                                     moves=moves)[0].unflatten(0, (rows, heads))
        kind = acc_dtype(keys)
        shape = (rows, heads, self.num_buckets)
        self.number = torch.zeros(rows, heads, 0, dtype=torch.int16, device=keys.device)
        self.counts = torch.zeros(shape, dtype=kind, device=keys.device)
        self.key_sums, self.value_sums = (torch.zeros(*shape, view.head_dim, dtype=kind, device=keys.device)
                                          for _ in range(2))
        self.in_kernel = view.in_place
        self._add(view, None, regions.edges[0], end)

    def restore(self, view: CacheLayer, state: dict[str, Any]) -> None:
        super().restore(view, state)
        self.in_kernel = view.in_place

    def extend(self, view: CacheLayer, old: Regions) -> None:
        self._add(view, old.mid_last, old.edges[2], view.regions.edges[3])

    def _add(self, view: CacheLayer, after: Tensor | None, low: int, end: int) -> None:
        """The tokens of the mid region, from `after[b]` on where given, join their buckets; numbers are those of all
        tokens before `end`."""
        known = min(self.number.shape[-1], low)
        new = assign_buckets(view.keys_at(known, end), self.centroids)
        self.number = torch.cat([self.number[..., :known], new.to(torch.int16)], dim=-1)
        for a in range(low, end, BLOCK):
            b = min(a + BLOCK, end)
            joined, number = view.regions.mid_mask(a, b, after)[:, None], self.number[..., a:b]
            count, keys = bucket_sums(view.keys_at(a, b), number, joined, self.num_buckets)
            values = bucket_sums(view.values_at(a, b), number, joined, self.num_buckets)[1]
            self.counts, self.key_sums, self.value_sums = (
                self.counts + count, self.key_sums + keys, self.value_sums + values)
        self.means = (self.key_sums / self.counts.clamp(min=1)[..., None]).to(view.dtype)

    def query(self, view: CacheLayer, queries: Queries) -> CompletionQuery:
        sums = BucketSums(self.means, self.counts, self.value_sums)
        return bucket_query(queries.folded, sums, view.scale, queries.seats)._replace(keys=KeyBuckets(self.number))

    def partial(self, view: CacheLayer, queries: Queries, selection: Selection) -> tuple[Tensor, Tensor]:
        tokens = view.listed(selection)
        return bucket_remainder(self.query(view, queries), tokens, view.gather(tokens)[1])

    def cost_tokens(self, view: CacheLayer) -> float:
        return self.num_buckets * (1 + 1 / (2 * view.head_dim))
