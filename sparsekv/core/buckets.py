"""Buckets of keys: k-means, sums and means, and where a bucket that no key falls into starts anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsekv.kernels import against_bucket, assign_buckets, bucket_sums

RESTARTS = 3
"""How often the empty buckets of a request restart."""
POINTS_PER_CENTROID = 512


class Moves(NamedTuple):
    """The move of trained buckets to a request: iterations of k-means, and sampled keys per bucket."""

    iterations: int
    keys: int

    def stride(self, tokens: Any, buckets: int) -> Any:
        """Stride between sampled keys, of a number of tokens (int) or per row (`[B]`)."""
        return tokens // (self.keys * buckets)


ALONE, BEFORE_CODES = Moves(4, 32), Moves(2, 4)
"""Where buckets alone choose what is read, and where codes tell their tokens apart, for which fewer keys find nearly as
much (docs/log/sketches.md)."""


def spherical_kmeans(
    keys: Tensor, num_buckets: int, *, iterations: int = 10, seed: int = 0,
    advance: Callable[[int], None] | None = None,
) -> Tensor:
    """Cluster keys by spherical k-means, every head on its own (Saap §4).

    Assignment is by largest inner product, the start random keys. At most `POINTS_PER_CENTROID · C` keys a head are
    used; with fewer keys than buckets keys are repeated; a bucket that is left empty restarts at a key served worst.

    Args:
        keys: `[H, n, d]`.
        num_buckets: C.
        advance: called once an iteration.

    Returns:
        Unit centroids `[H, C, d]`, float32 at least.
    """
    heads, count, dim = keys.shape
    generator = torch.Generator().manual_seed(seed)
    if count == 0:
        return F.normalize(torch.ones(heads, num_buckets, dim, device=keys.device), dim=-1)
    order = torch.randperm(count, generator=generator).to(keys.device)
    if count > POINTS_PER_CENTROID * num_buckets:
        keys = keys[:, order[:POINTS_PER_CENTROID * num_buckets]]
        order = torch.arange(keys.shape[1], device=keys.device)
    keys = keys if keys.dtype == torch.float64 else keys.float()
    centroids = F.normalize(keys[:, order[torch.arange(num_buckets, device=keys.device) % keys.shape[1]]], dim=-1)
    for _ in range(iterations):
        centroids = moved(keys, centroids)
        if advance is not None:
            advance(1)
    return restart_empty(keys, centroids, RESTARTS)[0]


def moved(keys: Tensor, centroids: Tensor, used: Tensor | None = None) -> Tensor:
    """Unit centroids `[H, C, d]` after an iteration of spherical k-means on keys `[H, n, d]`, of those that are used
    `[H, n]`."""
    centroids, nearest = restart_empty(keys, centroids, 1, used)
    counts, sums = (x[0] for x in bucket_sums(keys[None], nearest[None], None if used is None else used[None],
                                              centroids.shape[1]))
    return torch.where((counts > 0)[..., None], F.normalize(sums, dim=-1).to(centroids.dtype), centroids)


def fit_buckets(
    keys: Tensor, centroids: Tensor, used: Tensor, some: tuple[Tensor, Tensor] | None = None, moves: Moves = ALONE,
) -> tuple[Tensor, Tensor]:
    """Move trained buckets to a request's keys: iterations of spherical k-means on some of them (this project's own).

    Args:
        keys: `[H, n, d]`.
        centroids: `[H, C, d]`, of unit length.
        used: `[H, n]` bool.
        some: the keys that are iterated on `[H, m, d]`, and which of them are used `[H, m]`; None: evenly spaced ones.

    Returns:
        Unit centroids `[H, C, d]` in the keys' dtype, and the bucket of every key `[H, n]` int32. No bucket is empty
        while there are keys.
    """
    centroids = centroids.to(keys.dtype)
    if some is None:
        step = max(1, moves.stride(keys.shape[1], centroids.shape[1]))
        some = keys[:, ::step], used[:, ::step]
    for _ in range(moves.iterations if keys.shape[1] else 0):
        centroids = moved(some[0], centroids, some[1])
    return restart_empty(keys, centroids, RESTARTS, used)


def own_centroids(keys: Tensor, first: Tensor, last: Tensor, number: int) -> Tensor:
    """Start the buckets of an untrained request at `number` of its keys, evenly spaced.

    Args:
        keys: `[B, H, N, d]`.
        first, last: `[B]`, the keys that count are `first[b] … last[b] − 1`.
        number: of buckets.

    Returns:
        Unit centroids `[B, H, C, d]` in the keys' dtype; with fewer keys than buckets keys are repeated.
    """
    share = (torch.arange(number, device=keys.device) + 0.5) / number
    first, last = first.to(keys.device)[:, None], last.to(keys.device)[:, None]
    positions = (first + (share * (last - first)).long()).clamp(max=max(keys.shape[2] - 1, 0))
    if not keys.shape[2]:
        return keys.new_zeros(*keys.shape[:2], number, keys.shape[3])
    some = keys.gather(2, positions[:, None, :, None].expand(-1, keys.shape[1], -1, keys.shape[3]))
    return F.normalize(some.to(torch.promote_types(keys.dtype, torch.float32)), dim=-1).to(keys.dtype)


def imbalance(sizes: Tensor) -> Tensor:
    """`C · Σ share²` over the last dimension: 1 for equal buckets."""
    share = sizes.float() / sizes.sum(-1, keepdim=True).clamp(min=1)
    return sizes.shape[-1] * share.square().sum(-1)


def restart_empty(
    keys: Tensor, centroids: Tensor, rounds: int, used: Tensor | None = None, free: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Buckets that none of these keys falls into restart at the keys served worst, one key each.

    keys `[H, n, d]`, unit centroids `[H, C, d]`, used `[H, n]` (the keys that count; all of them without it) -> unit
    centroids `[H, C, d]` in the keys' dtype, and the bucket of every key `[H, n]` int32. Served worst are the keys
    furthest from the mean of their bucket, which is what `mean_key` scores in their place; a key serves once. Buckets
    that hold keys keep their centroids; where none is empty nothing changes. free `[H, n]`: the keys that have not
    served. This project's own.
    """
    heads, count, _ = keys.shape
    centroids = centroids.to(keys.dtype)
    used = torch.ones(heads, count, dtype=torch.bool, device=keys.device) if used is None else used
    if count == 0:
        return centroids, torch.zeros(heads, 0, dtype=torch.int32, device=keys.device)
    free = used if free is None else free
    nearest = assign_buckets(keys[None], centroids)[0].long()
    for done in range(rounds):
        sizes = torch.zeros(heads, centroids.shape[1], device=keys.device).scatter_add_(1, nearest, used.float())
        empty = sizes == 0
        taken = empty & (empty.cumsum(1) <= free.sum(1, keepdim=True))  # while there are keys
        some = taken.any(1).nonzero()[:, 0]
        if not len(some):
            break
        if 2 * len(some) <= heads:  # the others are done
            moved_to, bucket = restart_empty(keys[some], centroids[some], rounds - done, used[some], free[some])
            centroids, nearest = centroids.index_copy(0, some, moved_to), nearest.index_copy(0, some, bucket.long())
            break
        worst = _served_worst(keys, nearest, sizes, used, free)
        # the i-th empty bucket takes the i-th worst key; other entries are ignored
        which = worst.gather(1, (empty.cumsum(1) - 1).clamp(min=0, max=worst.shape[1] - 1))
        start = F.normalize(_take(keys, which).float(), dim=-1).to(keys.dtype)
        free = free & ~torch.zeros_like(free, dtype=torch.int32).scatter_add_(1, which, taken.int()).bool()
        centroids = torch.where(taken[..., None], start, centroids)
        nearest = _after_moves(keys, centroids, nearest, taken)
    return centroids, nearest.int()


