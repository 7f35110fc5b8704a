"""Index of a request: buckets of keys and their CSR, at prefill speed, and keys that join later."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsekv.kernels import reference

BLOCK, BUCKETS, WARPS, STAGES = 128, 64, 4, 3
KEYS_AT_ONCE = 8192


def assign_buckets(keys: Tensor, centroids: Tensor) -> Tensor:
    """See `reference.assign_buckets`, some keys at a time; on CUDA products and maximum are one kernel, in the keys'
    precision, and the scores `[N, C]` are never written. Returns int32 there."""
    if not keys.is_cuda or keys.dtype == torch.float64:
        parts = keys.split(KEYS_AT_ONCE, dim=2)
        return torch.cat([reference.assign_buckets(part, centroids) for part in parts], dim=2)
    return launch_assign(keys, centroids)


def launch_assign(keys: Tensor, centroids: Tensor) -> Tensor:
    """`assign_buckets` through Triton."""
    from sparsekv.kernels.indexing_triton import assign_kernel

    keys = keys if keys.stride(-1) == 1 else keys.contiguous()
    batch, heads, length, dim = keys.shape
    assigned = torch.empty(batch, heads, length, dtype=torch.int32, device=keys.device)
    assign_kernel[(batch * heads, -(-length // BLOCK))](
        keys, centroids.to(keys.dtype).contiguous(), assigned, heads, length, centroids.shape[1], dim,
        *keys.stride()[:3], BLOCK=BLOCK, BUCKETS=BUCKETS, DIM=max(16, 1 << (dim - 1).bit_length()), num_warps=WARPS,
        num_stages=STAGES)
    return assigned


def extend_index(
    order: Tensor, offsets: Tensor, joined: Tensor, positions: Tensor,
) -> tuple[Tensor, Tensor]:
    """Tokens join the index without its being sorted again: as `reference.build_index` over old and new tokens.

    order `[B, H, M]`, offsets `[B, H, C + 1]`; joined `[B, H, n]`: the buckets of the tokens positions `[B, n]`, all
    later than those there, -1 = not yet. Returns order `[B, H, M + n]` and offsets, both int32.
    """
    batch, heads, width = order.shape
    buckets, count = offsets.shape[-1] - 1, joined.shape[-1]
    keyed = torch.where(joined >= 0, joined, buckets).long()
    sizes = torch.zeros(batch, heads, buckets + 1, dtype=torch.int64, device=order.device)
    sizes.scatter_add_(-1, keyed, torch.ones_like(keyed))
    before = torch.nn.functional.pad(sizes[..., :buckets].cumsum(-1), (1, 0))
    result = torch.full((batch, heads, width + count + 1), -1, dtype=torch.int32, device=order.device)
    slots = torch.arange(width, device=order.device).expand(batch, heads, width).contiguous()
    held = torch.searchsorted(offsets[..., 1:].contiguous(), slots.to(torch.int32), right=True)
    place = torch.where(slots < offsets[..., -1:], slots + before.gather(-1, held.clamp(max=buckets)), width + count)
    result.scatter_(-1, place, order)
    by_bucket = keyed.argsort(dim=-1, stable=True)
    bucket = keyed.gather(-1, by_bucket)
    rank = torch.arange(count, device=order.device) - torch.nn.functional.pad(before, (0, 1)).gather(
        -1, bucket.clamp(max=buckets))
    start = offsets.long().gather(-1, (bucket + 1).clamp(max=buckets)) + before.gather(-1, bucket.clamp(max=buckets))
    place = torch.where(bucket < buckets, start + rank, width + count)
    result.scatter_(-1, place, positions[:, None].expand(-1, heads, -1).gather(-1, by_bucket).to(torch.int32))
    return result[..., :-1], (offsets + before).to(torch.int32)
