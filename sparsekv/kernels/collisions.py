"""Keys that share hash tables with a query: who is sampled by MagicPIG (Chen et al. 2024, §4)."""

from __future__ import annotations

import torch
from torch import Tensor

TABLES_AT_ONCE = 32


def collisions(codes: Tensor, queries: Tensor, *, least: int = 2) -> Tensor:
    """Return whether at least `least` of L hash tables hold key and query in the same bucket (MagicPIG, Chen et al.
    2024, §4).

    codes `[B, Hkv, N, L]` and queries `[B, Hq, T, L]` int16, with any strides: the buckets of keys and queries; query
    head h looks at KV head `h // (Hq // Hkv)`. Returns bool `[B, Hq, T, N]`. The comparisons of one KV head and
    `TABLES_AT_ONCE` tables are held at once.
    """
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
