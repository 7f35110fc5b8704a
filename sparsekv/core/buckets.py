"""Where a bucket that no key falls into starts anew: in training, and on a request whose keys leave some empty."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsekv.kernels import assign_buckets

ROUNDS = 3
"""How often the empty buckets of a request restart, unless told otherwise."""
BLOCK = 8192


def restarts(empty: Tensor, worst: Tensor) -> Tensor:
    """For the i-th empty bucket of a head the number of the i-th worst served key, `[H, C]`; what stands in the other
    places means nothing. empty `[H, C]`, worst `[H, k]`: keys by number, the worst first; past them the last."""
    return worst.gather(1, (empty.cumsum(1) - 1).clamp(min=0, max=worst.shape[1] - 1))


def rows_of(table: Tensor, index: Tensor) -> Tensor:
    """The rows of every head by number: `[H, n, d]`, `[H, k]` -> `[H, k, d]`."""
    return table.gather(1, index[..., None].expand(-1, -1, table.shape[2]))


def restart_empty(
    keys: Tensor, centroids: Tensor, rounds: int, used: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Buckets that none of these keys falls into restart at the keys served worst, one key each.

    keys `[H, n, d]`, unit centroids `[H, C, d]`, used `[H, n]` (the keys that count; all of them without it) -> unit
    centroids `[H, C, d]` in the keys' dtype, and the bucket of every key `[H, n]` int64. Served worst are the keys
    furthest from the mean of their bucket, which is what `mean_key` scores in their place; a key serves once. Buckets
    that hold keys keep their centroids; where none is empty nothing changes. This project's own.
    """
    heads, count, _ = keys.shape
    centroids = centroids.to(keys.dtype)
    used = torch.ones(heads, count, dtype=torch.bool, device=keys.device) if used is None else used
    if count == 0:
        return centroids, torch.zeros(heads, 0, dtype=torch.long, device=keys.device)
    free = used
    nearest = assign_buckets(keys[None], centroids)[0].long()
    for _ in range(rounds):
        sizes = torch.zeros(heads, centroids.shape[1], device=keys.device).scatter_add_(1, nearest, used.float())
        empty = sizes == 0
        taken = empty & (empty.cumsum(1) <= free.sum(1, keepdim=True))  # while there are keys
        if not bool(taken.any()):
            break
        which = restarts(empty, _served_worst(keys, nearest, sizes, used, free))
        start = torch.nn.functional.normalize(rows_of(keys, which).float(), dim=-1).to(keys.dtype)
        free = free & ~torch.zeros_like(free, dtype=torch.int32).scatter_add_(1, which, taken.int()).bool()
        centroids = torch.where(taken[..., None], start, centroids)
        nearest = _after_moves(keys, centroids, nearest, taken)
    return centroids, nearest


def _after_moves(keys: Tensor, centroids: Tensor, nearest: Tensor, taken: Tensor) -> Tensor:
    """Bucket of every key once the buckets `taken [H, C]` have moved to where their centroids now are."""
    lost = taken.gather(1, nearest).any(0)  # keys that do not count may have been of a bucket that counted as empty
    if bool(lost.any()):
        nearest[:, lost] = assign_buckets(keys[None, :, lost], centroids)[0].long()
    # the others stay or join a moved one (heads with fewer of these compare with some that lose, to fill up)
    new = taken.float().topk(int(taken.sum(1).max()), dim=1).indices
    moved = rows_of(centroids, new)
    found = assign_buckets(keys[None], moved)[0].long()
    nearer = _products(keys, moved, found) > _products(keys, centroids, nearest)
    return torch.where(nearer, new.gather(1, found), nearest)


def request_buckets(keys: Tensor, centroids: Tensor, scores: str, *, sink_size: int, window_size: int) -> Tensor:
    """Bucket of every key of a window `[H, N, d]`, `[H, N]` int64, as the runtime has them when a prefill ends with it:
    with `mean_key` scores empty ones have restarted at keys that are neither sink nor tail."""
    place = torch.arange(keys.shape[1], device=keys.device)
    mid = (place >= sink_size) & (place < keys.shape[1] - window_size)
    return restart_empty(keys, centroids, ROUNDS if scores == "mean_key" else 0, mid.expand(keys.shape[0], -1))[1]


def _products(keys: Tensor, centroids: Tensor, buckets: Tensor) -> Tensor:
    """Inner product of every key with the centroid of its bucket, `[H, n]` float32, some keys at a time."""
    return torch.cat([(part.float() * rows_of(centroids, own)).sum(-1)
                      for part, own in zip(keys.split(BLOCK, dim=1), buckets.split(BLOCK, dim=1), strict=True)], dim=1)


def _served_worst(keys: Tensor, buckets: Tensor, sizes: Tensor, used: Tensor, free: Tensor) -> Tensor:
    """The free keys by distance to the mean of their bucket, of the used ones, furthest first and as many as there are
    buckets: `[H, k]`. sizes `[H, C]`."""
    parts = list(zip(*(x.split(BLOCK, dim=1) for x in (keys, buckets, used)), strict=True))
    means = torch.zeros(*sizes.shape, keys.shape[2], device=keys.device)
    for part, own, counts in parts:
        means.scatter_add_(1, own[..., None].expand_as(part), part.float() * counts[..., None])
    means /= sizes.clamp(min=1)[..., None]
    apart = torch.cat([(part.float() - rows_of(means, own)).norm(dim=-1) for part, own, _ in parts], dim=1)
    return apart.masked_fill(~free, -1.0).topk(min(sizes.shape[1], keys.shape[1]), dim=1).indices
