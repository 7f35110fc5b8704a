"""Features of keys, made anew wherever they are wanted: the map of keys is one hidden layer of ReLUs, so that a step
makes those of the keys that it reads from the keys themselves, and none are kept. What is summed over the mid region
and what is taken out again are the same function in the same rounding. A map with ReZero blocks (completion paper,
appendix J) is run in plain torch, in float32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsekv.kernels.completion import log_phi
from sparsekv.kernels.launch import NEG_INF, acc_dtype, as_tokens, dense_last, finite, on_device, padded, shared_bytes
from sparsekv.kernels.types import BlockFeatures, FeatureMapWeights, KeyFeatures, KeyMap, PhiCache

LOG2_E = 1.4426950408889634
BLOCK, WARPS = 64, 4
"""Keys at once, the rows of one product of a warp group, and its warps."""
SUM_WARPS = 8
JOINED_AT_ONCE, JOIN_WARPS = 8, 4
"""Features of a program that joins caches, and its warps."""
BESIDE_BYTES = 34_816
"""Shared memory that the kernels of features want beside the map, of keys of 128 numbers in half precision; in float32
twice that."""
PROGRAMS = 264
"""Programs wanted of the sums."""
SLICE = 1024
"""Tokens of one product of a sum over all of them, in plain torch."""


def key_map(
    maps: Sequence[FeatureMapWeights], features: int, dtype: torch.dtype,
) -> KeyMap | FeatureMapWeights:
    """The map of keys from the one that sees keys and, if there are two, that which sees them without the request's
    mean key: all units side by side, products in `dtype`. Maps that make fewer than `features` make the first of them,
    the second map the last; those that both make are added.

    A key is taken as it is: what a unit of the second map takes off goes into its bias, and what the rounding of the
    stem makes of the mean key is put back there, because keys lie far from zero.

    One map with blocks stays as it is, in float32 at least.
    """
    acc = acc_dtype(maps[0].w_in.to(dtype))
    if any(m.alpha.shape[-1] for m in maps):
        assert len(maps) == 1, "a map of keys with blocks has no centred half"
        return FeatureMapWeights(*(w.to(acc).contiguous() for w in maps[0]))
    rows, biases, moves = [], [], []
    for index, m in enumerate(maps):
        first = 0 if index == 0 else features - m.w_out.shape[-1]
        room = (first, features - first - m.w_out.shape[-1])
        rows.append(F.pad(m.w_out, room))
        biases.append(F.pad(m.b_out, room))
        rounded = m.w_in.to(dtype).to(acc)
        moves.append(m.w_in.to(acc) - rounded if index == 0 else -rounded)
    w_in, b_in = torch.cat([m.w_in for m in maps], -1), torch.cat([m.b_in for m in maps], -1)
    w_out, b_out = LOG2_E * torch.cat(rows, -2), LOG2_E * torch.stack(biases).sum(0)
    return KeyMap(w_in.to(dtype).contiguous(), b_in.to(acc), torch.cat(moves, -1), w_out.to(dtype).contiguous(),
                  b_out.to(acc).contiguous())


def for_request(maps: KeyMap | FeatureMapWeights, mean: Tensor) -> KeyFeatures | BlockFeatures:
    """Put the mean keys `[B, Hkv, d]` of a batch of requests into a map of keys; its shift is zero."""
    if isinstance(maps, FeatureMapWeights):
        return BlockFeatures(maps, maps.b_out.new_zeros(len(mean), *maps.b_out.shape))
    bias = maps.b_in + (mean.to(maps.b_in.dtype)[..., None, :] @ maps.of_mean)[..., 0, :]
    return KeyFeatures(maps.w_in, bias.contiguous(), maps.w_out, maps.b_out,
                       bias.new_zeros(len(mean), *maps.b_out.shape))


def fused(maps: KeyMap | FeatureMapWeights | KeyFeatures | BlockFeatures) -> bool:
    """Return whether the kernels run this map: without blocks, on CUDA, not float64, both matrices in a program's
    shared memory."""
    if not isinstance(maps, KeyMap | KeyFeatures):
        return False
    return on_device(maps.w_in) and room_beside(maps) >= BESIDE_BYTES * maps.w_in.element_size() // 2


def room_beside(maps: KeyMap | KeyFeatures) -> int:
    """Shared memory that the matrices of a map leave to a program [bytes]; no limit under the interpreter."""
    if not maps.w_in.is_cuda:
        return 1 << 30
    dim, units, features = (padded(n) for n in (*maps.w_in.shape[-2:], maps.w_out.shape[-1]))
    return shared_bytes(maps.w_in.device) - maps.w_in.element_size() * units * (dim + features)


def log_features(keys: Tensor, maps: KeyFeatures | BlockFeatures) -> Tensor:
    """Logarithms to the base 2 of the features of keys `[Q, Hkv, n, d]` with RoPE, Q a multiple of the batch, in plain
    torch: `[Q, Hkv, n, r]`, float32 at least. The shift is not taken off."""
    if isinstance(maps, BlockFeatures):
        return LOG2_E * log_phi(keys, maps.weights)
    dtype = maps.w_in.dtype
    acc = acc_dtype(maps.w_in)
    bias = maps.bias.repeat_interleave(keys.shape[0] // maps.bias.shape[0], dim=0)
    hidden = F.relu(keys.to(dtype).to(acc) @ maps.w_in.to(acc) + bias[:, :, None])
    return hidden.to(dtype).to(acc) @ maps.w_out.to(acc) + maps.b_out[:, None]


def key_features(keys: Tensor, maps: KeyFeatures | BlockFeatures) -> Tensor:
    """Make the features of keys, relative to the request's shift.

    Args:
        keys: `[Q, Hkv, n, d]` with RoPE, Q a multiple of the batch.
        maps: of `for_request`.

    Returns:
        `[Q, Hkv, n, r]` in the precision of the map.
    """
    if isinstance(maps, KeyFeatures) and fused(maps):
        return launch_features(keys, maps)
    return key_features_reference(keys, maps)


def key_features_reference(keys: Tensor, maps: KeyFeatures | BlockFeatures) -> Tensor:
    """`key_features` in plain torch."""
    shift = finite(maps.shift).repeat_interleave(keys.shape[0] // maps.shift.shape[0], dim=0)
    return torch.exp2(log_features(keys, maps) - shift[:, :, None]).to(_precision(maps))


def _precision(maps: KeyFeatures | BlockFeatures) -> torch.dtype:
    """Of the features that a map makes."""
    return (maps.weights if isinstance(maps, BlockFeatures) else maps).w_in.dtype


def launch_features(keys: Tensor, maps: KeyFeatures) -> Tensor:
    """`key_features` through Triton."""
    from sparsekv.kernels.features_triton import features_kernel

    keys = dense_last(keys)
    count, heads, length, dim = keys.shape
    units, features = maps.w_out.shape[-2:]
    out = torch.empty(count, heads, length, features, dtype=maps.w_in.dtype, device=keys.device)
    if length:
        block = block_of(maps)
        features_kernel[(count * heads, -(-length // block))](
            as_tokens(keys), KeyFeatures(*(x.contiguous() for x in maps)), out, heads, length,
            count // maps.bias.shape[0], dim, units, features, BLOCK=block, DIM=padded(dim), UNITS=padded(units),
            FEATURES=padded(features), num_warps=WARPS)
    return out


def block_of(maps: KeyFeatures) -> int:
    """Keys at once of a map of such sizes: fewer where they are of four bytes."""
    return BLOCK if maps.w_in.element_size() == 2 else 16


def phi_sums(
    keys: Tensor, values: Tensor, first: Tensor, last: Tensor, maps: KeyFeatures | BlockFeatures,
) -> PhiCache:
    """Sum the features of tokens into a stable cache, in one pass (completion paper, appendix C). Waits for no device.

    Args:
        keys, values: `[B, Hkv, N, d]`, keys with RoPE.
        first, last: `[B]`, the tokens that count are `first[b] <= i < last[b]`.

    Returns:
        The cache; its shift is a whole number, so that raising it rounds nothing. Where there are no tokens
        `m = -inf, z = 0, s = 0`.
    """
    if isinstance(maps, KeyFeatures) and fused(maps):
        return launch_sums(keys, values, first, last, maps)
    return phi_sums_reference(keys, values, first, last, maps)


def phi_sums_reference(
    keys: Tensor, values: Tensor, first: Tensor, last: Tensor, maps: KeyFeatures | BlockFeatures,
) -> PhiCache:
    """`phi_sums` in plain torch."""
    places = torch.arange(keys.shape[2], device=keys.device)
    inside = ((places >= first[:, None]) & (places < last[:, None]))[:, None, :, None]
    logs = log_features(keys, maps).masked_fill(~inside, NEG_INF)
    empty = keys.shape[2] == 0
    m = logs.new_full((*logs.shape[:2], logs.shape[3]), NEG_INF) if empty else logs.amax(2).ceil()
    weights = torch.exp2(logs - finite(m)[:, :, None]).to(_precision(maps))
    return PhiCache(m, weights.sum(2, dtype=logs.dtype), products(weights, values.to(weights.dtype)))


def launch_sums(keys: Tensor, values: Tensor, first: Tensor, last: Tensor, maps: KeyFeatures) -> PhiCache:
    """`phi_sums` through Triton: slices of the keys, then their sums brought to one shift."""
    from sparsekv.kernels.features_triton import join_kernel, sums_kernel

    keys, values = dense_last(keys), dense_last(values)
    batch, heads, length, dim = keys.shape
    units, features = maps.w_out.shape[-2:]
    block = block_of(maps)
    splits = max(1, min(PROGRAMS // (batch * heads), -(-length // block)))

    def empty(*size: int) -> PhiCache:
        m, z = (torch.empty(*size, features, dtype=torch.float32, device=keys.device) for _ in range(2))
        return PhiCache(m, z, torch.empty(*size, features, dim, dtype=torch.float32, device=keys.device))

    parts, found = empty(batch, heads, splits), empty(batch, heads)
    sums_kernel[(batch * heads, splits)](
        as_tokens(keys), as_tokens(values), KeyFeatures(*(x.contiguous() for x in maps)), first.contiguous(),
        last.contiguous(), parts, heads, length, dim, units, features, BLOCK=block, DIM=padded(dim),
        UNITS=padded(units), FEATURES=padded(features), num_warps=SUM_WARPS)
    if found.m.numel():
        join_kernel[(batch * heads, -(-features // JOINED_AT_ONCE))](
            parts, found, splits, dim, features, BLOCK=JOINED_AT_ONCE, DIM=padded(dim), num_warps=JOIN_WARPS)
    return found


def phi_join(one: PhiCache, other: PhiCache) -> PhiCache:
    """Join the caches of two disjoint sets of tokens."""
    m = torch.maximum(one.m, other.m)
    a, b = (torch.exp2(x.m - finite(m)) for x in (one, other))
    return PhiCache(m, one.z * a + other.z * b, one.s * a[..., None] + other.s * b[..., None])


def products(a: Tensor, b: Tensor) -> Tensor:
    """`aᵀ b` over the tokens: a `[B, H, n, r]`, b `[B, H, n, d]` of one dtype -> `[B, H, r, d]`, float32 at least. As
    many products side by side as there are slices of the tokens: one of so few rows and columns leaves most of a GPU
    idle."""
    batch, heads, length, rows = a.shape
    whole = length // SLICE * SLICE

    def sums(parts: int, x: Tensor, y: Tensor) -> Tensor:
        x, y = (t.unflatten(2, (parts, -1)).flatten(0, 2) for t in (x, y))
        total = torch.zeros(len(x), rows, y.shape[-1], dtype=acc_dtype(a), device=a.device)
        if a.dtype != total.dtype and a.is_cuda:
            torch.baddbmm(total, x.mT, y, out_dtype=total.dtype, out=total)
        else:
            total.baddbmm_(x.mT.to(total.dtype), y.to(total.dtype))
        return total.unflatten(0, (batch, heads, parts)).sum(2)

    last = sums(1, a[:, :, whole:], b[:, :, whole:])
    return last if whole == 0 else last + sums(whole // SLICE, a[:, :, :whole], b[:, :, :whole])


def away_from(x: Tensor, mean: Tensor, dtype: torch.dtype) -> Tensor:
    """`x − mean` in `dtype`, rounded after: x `[..., n, d]`, mean `[..., d]`. One pass over memory."""
    return torch.sub(x, mean[..., None, :], out=torch.empty(x.shape, dtype=dtype, device=x.device))
