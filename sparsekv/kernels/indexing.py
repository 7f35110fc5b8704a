"""The index of a request: the bucket of every key, at prefill speed, the buckets' tokens side by side, and tokens that
join later. Buckets, tokens and offsets are int32."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsekv.kernels.launch import acc_dtype, at_once, dense_last, on_device, padded

ASSIGNED_AT_ONCE, BUCKETS_AT_ONCE, WARPS, STAGES = 128, 64, 4, 3
WIDE_WARPS = 8
"""Warps for numbers of 4 bytes, whose products are not those of matrix units: with 4 a program's registers overflow."""
ROW_BYTES = 256
"""The widest key of which ASSIGNED_AT_ONCE are compared with BUCKETS_AT_ONCE buckets at once."""
SORTED_AT_ONCE, PLACED_AT_ONCE = 2048, 64
"""Places that a program counts, and how many of them are put in order at once."""
TWIN_KEYS = 1024


def assign_buckets(keys: Tensor, centroids: Tensor) -> Tensor:
    """Assign every key to the bucket of the largest inner product.

    Args:
        keys: `[B, H, N, d]`.
        centroids: `[H, C, d]` or `[B, H, C, d]`.

    Returns:
        `[B, H, N]`. On CUDA products and maximum are one kernel, and the scores `[N, C]` are never written.
    """
    return launch_assign(keys, centroids) if on_device(keys) else assign_buckets_reference(keys, centroids)


def assign_buckets_reference(keys: Tensor, centroids: Tensor) -> Tensor:
    """`assign_buckets` in plain torch, some keys at a time; on a CPU `max` takes half of the time of `argmax`."""
    acc = acc_dtype(keys)
    parts = [(part.to(acc) @ centroids.to(acc).mT).max(-1).indices for part in keys.split(TWIN_KEYS, dim=2)]
    return torch.cat(parts, dim=2).to(torch.int32)


def assign_warps(size: int) -> int:
    """Warps of `assign_kernel`, of numbers of `size` bytes."""
    return WARPS if size < 4 else WIDE_WARPS


