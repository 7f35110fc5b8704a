"""Attention of captured queries over sink and tail alone: the exact part beside which feature maps are trained."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsekv.trainers.pool import Pool

ELEMENTS_AT_ONCE = 50_000_000


def anchor_attention(pool: Pool) -> tuple[Tensor, Tensor]:
    """Partial attention `(out [D, Lq, T, d], lse [D, Lq, T])` of every captured query over the first `sink_size` keys
    and the last `window_size` up to its own position, out in the pool's dtype, lse in float32."""
    documents, heads_q, count, dim = pool.queries.shape
    out = torch.empty_like(pool.queries)
    lse = torch.empty(documents, heads_q, count, device=out.device)
    width = pool.sink_size + pool.window_size
    step = max(1, ELEMENTS_AT_ONCE // (heads_q * width * dim))
    sink = torch.arange(pool.sink_size, device=out.device)
    back = torch.arange(pool.window_size, device=out.device)
    for document in range(documents):
        for first in range(0, count, step):
            some = slice(first, first + step)
            place = pool.positions[document, :, some, None].long()
            tail = place - back
            columns = torch.cat([sink.expand(*tail.shape[:2], -1), tail], -1)
            seen = torch.cat([sink <= place, tail >= pool.sink_size], -1)
            grouped = columns.clamp(min=0).reshape(pool.heads_kv, -1, 1).expand(-1, -1, dim)
            keys, values = (x[document].gather(1, grouped).reshape(*columns.shape, dim).float()
                            for x in (pool.keys, pool.values))
            queries = pool.queries[document, :, some].float()
            scores = torch.einsum("htd,htwd->htw", queries, keys) * pool.scale
            scores = scores.masked_fill(~seen, float("-inf"))
            lse[document, :, some] = scores.logsumexp(-1)
            out[document, :, some] = torch.einsum("htw,htwd->htd", scores.softmax(-1), values).to(out.dtype)
    return out, lse
