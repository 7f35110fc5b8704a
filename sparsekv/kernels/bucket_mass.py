"""Attention mass per bucket of keys: the target of a router (Saap §4.2), streamed over keys sorted by bucket.

`bucket_mass` runs the Triton kernel on CUDA tensors and its plain-torch twin `bucket_mass_reference` elsewhere. The
attention matrix is never written: a program owns a block of queries and a range of buckets, and keeps a running maximum
and sum while it walks over a bucket's keys.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

ROWS = 64
BLOCKS = (16, 32, 64)
CHUNK_BYTES = 1 << 30
PROGRAMS = 1024


def bucket_mass(
    queries: Tensor, keys: Tensor, bucket: Tensor, positions: Tensor, num_buckets: int, *, scale: float, sink_size: int,
    window_size: int, dtype: torch.dtype = torch.float32,
) -> Tensor:
    """queries `[Hq, T, d]`, keys `[Hkv, N, d]`, both with RoPE; bucket `[Hkv, N]` in `0..C-1`; positions `[Hq, T]` of
    the last key a query sees -> `[Hq, T, C]` in `dtype`: the share of the mid region's attention in every bucket.

    Mid keys of a query at p: `sink_size <= i <= p - window_size`. A query without any gets zeros.
    """
    heads_q, count, _ = queries.shape
    out = torch.empty(heads_q, count, num_buckets, dtype=dtype, device=queries.device)
    if queries.is_cuda:
        sorted_keys, where, offsets = sort_by_bucket(keys, bucket, num_buckets)
    chunk = max(ROWS, CHUNK_BYTES // (4 * heads_q * (num_buckets if queries.is_cuda else 2 * keys.shape[1])))
    for a in range(0, count, chunk):
        part = slice(a, a + chunk)
        if queries.is_cuda:
            log_mass = _launch(queries[:, part], sorted_keys, where, offsets, positions[:, part], scale, sink_size,
                               window_size)
            out[:, part] = log_mass.softmax(-1).nan_to_num_(0.0)
        else:
            out[:, part] = bucket_mass_reference(queries[:, part], keys, bucket, positions[:, part], num_buckets,
                                                 scale=scale, sink_size=sink_size, window_size=window_size)
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
    weights = scores.masked_fill(~mid, float("-inf")).softmax(-1).nan_to_num(0.0)
    index = bucket.long().repeat_interleave(heads_q // heads_kv, 0)[:, None].expand_as(weights)
    return weights.new_zeros(heads_q, count, num_buckets).scatter_add_(-1, index, weights)


def sort_by_bucket(keys: Tensor, bucket: Tensor, num_buckets: int) -> tuple[Tensor, Tensor, Tensor]:
    """keys `[Hkv, N, d]` in the order of their buckets, the position of each `[Hkv, N]` int32, and where the buckets
    begin, `[Hkv, C + 1]` int32."""
    order = bucket.long().argsort(dim=1, stable=True)
    sizes = bucket.new_zeros(bucket.shape[0], num_buckets, dtype=torch.int64)
    sizes.scatter_add_(1, bucket.long(), torch.ones_like(bucket, dtype=torch.int64))
    offsets = torch.nn.functional.pad(sizes.cumsum(1), (1, 0)).to(torch.int32)
    moved = keys.gather(1, order[..., None].expand(-1, -1, keys.shape[2]))
    return moved, order.to(torch.int32), offsets


def _launch(
    queries: Tensor, keys: Tensor, where: Tensor, offsets: Tensor, positions: Tensor, scale: float, sink_size: int,
    window_size: int,
) -> Tensor:
    """Logarithm of the (not normalised) mass, `[Hq, T, C]` float32; -inf for a bucket without a mid key."""
    heads_q, count, dim = queries.shape
    heads_kv, length, _ = keys.shape
    buckets = offsets.shape[1] - 1
    queries, positions = queries.to(keys.dtype).contiguous(), positions.to(torch.int32).contiguous()
    out = torch.empty(heads_q, count, buckets, dtype=torch.float32, device=queries.device)
    blocks = -(-count // ROWS)
    parts = min(buckets, max(1, -(-PROGRAMS // (blocks * heads_q))))
    per_part = -(-buckets // parts)
    block = next((b for b in BLOCKS if b * buckets >= length), BLOCKS[-1])
    kernel()[(blocks, heads_q, -(-buckets // per_part))](
        queries, keys, where, offsets, positions, out, scale, count, length, buckets, per_part, sink_size, window_size,
        GROUP=heads_q // heads_kv, ROWS=ROWS, DIM=dim, WIDTH=max(16, 1 << (dim - 1).bit_length()), BLOCK=block,
        num_warps=4, num_stages=2)
    return out


@functools.cache
def kernel() -> Any:
    """The jitted kernel; importing Triton waits until it is wanted."""
    import triton
    import triton.language as tl

    @triton.jit
    def bucket_mass_kernel(
        q, k, where, offsets, positions, out, scale, count, length, buckets, per_part, sink, window,
        GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ):
        head = tl.program_id(1).to(tl.int64)
        head_kv = head // GROUP
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        width = tl.arange(0, WIDTH)
        column = tl.arange(0, BLOCK)
        place = tl.load(positions + head * count + row, mask=row < count, other=-1)
        query = tl.load(q + (head * count + row)[:, None] * DIM + width[None, :],
                        mask=(row < count)[:, None] & (width < DIM)[None, :], other=0.0)
        key_base = k + head_kv * length * DIM
        where_base = where + head_kv * length
        edge = offsets + head_kv * (buckets + 1)
        slot = out + (head * count + row) * buckets
        first = tl.program_id(2) * per_part
        last = tl.minimum(first + per_part, buckets)
        for c in range(first, last):
            begin = tl.load(edge + c)
            end = tl.load(edge + c + 1)
            # a finite floor: -inf minus -inf must not appear
            top = tl.full([ROWS], -1e30, tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            for at in range(begin, end, BLOCK):
                token = at + column
                inside = token < end
                key = tl.load(key_base + token.to(tl.int64)[:, None] * DIM + width[None, :],
                              mask=inside[:, None] & (width < DIM)[None, :], other=0.0)
                origin = tl.load(where_base + token, mask=inside, other=-1)
                score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
                mid = (origin[None, :] >= sink) & (origin[None, :] <= place[:, None] - window) & inside[None, :]
                score = tl.where(mid, score, float("-inf"))
                higher = tl.maximum(top, tl.max(score, 1))
                total = total * tl.exp(top - higher) + tl.sum(tl.exp(score - higher[:, None]), 1)
                top = higher
            tl.store(slot + c, tl.where(total > 0, top + tl.log(total), float("-inf")), mask=row < count)

    return bucket_mass_kernel
