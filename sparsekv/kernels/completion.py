"""The completion's own kernels: the stable cache in one pass, and the query's features of one decode step. Subtraction
and merge belong to the attention kernel (`attend.py`): every key it reads takes its own estimate out."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsekv.kernels import reference
from sparsekv.kernels.reference import FeatureMapWeights, PhiCache, PhiRest, PhiStore

BLOCK, CACHE_WARPS, QUERY_WARPS = 64, 8, 8
PROGRAMS = 264


def phi_cache(log_phi_k: Tensor, v: Tensor, mask: Tensor | None = None) -> PhiCache:
    """See `reference.phi_cache`; on CUDA one pass over features and values in half precision."""
    if not log_phi_k.is_cuda or v.dtype == torch.float64 or log_phi_k.shape[2] == 0:
        return reference.phi_cache(log_phi_k, v, mask)
    return launch_cache(log_phi_k, v, mask)


def launch_cache(log_phi_k: Tensor, v: Tensor, mask: Tensor | None) -> PhiCache:
    """`phi_cache` through Triton: slices of the keys, then their sums brought to one shift."""
    from sparsekv.kernels.completion_triton import cache_kernel

    log_phi_k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (log_phi_k, v))
    batch, heads, length, features = log_phi_k.shape
    dim = v.shape[-1]
    splits = max(1, min(PROGRAMS // (batch * heads), -(-length // BLOCK)))
    per_split = -(-length // (splits * BLOCK)) * BLOCK
    m, z = (torch.empty(batch, heads, splits, features, dtype=torch.float32, device=v.device) for _ in range(2))
    s = torch.empty(batch, heads, splits, features, dim, dtype=torch.float32, device=v.device)
    counted = log_phi_k if mask is None else mask.expand(batch, heads, length).contiguous().to(torch.int8)
    cache_kernel[(batch * heads, splits)](
        log_phi_k, v, counted, m, z, s, heads, length, per_split, *log_phi_k.stride()[:3], *v.stride()[:3], dim,
        features, SPLITS=splits, MASKED=mask is not None, BLOCK=BLOCK, DIM=max(16, _power_of_two(dim)),
        FEATURES=max(16, _power_of_two(features)), num_warps=CACHE_WARPS)
    top = m.amax(2)
    share = torch.exp(m - torch.where(torch.isinf(top), torch.zeros_like(top), top)[:, :, None])
    return PhiCache(top, (z * share).sum(2), (s * share[..., None]).sum(2))


def phi_query(q: Tensor, weights: FeatureMapWeights, offset: Tensor, store: PhiStore) -> PhiRest:
    """The query's side of a completed step, from the maps themselves: q `[B, Hq, d]` with RoPE, weights of the query
    maps (leading dimension `Hq`), offset `[Hq]` or `[B, Hq]`, the request's store. One launch on CUDA, all layers of a
    head in one program."""
    if q.is_cuda and weights.w_in.dtype == q.dtype and max(weights.w_in.shape[-1], store.m.shape[-1]) <= 256:
        return launch_query(q, weights, offset, store)
    logs = reference.add_centre(reference.log_phi(q[:, :, None], weights), q[:, :, None], store.centre)[:, :, 0]
    rest = reference.phi_query(logs + offset[..., None], store, q.dtype)
    if store.moments is None:
        return rest
    return rest._replace(cap=reference.moments_cap(q, store.moments, offset))


def launch_query(q: Tensor, weights: FeatureMapWeights, offset: Tensor, store: PhiStore) -> PhiRest:
    """`phi_query` through Triton."""
    from sparsekv.kernels.completion_triton import query_kernel

    q = q if q.stride(-1) == 1 else q.contiguous()
    batch, heads_q, dim = q.shape
    width, features = weights.w_out.shape[-2:]
    offset = offset.contiguous()
    a = torch.empty(batch, heads_q, features, dtype=q.dtype, device=q.device)
    c, whole = (torch.empty(batch, heads_q, dtype=torch.float32, device=q.device) for _ in range(2))
    base = torch.empty(batch, heads_q, dim, dtype=torch.float32, device=q.device)
    moments: tuple[Tensor, ...] = (whole,) * 5
    cap = whole
    rank = 1
    if store.moments is not None:
        rank = store.moments.factors.shape[2]
        moments = tuple(x.contiguous() for x in store.moments)
        cap = torch.empty(batch, heads_q, dtype=torch.float32, device=q.device)
    query_kernel[(batch * heads_q,)](
        q, *(w.contiguous() for w in weights), offset, *(x.contiguous() for x in store[:3]),
        store.m if store.centre is None else store.centre.contiguous(), *moments, a, c, whole, base, cap,
        heads_q, store.m.shape[1], q.stride(0), q.stride(1), heads_q if offset.dim() == 2 else 0, dim, width, features,
        rank, CENTRED=store.centre is not None, CAPPED=store.moments is not None, RANK=_power_of_two(rank), ROWS=16,
        DIM=max(16, _power_of_two(dim)), WIDTH=max(16, _power_of_two(width)), FEATURES=max(16, _power_of_two(features)),
        num_warps=QUERY_WARPS)
    rest = PhiRest(a, c, whole, base, *store[3:6])
    return rest if store.moments is None else rest._replace(cap=cap)


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