def launch_assign(keys: Tensor, centroids: Tensor) -> Tensor:
    """`assign_buckets` through Triton."""
    from sparsekv.kernels.indexing_triton import assign_kernel

    keys, centroids = dense_last(keys), centroids.to(keys.dtype).contiguous()
    batch, heads, length, dim = keys.shape
    buckets = centroids.shape[-2]
    row_bytes = padded(dim) * keys.element_size()
    block = at_once(ASSIGNED_AT_ONCE, row_bytes, ROW_BYTES)
    assigned = torch.empty(batch, heads, length, dtype=torch.int32, device=keys.device)
    assign_kernel[(batch * heads, -(-length // block))](
        keys, centroids, assigned, heads, length, buckets, dim, *keys.stride()[:3],
        centroids.stride(0) if centroids.dim() == 4 else 0, buckets * dim, BLOCK=block,
        BUCKETS=at_once(BUCKETS_AT_ONCE, row_bytes, ROW_BYTES), DIM=padded(dim),
        num_warps=assign_warps(keys.element_size()), num_stages=STAGES)
    return assigned


def build_index(assignment: Tensor, num_buckets: int, first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Sort the tokens `first[b] <= i < last[b]` by bucket.

    Args:
        assignment: `[B, H, N]`, the bucket of every token.

    Returns:
        order `[B, H, N]` and offsets `[B, H, C + 1]`; tokens keep their order inside a bucket, and entries of `order`
        past `offsets[..., C]` are -1.
    """
    positions = torch.arange(assignment.shape[-1], device=assignment.device)
    inside = (positions >= first[:, None]) & (positions < last[:, None])
    order, offsets = sort_by_bucket(assignment, inside[:, None], num_buckets)
    return torch.where(positions < offsets[..., -1:], order, -1), offsets


def sort_by_bucket(bucket: Tensor, used: Tensor | None, num_buckets: int) -> tuple[Tensor, Tensor]:
    """The places `[..., N]` of bucket `[..., N]` in the order of their buckets, those of a bucket ascending, what is
    not used (broadcastable; None: all are) last; and where the buckets begin, `[..., C + 1]`. Both are int32 and
    contiguous, whatever the strides of bucket and used: kernels read the places in a row. On CUDA tokens are counted
    and put in their places, which a sort by comparison or by digits of 64 bits takes ten times as long for."""
    keyed = (bucket.int() if used is None else torch.where(used, bucket.int(), num_buckets)).contiguous()
    return (launch_sort if keyed.is_cuda else sort_by_bucket_reference)(keyed, num_buckets)


def sort_by_bucket_reference(keyed: Tensor, num_buckets: int) -> tuple[Tensor, Tensor]:
    """`sort_by_bucket` of keyed `[..., N]` int32, `num_buckets` where a place is not used, in plain torch."""
    keyed = keyed.long()
    counts = torch.zeros(*keyed.shape[:-1], num_buckets + 1, dtype=torch.int64, device=keyed.device)
    counts.scatter_add_(-1, keyed, torch.ones_like(keyed))
    offsets = torch.nn.functional.pad(counts[..., :num_buckets].cumsum(-1), (1, 0))
    return keyed.argsort(dim=-1, stable=True).to(torch.int32), offsets.to(torch.int32)


def launch_sort(keyed: Tensor, num_buckets: int) -> tuple[Tensor, Tensor]:
    """`sort_by_bucket_reference` through Triton: every program counts its stretch of places by bucket; sums say where
    its first of a bucket goes; then it puts them there, in order."""
    from sparsekv.kernels.indexing_triton import count_kernel, place_kernel

    length, rows = keyed.shape[-1], keyed.shape[:-1].numel()
    parts = max(1, -(-length // SORTED_AT_ONCE))
    counts = torch.zeros(rows, parts, num_buckets + 1, dtype=torch.int32, device=keyed.device)
    order = torch.empty_like(keyed)
    if keyed.numel():
        count_kernel[(rows, parts)](keyed, counts, length, num_buckets, STRETCH=SORTED_AT_ONCE, num_warps=WARPS)
    whole = counts.sum(1, dtype=torch.int32)
    ends = whole.cumsum(-1, dtype=torch.int32)
    first = counts.cumsum(1, dtype=torch.int32).sub_(counts).add_((ends - whole)[:, None])
    if keyed.numel():
        place_kernel[(rows, parts)](keyed, first, order, length, num_buckets, STRETCH=SORTED_AT_ONCE,
                                    BLOCK=PLACED_AT_ONCE, num_warps=WARPS)
    offsets = torch.nn.functional.pad(ends[:, :num_buckets], (1, 0))
    return order, offsets.reshape(*keyed.shape[:-1], num_buckets + 1)


def extend_index(order: Tensor, offsets: Tensor, joined: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Add tokens to an index without sorting it again: as `build_index` over old and new tokens.

    Args:
        order, offsets: `[B, H, M]` and `[B, H, C + 1]`.
        joined: `[B, H, n]`, the buckets of the new tokens, -1 = not yet.
        positions: `[B, n]` of the new tokens, all later than those there.

    Returns:
        order `[B, H, M + n]` and offsets.
    """
    batch, heads, width = order.shape
    buckets, count = offsets.shape[-1] - 1, joined.shape[-1]
    keyed = torch.where(joined >= 0, joined, buckets).long()
    sizes = torch.zeros(batch, heads, buckets + 1, dtype=torch.int64, device=order.device)
    sizes.scatter_add_(-1, keyed, torch.ones_like(keyed))
    before = torch.nn.functional.pad(sizes[..., :buckets].cumsum(-1), (1, 0))
    result = torch.full((batch, heads, width + count + 1), -1, dtype=torch.int32, device=order.device)
    slots = torch.arange(width, device=order.device).expand(batch, heads, width).contiguous()
    bucket = torch.searchsorted(offsets[..., 1:].contiguous(), slots.to(torch.int32), right=True)
    place = torch.where(slots < offsets[..., -1:], slots + before.gather(-1, bucket.clamp(max=buckets)), width + count)
    result.scatter_(-1, place, order)
    by_bucket = keyed.argsort(dim=-1, stable=True)
    bucket = keyed.gather(-1, by_bucket)
    rank = torch.arange(count, device=order.device) - torch.nn.functional.pad(before, (0, 1)).gather(
        -1, bucket.clamp(max=buckets))
    start = offsets.long().gather(-1, (bucket + 1).clamp(max=buckets)) + before.gather(-1, bucket.clamp(max=buckets))
    place = torch.where(bucket < buckets, start + rank, width + count)
    result.scatter_(-1, place, positions[:, None].expand(-1, heads, -1).gather(-1, by_bucket).to(torch.int32))
    return result[..., :-1], (offsets + before).to(torch.int32)


def bucket_tokens(order: Tensor, offsets: Tensor, buckets: Tensor) -> Tensor:
    """List the tokens of the chosen buckets.

    Args:
        order, offsets: `[B, Hkv, M]` and `[B, Hkv, C + 1]`.
        buckets: `[Q, Hkv, L]`, -1 = none, no bucket twice.

    Returns:
        `[Q, Hkv, K]`, padded with -1 to the longest list.
    """
    first, sizes = _stretches(offsets, buckets)
    total = sizes.sum(-1)
    return tokens_at(order, first, sizes, int(total.max()) if total.numel() else 0)


def bucket_counts(offsets: Tensor, buckets: Tensor) -> Tensor:
    """Count the tokens of the chosen buckets, `[Q, Hkv]` int64: offsets and buckets as for `bucket_tokens`."""
    return _stretches(offsets, buckets)[1].sum(-1)


def tokens_at(order: Tensor, first: Tensor, sizes: Tensor, width: int) -> Tensor:
    """`sizes [Q, H, L]` tokens of order `[B, Hkv, M]` from `first` on for every entry, side by side: `[Q, H, width]`
    padded with -1. `H` is a multiple of `Hkv`."""
    table = per_query(order, *sizes.shape[:2])
    if width == 0 or sizes.shape[-1] == 0 or order.shape[-1] == 0:
        return torch.full((*sizes.shape[:2], width), -1, dtype=order.dtype, device=order.device)
    ends = sizes.cumsum(-1)
    slots = torch.arange(width, device=order.device).expand(*ends.shape[:-1], width)
    which = torch.searchsorted(ends, slots.contiguous(), right=True).clamp(max=sizes.shape[-1] - 1)
    position = first.gather(-1, which) + slots - (ends - sizes).gather(-1, which)
    tokens = table.gather(-1, position.clamp(0, order.shape[-1] - 1))
    return torch.where(slots < ends[..., -1:], tokens, -1)


def per_query(table: Tensor, queries: int, heads: int) -> Tensor:
    """`[B, Hkv, n] -> [Q, H, n]`: every row once a query, every head once a list; a view where it can be."""
    batch, heads_kv, _ = table.shape
    if heads != heads_kv:
        table = table.repeat_interleave(heads // heads_kv, dim=1)
    if batch == queries:
        return table
    return table.expand(queries, -1, -1) if batch == 1 else table.repeat_interleave(queries // batch, dim=0)


def _stretches(offsets: Tensor, buckets: Tensor) -> tuple[Tensor, Tensor]:
    """Where the chosen buckets begin in the order, and their sizes, `[Q, Hkv, L]` int64 each."""
    table, chosen = per_query(offsets, *buckets.shape[:2]), buckets.clamp(min=0).long()
    first = table.gather(-1, chosen).long()
    return first, torch.where(buckets >= 0, table.gather(-1, chosen + 1).long() - first, 0)
