"""Sums over the keys of every bucket, and each key against what stands for its bucket: what restarting buckets and
their means are made of. No atomics: a bucket's keys are found through an index, and sums are the same in every run."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsekv.kernels.indexing import sort_by_bucket
from sparsekv.kernels.launch import acc_dtype, dense_last, on_device, padded

SUMMED_AT_ONCE, COMPARED_AT_ONCE, WARPS = 32, 64, 4
TWIN_KEYS = 8192


def bucket_sums(x: Tensor, bucket: Tensor, used: Tensor | None, num_buckets: int) -> tuple[Tensor, Tensor]:
    """Count and sum what falls into every bucket.

    Args:
        x: `[B, H, n, w]`.
        bucket: `[B, H, n]`.
        used: bool, broadcastable to `bucket`; what is not used counts nowhere. None: all count.

    Returns:
        Counts `[B, H, C]` and sums `[B, H, C, w]`, float32 at least.
    """
    return (launch_bucket_sums if on_device(x) else bucket_sums_reference)(x, bucket, used, num_buckets)


def square_sums(x: Tensor, bucket: Tensor, used: Tensor | None, num_buckets: int) -> Tensor:
    """Sum the squared lengths of what falls into every bucket: arguments of `bucket_sums` -> `[B, H, C]`."""
    lengths = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=acc_dtype(x))
    return bucket_sums(lengths.square_(), bucket, used, num_buckets)[1][..., 0]


def bucket_sums_reference(x: Tensor, bucket: Tensor, used: Tensor | None, num_buckets: int) -> tuple[Tensor, Tensor]:
    """`bucket_sums` in plain torch."""
    acc = acc_dtype(x)
    place = bucket.long() if used is None else torch.where(used, bucket.long(), num_buckets)
    counts = torch.zeros(*place.shape[:-1], num_buckets + 1, dtype=acc, device=x.device)
    counts.scatter_add_(-1, place, torch.ones_like(place, dtype=acc))
    sums = torch.zeros(*place.shape[:-1], num_buckets + 1, x.shape[-1], dtype=acc, device=x.device)
    for part, own in zip(x.split(TWIN_KEYS, dim=-2), place.split(TWIN_KEYS, dim=-1), strict=True):
        sums.scatter_add_(-2, own[..., None].expand(*own.shape, x.shape[-1]), part.to(acc).expand(*own.shape, -1))
    return counts[..., :-1], sums[..., :-1, :]


def launch_bucket_sums(x: Tensor, bucket: Tensor, used: Tensor | None, num_buckets: int) -> tuple[Tensor, Tensor]:
    """`bucket_sums` through Triton: keys sorted by bucket, one program a bucket."""
    from sparsekv.kernels.bucket_sums_triton import sums_kernel

    x = dense_last(x)
    batch, heads, length, width = x.shape
    order, offsets = sort_by_bucket(bucket, used, num_buckets)
    sums = torch.empty(batch, heads, num_buckets, width, dtype=torch.float32, device=x.device)
    sums_kernel[(batch * heads * num_buckets,)](
        x, order, offsets, sums, heads, num_buckets, length, *x.stride()[:3], DIM=width, WIDTH=padded(width),
        BLOCK=SUMMED_AT_ONCE, num_warps=WARPS)
    return offsets.diff(dim=-1).float(), sums


def against_bucket(x: Tensor, table: Tensor, bucket: Tensor, *, apart: bool) -> Tensor:
    """Compare every row with its bucket's row of a table.

    Args:
        x: `[B, H, n, w]`.
        table: `[B, H, C, w]`.
        bucket: `[B, H, n]`.
        apart: their distance in place of the inner product.

    Returns:
        `[B, H, n]`, float32 at least.
    """
    return (launch_against if on_device(x) else against_bucket_reference)(x, table, bucket, apart=apart)


def against_bucket_reference(x: Tensor, table: Tensor, bucket: Tensor, *, apart: bool) -> Tensor:
    """`against_bucket` in plain torch."""
    acc, parts = acc_dtype(x), []
    for part, own in zip(x.split(TWIN_KEYS, dim=2), bucket.split(TWIN_KEYS, dim=2), strict=True):
        mine = table.gather(2, own.long()[..., None].expand(*own.shape, x.shape[-1])).to(acc)
        parts.append((part.to(acc) - mine).norm(dim=-1) if apart else (part.to(acc) * mine).sum(-1))
    return torch.cat(parts, dim=2)


def launch_against(x: Tensor, table: Tensor, bucket: Tensor, *, apart: bool) -> Tensor:
    """`against_bucket` through Triton."""
    from sparsekv.kernels.bucket_sums_triton import rows_kernel

    x, table, bucket = dense_last(x), table.contiguous(), bucket.contiguous()
    batch, heads, length, width = x.shape
    out = torch.empty(batch, heads, length, dtype=torch.float32, device=x.device)
    rows_kernel[(batch * heads, -(-length // COMPARED_AT_ONCE))](
        x, table, bucket, out, heads, length, *x.stride()[:3], *table.stride()[:2], DIM=width,
        WIDTH=padded(width), BLOCK=COMPARED_AT_ONCE, APART=apart, num_warps=WARPS)
    return out
