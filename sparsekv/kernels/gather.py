"""Keys and values gathered row by row, attention over what was gathered, and the merge of partial attentions."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsekv.kernels.launch import NEG_INF, acc_dtype, finite, power_of_two

HOST_BLOCK = 16


def gather_rows(x: Tensor, index: Tensor, *, pinned: bool = False) -> Tensor:
    """`x[b, h, index[q, h, :]]` with `b = q // T`: x `[B, H, N, d]` with any strides, index `[Q, H, K]` ≥ 0
    -> `[Q, H, K, d]`, in page-locked memory if `pinned`."""
    batch, heads, _, dim = x.shape
    sb, sh, sn, _ = x.stride()
    per_row = index.shape[0] // batch
    if x.stride(-1) != 1 or sb % dim or sh % dim or sn % dim or x.shape[2] == 0:
        rows = torch.arange(batch, device=x.device).repeat_interleave(per_row)
        return x[rows[:, None, None], torch.arange(heads, device=x.device)[:, None], index]
    last = (batch - 1) * sb + (heads - 1) * sh + (x.shape[2] - 1) * sn
    flat = x.as_strided((last // dim + 1, dim), (dim, 1), x.storage_offset())
    rows, columns = torch.arange(batch, device=x.device), torch.arange(heads, device=x.device)
    base = (rows[:, None] * (sb // dim) + columns * (sh // dim)).repeat_interleave(per_row, dim=0)
    place = index * (sn // dim) + base[:, :, None] if sn != dim else index + base[:, :, None]
    out = torch.empty(index.numel(), dim, dtype=x.dtype, pin_memory=True) if pinned else None
    return torch.index_select(flat, 0, place.reshape(-1), out=out).view(*index.shape, dim)


def attend_gathered(
    q: Tensor, keys: Tensor, values: Tensor, used: Tensor, scale: float, log_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over rows already gathered: q `[Q, Hq, d]`, keys and values `[Q, H, n, d]` with `H` dividing `Hq`, used
    `[Q, H, n]` false = padding, log_weights `[Q, H, n]` added to the scores.

    Returns `(out [Q, Hq, d], lse [Q, Hq])`.
    """
    count, heads_q, dim = q.shape
    lists, width = keys.shape[1], keys.shape[2]
    acc = acc_dtype(q)
    keys, values = (x.to(acc).reshape(count * lists, width, dim) for x in (keys, values))
    query = q.to(acc).reshape(count * lists, heads_q // lists, dim)
    scores = torch.bmm(query, keys.mT).mul_(scale)
    if log_weights is not None:
        scores += log_weights.to(acc).reshape(count * lists, 1, width)
    scores.masked_fill_(~used.reshape(count * lists, 1, width), NEG_INF)
    if width == 0:
        return q.new_zeros(count, heads_q, dim), scores.new_full((count, heads_q), NEG_INF)
    # weights over their own sum, not over exp(lse): large scores round the logarithm
    top = finite(scores.amax(-1, keepdim=True))
    weights = scores.sub_(top).exp_()
    mass = weights.sum(-1, keepdim=True)
    out = torch.bmm(weights, values) / torch.where(mass > 0, mass, 1.0)
    return out.reshape(count, heads_q, dim).to(q.dtype), (top + mass.log()).reshape(count, heads_q)


def anchor_indices(starts: Tensor, sink_size: int, tail_starts: Tensor, lengths: Tensor) -> Tensor:
    """Tokens of sink and local window of every query, `[Q, n]` int64 padded with -1; each token once."""
    longest = int((lengths - tail_starts).clamp(min=0).max()) if lengths.numel() else 0
    sink = starts[:, None] + torch.arange(sink_size, device=starts.device)
    sink = torch.where(sink < torch.minimum(tail_starts, lengths)[:, None], sink, -1)
    tail = tail_starts[:, None] + torch.arange(longest, device=starts.device)
    tail = torch.where(tail < lengths[:, None], tail, -1)
    return torch.cat([sink, tail], dim=1)


def slots_at(table: Tensor, places: Tensor, page: int) -> Tensor:
    """Slots of tokens by their places: table `[R, blocks]`, places `[R, n]` ≥ 0 -> `[R, n]` int64. Places past the
    table give those of its last block."""
    block = (places // page).clamp(max=table.shape[1] - 1)
    return table.gather(1, block).long() * page + places % page


def merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Combine partial attentions over disjoint sets: outs `[S, ..., d]`, lses `[S, ...]` -> `([..., d], [...])`."""
    lse = torch.logsumexp(lses, dim=0)
    weights = torch.exp(lses - finite(lses.amax(0)))
    mass = weights.sum(0)
    total = (weights[..., None] * outs.to(weights.dtype)).sum(0)
    return (total / torch.where(mass > 0, mass, 1.0)[..., None]).to(outs.dtype), lse


def gather_from_host(source: Tensor, index: Tensor) -> Tensor:
    """`gather_rows` of a page-locked host tensor, read by the GPU itself over the bus: no CPU work, no synchronisation.

    source `[B, H, N, d]`, its last dimension contiguous; index `[Q, H, K]` on the device -> `[Q, H, K, d]` on the
    device. Where index is on the host too it is `gather_rows`.
    """
    return launch_gather(source, index) if index.is_cuda else gather_rows(source, index)


def launch_gather(source: Tensor, index: Tensor) -> Tensor:
    """`gather_from_host` through Triton."""
    from sparsekv.kernels.gather_triton import gather_kernel

    count, heads, width = index.shape
    dim = source.shape[-1]
    out = torch.empty(count, heads, width, dim, dtype=source.dtype, device=index.device)
    if out.numel():
        gather_kernel[(-(-width // HOST_BLOCK), count * heads)](
            source, index.contiguous(), out, width, heads, count // source.shape[0], *source.stride()[:3], DIM=dim,
            WIDTH=power_of_two(dim), BLOCK=HOST_BLOCK)
    return out
