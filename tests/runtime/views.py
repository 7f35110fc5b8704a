"""A layer on random tensors, for tests below `attach`."""

from __future__ import annotations

import torch

from sparsekv.core.regions import Regions
from sparsekv.core.rope import rotate, unrotate
from sparsekv.core.selectors.base import LayerView, Queries


def tables(length: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.arange(length)[:, None] * (10.0 ** -torch.linspace(0, 2, dim // 2))
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos(), angle.sin()


def make_view(
    *, batch: int = 1, heads_q: int = 4, heads_kv: int = 2, length: int = 90, dim: int = 8, new: int = 1, sink: int = 3,
    window: int = 10, pads: tuple[int, ...] | None = None, layer_idx: int = 1, num_layers: int = 4, seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> tuple[LayerView, Queries, LayerView]:
    """The view at prefill end, the queries of the `new` tokens after it, and the view at the step."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    total = length + new
    keys, values = draw(batch, heads_kv, total, dim) * 1.5, draw(batch, heads_kv, total, dim)
    recent = draw(batch, heads_q, min(64, length), dim)
    starts = torch.tensor(pads or (0,) * batch)
    regions = Regions.at_prefill_end(starts, length, sink, window)
    cos, sin = tables(total, dim)

    def turn(x, old, new):
        return rotate(unrotate(x, cos[old], sin[old], "half"), cos[new], sin[new], "half")

    def view(end: int) -> LayerView:
        return LayerView(
            keys=keys[:, :, :end], values=values[:, :, :end], regions=regions.grown(end), scale=dim**-0.5,
            num_query_heads=heads_q, layer_idx=layer_idx, num_layers=num_layers,
            unrotate=lambda x, a, b: unrotate(x, cos[a:b], sin[a:b], "half"), turn=turn,
            recent_queries=recent, recent_end=length)

    q = draw(batch, heads_q, new, dim) * 1.5
    step = view(total)
    return view(length), Queries(q, lambda: step.unrotate(q, length, total)), step


def full_attention(step: LayerView, queries: Queries) -> torch.Tensor:
    """Literal softmax attention of every query over what it sees, `[B, Hq, T, d]` float64."""
    q, k, v = queries.rot.double(), step.keys.double(), step.values.double()
    out = torch.zeros_like(q)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for t in range(q.shape[2]):
                end = step.length - q.shape[2] + t + 1
                seen = slice(int(step.regions.starts[b]), end)
                weights = (k[b, h // step.group, seen] @ q[b, h, t] * step.scale).softmax(0)
                out[b, h, t] = weights @ v[b, h // step.group, seen]
    return out
