"""Attention mass per bucket of keys: the target of a router (Saap §4), streamed over keys sorted by bucket. The
attention matrix is never written: a program owns a block of queries and a range of buckets, and keeps a running maximum
and sum while it walks over a bucket's keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsekv.kernels.indexing import sort_by_bucket
from sparsekv.kernels.launch import NEG_INF, at_once, on_device, padded

QUERIES_AT_ONCE = 64
KEYS_AT_ONCE = (16, 32, 64)
CHUNK_BYTES = 1 << 30
PROGRAMS = 1024


def bucket_mass(
    queries: Tensor, keys: Tensor, bucket: Tensor, positions: Tensor, num_buckets: int, *, scale: float, sink_size: int,
    window_size: int, dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Sum the attention of the mid region by bucket.

    Args:
        queries: `[Hq, T, d]` with RoPE.
        keys: `[Hkv, N, d]` with RoPE.
        bucket: `[Hkv, N]` in `0..C-1`.
        positions: `[Hq, T]`, the last key a query sees; its mid keys are `sink_size <= i <= p - window_size`.

    Returns:
        `[Hq, T, C]` in `dtype`, shares that sum to one; zeros for a query without mid keys.
    """
    heads_q, count, _ = queries.shape
    fast = on_device(queries)
    out = torch.empty(heads_q, count, num_buckets, dtype=dtype, device=queries.device)
    index = sorted_keys(keys, bucket, num_buckets) if fast else None
    regions: dict[str, Any] = {"scale": scale, "sink_size": sink_size, "window_size": window_size}
    chunk = max(QUERIES_AT_ONCE, CHUNK_BYTES // (4 * heads_q * (num_buckets if fast else 2 * keys.shape[1])))
    for a in range(0, count, chunk):
        part = slice(a, a + chunk)
        if index is not None:
            log_mass = launch_log_mass(queries[:, part], *index, positions[:, part], **regions)
            out[:, part] = log_mass.softmax(-1).nan_to_num_(0.0)
        else:
            out[:, part] = bucket_mass_reference(queries[:, part], keys, bucket, positions[:, part], num_buckets,
                                                 **regions)
    return out


def bucket_mass_reference(
    queries: Tensor, keys: Tensor, bucket: Tensor, positions: Tensor, num_buckets: int, *, scale: float, sink_size: int,
    window_size: int,
) -> Tensor:
    """The plain-torch truth of `bucket_mass`, in the promoted dtype of queries and keys (at least float32)."""
    heads_q, count, dim = queries.shape
    heads_kv, length, _ = keys.shape
    kind = torch.promote_types(torch.promote_types(queries.dtype, keys.dtype), torch.float32)
    scores = (queries.to(kind).reshape(heads_kv, -1, dim) @ keys.to(kind).mT).reshape(heads_q, count, length) * scale
    column = torch.arange(length, device=keys.device)
    mid = (column >= sink_size) & (column <= positions[..., None] - window_size)
    weights = scores.masked_fill(~mid, NEG_INF).softmax(-1).nan_to_num(0.0)
    index = bucket.long().repeat_interleave(heads_q // heads_kv, 0)[:, None].expand_as(weights)
    return weights.new_zeros(heads_q, count, num_buckets).scatter_add_(-1, index, weights)


def sorted_keys(keys: Tensor, bucket: Tensor, num_buckets: int) -> tuple[Tensor, Tensor, Tensor]:
    """keys `[Hkv, N, d]` in the order of their buckets, the position of each `[Hkv, N]` int32, and where the buckets
    begin, `[Hkv, C + 1]` int32."""
    order, offsets = sort_by_bucket(bucket, None, num_buckets)
    return keys.gather(1, order.long()[..., None].expand(-1, -1, keys.shape[2])), order, offsets


def launch_log_mass(
    queries: Tensor, keys: Tensor, where: Tensor, offsets: Tensor, positions: Tensor, *, scale: float, sink_size: int,
    window_size: int,
) -> Tensor:
    """Logarithm of the (not normalised) mass through Triton, `[Hq, T, C]` float32; -inf for a bucket without a mid
    key."""
    from sparsekv.kernels.bucket_mass_triton import bucket_mass_kernel

    heads_q, count, dim = queries.shape
    heads_kv, length, _ = keys.shape
    buckets = offsets.shape[1] - 1
    queries, positions = queries.to(keys.dtype).contiguous(), positions.to(torch.int32).contiguous()
    out = torch.empty(heads_q, count, buckets, dtype=torch.float32, device=queries.device)
    blocks = -(-count // QUERIES_AT_ONCE)
    parts = min(buckets, max(1, -(-PROGRAMS // (blocks * heads_q))))
    per_part = -(-buckets // parts)
    block = next((b for b in KEYS_AT_ONCE if b * buckets >= length), KEYS_AT_ONCE[-1])
    block = min(block, at_once(KEYS_AT_ONCE[-1], padded(dim) * keys.element_size()))
    bucket_mass_kernel[(blocks, heads_q, -(-buckets // per_part))](
        queries, keys, where, offsets, positions, out, scale, count, length, buckets, per_part, sink_size, window_size,
        GROUP=heads_q // heads_kv, ROWS=QUERIES_AT_ONCE, DIM=dim, WIDTH=padded(dim), BLOCK=block,
        num_warps=4, num_stages=2)
    return out
