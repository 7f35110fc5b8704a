"""Spherical k-means of a request's own keys, all heads in one batch, in plain torch (no Faiss at decode time)."""

from __future__ import annotations

import torch
from torch import Tensor

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


def cluster_segments(keys: Tensor, cuts: list[int], num_buckets: int, iterations: int) -> Tensor:
    """k-means apart in every segment `[cuts[s], cuts[s + 1])`: keys `[H, n, d]` -> `[H, C, d]`; bucket `c` belongs to
    segment `c · segments // C`."""
    segments = len(cuts) - 1
    owner = torch.arange(num_buckets) * segments // num_buckets
    sizes = torch.bincount(owner, minlength=segments).tolist()
    parts = [spherical_kmeans(keys[:, a:b], size, iterations)
             for a, b, size in zip(cuts[:-1], cuts[1:], sizes, strict=True) if size]
    return torch.cat(parts, dim=1)
