"""Keys that share hash tables with a query: who is sampled by MagicPIG (Chen et al. 2024, §4).

A program compares a block of keys of one KV head with up to `QUERIES_AT_ONCE` of the head's queries: a decode step
reads the codes from memory once, and neither comparisons nor counts are ever written.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparsekv.kernels.launch import power_of_two

TABLES_AT_ONCE = 32
QUERIES_AT_ONCE, PAIRS, KEYS_AT_ONCE, WIDTH, WARPS = 8, 64, 32, 16, 1


def collisions(codes: Tensor, queries: Tensor, *, least: int = 2) -> Tensor:
    """Whether at least `least` of L hash tables hold key and query in the same bucket (MagicPIG, Chen et al. 2024, §4).

    codes `[B, Hkv, N, L]` and queries `[B, Hq, T, L]` int16, with any strides: the buckets of keys and queries; query
    head h looks at KV head `h // (Hq // Hkv)`. Returns bool `[B, Hq, T, N]`.
    """
    meet = launch_collisions if codes.is_cuda else collisions_reference
    return meet(codes, queries, least=least)


def collisions_reference(codes: Tensor, queries: Tensor, *, least: int = 2) -> Tensor:
    """The plain-torch truth of `collisions`; it holds the comparisons of one KV head and `TABLES_AT_ONCE` tables."""
    batch, heads, length, tables = codes.shape
    group = queries.shape[1] // heads
    out = torch.empty(*queries.shape[:3], length, dtype=torch.bool, device=codes.device)
    for h in range(heads):
        own = slice(h * group, (h + 1) * group)
        mine = queries[:, own].flatten(1, 2)
        hits = torch.zeros(batch, mine.shape[1], length, dtype=torch.int16, device=codes.device)
        for t in range(0, tables, TABLES_AT_ONCE):
            some = slice(t, t + TABLES_AT_ONCE)
            hits += (codes[:, h, None, :, some] == mine[:, :, None, some]).sum(-1, dtype=torch.int16)
        out[:, own] = (hits >= least).reshape(out[:, own].shape)
    return out


def launch_collisions(codes: Tensor, queries: Tensor, *, least: int = 2) -> Tensor:
    """`collisions` through Triton."""
    from sparsekv.kernels.collisions_triton import collision_kernel

    batch, heads, length, tables = codes.shape
    group, count = queries.shape[1] // heads, queries.shape[2]
    out = torch.empty(*queries.shape[:3], length, dtype=torch.bool, device=codes.device)
    if not out.numel():
        return out
    rows = min(QUERIES_AT_ONCE, power_of_two(group * count))
    parts, block = -(-group * count // rows), min(KEYS_AT_ONCE, PAIRS // rows)
    # the parts of the queries lie side by side: the later ones find the codes in the L2 cache
    collision_kernel[(batch * heads * parts, -(-length // block))](
        codes, queries, out, heads, parts, group * count, count, length, least, codes.stride(0), codes.stride(1),
        codes.stride(3), *queries.stride(), C_TOKEN=codes.stride(2), STEP=math.gcd(*codes.stride()[:2], 8), GROUP=group,
        TABLES=tables, ROWS=rows, BLOCK=block, WIDTH=WIDTH, num_warps=WARPS)
    return out
