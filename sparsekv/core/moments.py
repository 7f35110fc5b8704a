"""Statistics of the keys of a mid region, of every row its own, a block of tokens at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from sparsekv.kernels import away_from, products
from sparsekv.kernels.launch import acc_dtype, product_dtype

KeysAt = Callable[[int, int], Tensor]
"""Keys `[B, Hkv, n, d]` of the tokens first … last − 1, wherever they lie."""
BLOCK, DEVICE_BLOCK = 4096, 32_768
"""Tokens that are taken at once on a CPU and on a CUDA device."""


def edges_of(first: Tensor, last: Tensor) -> list[int]:
    """Smallest and largest `first`, smallest and largest `last` of all rows, 0 without rows; waits for the device."""
    if not first.numel():
        return [0, 0, 0, 0]
    return torch.stack([first.min(), first.max(), last.min(), last.max()]).tolist()


def blocks(first: Tensor, last: Tensor, edges: list[int] | None = None) -> Iterator[tuple[slice, Tensor | None]]:
    """Iterate over token blocks that cover every row, at least one, if empty: yields a slice and the mask
    `[B, 1, n, 1]` of `first[b] <= i < last[b]`, None where all count (`counted`). edges: `edges_of` first and last,
    where known."""
    edges = edges_of(first, last) if edges is None else edges
    low, high = edges[0], edges[3]
    size = DEVICE_BLOCK if first.is_cuda else BLOCK  # there a block is a handful of launches, whatever its size
    for a in range(low, high, size) or [low]:
        b = max(a, min(a + size, high))
        if edges[1] <= a and b <= edges[2]:
            yield slice(a, b), None
            continue
        positions = torch.arange(a, b, device=first.device)
        inside = (positions >= first[:, None]) & (positions < last[:, None])
        yield slice(a, b), inside[:, None, :, None]


def counted(x: Tensor, inside: Tensor | None) -> Tensor:
    """x `[B, H, n, ...]` of one of the `blocks`, with zero where a token does not count."""
    return x if inside is None else x.masked_fill(~inside, 0.0)


def all_of(keys: Tensor) -> KeysAt:
    """The keys of a tensor `[B, Hkv, N, d]` by place."""
    return lambda first, last: keys[:, :, first:last]


def key_mean(keys_at: KeysAt, first: Tensor, last: Tensor, edges: list[int] | None = None) -> Tensor:
    """Mean `[B, Hkv, d]`, float32 at least, of the keys with `first[b] <= i < last[b]`; zero where there are none."""
    parts = (counted(keys_at(block.start, block.stop), inside) for block, inside in blocks(first, last, edges))
    total = sum(x.sum(2, dtype=acc_dtype(x)) for x in parts)
    return total / (last - first).clamp(min=1)[:, None, None]


def key_covariance(
    keys_at: KeysAt, first: Tensor, last: Tensor, mean: Tensor, edges: list[int] | None = None,
) -> Tensor:
    """Covariance `[B, Hkv, d, d]` of the same keys around their `mean`, from which they are taken before they are
    multiplied: keys lie far from zero."""
    total = torch.zeros(*mean.shape, mean.shape[-1], device=mean.device, dtype=mean.dtype)
    for block, inside in blocks(first, last, edges):
        keys = keys_at(block.start, block.stop)
        away = counted(away_from(keys, mean, product_dtype(keys)), inside)
        total += products(away, away)
    return total / (last - first).clamp(min=1)[:, None, None, None]
