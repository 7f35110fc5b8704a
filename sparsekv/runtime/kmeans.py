"""Spherical k-means of a request's own keys, all heads in one batch, in plain torch (no Faiss at decode time)."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsekv.kernels import assign_buckets
from sparsekv.models.buckets import restarts

BLOCK = 8192


def spherical_kmeans(keys: Tensor, num_buckets: int, iterations: int = 10, *, sample: int = 64) -> Tensor:
    """keys `[H, n, d]` -> unit centroids `[H, C, d]` float32, assignment by largest inner product (Saap §4.1).

    Trained on at most `sample · C` evenly spaced keys. With fewer keys than buckets keys are repeated. An empty bucket
    keeps its centroid.
    """
    heads, count, dim = keys.shape
    if count == 0:
        return torch.nn.functional.normalize(torch.ones(heads, num_buckets, dim, device=keys.device), dim=-1)
    if count > sample * num_buckets:
        keys = keys[:, torch.linspace(0, count - 1, sample * num_buckets, device=keys.device).long()]
        count = keys.shape[1]
    keys = keys.float()
    start = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    centroids = torch.nn.functional.normalize(keys[:, start[torch.arange(num_buckets) % count].to(keys.device)], dim=-1)
    for _ in range(iterations):
        nearest = torch.cat([(part @ centroids.mT).argmax(-1) for part in keys.split(BLOCK, dim=1)], dim=1)
        sums = torch.zeros_like(centroids).scatter_add_(1, nearest[..., None].expand_as(keys), keys)
        norm = sums.norm(dim=-1, keepdim=True)
        centroids = torch.where(norm > 0, sums / norm.clamp(min=1e-12), centroids)
    return centroids


def restart_empty(
    keys: Tensor, centroids: Tensor, rounds: int, used: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Buckets that none of these keys falls into restart at the keys served worst, one key each.

    keys `[H, n, d]`, unit centroids `[H, C, d]`, used `[H, n]` (the keys that count; all of them without it) -> unit
    centroids `[H, C, d]` in the keys' dtype, and the bucket of every key `[H, n]` int64. Served worst are the keys
    furthest from the mean of their bucket, which is what `mean_key` scores in their place. Buckets that hold keys keep
    their centroids; where none is empty nothing changes. This project's own.
    """
    heads, count, dim = keys.shape
    buckets = centroids.shape[1]
    centroids = centroids.to(keys.dtype)
    used = torch.ones(heads, count, dtype=torch.bool, device=keys.device) if used is None else used
    if count == 0:
        return centroids, torch.zeros(heads, 0, dtype=torch.long, device=keys.device)
    nearest = assign_buckets(keys[None], centroids)[0].long()
    near = _products(keys, centroids, nearest)
    for _ in range(rounds):
        sizes = torch.zeros(heads, buckets, device=keys.device).scatter_add_(1, nearest, used.float())
        empty = sizes == 0
        taken = empty & (empty.cumsum(1) <= used.sum(1, keepdim=True))  # while there are keys that count
        if not bool(taken.any()):
            break
        start = restarts(keys, empty, _served_worst(keys, nearest, sizes, used))
        start = torch.nn.functional.normalize(start.float(), dim=-1).to(keys.dtype)
        centroids = torch.where(taken[..., None], start, centroids)
        # the others have not moved: keys are compared with the new ones alone (and, to fill up, with some that lose)
        new = taken.float().topk(int(taken.sum(1).max()), dim=1).indices
        moved = centroids.gather(1, new[..., None].expand(-1, -1, dim))
        found = assign_buckets(keys[None], moved)[0].long()
        product = _products(keys, moved, found)
        nearest = torch.where(product > near, new.gather(1, found), nearest)
        near = torch.maximum(near, product)
    others = ~used.all(0)
    if bool(others.any()):  # they may have been of a bucket that counted as empty and has moved
        nearest[:, others] = assign_buckets(keys[None, :, others], centroids)[0].long()
    return centroids, nearest


def _products(keys: Tensor, centroids: Tensor, buckets: Tensor) -> Tensor:
    """Inner product of every key with the centroid of its bucket, `[H, n]` float32, some keys at a time."""
    return torch.cat([(part.float() * centroids.gather(1, own[..., None].expand(-1, -1, keys.shape[2]))).sum(-1)
                      for part, own in zip(keys.split(BLOCK, dim=1), buckets.split(BLOCK, dim=1), strict=True)], dim=1)


def _served_worst(keys: Tensor, buckets: Tensor, sizes: Tensor, used: Tensor) -> Tensor:
    """The keys that count by distance to the mean of their bucket, furthest first and as many as there are buckets:
    `[H, k]`. sizes `[H, C]`."""
    places = [x[..., None].expand(-1, -1, keys.shape[2]) for x in buckets.split(BLOCK, dim=1)]
    means = torch.zeros(*sizes.shape, keys.shape[2], device=keys.device)
    for part, place, counts in zip(keys.split(BLOCK, dim=1), places, used.split(BLOCK, dim=1), strict=True):
        means.scatter_add_(1, place, part.float() * counts[..., None])
    means /= sizes.clamp(min=1)[..., None]
    apart = torch.cat([(part.float() - means.gather(1, place)).norm(dim=-1)
                       for part, place in zip(keys.split(BLOCK, dim=1), places, strict=True)], dim=1)
    return apart.masked_fill(~used, -1.0).topk(min(sizes.shape[1], keys.shape[1]), dim=1).indices


def cluster_segments(keys: Tensor, cuts: list[int], num_buckets: int, iterations: int) -> Tensor:
    """k-means apart in every segment `[cuts[s], cuts[s + 1])`: keys `[H, n, d]` -> `[H, C, d]`; bucket `c` belongs to
    segment `c · segments // C`."""
    segments = len(cuts) - 1
    owner = torch.arange(num_buckets) * segments // num_buckets
    sizes = torch.bincount(owner, minlength=segments).tolist()
    parts = [spherical_kmeans(keys[:, a:b], size, iterations)
             for a, b, size in zip(cuts[:-1], cuts[1:], sizes, strict=True) if size]
    return torch.cat(parts, dim=1)
