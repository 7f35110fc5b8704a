"""Features of keys, made anew wherever they are wanted: the map of keys is one hidden layer of ReLUs, so that a step
makes those of the keys that it reads from the keys themselves, and none are kept. What is summed over the mid region
and what is taken out again are the same function in the same rounding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsekv.kernels.launch import NEG_INF, acc_dtype, as_tokens, dense_last, finite, on_device, padded, shared_bytes
from sparsekv.kernels.types import FeatureMapWeights, KeyFeatures, KeyMap, PhiCache

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
REST_EPS = 1e-5
"""What is left of an estimate is dropped below this part of it: it is rounding error."""
SLICE = 1024
"""Tokens of one product of a sum over all of them, in plain torch."""


def key_map(maps: Sequence[FeatureMapWeights], features: int, dtype: torch.dtype) -> KeyMap:
    """The map of keys from the one that sees keys and, if there are two, that which sees them without the request's
    mean key: all units side by side, products in `dtype`. Maps that make fewer than `features` make the first of them,
    the second map the last; those that both make are added.

    A key is taken as it is: what a unit of the second map takes off goes into its bias, and what the rounding of the
    stem makes of the mean key is put back there, because keys lie far from zero.
    """
    assert not any(m.w_a.shape[-2] for m in maps), "a map of keys has one hidden layer"
    acc = acc_dtype(maps[0].w_in.to(dtype))
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


def for_request(maps: KeyMap, mean: Tensor) -> KeyFeatures:
    """The map as a batch of requests has it, its shift zero: mean `[B, Hkv, d]`, their mean keys."""
    bias = maps.b_in + (mean.to(maps.b_in.dtype)[..., None, :] @ maps.of_mean)[..., 0, :]
    return KeyFeatures(maps.w_in, bias.contiguous(), maps.w_out, maps.b_out,
                       bias.new_zeros(len(mean), *maps.b_out.shape))


def fused(maps: KeyMap | KeyFeatures) -> bool:
    """Whether the kernels run this map: on CUDA, not float64, both matrices in a program's shared memory."""
    return on_device(maps.w_in) and room_beside(maps) >= BESIDE_BYTES * maps.w_in.element_size() // 2


def room_beside(maps: KeyMap | KeyFeatures) -> int:
    """Shared memory that the matrices of a map leave to a program [bytes]; no limit under the interpreter."""
    if not maps.w_in.is_cuda:
        return 1 << 30
    dim, units, features = (padded(n) for n in (*maps.w_in.shape[-2:], maps.w_out.shape[-1]))
    return shared_bytes(maps.w_in.device) - maps.w_in.element_size() * units * (dim + features)


