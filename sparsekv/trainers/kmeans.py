"""Spherical k-means of keys, by Faiss; a batched torch engine for CUDA machines without faiss-gpu."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparsekv.core.buckets import restarts, rows_of
from sparsekv.errors import SparseKVError

ENGINES = ("auto", "faiss", "torch")
INITS = ("random", "kmeans++")
SCORES_AT_ONCE = 400_000_000
REPAIRS = 3
PLUS_PLUS_POINTS = 32


def spherical_kmeans(
    keys: Tensor, num_buckets: int, *, iterations: int = 10, seed: int = 0, engine: str = "auto",
    init: str = "random", max_points_per_centroid: int = 512, advance: Callable[[int], None] | None = None,
) -> Tensor:
    """keys `[H, n, d]`, every head on its own -> unit centroids `[H, C, d]` float32 (Saap §4.1).

    Assignment is by largest inner product. `engine` auto: faiss, or torch for keys on a CUDA device where faiss has no
    GPU. `init` random or kmeans++. At most `max_points_per_centroid · C` keys a head are used; a bucket that is left
    empty restarts at the key worst served. Raises SparseKVError for fewer keys than buckets.
    """
    heads, count, dim = keys.shape
    if count < num_buckets:
        raise SparseKVError(f"{num_buckets} buckets need at least as many keys, found {count}; use fewer buckets or a "
                            "larger capture")
    if engine not in ENGINES:
        raise SparseKVError(f"unknown k-means engine {engine!r}: expected one of {', '.join(ENGINES)}")
    limit = max_points_per_centroid * num_buckets
    if count > limit:
        generator = torch.Generator().manual_seed(seed)
        keys = keys[:, torch.randperm(count, generator=generator)[:limit].to(keys.device)]
    if init not in INITS:
        raise SparseKVError(f"unknown initialisation {init!r}: expected one of {', '.join(INITS)}")
    keys = keys.float()
    start = _plus_plus(keys, num_buckets, seed) if init == "kmeans++" else _random(keys, num_buckets, seed)
    if engine == "torch" or (engine == "auto" and keys.is_cuda and not _faiss_has_gpu()):
        for _ in range(iterations):
            start = _lloyd(keys, start)
        if advance is not None:
            advance(heads)
        return repair(keys, start)
    faiss = import_faiss()
    on_gpu = keys.is_cuda and _faiss_has_gpu()
    centroids = []
    for head in range(heads):
        points = keys[head].contiguous().cpu().numpy()
        model = faiss.Kmeans(dim, num_buckets, niter=iterations, spherical=True, seed=seed + 1, gpu=on_gpu,
                             max_points_per_centroid=max_points_per_centroid + 1, min_points_per_centroid=1)
        model.train(points, init_centroids=start[head].contiguous().cpu().numpy())
        centroids.append(torch.from_numpy(model.centroids))
        if advance is not None:
            advance(1)
    return repair(keys, torch.nn.functional.normalize(torch.stack(centroids), dim=-1).to(keys.device))


def import_faiss() -> Any:
    """faiss, or an error that says which of the two packages to install."""
    try:
        import faiss
    except ImportError as error:
        raise SparseKVError("k-means needs faiss, which is not installed: run `pip install 'sparsekv[cpu]'` (or "
                            "'sparsekv[gpu]' on a CUDA machine; the two exclude each other), or use "
                            "--kmeans-engine torch") from error
    return faiss


def _faiss_has_gpu() -> bool:
    try:
        import faiss
    except ImportError:
        return False
    return getattr(faiss, "get_num_gpus", lambda: 0)() > 0


def _random(keys: Tensor, num_buckets: int, seed: int) -> Tensor:
    """Keys drawn at random, the same places in every head: `[H, C, d]`, unit length."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randperm(keys.shape[1], generator=generator)[:num_buckets].to(keys.device)
    return torch.nn.functional.normalize(keys[:, start], dim=-1)


def _plus_plus(keys: Tensor, num_buckets: int, seed: int) -> Tensor:
    """Each next centroid is a key drawn with probability `1 − cos` to the nearest one so far, all heads at once, among
    at most `PLUS_PLUS_POINTS · C` keys (k-means++, Arthur and Vassilvitskii 2007)."""
    generator = torch.Generator().manual_seed(seed)
    some = torch.randperm(keys.shape[1], generator=generator)[:PLUS_PLUS_POINTS * num_buckets].to(keys.device)
    points = torch.nn.functional.normalize(keys[:, some], dim=-1)
    draws = torch.rand(num_buckets, generator=generator).to(keys.device)
    heads, count, dim = points.shape
    found = points.new_empty(heads, num_buckets, dim)
    distance = points.new_ones(heads, count)
    for c in range(num_buckets):
        running = distance.cumsum(1)
        place = torch.searchsorted(running, (draws[c] * running[:, -1:]).contiguous()).clamp(max=count - 1)
        found[:, c] = points.gather(1, place[..., None].expand(-1, -1, dim))[:, 0]
        distance = torch.minimum(distance, (1 - (points @ found[:, c, :, None])[..., 0]).clamp(min=0))
    return found


def _lloyd(keys: Tensor, centroids: Tensor) -> Tensor:
    """One iteration over all heads at once; an empty bucket restarts at the key worst served."""
    sums, sizes, worst = _assign(keys, centroids)
    moved = torch.where((sizes == 0)[..., None], rows_of(keys, restarts(sizes == 0, worst)), sums)
    return torch.nn.functional.normalize(moved, dim=-1)


def repair(keys: Tensor, centroids: Tensor) -> Tensor:
    """Restart the buckets that got no key at the keys worst served; the others stay."""
    for _ in range(REPAIRS):
        _, sizes, worst = _assign(keys, centroids)
        if bool((sizes > 0).all()):
            break
        new = torch.nn.functional.normalize(rows_of(keys, restarts(sizes == 0, worst)), dim=-1)
        centroids = torch.where((sizes == 0)[..., None], new, centroids)
    return centroids


def _assign(keys: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sum of the keys of every bucket `[H, C, d]`, their number `[H, C]`, and the C keys worst served `[H, C]`."""
    heads, count, dim = keys.shape
    buckets = centroids.shape[1]
    sums, sizes, served = torch.zeros_like(centroids), keys.new_zeros(heads, buckets), []
    for a in range(0, count, max(1, SCORES_AT_ONCE // (heads * buckets))):
        part = keys[:, a:a + max(1, SCORES_AT_ONCE // (heads * buckets))]
        score, bucket = (part @ centroids.mT).max(-1)
        sums.scatter_add_(1, bucket[..., None].expand(-1, -1, dim), part)
        sizes.scatter_add_(1, bucket, torch.ones_like(score))
        served.append(score / part.norm(dim=-1).clamp(min=1e-6))
    return sums, sizes, torch.cat(served, 1).topk(buckets, dim=1, largest=False).indices


def imbalance(sizes: Tensor) -> Tensor:
    """`C · Σ share²` over the last dimension: 1 for equal buckets."""
    share = sizes.float() / sizes.sum(-1, keepdim=True).clamp(min=1)
    return sizes.shape[-1] * share.square().sum(-1)
