"""The completion's features of every key at the end of a prefill, and their sums (completion paper §4, appendix C)."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsekv.kernels.completion import log_phi, phi_features, products
from sparsekv.kernels.launch import NEG_INF, acc_dtype, dense_last, finite, on_device, padded
from sparsekv.kernels.types import FeatureMapWeights, PhiCache

BLOCK, WARPS, PROGRAMS = 128, 8, 264
"""Keys of one program of the maps; programs wanted for the sums."""
WIDEST_BYTES = 256
"""Rows of the widest matrix of a map that the kernel holds whole."""
STEP, DEVICE_STEP = 4096, 16_384
"""Keys at once in plain torch, on a CPU and on a GPU."""


def log_phi_keys(
    keys: Tensor, key_map: FeatureMapWeights, centred: FeatureMapWeights | None, centre: Tensor | None,
) -> Tensor:
    """`log φ_k` of keys `[..., Hkv, N, d]` with RoPE, `[..., Hkv, N, r]`: by the heads' `key_map`, and for maps with a
    centred half by `centred` from what lies beyond `centre [..., Hkv, d]`, the request's mean key."""
    logs = log_phi(keys, key_map)
    if centred is None:
        return logs
    assert centre is not None, "maps with a centred half need the mean key of the request"
    dtype = centred.w_in.dtype
    return torch.cat([logs, log_phi(keys.to(dtype) - centre[..., None, :].to(dtype), centred)], dim=-1)


def key_features(
    keys: Tensor, values: Tensor, first: Tensor, last: Tensor, key_map: FeatureMapWeights,
    centred: FeatureMapWeights | None = None, centre: Tensor | None = None,
) -> tuple[PhiCache, Tensor]:
    """The stable cache of the tokens `first[b] <= i < last[b]`, and the features of all up to the last of any row,
    `[B, Hkv, n, r]` in the keys' precision and relative to the cache's shift, zero for tokens not counted: keys, values
    `[B, Hkv, N, d]`, maps with leading dimension Hkv, centre as in `log_phi_keys`. The sums are of what was rounded:
    taking all features out leaves nothing.

    On CUDA two passes in the keys' precision, products in float32 sums: the maps, relative to the largest of every
    block of keys; then one scale for all, and the sums.
    """
    widest = max(key_map.w_in.shape[-2:] + key_map.w_out.shape[-1:])
    if on_device(keys) and widest * keys.element_size() <= WIDEST_BYTES and int(last.max()):
        return launch_features(keys, values, first, last, key_map, centred, centre)
    return key_features_reference(keys, values, first, last, key_map, centred, centre)


def key_features_reference(
    keys: Tensor, values: Tensor, first: Tensor, last: Tensor, key_map: FeatureMapWeights,
    centred: FeatureMapWeights | None = None, centre: Tensor | None = None,
) -> tuple[PhiCache, Tensor]:
    """`key_features` in plain torch, a block of keys at a time."""
    batch, heads, _, dim = keys.shape
    width = key_map.w_out.shape[-1] + (0 if centred is None else centred.w_out.shape[-1])
    acc = acc_dtype(key_map.w_out)
    m = torch.full((batch, heads, width), NEG_INF, dtype=acc, device=keys.device)
    z, s = torch.zeros_like(m), torch.zeros(batch, heads, width, dim, dtype=acc, device=keys.device)
    parts, shifts = [], []
    length, step = int(last.max()), DEVICE_STEP if keys.is_cuda else STEP
    for a in range(0, length, step):
        place = torch.arange(a, min(a + step, length), device=keys.device)
        inside = (place >= first[:, None]) & (place < last[:, None])
        logs = log_phi_keys(keys[:, :, a:a + len(place)], key_map, centred, centre)
        logs = logs.masked_fill(~inside[:, None, :, None], NEG_INF)
        m = torch.maximum(m, logs.amax(2))
        parts.append(phi_features(logs, m).to(keys.dtype))
        shifts.append(m)
    for i, (part, shift) in enumerate(zip(parts, shifts, strict=True)):
        part.mul_(torch.exp(finite(shift) - finite(m))[:, :, None])
        exact = part.to(acc)
        z += exact.sum(2)
        s += products(exact, values[:, :, i * step:i * step + part.shape[2]].to(acc))
    features = torch.cat(parts, dim=2) if parts else keys.new_zeros(batch, heads, 0, width)
    return PhiCache(m, z, s), features


def launch_features(
    keys: Tensor, values: Tensor, first: Tensor, last: Tensor, key_map: FeatureMapWeights,
    centred: FeatureMapWeights | None = None, centre: Tensor | None = None,
) -> tuple[PhiCache, Tensor]:
    """`key_features` through Triton."""
    from sparsekv.kernels.features_triton import map_kernel, sum_kernel

    keys, values = dense_last(keys), dense_last(values)
    batch, heads, _, dim = keys.shape
    length, device = int(last.max()), keys.device
    maps = [key_map] if centred is None else [key_map, centred]
    width = sum(m.w_out.shape[-1] for m in maps)
    tiles = -(-length // BLOCK)

    def fresh(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(batch, heads, *shape, dtype=dtype, device=device)

    features, shifts = fresh(length, width, dtype=keys.dtype), fresh(tiles, width)
    edges = first.contiguous(), last.contiguous()
    column = 0
    for weights, middle in zip(maps, (None, centre), strict=False):
        inner, made = weights.w_out.shape[-2:]
        map_kernel[(tiles, batch * heads)](
            keys, *(w.to(keys.dtype).contiguous() for w in weights),
            shifts if middle is None else middle.float().contiguous(), *edges, features, shifts, heads, length, column,
            *keys.stride()[:3], dim, inner, made, width, CENTRED=middle is not None, BLOCK=BLOCK, DIM=padded(dim),
            WIDTH=padded(inner), FEATURES=padded(made), num_warps=WARPS)
        column += made
    m = shifts.amax(2)
    splits = max(1, min(PROGRAMS // (batch * heads), tiles))
    z, s = fresh(splits, width), fresh(splits, width, dim)
    sum_kernel[(batch * heads, splits)](
        features, values, shifts, m, z, s, heads, length, -(-tiles // splits), tiles, *values.stride()[:3], dim, width,
        BLOCK=BLOCK, DIM=padded(dim), FEATURES=padded(width), num_warps=WARPS, num_stages=2)
    return PhiCache(m, z.sum(2), s.sum(2)), features
