"""The completion by feature maps (completion paper §4 and appendix C): the query's side of one decode step, and what is
left of the estimate once the keys that are read are taken out. `features.py` has the side of the keys."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsekv.kernels.launch import (
    NEG_INF,
    WIDEST,
    acc_dtype,
    as_heads,
    dense_last,
    finite,
    on_device,
    padded,
    power_of_two,
    seats_or,
    shared_bytes,
)
from sparsekv.kernels.types import CompletionQuery, FeatureMapWeights, PhiCache, PhiState, ScoreMoments

RANK = 16
"""Rows in which the covariance of the keys is kept."""
QUERY_PROGRAMS, QUERY_ROWS, QUERY_WARPS = 128, 16, 8
"""Programs wanted, the most queries of one of them, and its warps: they run beside the selection and must leave it
room."""
FACTOR_WARPS = 4
LN_2 = 0.6931471805599453
REST_EPS = 1e-5
"""What is left of an estimate is dropped below this part of it: it is rounding error."""
BESIDE_BYTES = 10_240
"""Shared memory that the query kernel wants beside the widest matrix of a map, which it holds whole."""


def log_phi(x: Tensor, maps: FeatureMapWeights) -> Tensor:
    """`log φ(x)`: x `[..., H, T, d]` with RoPE -> `[..., H, T, r]`.

    Stem `h = gelu(W_in x + b)`, ReZero blocks `h + α·W_b gelu(W_a h + b_a)`, as many as the weights have, output
    `φ = exp(W_out h + b_out)`, of which the logarithm is kept.
    """
    x = x.to(maps.w_in.dtype)
    h = F.gelu(x @ maps.w_in + maps.b_in[..., None, :], approximate="tanh")
    width = h.shape[-1]
    for block in range(maps.alpha.shape[-1]):
        rows = slice(block * width, (block + 1) * width)
        inner = F.gelu(h @ maps.w_a[..., rows, :] + maps.b_a[..., None, rows], approximate="tanh")
        h = h + inner @ (maps.alpha[..., block, None, None] * maps.w_b[..., rows, :])
    return h @ maps.w_out + maps.b_out[..., None, :]


def log_phi_key(x: Tensor, maps: FeatureMapWeights) -> Tensor:
    """`log φ(x)` of a map of keys: x `[..., H, N, d]` with RoPE -> `[..., H, N, r]`. With blocks it is the paper's,
    `log_phi`. Without, `W_out relu(W_in x + b_in) + b_out`: no exponentials, because a step runs it for every key that
    it reads (ours, not the paper's)."""
    if maps.alpha.shape[-1]:
        return log_phi(x, maps)
    h = F.relu(x.to(maps.w_in.dtype) @ maps.w_in + maps.b_in[..., None, :])
    return h @ maps.w_out + maps.b_out[..., None, :]


def add_centre(log_phi_q: Tensor, queries: Tensor, centre: Tensor | None) -> Tensor:
    """`log φ_q [..., Hq, T, r]` with `q · centre` added to the second half of the features: queries `[..., Hq, T, d]`,
    centre `[..., Hkv, d]`, the mean key times the softmax scale, so that `exp(scale · q·k̄)` is exact. None adds
    nothing."""
    if centre is None:
        return log_phi_q
    group = queries.shape[-3] // centre.shape[-2]
    shift = torch.einsum("...td,...d->...t", queries.to(centre.dtype), centre.repeat_interleave(group, dim=-2))
    half = log_phi_q.shape[-1] // 2
    return torch.cat([log_phi_q[..., :half], log_phi_q[..., half:] + shift[..., None].to(log_phi_q.dtype)], dim=-1)


def phi_query(
    q: Tensor, maps: FeatureMapWeights, offset: Tensor, state: PhiState, seats: Tensor | None = None,
) -> CompletionQuery:
    """Make the query's side of a completed step (completion paper §4.4). One launch on CUDA.

    Args:
        q: `[Q, Hq, d]`, with RoPE.
        maps: of the query heads, leading dimension `Hq`.
        offset: `[Hq]` or `[Q, Hq]`, added to `log φ_q`; with seats `[B, Hq]`.
        state: the request's cache of sums.
        seats: `[Q]` int64, the rows of state and offset that are the queries', where these are kept by seat.

    Returns:
        A `CompletionQuery` without `keys`.
    """
    if on_device(q) and maps.w_in.dtype == q.dtype and fits(q, maps):
        return launch_query(q, maps, offset, state, seats)
    return phi_query_reference(q, maps, offset, state, seats)


def fits(q: Tensor, maps: FeatureMapWeights) -> bool:
    """Return whether the query kernel can hold the widest matrix of the maps. Of width 256 it takes 137 KiB in half
    precision: sm_86 and sm_89 have 99."""
    width, features = (padded(n) for n in maps.w_out.shape[-2:])
    whole = width * max(width, features, padded(q.shape[-1])) * q.element_size() + BESIDE_BYTES
    return max(width, features) * q.element_size() <= WIDEST and whole <= shared_bytes(q.device)


def phi_query_reference(
    q: Tensor, maps: FeatureMapWeights, offset: Tensor, state: PhiState, seats: Tensor | None = None,
) -> CompletionQuery:
    """`phi_query` in plain torch."""
    if seats is not None:
        found = phi_query_reference(q, maps, offset[seats], state_of(state, seats))
        return found._replace(seats=seats)
    count, heads_q, _ = q.shape
    batch, heads_kv, width = state.m.shape
    by_row = q.reshape(batch, -1, heads_q, q.shape[-1]).transpose(1, 2)
    logs = add_centre(log_phi(by_row, maps), by_row, state.centre).transpose(1, 2).reshape(count, heads_q, width)
    shift = finite(state.m).repeat_interleave(count // batch, dim=0).repeat_interleave(heads_q // heads_kv, dim=1)
    logs = logs + offset[..., None] + LN_2 * shift
    log_scale = logs.amax(-1)
    features = torch.exp(logs - finite(log_scale)[..., None]).to(q.dtype)
    # rounded before it is used, so that the whole and the parts taken out of it agree
    exact = features.to(state.z.dtype).reshape(batch, count // batch, heads_kv, -1, width)
    mass = torch.einsum("bthgr,bhr->bthg", exact, state.z).reshape(count, heads_q)
    numerator = torch.einsum("bthgr,bhrd->bthgd", exact, state.s).reshape(count, heads_q, -1)
    cap = None if state.moments is None else moments_cap(q, state.moments, offset)
    return CompletionQuery(features, log_scale, mass, numerator, cap)


def state_of(state: PhiState, seats: Tensor) -> PhiState:
    """The rows of a state `[Q]` that are chosen."""
    moments = None if state.moments is None else ScoreMoments(*(x[seats] for x in state.moments))
    m, z, s = (x[seats] for x in state[:3])
    return PhiState(m, z, s, None if state.centre is None else state.centre[seats], moments)


class QueryOutputs(NamedTuple):
    """The output of the query kernel, as in `CompletionQuery`."""

    features: Tensor
    log_scale: Tensor
    mass: Tensor
    numerator: Tensor
    cap: Tensor


def launch_query(
    q: Tensor, maps: FeatureMapWeights, offset: Tensor, state: PhiState, seats: Tensor | None = None,
) -> CompletionQuery:
    """`phi_query` through Triton."""
    from sparsekv.kernels.completion_triton import query_kernel

    q, offset = dense_last(q), offset.contiguous()
    count, heads_q, dim = q.shape
    width, features = maps.w_out.shape[-2:]

    def fresh(*shape: int) -> Tensor:
        return torch.empty(count, heads_q, *shape, dtype=torch.float32, device=q.device)

    found = torch.empty(count, heads_q, features, dtype=q.dtype, device=q.device)
    log_scale, mass, numerator = fresh(), fresh(), fresh(dim)
    cap = None if state.moments is None else fresh()
    moments = ScoreMoments(*((mass,) * 5 if state.moments is None else (x.contiguous() for x in state.moments)))
    rank = 1 if state.moments is None else state.moments.factors.shape[2]
    together = min(QUERY_ROWS, max(1, -(-count * heads_q // QUERY_PROGRAMS)))
    outputs = QueryOutputs(found, log_scale, mass, numerator, mass if cap is None else cap)
    query_kernel[(-(-count // together) * heads_q,)](
        as_heads(q), FeatureMapWeights(*(w.contiguous() for w in maps)), offset,
        PhiCache(*(x.contiguous() for x in state[:3])), state.m if state.centre is None else state.centre.contiguous(),
        moments, seats_or(seats, mass), outputs, count, heads_q, state.m.shape[1],
        1 if seats is not None else count // state.m.shape[0], together,
        heads_q if offset.dim() == 2 else 0, dim, width, features, rank,
        CENTRED=state.centre is not None, CAPPED=cap is not None, RANK=power_of_two(rank), ROWS=QUERY_ROWS,
        BLOCKS=maps.alpha.shape[-1], DIM=padded(dim), WIDTH=padded(width), FEATURES=padded(features),
        SEATED=seats is not None, num_warps=QUERY_WARPS)
    return CompletionQuery(found, log_scale, mass, numerator, cap, seats=seats)


def remainder(query: CompletionQuery, key_features: Tensor, values: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
    """Take the tokens that are read out of the estimate of the mid region: one more partial attention.

    Args:
        query: of `phi_query`.
        key_features: `[Q, H, K, r]` of the tokens, `H` dividing `Hq`.
        values: `[Q, H, K, d]` of the tokens.
        used: `[Q, H, K]` bool, false = padding.

    Returns:
        `(out [Q, Hq, d], lse [Q, Hq])`, at most `query.cap`; nothing where what is left is rounding error.
    """
    count, heads, _, width = key_features.shape
    acc = acc_dtype(query.features)
    features = query.features.to(acc).reshape(count, heads, -1, width)
    # what is not used may exceed any number: a key that was never summed
    return rest_of(query, (features @ key_features.to(acc).mT).masked_fill(~used[:, :, None], 0.0), values)


def rest_of(query: CompletionQuery, taken: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Compute what is left of an estimate when those of the tokens read, taken `[Q, H, G, K]` with values `[Q, H, K,
    d]`, are out of it: `(out [Q, Hq, d], lse [Q, Hq])`."""
    acc = taken.dtype
    mass = query.mass.to(acc)
    left = mass - taken.sum(-1).flatten(1)
    out = query.numerator.to(acc) - (taken @ values.to(acc)).flatten(1, 2)
    live = left > (REST_EPS if acc == torch.float32 else REST_EPS**2) * mass
    safe = torch.where(live, left, 1.0)
    lse = torch.where(live, safe.log() + query.log_scale.to(acc), NEG_INF)
    if query.cap is not None:
        lse = torch.minimum(lse, query.cap.to(acc))
    return torch.where(live[..., None], out / safe[..., None], 0.0), lse


def read_bound(share: Tensor) -> Tensor:
    """Find where the best `share` of a standard normal distribution begins; infinite for none."""
    return torch.special.ndtri(1 - share.clamp(0.0, 0.999))


def mass_cap(mean: Tensor, variance: Tensor, size: Tensor, bound: Tensor) -> Tensor:
    """Bound `log Σ exp(s)` over `size` keys less the best ones: by what it were, had the scores the normal distribution
    of their mean and variance (the mass of a log-normal one below `bound`, in standard deviations from the mean). This
    project's own: on texts unlike the training text a map may overestimate all keys of a query many times.

    Args: any shapes that broadcast. Returns infinity where nothing is read, since a few best keys then hold most of the
    mass.
    """
    expected = size.log() + mean + variance / 2 + torch.special.log_ndtr(bound - variance.clamp(min=0).sqrt())
    return torch.where(torch.isinf(bound), torch.inf, expected)


def moments_cap(q: Tensor, moments: ScoreMoments, offset: Tensor) -> Tensor:
    """`mass_cap` of the mid region for queries `[Q, Hq, d]`, offset `[Hq]` or `[Q, Hq]` added: `[Q, Hq]`."""
    acc = acc_dtype(q)
    batch, heads = moments.key.shape[:2]
    query = q.to(acc).reshape(batch, q.shape[0] // batch, heads, -1, q.shape[-1])
    mean = torch.einsum("bthgd,bhd->bthg", query, moments.key.to(acc))
    along = torch.einsum("bthgd,bhpd->bthgp", query, moments.factors.to(acc))
    variance = along.square().sum(-1) + torch.einsum("bthgd,bhd->bthg", query.square(), moments.rest.to(acc))
    size, bound = (x.to(acc).reshape(batch, 1, 1, 1) for x in (moments.size, moments.bound))
    moved = offset.expand(q.shape[:2]).reshape(mean.shape)
    return mass_cap(mean + moved, variance, size, bound).reshape(q.shape[:2])


def factored(covariance: Tensor, rank: int = RANK) -> tuple[Tensor, Tensor]:
    """Factor a covariance by Cholesky steps on the largest variance that is left.

    Args:
        covariance: `[..., d, d]`.
        rank: rows ρ.

    Returns:
        rows `[..., ρ, d]` and the variances after them `[..., d]`: `rowsᵀ rows + diag(left)`, its diagonal exact.
    """
    return (launch_factored if on_device(covariance) else factored_reference)(covariance, rank)


def factored_reference(covariance: Tensor, rank: int = RANK) -> tuple[Tensor, Tensor]:
    """`factored` in plain torch."""
    left = covariance.diagonal(dim1=-2, dim2=-1).clone()
    least = 1e-6 * left.amax(-1, keepdim=True)
    rows = covariance.new_zeros(*left.shape[:-1], min(rank, left.shape[-1]), left.shape[-1])
    for step in range(rows.shape[-2]):
        pivot = left.argmax(-1, keepdim=True)
        where = pivot[..., None]
        row = covariance.gather(-2, where.expand(*pivot.shape, left.shape[-1]))[..., 0, :]
        row = row - (rows.gather(-1, where.expand(*rows.shape[:-1], 1)) * rows).sum(-2)
        size = left.gather(-1, pivot)
        row = torch.where(size > least, row / size.clamp(min=1e-30).sqrt(), 0.0)
        rows[..., step, :] = row
        left = (left - row.square()).clamp(min=0)
    return rows, left


def launch_factored(covariance: Tensor, rank: int = RANK) -> tuple[Tensor, Tensor]:
    """`factored` through Triton: one launch for its ten and more a step."""
    from sparsekv.kernels.completion_triton import factor_kernel

    covariance = covariance.contiguous()
    *some, dim, _ = covariance.shape
    rank = min(rank, dim)
    rows, left = (torch.empty(*some, *s, dtype=torch.float32, device=covariance.device) for s in ((rank, dim), (dim,)))
    if left.numel():
        factor_kernel[(left.numel() // dim,)](covariance, rows, left, dim, rank, DIM=power_of_two(dim),
                                              RANK=power_of_two(rank), num_warps=FACTOR_WARPS)
    return rows, left
