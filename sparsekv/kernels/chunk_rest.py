"""The completion of a chunk of a prompt: its queries share what they read, and so the sums of features of what they do
not."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsekv.kernels.attend import merge
from sparsekv.kernels.completion import hidden_phi, phi_query_reference
from sparsekv.kernels.launch import NEG_INF, as_tokens, dense_last, on_device, padded, shared_bytes, wide_product
from sparsekv.kernels.types import FeatureMapWeights, PhiCache, PhiState, ScoreMoments

ROWS, WARPS = 64, 8
"""Queries of a program, and its warps."""
COLUMNS = 64
"""Columns of the values that a program takes at once."""
MAP_ROWS, MAP_WARPS, INNER = 64, 8, 64
"""Queries of a program that makes their features, its warps, and hidden units of a block at once."""
MAP_BYTES = 8192
"""Shared memory that it wants beside what a program holds of its weights and queries."""


def add_rest(
    out: Tensor, lse: Tensor, q: Tensor, maps: FeatureMapWeights, offset: Tensor, left: PhiState,
) -> tuple[Tensor, Tensor]:
    """Attention of a chunk and what the features estimate of the tokens that it does not read, under one normalisation
    (completion paper §4.4): out `[B, Hq, c, d]` and lse `[B, Hq, c]`, both overwritten, of the queries q alike with
    RoPE; maps of the query heads (leading dimension Hq), offset `[Hq]` or `[B, Hq]` added to log features; left: the
    sums of the tokens that are not read, those of values as means (`phi_left`), and moments of the region that they
    are of. Mean key and moments, all but their size and bound, may be of fewer rows, of as many of these each.

    Returns `(out, lse)`.
    """
    add = launch_rest if on_device(q) and maps.w_in.dtype == q.dtype else add_rest_reference
    return add(out, lse, q, maps, offset, left)


def add_rest_reference(
    out: Tensor, lse: Tensor, q: Tensor, maps: FeatureMapWeights, offset: Tensor, left: PhiState,
) -> tuple[Tensor, Tensor]:
    """`add_rest` in plain torch."""
    batch, heads, count, dim = q.shape
    moved = offset.expand(batch, heads).repeat_interleave(count, dim=0)
    centre, moments = left.centre, left.moments
    if centre is not None:
        centre = centre.repeat_interleave(batch // len(centre), dim=0)
    if moments is not None:
        key, factors, rest = (x.repeat_interleave(batch // len(x), dim=0) for x in moments[:3])
        moments = ScoreMoments(key, factors, rest, moments.size, moments.bound)
    left = PhiState(left.m, left.z, left.s.to(left.z.dtype) * left.z[..., None], centre, moments)
    estimate = phi_query_reference(q.transpose(1, 2).reshape(-1, heads, dim), maps, moved, left)
    safe = torch.where(estimate.mass > 0, estimate.mass, 1.0)
    more = torch.where(estimate.mass > 0, safe.log() + estimate.log_scale, NEG_INF)
    if estimate.cap is not None:
        more = torch.minimum(more, estimate.cap.to(more.dtype))
    more = more.unflatten(0, (batch, count)).transpose(1, 2)
    rest = (estimate.numerator / safe[..., None]).unflatten(0, (batch, count)).transpose(1, 2)
    both, whole = merge(torch.stack([out.to(rest.dtype), rest]), torch.stack([lse, more.to(lse.dtype)]))
    return out.copy_(both), lse.copy_(whole)


def launch_rest(
    out: Tensor, lse: Tensor, q: Tensor, maps: FeatureMapWeights, offset: Tensor, left: PhiState,
) -> tuple[Tensor, Tensor]:
    """`add_rest` through Triton: the log features, then what they make of the sums."""
    from sparsekv.kernels.chunk_rest_triton import rest_kernel

    batch, heads, count, dim = q.shape
    q, features = dense_last(q), maps.w_out.shape[-1]
    stages = map_stages(q, maps)
    logs = launch_logs(q, maps, stages) if stages else product_logs(q, maps)
    moments = left.moments
    described = ScoreMoments(*((lse,) * 5 if moments is None else (x.contiguous() for x in moments)))
    rank = 1 if moments is None else moments.factors.shape[2]
    rest_kernel[(batch * heads, -(-count // ROWS))](
        as_tokens(q), logs, maps.b_out.contiguous(), offset.contiguous(),
        PhiCache(*(x.contiguous() for x in left[:3])),
        lse if left.centre is None else left.centre.contiguous(), described, as_tokens(out), lse, heads,
        left.m.shape[1], heads if offset.dim() == 2 else 0, batch,
        1 if left.centre is None else batch // len(left.centre),
        1 if moments is None else batch // len(moments.key), count, rank, features,
        CENTRED=left.centre is not None, CAPPED=moments is not None, RANK=padded(rank), ROWS=ROWS, DIM=dim,
        WIDTH=padded(dim), COLUMNS=min(COLUMNS, padded(dim)), FEATURES=padded(features), num_warps=WARPS)
    return out, lse


def product_logs(q: Tensor, maps: FeatureMapWeights) -> Tensor:
    """Log features of queries `[B, Hq, c, d]` but for `b_out`, `[Hq, B, c, r]` in float32 at least, by torch's
    products."""
    batch, heads, count, dim = q.shape
    rows = hidden_phi(q.transpose(0, 1).reshape(heads, batch * count, dim), maps)
    return wide_product(rows, maps.w_out).unflatten(1, (batch, count))


def map_bytes(dim: int, width: int, features: int, size: int, stages: int) -> int:
    """Shared memory of a program of `logs_kernel`, by the size of a number and how many parts of the weights are under
    way."""
    dim, width, features = padded(dim), padded(width), padded(features)
    parts = 2 * stages * width * INNER
    ahead = parts if stages > 1 else 0
    return MAP_BYTES + size * max(dim * (width + MAP_ROWS) + ahead, MAP_ROWS * (width + INNER) + parts,
                                  width * (features + MAP_ROWS))


def map_stages(q: Tensor, maps: FeatureMapWeights) -> int:
    """Parts of the weights that are under way to a program of `logs_kernel`; 0 where there is no room for one, no limit
    under the interpreter."""
    room = shared_bytes(q.device) if q.is_cuda else 1 << 30
    width, features = maps.w_out.shape[-2:]
    return next((n for n in (2, 1) if map_bytes(q.shape[3], width, features, q.element_size(), n) <= room), 0)


def launch_logs(q: Tensor, maps: FeatureMapWeights, stages: int) -> Tensor:
    """`product_logs` through Triton, in one launch."""
    from sparsekv.kernels.chunk_rest_triton import logs_kernel

    batch, heads, count, dim = q.shape
    width, features = maps.w_out.shape[-2:]
    logs = torch.empty(heads, batch, count, features, dtype=torch.float32, device=q.device)
    if logs.numel():
        logs_kernel[(-(-count // MAP_ROWS), batch * heads)](
            as_tokens(q), FeatureMapWeights(*(w.contiguous() for w in maps)), logs, heads, batch, count, dim, width,
            features, BLOCKS=maps.alpha.shape[-1], ROWS=MAP_ROWS, INNER=INNER, DIM=padded(dim), WIDTH=padded(width),
            FEATURES=padded(features), num_warps=MAP_WARPS, num_stages=stages)
    return logs