def _take(table: Tensor, index: Tensor) -> Tensor:
    """The rows of every head by number: `[H, n, d]`, `[H, k]` -> `[H, k, d]`."""
    return table.gather(1, index[..., None].expand(-1, -1, table.shape[2]))


def _after_moves(keys: Tensor, centroids: Tensor, nearest: Tensor, taken: Tensor) -> Tensor:
    """Bucket of every key once the buckets `taken [H, C]` have moved to where their centroids now are."""
    lost = taken.gather(1, nearest).any(0)  # keys that do not count may have been of a bucket that counted as empty
    if bool(lost.any()):
        nearest[:, lost] = assign_buckets(keys[None, :, lost], centroids)[0].long()
    # the others stay or join a moved one (heads with fewer of these compare with some that lose, to fill up)
    new = taken.float().topk(int(taken.sum(1).max()), dim=1).indices
    moved = _take(centroids, new)
    nearest_moved = assign_buckets(keys[None], moved)[0].long()
    nearer = _products(keys, moved, nearest_moved) > _products(keys, centroids, nearest)
    return torch.where(nearer, new.gather(1, nearest_moved), nearest)


def _products(keys: Tensor, centroids: Tensor, buckets: Tensor) -> Tensor:
    """Inner product of every key with the centroid of its bucket, `[H, n]`."""
    return against_bucket(keys[None], centroids[None], buckets[None], apart=False)[0]


def _served_worst(keys: Tensor, buckets: Tensor, sizes: Tensor, used: Tensor, free: Tensor) -> Tensor:
    """The free keys by distance to the mean of their bucket, of the used ones, furthest first and as many as there are
    buckets: `[H, k]`. sizes `[H, C]`."""
    counts, sums = bucket_sums(keys[None], buckets[None], used[None], sizes.shape[1])
    means = sums / counts.clamp(min=1)[..., None]
    apart = against_bucket(keys[None], means, buckets[None], apart=True)[0]
    return apart.masked_fill(~free, -1.0).topk(min(sizes.shape[1], keys.shape[1]), dim=1).indices
