"""The tokens that chunks of a prompt read: one list a KV head for all of a chunk's queries. Chunks that stand one
behind the other and read as many tokens each are rows of one call.

Some representative queries attend to every key before the chunk, each with a softmax of its own. A key's score is the
sum of the attention that it gets from them: what would be lost without it. The best are found by the bins of a
histogram (`histogram.py`). Nothing waits for the host. This project's own; TokenSelect §5.2 has one mean query a chunk
and one list for all heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsekv.kernels.histogram import best_tokens_reference, bins_of
from sparsekv.kernels.launch import acc_dtype, as_tokens, at_once, dense_last, on_device, padded
from sparsekv.kernels.sketch import Binned, histogram_size, launch_select

KEYS_AT_ONCE, WARPS, PROGRAMS = 128, 4, 528
"""Keys of a block, warps of a program, and programs wanted."""
WIDEST = 256
"""Bytes of a key up to which so many are taken at once."""
MASSES_AT_ONCE = 16
"""Slices whose masses a program adds at once."""
MOST_REPRESENTATIVES = 128
"""Representatives of a KV head that the kernels take."""


def chunk_tokens(
    representatives: Tensor, k: Tensor, first: int, last: int, count: int, *, scale: float, step: int = 0,
) -> Tensor:
    """The `count` tokens of `first … last − 1` with the largest sums of softmax over the representatives, of one bin
    those that stand first, in ascending order: `[B·n, Hkv, count]` int32. Of the chunks of a row each has `step` more
    candidates than the one before it.

    representatives `[B·n, Hkv, R, d]`, R up to `MOST_REPRESENTATIVES`, and k `[B, Hkv, N, d]`, both with RoPE; count at
    most `last − first`.
    """
    choose = launch_chunk_tokens if on_device(k) else chunk_tokens_reference
    return choose(representatives, k, first, last, count, scale=scale, step=step)


def chunk_tokens_reference(
    representatives: Tensor, k: Tensor, first: int, last: int, count: int, *, scale: float, step: int = 0,
) -> Tensor:
    """`chunk_tokens` in plain torch, one chunk of all rows after the other."""
    acc, chunks = acc_dtype(k), len(representatives) // len(k)
    budget = torch.full((len(k),), count, device=k.device)
    lists = []
    for i in range(chunks):
        keys = k[:, :, first:last + i * step].to(acc)
        scores = (representatives[i::chunks].to(acc) @ keys.mT * scale).softmax(-1).sum(2)
        lists.append(best_tokens_reference(bins_of(scores), None, budget, count) + first)
    return torch.stack(lists, dim=1).flatten(0, 1)


def representatives(q: Tensor, heads_kv: int) -> Tensor:
    """Means of runs of neighbouring queries of chunks `[Q, Hq, c, d]`, as many a query head as the kernels take of a
    KV head: `[Q, Hkv, R, d]`. A last run that is too short is filled with its last query."""
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
    representatives: Tensor, k: Tensor, first: int, last: int, count: int, *, scale: float, step: int = 0,
) -> Tensor:
    """`chunk_tokens` through Triton: the mass of every representative, the bins of the keys, the selection."""
    from sparsekv.kernels.chunk_tokens_triton import bins_kernel, masses_kernel

    k, asking = dense_last(k), representatives.contiguous()
    total, heads, number, dim = asking.shape
    chunks, device = total // k.shape[0], k.device
    width = last - first + (chunks - 1) * step
    if number > MOST_REPRESENTATIVES:
        raise ValueError(f"at most {MOST_REPRESENTATIVES} representatives of a KV head, found {number}")
    if not width or not count:
        return torch.empty(total, heads, count, dtype=torch.int32, device=device)
    block = at_once(KEYS_AT_ONCE, padded(dim) * k.element_size(), WIDEST)
    parts = max(1, min(PROGRAMS // (total * heads), -(-width // block)))
    tops, masses = (torch.empty(total, heads, parts, number, dtype=torch.float32, device=device) for _ in range(2))
    # of chunks with fewer candidates than the last the others are none: bin 0
    bins = (torch.empty if chunks == 1 else torch.zeros)(total, heads, width, dtype=torch.uint8, device=device)
    histogram = torch.zeros(total, heads, histogram_size(width, count), dtype=torch.int32, device=device)
    sizes = (first, last - first, step, heads, chunks, number)
    how = {"ROWS": padded(number), "BLOCK": block, "DIM": dim, "WIDTH": padded(dim), "num_warps": WARPS}
    masses_kernel[(total * heads, parts)](asking, as_tokens(k), tops, masses, scale, *sizes, **how)
    bins_kernel[(total * heads, parts)](
        asking, as_tokens(k), tops, masses, bins, histogram, scale, count, width, histogram.shape[2], *sizes,
        SLICES=MASSES_AT_ONCE, **how)
    return launch_select(Binned(bins, None, None, histogram), count).add_(first)
