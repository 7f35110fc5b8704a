"""The completion of a chunk of a prompt: its queries share what they read, and so the sums of features of what they do
not."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsekv.kernels.attend import merge
from sparsekv.kernels.completion import hidden_phi, phi_query_reference
from sparsekv.kernels.launch import NEG_INF, as_tokens, dense_last, on_device, padded, wide_product
from sparsekv.kernels.types import FeatureMapWeights, PhiCache, PhiState, ScoreMoments

ROWS, WARPS = 64, 8
"""Queries of a program, and its warps."""
COLUMNS = 64
"""Columns of the values that a program takes at once."""


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
    asked = phi_query_reference(q.transpose(1, 2).reshape(-1, heads, dim), maps, moved, left)
    safe = torch.where(asked.mass > 0, asked.mass, 1.0)
    more = torch.where(asked.mass > 0, safe.log() + asked.log_scale, NEG_INF)
    if asked.cap is not None:
        more = torch.minimum(more, asked.cap.to(more.dtype))
    more = more.unflatten(0, (batch, count)).transpose(1, 2)
    rest = (asked.numerator / safe[..., None]).unflatten(0, (batch, count)).transpose(1, 2)
    both, whole = merge(torch.stack([out.to(rest.dtype), rest]), torch.stack([lse, more.to(lse.dtype)]))
    return out.copy_(both), lse.copy_(whole)


def launch_rest(
    out: Tensor, lse: Tensor, q: Tensor, maps: FeatureMapWeights, offset: Tensor, left: PhiState,
) -> tuple[Tensor, Tensor]:
    """`add_rest`: the map by torch's products, what its features make of the sums through Triton."""
    from sparsekv.kernels.chunk_rest_triton import rest_kernel

    batch, heads, count, dim = q.shape
    rows = hidden_phi(q.transpose(0, 1).reshape(heads, batch * count, dim), maps)
    features = maps.w_out.shape[-1]
    logs = wide_product(rows, maps.w_out)
    moments = left.moments
    described = ScoreMoments(*((lse,) * 5 if moments is None else (x.contiguous() for x in moments)))
    rank = 1 if moments is None else moments.factors.shape[2]
    rest_kernel[(batch * heads, -(-count // ROWS))](
        as_tokens(dense_last(q)), logs, maps.b_out.contiguous(), offset.contiguous(),
        PhiCache(*(x.contiguous() for x in left[:3])),
        lse if left.centre is None else left.centre.contiguous(), described, as_tokens(out), lse, heads,
        left.m.shape[1], heads if offset.dim() == 2 else 0, batch,
        1 if left.centre is None else batch // len(left.centre),
        1 if moments is None else batch // len(moments.key), count, rank, features,
        CENTRED=left.centre is not None, CAPPED=moments is not None, RANK=padded(rank), ROWS=ROWS, DIM=dim,
        WIDTH=padded(dim), COLUMNS=min(COLUMNS, padded(dim)), FEATURES=padded(features), num_warps=WARPS)
    return out, lse
