"""Spherical k-means of keys, by Faiss; a batched torch engine for CUDA machines without faiss-gpu."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparsekv.errors import SparseKVError

ENGINES = ("auto", "faiss", "torch")


def spherical_kmeans(
    keys: Tensor, num_buckets: int, *, iterations: int = 10, seed: int = 0, engine: str = "auto",
    max_points_per_centroid: int = 512, advance: Callable[[int], None] | None = None,
) -> Tensor:
    """keys `[H, n, d]`, every head on its own -> unit centroids `[H, C, d]` float32 (Saap §4.1).

    Assignment is by largest inner product. `engine` auto: faiss, or torch for keys on a CUDA device where faiss has no
    GPU. At most `max_points_per_centroid · C` keys a head are used. Raises SparseKVError for fewer keys than buckets.
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
    if engine == "torch" or (engine == "auto" and keys.is_cuda and not _faiss_has_gpu()):
        result = _torch_engine(keys.float(), num_buckets, iterations, seed)
        if advance is not None:
            advance(heads)
        return result
    faiss = import_faiss()
    on_gpu = keys.is_cuda and _faiss_has_gpu()
    centroids = []
    for head in range(heads):
        points = keys[head].float().contiguous().cpu().numpy()
        model = faiss.Kmeans(dim, num_buckets, niter=iterations, spherical=True, seed=seed + 1, gpu=on_gpu,
                             max_points_per_centroid=max_points_per_centroid + 1, min_points_per_centroid=1)
        model.train(points)
        centroids.append(torch.from_numpy(model.centroids))
        if advance is not None:
            advance(1)
    return torch.nn.functional.normalize(torch.stack(centroids), dim=-1).to(keys.device)


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


def _torch_engine(keys: Tensor, num_buckets: int, iterations: int, seed: int) -> Tensor:
    """Lloyd's iterations over all heads at once; an empty bucket restarts at the key worst served."""
    heads, count, dim = keys.shape
    generator = torch.Generator().manual_seed(seed)
    start = torch.stack([torch.randperm(count, generator=generator)[:num_buckets] for _ in range(heads)])
    centroids = keys.gather(1, start.to(keys.device)[..., None].expand(-1, -1, dim))
    centroids = torch.nn.functional.normalize(centroids, dim=-1)
    step = max(1, 400_000_000 // (heads * num_buckets))
    for _ in range(iterations):
        sums = torch.zeros_like(centroids)
        sizes = keys.new_zeros(heads, num_buckets)
        served = []
        for a in range(0, count, step):
            part = keys[:, a:a + step]
            score, bucket = (part @ centroids.mT).max(-1)
            sums.scatter_add_(1, bucket[..., None].expand(-1, -1, dim), part)
            sizes.scatter_add_(1, bucket, torch.ones_like(score))
            served.append(score / part.norm(dim=-1).clamp(min=1e-6))
        whom = torch.cat(served, 1).topk(num_buckets, dim=1, largest=False).indices
        replacement = keys.gather(1, whom[..., None].expand(-1, -1, dim))
        # the i-th empty bucket takes the i-th worst served key
        rank = ((sizes == 0).cumsum(1) - 1).clamp(min=0)
        replacement = replacement.gather(1, rank[..., None].expand(-1, -1, dim))
        centroids = torch.nn.functional.normalize(torch.where((sizes == 0)[..., None], replacement, sums), dim=-1)
    return centroids


def imbalance(sizes: Tensor) -> Tensor:
    """`C · Σ share²` over the last dimension: 1 for equal buckets."""
    share = sizes.float() / sizes.sum(-1, keepdim=True).clamp(min=1)
    return sizes.shape[-1] * share.square().sum(-1)