def log_features(keys: Tensor, maps: KeyFeatures) -> Tensor:
    """Logarithms to the base 2 of the features of keys `[Q, Hkv, n, d]` with RoPE, Q a multiple of the batch, in plain
    torch: `[Q, Hkv, n, r]`, float32 at least. The shift is not taken off."""
    dtype = maps.w_in.dtype
    acc = acc_dtype(maps.w_in)
    bias = maps.bias.repeat_interleave(keys.shape[0] // maps.bias.shape[0], dim=0)
    hidden = F.relu(keys.to(dtype).to(acc) @ maps.w_in.to(acc) + bias[:, :, None])
    return hidden.to(dtype).to(acc) @ maps.w_out.to(acc) + maps.b_out[:, None]


def key_features(keys: Tensor, maps: KeyFeatures) -> Tensor:
    """Features of keys `[Q, Hkv, n, d]` with RoPE, Q a multiple of the batch, relative to the request's shift:
    `[Q, Hkv, n, r]` in the precision of the map."""
    return launch_features(keys, maps) if fused(maps) else key_features_reference(keys, maps)


def key_features_reference(keys: Tensor, maps: KeyFeatures) -> Tensor:
    """`key_features` in plain torch."""
    shift = finite(maps.shift).repeat_interleave(keys.shape[0] // maps.shift.shape[0], dim=0)
    return torch.exp2(log_features(keys, maps) - shift[:, :, None]).to(maps.w_in.dtype)


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


def phi_sums(keys: Tensor, values: Tensor, first: Tensor, last: Tensor, maps: KeyFeatures) -> PhiCache:
    """The stable cache of the tokens `first[b] <= i < last[b]`: keys `[B, Hkv, N, d]` with RoPE and values alike, one
    pass over both, waiting for no device. The shift is a whole number, so that raising it rounds nothing; where there
    are no tokens `m = -inf, z = 0, s = 0`."""
    sums = launch_sums if fused(maps) else phi_sums_reference
    return sums(keys, values, first, last, maps)


def phi_sums_reference(keys: Tensor, values: Tensor, first: Tensor, last: Tensor, maps: KeyFeatures) -> PhiCache:
    """`phi_sums` in plain torch."""
    places = torch.arange(keys.shape[2], device=keys.device)
    inside = ((places >= first[:, None]) & (places < last[:, None]))[:, None, :, None]
    logs = log_features(keys, maps).masked_fill(~inside, NEG_INF)
    empty = keys.shape[2] == 0
    m = logs.new_full((*logs.shape[:2], logs.shape[3]), NEG_INF) if empty else logs.amax(2).ceil()
    weights = torch.exp2(logs - finite(m)[:, :, None]).to(maps.w_in.dtype)
    return PhiCache(m, weights.sum(2, dtype=logs.dtype), products(weights, values.to(weights.dtype)))


def launch_sums(keys: Tensor, values: Tensor, first: Tensor, last: Tensor, maps: KeyFeatures) -> PhiCache:
    """`phi_sums` through Triton: slices of the keys, then their sums brought to one shift."""
    found = launch_join(None, launch_parts(keys, values, maps, first, last), len(keys))
    return PhiCache(*(x[:, 0] for x in found))


def phi_prefixes(start: PhiCache, keys: Tensor, values: Tensor, maps: KeyFeatures) -> PhiCache:
    """A cache of B rows and it with one more chunk of tokens each time, `[B, n + 1, Hkv, r(, d)]`: keys `[B·n, Hkv, c,
    d]` with RoPE, n of a row one behind the other, and values alike."""
    chunks = len(keys) // len(start.m)
    if fused(maps):
        return launch_join(start, launch_parts(keys, values, maps), len(start.m))
    none = torch.zeros(len(keys), dtype=torch.long, device=keys.device)
    each = maps._replace(bias=maps.bias.repeat_interleave(chunks, dim=0))
    more = PhiCache(*(x.unflatten(0, (-1, chunks)) for x in phi_sums_reference(
        keys, values, none, none + keys.shape[2], each)))
    found = [start]
    for i in range(chunks):
        found.append(phi_join(found[-1], PhiCache(*(x[:, i] for x in more))))
    return PhiCache(*(torch.stack(x, dim=1) for x in zip(*found, strict=True)))


def phi_left(whole: PhiCache, keys: Tensor, values: Tensor, maps: KeyFeatures) -> PhiCache:
    """`whole [Q, Hkv, r(, d)]` without some of its tokens, each named once, keys `[Q, Hkv, n, d]` and values alike;
    relative to its shift, and in place of the sums of values their means, in the precision of the map, which holds
    those. A feature of which no more is left than rounding error has nothing left: features are rounded alike in
    both."""
    if fused(maps):
        return launch_left(whole, keys, values, maps)
    none = torch.zeros(len(keys), dtype=torch.long, device=keys.device)
    each = maps._replace(bias=maps.bias.repeat_interleave(len(keys) // len(maps.bias), dim=0))
    part = phi_sums_reference(keys, values, none, none + keys.shape[2], each)
    back = torch.exp2(part.m - finite(whole.m))
    z = whole.z - part.z * back
    live = z > (REST_EPS if z.dtype == torch.float32 else REST_EPS**2) * whole.z
    means = (whole.s - part.s * back[..., None]) / torch.where(live, z, 1.0)[..., None]
    return PhiCache(whole.m, torch.where(live, z, 0.0),
                    torch.where(live[..., None], means, 0.0).to(maps.w_in.dtype))


def launch_left(whole: PhiCache, keys: Tensor, values: Tensor, maps: KeyFeatures) -> PhiCache:
    """`phi_left` through Triton."""
    from sparsekv.kernels.features_triton import left_kernel

    parts, whole = launch_parts(keys, values, maps), PhiCache(*(x.contiguous() for x in whole))
    queries, heads, splits, features, dim = parts.s.shape
    z, means = torch.empty_like(whole.z), torch.empty_like(whole.s, dtype=maps.w_in.dtype)
    if z.numel():
        left_kernel[(queries * heads, -(-features // JOINED_AT_ONCE))](
            whole, parts, z, means, splits, dim, features, EPS=REST_EPS, BLOCK=JOINED_AT_ONCE, DIM=padded(dim),
            num_warps=JOIN_WARPS)
    return PhiCache(whole.m, z, means)


def launch_join(start: PhiCache | None, parts: PhiCache, rows: int) -> PhiCache:
    """A cache of so many rows, or none, and it with one more chunk each time of parts `[B·n, Hkv, slices, r(, d)]`:
    `[B, n, Hkv, r(, d)]`, n + 1 with a cache."""
    from sparsekv.kernels.features_triton import join_kernel

    total, heads, splits, features, dim = parts.s.shape
    chunks, started = total // rows, start is not None
    m, z = (torch.empty(rows, chunks + started, heads, features, dtype=torch.float32, device=parts.m.device)
            for _ in range(2))
    found = PhiCache(m, z, torch.empty(*m.shape, dim, dtype=torch.float32, device=m.device))
    if m.numel():
        join_kernel[(rows * heads, -(-features // JOINED_AT_ONCE))](
            found if start is None else PhiCache(*(x.contiguous() for x in start)), parts, found, heads, chunks, splits,
            dim, features, STARTED=started, BLOCK=JOINED_AT_ONCE, DIM=padded(dim), num_warps=JOIN_WARPS)
    return found


def launch_parts(
    keys: Tensor, values: Tensor, maps: KeyFeatures, first: Tensor | None = None, last: Tensor | None = None,
) -> PhiCache:
    """`(m, z, S)` of slices of the keys `[Q, Hkv, N, d]`, Q a multiple of the batch, `[Q, Hkv, slices, r(, d)]`;
    without edges of all tokens."""
    from sparsekv.kernels.features_triton import sums_kernel

    keys, values = dense_last(keys), dense_last(values)
    batch, heads, length, dim = keys.shape
    units, features = maps.w_out.shape[-2:]
    block = block_of(maps)
    splits = max(1, min(PROGRAMS // (batch * heads), -(-length // block)))
    m, z = (torch.empty(batch, heads, splits, features, dtype=torch.float32, device=keys.device) for _ in range(2))
    s = torch.empty(batch, heads, splits, features, dim, dtype=torch.float32, device=keys.device)
    edges = [m if x is None else x.contiguous() for x in (first, last)]
    sums_kernel[(batch * heads, splits)](
        as_tokens(keys), as_tokens(values), KeyFeatures(*(x.contiguous() for x in maps)), *edges, PhiCache(m, z, s),
        heads, batch // len(maps.bias), length, dim, units, features, EDGED=first is not None, BLOCK=block,
        DIM=padded(dim), UNITS=padded(units), FEATURES=padded(features), num_warps=SUM_WARPS)
    return PhiCache(m, z, s)


def phi_join(one: PhiCache, other: PhiCache) -> PhiCache:
    """The cache of two disjoint sets of tokens from theirs."""
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
