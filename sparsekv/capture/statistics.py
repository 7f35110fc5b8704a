"""Attention statistics of sampled queries, tile by tile: the largest temporary is `tile × N` scores, never `N × N`."""

from __future__ import annotations

import torch
from torch import Tensor

TILE_ELEMENTS = 16_000_000


def query_statistics(
    queries_rot: Tensor, keys_rot: Tensor, positions: Tensor, *, scale: float, sink_size: int, window_size: int,
) -> dict[str, Tensor]:
    """Where the mass of each query lies.

    queries_rot `[Hq, T, d]` and keys_rot `[Hkv, N, d]` with RoPE; positions `[Hq or 1, T]`: query t attends to the keys
    `0..position`. The sink is the first `sink_size` keys, the tail the last `window_size` up to and including the
    query's own position, the mid region what lies between. Returns, each `[Hq, T]`:

    - `lse`, `lse_mid`: log-sum-exp of the scores over all visible keys and over the mid region (−inf if empty) [nats];
    - `mass_sink`, `mass_tail`, `mass_mid`: shares of the attention, summing to one;
    - `top1_position` (int32), `top1_score`: the best key outside the sink, and its scaled score (−1 and −inf if none);
    - `entropy_mid`: entropy of the attention within the mid region over `log |mid|`, in 0..1.
    """
    heads_q, count, _ = queries_rot.shape
    length = keys_rot.shape[1]
    tile = max(1, min(count, TILE_ELEMENTS // max(1, heads_q * length)))
    parts = [
        _tile(queries_rot[:, a:a + tile], keys_rot, positions[:, a:a + tile], scale, sink_size, window_size)
        for a in range(0, count, tile)
    ]
    return {name: torch.cat([p[name] for p in parts], dim=1) for name in parts[0]} if parts else {}


def _tile(queries: Tensor, keys: Tensor, positions: Tensor, scale: float, sink: int, window: int) -> dict[str, Tensor]:
    heads_q, count, dim = queries.shape
    visible = int(positions.max()) + 1
    keys = keys[:, :visible]
    group = heads_q // keys.shape[0]
    dtype = torch.promote_types(queries.dtype, torch.float32)
    scores = (queries.to(dtype).reshape(keys.shape[0], group * count, dim) @ keys.to(dtype).mT) * scale
    scores = scores.reshape(heads_q, count, visible)
    column = torch.arange(visible, device=keys.device)
    place = positions.to(keys.device)[..., None]
    scores.masked_fill_(column > place, float("-inf"))
    top = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - top)
    total = weights.sum(-1)
    sink_sum = weights[..., :sink].sum(-1)
    outside = scores[..., sink:]
    score, where = outside.max(-1) if outside.shape[-1] else (total.new_full(total.shape, float("-inf")), total.long())
    middle = (column >= sink) & (column <= place - window)
    weights = weights.masked_fill_(~middle, 0.0)
    mid_sum = weights.sum(-1)
    # Σ p s over the mid region; −inf scores meet weight zero
    energy = (weights * (scores - top).clamp_(min=-1e4)).sum(-1)
    size = (place[..., 0] - window + 1 - sink).clamp(min=0).expand(heads_q, count)
    safe = mid_sum.clamp(min=torch.finfo(dtype).tiny)
    entropy = (safe.log() - energy / safe) / size.clamp(min=2).to(dtype).log()
    none = torch.isinf(score)
    return {
        "lse": total.log() + top[..., 0],
        "lse_mid": torch.where(mid_sum > 0, safe.log() + top[..., 0], float("-inf")),
        "top1_position": torch.where(none, -1, where + sink).to(torch.int32),
        "top1_score": score,
        "mass_sink": sink_sum / total,
        "mass_tail": ((total - sink_sum - mid_sum) / total).clamp(min=0.0),
        "mass_mid": mid_sum / total,
        "entropy_mid": torch.where((size >= 2) & (mid_sum > 0), entropy, 0.0).clamp(0.0, 1.0),
    }
