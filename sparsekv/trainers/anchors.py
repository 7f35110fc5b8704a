"""Attention of captured queries over sink and local window alone, the exact part beside which maps are trained."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsekv.kernels import attend_tokens
from sparsekv.trainers.pool import Pool

AT_ONCE = 512


def anchor_attention(pool: Pool, at_once: int = AT_ONCE) -> tuple[Tensor, Tensor]:
    """Partial attention `(out [D, Lq, T, d], lse [D, Lq, T])` of every captured query over the first `sink_size` keys
    and the last `window_size` up to its own position, out in the pool's dtype, lse in float32; `at_once` queries
    a call."""
    documents, heads_q, count, _ = pool.queries.shape
    out = torch.empty_like(pool.queries)
    lse = torch.empty(documents, heads_q, count, device=out.device)
    for document in range(documents):
        for a in range(0, count, at_once):
            some = slice(a, a + at_once)
            lengths = pool.positions[document, some] + 1
            none = torch.empty(len(lengths), pool.heads_kv, 0, dtype=torch.long, device=out.device)
            found, mass = attend_tokens(
                pool.queries[document, :, some].transpose(0, 1).contiguous(), pool.keys[document:document + 1],
                pool.values[document:document + 1], none, scale=pool.scale, starts=torch.zeros_like(lengths),
                sink_size=pool.sink_size, tail_starts=(lengths - pool.window_size).clamp(min=0), lengths=lengths)
            out[document, :, some], lse[document, :, some] = found.transpose(0, 1), mass.T
    return out, lse
