"""The tokens that a chunk of a prompt reads: one list a KV head for all of the chunk's queries.

Some representatives ask every key before the chunk, each with a softmax of its own; a key's score is the sum of what
they give it, the attention that would be lost without it. The best are found by the bins of a histogram
(`histogram.py`). Nothing waits for the host. This project's own; TokenSelect §5.2 has one mean query a chunk and one
list for all heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsekv.kernels.histogram import best_tokens_reference, bins_of
from sparsekv.kernels.launch import acc_dtype, as_tokens, at_once, dense_last, on_device, padded
from sparsekv.kernels.sketch import Binned, histogram_size, launch_select

KEYS_AT_ONCE, WARPS, PROGRAMS = 128, 8, 528
"""Keys of a block, warps of a program, and programs wanted."""
WIDEST = 256
"""Bytes of a key up to which so many are taken at once."""
MOST_REPRESENTATIVES = 128
"""Representatives of a KV head that the kernels take."""


def chunk_tokens(representatives: Tensor, k: Tensor, first: int, last: int, count: int, *, scale: float) -> Tensor:
    """The `count` tokens of `first … last − 1` with the largest sums of softmax over the representatives, of one bin
    those that stand first, in ascending order: `[B, Hkv, count]` int32.

    representatives `[B, Hkv, R, d]`, R up to `MOST_REPRESENTATIVES`, and k `[B, Hkv, N, d]`, both with RoPE; count at
    most `last − first`.
    """
    choose = launch_chunk_tokens if on_device(k) else chunk_tokens_reference
    return choose(representatives, k, first, last, count, scale=scale)


def chunk_tokens_reference(
    representatives: Tensor, k: Tensor, first: int, last: int, count: int, *, scale: float,
) -> Tensor:
    """`chunk_tokens` in plain torch."""
    acc = acc_dtype(k)
    scores = (representatives.to(acc) @ k[:, :, first:last].to(acc).mT * scale).softmax(-1).sum(2)
    budget = torch.full((k.shape[0],), count, device=k.device)
    return best_tokens_reference(bins_of(scores), None, budget, count) + first


def representatives(q: Tensor, heads_kv: int) -> Tensor:
    """Means of runs of neighbouring queries of a chunk `[B, Hq, c, d]`, as many a query head as the kernels take of a
    KV head: `[B, Hkv, R, d]`. A last run that is too short is filled with its last query."""
    batch, heads_q, count, dim = q.shape
    group = heads_q // heads_kv
    runs = 1
    while 2 * runs * group <= MOST_REPRESENTATIVES and 2 * runs <= count:
        runs *= 2
    missing = -count % runs
    if missing:
        q = torch.cat([q, q[:, :, -1:].expand(-1, -1, missing, -1)], dim=2)
    means = q.unflatten(2, (runs, -1)).mean(3, dtype=acc_dtype(q))
    return means.to(q.dtype).reshape(batch, heads_kv, group * runs, dim)


def launch_chunk_tokens(
    representatives: Tensor, k: Tensor, first: int, last: int, count: int, *, scale: float,
) -> Tensor:
    """`chunk_tokens` through Triton: the mass of every representative, the bins of the keys, the selection."""
    from sparsekv.kernels.chunk_tokens_triton import bins_kernel, masses_kernel

    k, asking = dense_last(k), representatives.contiguous()
    batch, heads, number, dim = asking.shape
    width, device = last - first, k.device
    if number > MOST_REPRESENTATIVES:
        raise ValueError(f"at most {MOST_REPRESENTATIVES} representatives of a KV head, found {number}")
    rows = padded(number)
    block = at_once(KEYS_AT_ONCE, padded(dim) * k.element_size(), WIDEST)
    parts = max(1, min(PROGRAMS // (batch * heads), -(-width // block)))
    tops, masses = (torch.empty(batch, heads, parts, number, dtype=torch.float32, device=device) for _ in range(2))
    bins = torch.empty(batch, heads, width, dtype=torch.uint8, device=device)
    histogram = torch.zeros(batch, heads, histogram_size(width, count), dtype=torch.int32, device=device)
    if not width or not count:
        return torch.empty(batch, heads, count, dtype=torch.int32, device=device)
    sizes = (first, width, -(-width // parts), heads, number)
    how = {"ROWS": rows, "BLOCK": block, "DIM": dim, "WIDTH": padded(dim), "num_warps": WARPS}
    masses_kernel[(batch * heads, parts)](asking, as_tokens(k), tops, masses, scale, *sizes, **how)
    lse = torch.logsumexp(tops + masses.clamp(min=1e-30).log(), 2)
    bins_kernel[(batch * heads, parts)](
        asking, as_tokens(k), lse, bins, histogram, scale, count, histogram.shape[2], *sizes, **how)
    return launch_select(Binned(bins, None, None, histogram), count).add_(first)
