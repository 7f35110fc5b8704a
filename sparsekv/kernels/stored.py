"""A decode step on storage of fixed capacity: append the new token, attend to all that is there. Lengths are read on
the device, so that the same launches serve every step of a CUDA graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsekv.kernels.attend import MAX_SPLITS, MERGE_WARPS, MERGE_WIDTH
from sparsekv.kernels.launch import (
    NEG_INF,
    acc_dtype,
    at_once,
    dense_last,
    finite,
    on_device,
    overlaps,
    padded,
    power_of_two,
)

KEYS_AT_ONCE, WARPS, PROGRAMS = 32, 2, 528
STAGES_BYTES = 48 * 1024
"""Keys and values on their way to one program: several fit the shared memory of one multiprocessor."""


def append_token(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> None:
    """Write one new token of every row, k, v `[B, H, 1, d]`, into keys, values `[B, H, N, d]` at `lengths[b] − 1`."""
    (launch_append if on_device(k) else append_token_reference)(k, v, keys, values, lengths)


def append_token_reference(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> None:
    """`append_token` in plain torch."""
    place = (lengths - 1)[:, None, None, None].expand_as(k)
    keys.scatter_(2, place, k.to(keys.dtype))
    values.scatter_(2, place, v.to(values.dtype))


def launch_append(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> None:
    """`append_token` through Triton."""
    from sparsekv.kernels.stored_triton import append_kernel

    k, v = dense_last(k), dense_last(v)
    batch, heads, _, dim = k.shape
    append_kernel[(batch * heads,)](
        k, v, keys, values, lengths, heads, *k.stride()[:2], *v.stride()[:2], *keys.stride()[:3], *values.stride()[:3],
        DIM=dim, WIDTH=power_of_two(dim), num_warps=1)


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, lengths: Tensor, *, scale: float,
) -> tuple[Tensor, Tensor]:
    """Attend fully with one query a row.

    Args:
        q: `[B, Hq, d]`.
        k, v: `[B, Hkv, N, d]`, of which row b has the tokens `starts[b] <= i < lengths[b]`.

    Returns:
        `(out [B, Hq, d], lse [B, Hq])`.
    """
    return (launch_decode if on_device(q) else decode_attention_reference)(q, k, v, starts, lengths, scale=scale)


def decode_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, lengths: Tensor, *, scale: float,
) -> tuple[Tensor, Tensor]:
    """`decode_attention` in plain torch; what lies outside a row's tokens is never multiplied."""
    acc = acc_dtype(q)
    batch, heads_q, dim = q.shape
    end = int(lengths.max()) if lengths.numel() else 0
    places = torch.arange(end, device=k.device)
    inside = ((places >= starts[:, None]) & (places < lengths[:, None]))[:, None, :, None]
    keys, values = (torch.where(inside, x[:, :, :end].to(acc), 0) for x in (k, v))
    scores = (q.to(acc).reshape(batch, k.shape[1], -1, dim) @ keys.mT) * scale
    scores = scores.masked_fill(~inside.mT, NEG_INF)
    if end == 0:
        return torch.zeros_like(q), scores.new_full((batch, heads_q), NEG_INF)
    top = finite(scores.amax(-1, keepdim=True))
    weights = torch.exp(scores - top)
    mass = weights.sum(-1, keepdim=True)
    out = (weights @ values) / torch.where(mass > 0, mass, 1.0)
    return out.reshape(batch, heads_q, dim).to(q.dtype), (top + mass.log()).reshape(batch, heads_q)


def stages_of(dim: int, size: int) -> int:
    """Blocks of keys and values of `size` bytes an element that are loaded ahead."""
    return max(1, min(4, STAGES_BYTES // (2 * KEYS_AT_ONCE * padded(dim) * size)))


def launch_decode(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, lengths: Tensor, *, scale: float,
) -> tuple[Tensor, Tensor]:
    """`decode_attention` through Triton: a row's tokens in slices as equal as can be, all over the device, then one
    merge. Each launch is prepared while the one before it ends."""
    from sparsekv.kernels.attend_triton import merge_kernel
    from sparsekv.kernels.stored_triton import decode_kernel

    q, k, v = (dense_last(x) for x in (q, k, v))
    batch, heads_q, dim = q.shape
    heads = k.shape[1]
    group = heads_q // heads
    block = at_once(KEYS_AT_ONCE, padded(dim) * q.element_size())
    splits = max(1, min(MAX_SPLITS, -(-PROGRAMS // (batch * heads)), -(-k.shape[2] // block)))
    partial = torch.empty(batch, heads_q, splits, dim, dtype=torch.float32, device=q.device)
    partial_lse = torch.empty(batch, heads_q, splits, dtype=torch.float32, device=q.device)
    out, lse = torch.empty_like(q, memory_format=torch.contiguous_format), partial_lse.new_empty(batch, heads_q)
    pdl: dict[str, Any] = {"launch_pdl": True} if overlaps(q.device) else {}
    decode_kernel[(batch * heads, splits)](
        q, k, v, starts, lengths, partial, partial_lse, scale, heads, *q.stride()[:2], *k.stride()[:3],
        *v.stride()[:3], GROUP=group, ROWS=padded(group), DIM=dim, WIDTH=padded(dim), BLOCK=block,
        STAGES=stages_of(dim, k.element_size()), OVERLAP=bool(pdl), num_warps=WARPS, **pdl)
    columns = min(padded(dim), MERGE_WIDTH)
    merge_kernel[(batch * heads_q, -(-dim // columns))](
        partial, partial_lse, partial, partial_lse, lse, lse, lse, lse, out, lse, 0.0, *out.stride()[:2], heads_q,
        splits, splits, PADDED=power_of_two(splits), DIM=dim, WIDTH=columns, PHI=False, CAPPED=False,
        OVERLAP=bool(pdl), num_warps=MERGE_WARPS, **pdl)
    return out, lse
