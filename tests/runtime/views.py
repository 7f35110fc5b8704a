"""A layer on random tensors, for tests below `attach`."""

from __future__ import annotations

import torch

from sparsekv.core.layer import LayerView, Queries
from sparsekv.core.regions import Regions
from sparsekv.core.rope import RopeTable
from sparsekv.core.selectors import Selector
from sparsekv.core.step import build


def rope_table(length: int, dim: int) -> RopeTable:
    angle = torch.arange(length)[:, None] * (10.0 ** -torch.linspace(0, 2, dim // 2))
    angle = torch.cat([angle, angle], dim=-1)[None]
    return RopeTable("half", angle.cos(), angle.sin())


def make_view(
    *, batch: int = 1, heads_q: int = 4, heads_kv: int = 2, length: int = 90, dim: int = 8, new: int = 1, sink: int = 3,
    window: int = 10, pads: tuple[int, ...] | None = None, layer_idx: int = 1, num_layers: int = 4, seed: int = 0,
) -> tuple[LayerView, Queries, LayerView]:
    """The view at prefill end, the queries of the `new` tokens after it, and the view at the step."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    total = length + new
    keys, values = draw(batch, heads_kv, total, dim) * 1.5, draw(batch, heads_kv, total, dim)
    recent = draw(batch, heads_q, min(64, length), dim)
    regions = Regions.at_prefill_end(torch.tensor(pads or (0,) * batch), length, sink, window)
    rope = rope_table(total, dim)

    def view(end: int) -> LayerView:
        return LayerView(keys[:, :, :end], values[:, :, :end], regions=regions.grown(end), scale=dim**-0.5,
                         num_query_heads=heads_q, layer_idx=layer_idx, num_layers=num_layers, rope=rope,
                         recent_queries=recent, recent_end=length)

    return view(length), Queries.last(draw(batch, heads_q, new, dim) * 1.5, total, rope), view(total)


def built(selector: Selector, view: LayerView) -> Selector:
    """Prepared for the mid region of a view."""
    build(view, selector, None)
    return selector


def extended(selector: Selector, step: LayerView, tail_start: int) -> Selector:
    """The mid region of `step` grows up to `tail_start`, and the selector with it."""
    old, step.regions = step.regions, step.regions.moved(tail_start, step.length)
    selector.prepare(step)
    selector.extend(step, old)
    return selector


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
