"""Exact attention over anchors and chosen tokens: split by keys, one merge, no bucket ever waited for.

A grid of `(rows · KV heads, splits)` programs cuts the anchors and the tokens to read into equal slices, whatever
bucket a key came from, so one oversized bucket does not set the time; all query heads of a group share every key that
is loaded. A second, small kernel merges the splits by log-sum-exp. With a completion (`PhiRest`) every chosen key also
takes its own estimate out of the remainder, and the merge adds what is left of it under the same normalisation.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from sparsekv.kernels import reference
from sparsekv.kernels.completion import phi_query
from sparsekv.kernels.reference import BucketMeans, FeatureMapWeights, PhiRest, PhiStore, RouterWeights
from sparsekv.kernels.routing import launch as launch_route
from sparsekv.kernels.routing import overlaps
from sparsekv.kernels.tuning import configuration

MAX_SPLITS = 256
SUM_WARPS = 4


def attend_tokens(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, *, scale: float,
    starts: Tensor, sink_size: int, tail_starts: Tensor, lengths: Tensor, rest: PhiRest | None = None,
) -> tuple[Tensor, Tensor]:
    """See `reference.attend_tokens`: same arguments, same result. CUDA tensors go through Triton."""
    regions: dict[str, Any] = {"scale": scale, "starts": starts, "sink_size": sink_size, "tail_starts": tail_starts,
                               "lengths": lengths}
    if not q.is_cuda:
        return reference.attend_tokens(q, k, v, indices, **regions, rest=rest)
    return launch(q, k, v, indices, **regions, rest=rest)


def attend_buckets(
    q: Tensor, k: Tensor, v: Tensor, order: Tensor, offsets: Tensor, buckets: Tensor, *, scale: float,
    starts: Tensor, sink_size: int, tail_starts: Tensor, lengths: Tensor, rest: PhiRest | None = None,
    copies: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """See `reference.attend_buckets`: same arguments, same result. On CUDA the bucket lists are read by the kernel
    itself, so nothing waits for the host. copies: keys and values `[B, Hkv, M, d]` in the order of `order`, read
    instead of the rows it names."""
    regions: dict[str, Any] = {"scale": scale, "starts": starts, "sink_size": sink_size, "tail_starts": tail_starts,
                               "lengths": lengths}
    if not q.is_cuda:
        return reference.attend_buckets(q, k, v, order, offsets, buckets, **regions, rest=rest)
    return launch(q, k, v, order, offsets, buckets, **regions, rest=rest, copies=copies)


def routed_attention(
    q: Tensor, k: Tensor, v: Tensor, order: Tensor, offsets: Tensor, counts: Tensor, probes: int, *,
    weights: RouterWeights | None = None, means: BucketMeans | None = None, q_router: Tensor | None = None,
    scale: float, starts: Tensor, sink_size: int, tail_starts: Tensor, lengths: Tensor,
    phi: tuple[FeatureMapWeights, Tensor, PhiStore] | None = None, copies: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`route` and `attend_buckets` as one step: `(out, lse, buckets)`.

    q_router `[B, Hq, d]`: the query in the router's space, where that is not q's. phi: maps of the queries, offset
    `[Hq]` and the request's store complete the step by what was not read; the query's features are computed on a second
    stream beside the router.
    """
    query = q if q_router is None else q_router
    regions: dict[str, Any] = {"scale": scale, "starts": starts, "sink_size": sink_size, "tail_starts": tail_starts,
                               "lengths": lengths}
    rest: PhiRest | None = None
    if not q.is_cuda:
        chosen = reference.route(query, weights, k.shape[1], probes, counts, means=means, q_means=q)
        if phi is not None:
            rest = phi_query(q, *phi)
        return *reference.attend_buckets(q, k, v, order, offsets, chosen, **regions, rest=rest), chosen
    main, side = torch.cuda.current_stream(q.device), _side_stream(q.device)
    if phi is not None:
        side.wait_stream(main)
        with torch.cuda.stream(side):
            rest = phi_query(q, *phi)
    chosen = launch_route(query, weights, k.shape[1], probes, counts, means, q)
    if phi is not None:
        main.wait_stream(side)
    return *launch(q, k, v, order, offsets, chosen, **regions, rest=rest, copies=copies, overlap=phi is None), chosen


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def launch(
    q: Tensor, k: Tensor, v: Tensor, tokens: Tensor, offsets: Tensor | None = None, buckets: Tensor | None = None, *,
    scale: float, starts: Tensor, sink_size: int, tail_starts: Tensor, lengths: Tensor, rest: PhiRest | None = None,
    copies: tuple[Tensor, Tensor] | None = None, overlap: bool = False,
) -> tuple[Tensor, Tensor]:
    """Both doors through Triton: `tokens` is the list itself, or, with `offsets` and `buckets`, the CSR's order.
    overlap: the kernel ahead in the stream is `route`'s last."""
    from sparsekv.kernels.attend_triton import bucket_kernel, merge_kernel, split_kernel

    batch, heads_q, dim = q.shape
    heads_kv, device = k.shape[1], q.device
    if buckets is None and tokens.shape[1] == heads_q and heads_q != heads_kv:
        # every query head has a list of its own: treat it as a KV head with a group of one
        group = heads_q // heads_kv
        k, v = (x[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2) for x in (k, v))
        if rest is not None and rest.features is not None:
            rest = rest._replace(features=rest.features.repeat_interleave(group, dim=1))
        heads_kv = heads_q
    q, k, v, tokens = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v, tokens))
    lists = [tokens] * 3 if offsets is None or buckets is None else [tokens, offsets, buckets]
    probes = 0 if buckets is None else buckets.shape[2]
    listed_k, listed_v = copies if copies is not None else (k, v)
    by_key = rest is not None and rest.features is not None
    how = configuration("attend_phi" if by_key else "attend", device, rows=batch * heads_kv,
                        group=heads_q // heads_kv, dim=dim, length=k.shape[2], dtype=q.dtype)
    splits = max(1, min(MAX_SPLITS, how["programs"] // (batch * heads_kv)))
    out = torch.empty(batch, heads_q, dim, dtype=q.dtype, device=device)
    lse = torch.empty(batch, heads_q, dtype=torch.float32, device=device)
    partial = torch.empty(batch, heads_q, splits, dim, dtype=torch.float32, device=device)
    partial_lse = torch.empty(batch, heads_q, splits, dtype=torch.float32, device=device)
    partial_rest, partial_mass, features, a, c, whole, base = partial, partial_lse, k, q, lse, lse, lse
    cap = lse if rest is None or rest.cap is None else rest.cap
    rest_parts = splits
    if rest is not None:
        a, c, whole, base = rest[:4]
        if rest.features is not None:
            features = rest.features
        elif rest.bucket_s is not None and buckets is not None:
            rest_parts = probes
        else:
            raise ValueError("a completion needs the features of the keys, or the sums of the buckets that are read")
        partial_rest = torch.empty(batch, heads_q, rest_parts, dim, dtype=torch.float32, device=device)
        partial_mass = torch.empty(batch, heads_q, rest_parts, dtype=torch.float32, device=device)
    pdl: dict[str, Any] = {"launch_pdl": True} if overlaps(device) else {}
    group, width = heads_q // heads_kv, max(16, _power_of_two(dim))
    half = max(8 if by_key else 16, _power_of_two(group))
    split_kernel[(batch * heads_kv, splits)](
        q, k, v, *lists, listed_k, listed_v, features, a, starts, tail_starts, lengths, partial, partial_lse,
        partial_rest, partial_mass, scale, tokens.shape[2], sink_size, heads_kv, q.stride(0), q.stride(1),
        *(x for t in (k, v, listed_k, listed_v) for x in t.stride()[:3]),
        *(x for t in lists for x in t.stride()[:2]), *features.stride()[:3],
        PROBES=probes, PADDED_PROBES=_power_of_two(max(probes, 1)), GROUP=group, HALF=half,
        ROWS=2 * half if by_key else half, DIM=dim, WIDTH=width, FEATURES=features.shape[-1], PHI=by_key,
        COPIES=copies is not None, OVERLAP=bool(pdl), BLOCK=how["block"], num_warps=how["warps"],
        num_stages=1, **(pdl if overlap else {}))
    if rest is not None and not by_key:
        assert rest.bucket_s is not None and rest.bucket_z is not None and buckets is not None
        count = a.shape[-1]
        bucket_kernel[(batch * heads_kv, probes)](
            buckets, a, rest.bucket_z, rest.bucket_s, partial_rest, partial_mass, heads_kv, rest.bucket_z.shape[2], dim,
            count, buckets.stride(0), buckets.stride(1), PROBES=probes, GROUP=group, ROWS=max(16, _power_of_two(group)),
            DIM=width, FEATURES=max(16, _power_of_two(count)), OVERLAP=bool(pdl), num_warps=SUM_WARPS, **pdl)
    columns = min(width, how["merge_width"])
    merge_kernel[(batch * heads_q, width // columns)](
        partial, partial_lse, partial_rest, partial_mass, c, whole, base, cap, out, lse, reference.REST_EPS,
        out.stride(0), out.stride(1), heads_q, splits, rest_parts, PADDED=_power_of_two(splits),
        PADDED_REST=_power_of_two(rest_parts), DIM=dim, WIDTH=columns, PHI=rest is not None, CAPPED=cap is not lse,
        OVERLAP=bool(pdl), num_warps=how["merge_warps"], **pdl)
    return out, lse


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
