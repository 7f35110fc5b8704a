"""What a router is trained and judged on: the bucket of every key, the attention mass per bucket of every query, and
the share of it that a choice of buckets reaches. All on a pool, all heads at once, never the attention matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sparsekv.core.buckets import request_buckets
from sparsekv.kernels.bucket_mass import bucket_mass
from sparsekv.trainers.pool import Pool

ASSIGN_AT_ONCE = 200_000_000
SPAN = 128
EMPTY = -1e4


class Targets(NamedTuple):
    """mass `[D, Lq, T, C]` float16, rows summing to one (zero where a query has no mid key); base of the same shape,
    the mean-key logits, or None."""

    mass: Tensor
    base: Tensor | None


def assign(keys: Tensor, centroids: Tensor) -> Tensor:
    """Bucket of every key, `[H, N, d]`, `[H, C, d]` -> `[H, N]` int64: the largest inner product."""
    step = max(1, ASSIGN_AT_ONCE // (centroids.shape[0] * centroids.shape[1]))
    starts = range(0, keys.shape[1], step)
    return torch.cat([(keys[:, a:a + step].float() @ centroids.mT).argmax(-1) for a in starts], 1)


def make_targets(
    pool: Pool, centroids: Tensor, space: str, *, mean_key: bool, advance: Callable[[int], None] | None = None,
) -> Targets:
    """Targets of every captured query, once per k-means; with `mean_key` also the untrained logits."""
    shape = (*pool.queries.shape[:3], centroids.shape[1])
    mass = torch.empty(shape, dtype=torch.float16, device=pool.keys.device)
    base = torch.empty_like(mass) if mean_key else None
    for document in range(pool.documents):
        bucket = assign(pool.clustered(space)[document], centroids)
        mass[document] = _mass(pool, pool.queries[document], document, bucket, centroids.shape[1], torch.float16)
        if base is not None:
            base[document] = mean_key_logits(pool, document, bucket, centroids.shape[1]).to(torch.float16)
        if advance is not None:
            advance(1)
    return Targets(mass, base)


def _mass(pool: Pool, queries: Tensor, document: int, bucket: Tensor, buckets: int, dtype: torch.dtype,
          positions: Tensor | None = None) -> Tensor:
    positions = pool.positions[document] if positions is None else positions
    return bucket_mass(queries, pool.keys[document], bucket, positions, buckets, scale=pool.scale,
                       sink_size=pool.sink_size, window_size=pool.window_size, dtype=dtype)


def mean_key_logits(pool: Pool, document: int, bucket: Tensor, buckets: int, some: Tensor | None = None) -> Tensor:
    """`log n_c + q·mean_c·scale` over the mid keys that a query sees, as at run time: `[Lq, T, C]` float32, `EMPTY` for
    a bucket without one; `some` picks queries. Means over the whole window would show a query keys from its future,
    most of what it sees of a small bucket."""
    keys = pool.keys[document].float()
    heads_kv, length, dim = keys.shape
    queries, positions = pool.queries[document], pool.positions[document]
    if some is not None:
        queries, positions = queries[:, some], positions[:, some]
    ends = (positions - pool.window_size + 1).clamp(min=0, max=length - 1)
    logits = torch.full((*queries.shape[:2], buckets), EMPTY, device=keys.device)
    sums, counts = torch.zeros(heads_kv, buckets, dim, device=keys.device), torch.zeros(
        heads_kv, buckets, device=keys.device)
    for a in range(0, length, SPAN):
        # queries whose sight ends in this span: sums of the keys before it, and the span's own keys one by one
        column = torch.arange(a, min(a + SPAN, length), device=keys.device)
        here = (ends >= a) & (ends < a + SPAN)
        chosen = here.any(0).nonzero()[:, 0]
        place = bucket[:, a:a + SPAN]
        if len(chosen):
            part = queries[:, chosen].float().reshape(heads_kv, -1, dim)
            rows = pool.group * len(chosen)
            seen = ((column >= pool.sink_size) & (column < ends[:, chosen, None])).reshape(heads_kv, rows, -1)
            spread = place[:, None].expand_as(seen)
            count = counts[:, None].expand(-1, rows, -1).scatter_add(-1, spread, seen.float())
            scores = (part @ keys[:, a:a + SPAN].mT).masked_fill_(~seen, 0.0)
            total = (part @ sums.mT).scatter_add_(-1, spread, scores)
            found = (total / count.clamp(min=1) * pool.scale + count.log()).clamp_(min=EMPTY)
            found = found.reshape(-1, len(chosen), buckets)
            logits[:, chosen] = torch.where(here[:, chosen, None], found, logits[:, chosen])
        mid = (column >= pool.sink_size).float()
        sums.scatter_add_(1, place[..., None].expand(-1, -1, dim), keys[:, a:a + SPAN] * mid[:, None])
        counts.scatter_add_(1, place, mid.expand_as(place))
    return logits


def bucket_sizes(bucket: Tensor, buckets: int) -> Tensor:
    """Keys per bucket, `[H, N]` -> `[H, C]` float32."""
    sizes = torch.zeros(bucket.shape[0], buckets, device=bucket.device)
    return sizes.scatter_add_(1, bucket, torch.ones_like(bucket, dtype=torch.float32))


class HeldOut(NamedTuple):
    """Some queries of one validation window: their places `[T]`, mass `[Lq, T, C]`, keys in sight per bucket of the
    same shape, mean-key logits (or None), tokens in sight `[Lq, T]`, and the sizes of the buckets `[Lk, C]`."""

    document: int
    some: Tensor
    mass: Tensor
    sizes: Tensor
    base: Tensor | None
    context: Tensor
    counts: Tensor


def held_out(pool: Pool, centroids: Tensor, space: str, *, scores: str, limit: int = 64) -> list[HeldOut]:
    """For every document of a validation pool, at most `limit` of its queries past the first third. scores: how the
    router will score its buckets; those of `mean_key` restart where a window leaves them empty, as at run time."""
    buckets, total = centroids.shape[1], pool.queries.shape[2]
    some = torch.linspace(total // 3, total - 1, min(limit, total), device=pool.keys.device).long()
    found = []
    for document in range(pool.documents):
        bucket = request_buckets(pool.clustered(space)[document].float(), centroids, scores,
                                 sink_size=pool.sink_size, window_size=pool.window_size)
        queries, positions = pool.queries[document][:, some], pool.positions[document][:, some]
        mass = _mass(pool, queries, document, bucket, buckets, torch.float32, positions)
        # a query of zeros attends to all keys alike: its mass counts the mid keys in sight
        mid = (positions - pool.window_size - pool.sink_size + 1).clamp(min=0)
        alike = _mass(pool, torch.zeros_like(queries), document, bucket, buckets, torch.float32, positions)
        base = mean_key_logits(pool, document, bucket, buckets, some) if scores != "mlp" else None
        found.append(HeldOut(document, some, mass, alike * mid[..., None], base, positions + 1,
                             bucket_sizes(bucket, buckets)))
    return found


def recall(held: HeldOut, probability: Tensor, group: int, fractions: tuple[float, ...]) -> Tensor:
    """Share of the mid mass in the buckets with the most `probability` `[Lq, T, C]` per key, summed over the group,
    when `fraction` of the context is read; the last bucket counts in part: `[len(fractions), Lq]`."""
    count, buckets = probability.shape[1:]
    shared = probability.reshape(-1, group, count, buckets).sum(1).repeat_interleave(group, 0)
    order = (shared / held.sizes.clamp(min=1e-6)).masked_fill(held.sizes < 0.5, -1.0).argsort(-1, descending=True)
    sizes, mass = held.sizes.gather(-1, order), held.mass.gather(-1, order)
    before = sizes.cumsum(-1) - sizes
    rows = []
    for fraction in fractions:
        budget = torch.ceil(held.context * fraction - 1e-9)[..., None]
        part = ((budget - before) / sizes.clamp(min=0.5)).clamp(0.0, 1.0)
        rows.append((mass * part).sum(-1).mean(-1))
    return torch.stack(rows)
