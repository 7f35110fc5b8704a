"""Several layers' selectors and estimators built at once: layers that are built alike stand side by side, as rows of
one batch or as heads of one layer, since a row and a head are what they are by themselves. A short prompt is a few
hundred launches then, and not that many a layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsekv.core.estimators import Estimator
from sparsekv.core.layer import LayerView, joined, needed
from sparsekv.core.selectors.base import Selector

STACKED_BYTES = 1 << 30
"""Keys that stand side by side at once: they are copied there. A layer with as many is built by itself."""
SUMMED_BYTES = 1 << 28
"""The same of estimators, for which values are copied too."""


@dataclass
class StackedView(LayerView):
    """Layers with the same regions as rows of one batch, all rows of the first layer first. keys `[L·B, Hkv, N, d]`;
    there are no values to choose by. rope: of the B rows of a layer; views: those of the layers."""

    views: Sequence[LayerView] = ()

    def keys_pre(self, first: int, last: int) -> Tensor:
        columns = torch.arange(first, last, device=self.keys.device)
        return torch.cat([needed(self.rope).unrotate(x, columns)
                          for x in self.keys[:, :, first:last].chunk(len(self.views))])


def side_by_side(views: Sequence[LayerView]) -> StackedView:
    """Views of layers with the same regions, shapes and scale as one."""
    one, count = views[0], len(views)
    recent = None if one.recent_queries is None else torch.cat([queries_of(view) for view in views])
    keys = joined((view.keys_at(0, view.stored) for view in views), count, 0)
    made: StackedView = (one.stacks_as or StackedView)(
        keys, keys[..., :0], one.regions.repeated(count), one.scale, one.num_query_heads, one.layer_idx, one.num_layers,
        one.rope, recent, one.recent_end, one.completion_tokens, views=views)
    return made


def queries_of(view: LayerView) -> Tensor:
    assert view.recent_queries is not None
    return view.recent_queries


def build_selectors(views: Sequence[LayerView], selectors: Sequence[Selector]) -> None:
    """The state of every layer's selector over its view, of layers that are built alike in one go."""
    for group in alike(views, selectors, STACKED_BYTES):
        some, chosen = [views[i] for i in group], [selectors[i] for i in group]
        view, selector = some[0], chosen[0]
        if len(group) > 1:
            view, selector = side_by_side(some), selector.stacked(chosen, some[0].regions.starts.shape[0])
        selector.prepare(view)
        selector.build(view)
        if len(group) > 1:
            for i, one in enumerate(chosen):
                one.take_layer(selector, i, len(group))


def build_estimators(views: Sequence[LayerView], estimators: Sequence[Estimator]) -> None:
    """The same of every layer's estimator."""
    for group in alike(views, estimators, SUMMED_BYTES):
        first, *others = (estimators[i] for i in group)
        if others:
            first.build_together([views[i] for i in group], others)
        else:
            first.build(views[group[0]])


def alike(
    views: Sequence[LayerView], parts: Sequence[Selector | Estimator], at_once: int,
) -> Iterator[list[int]]:
    """Which layers are built together: those of one kind, as many as `at_once` bytes of keys."""
    groups: dict[object, list[int]] = {}
    for i, (view, part) in enumerate(zip(views, parts, strict=True)):
        kind = part.stacks_by(view) if len(views) > 1 else None
        stacks = type(view) is LayerView or view.stacks_as is not None
        same = (i,) if kind is None or not stacks else (
            kind, type(view), id(view.regions), view.stored, view.keys.shape, view.keys.dtype, view.keys.device,
            view.scale, view.num_query_heads, id(view.rope), view.recent_end, view.completion_tokens,
            None if view.recent_queries is None else view.recent_queries.shape)
        groups.setdefault(same, []).append(i)
    for group in groups.values():
        yield from in_pieces(group, bytes_of(views[group[0]]), at_once)


def in_pieces(layers: Sequence[Any], size: int, at_once: int) -> Iterator[Any]:
    """Layers of `size` bytes of keys each, as many as `at_once` bytes at once, in pieces of nearly one size."""
    pieces = -(-len(layers) // max(1, at_once // max(1, size)))
    for first in range(pieces):
        yield layers[first * len(layers) // pieces:(first + 1) * len(layers) // pieces]


def bytes_of(view: LayerView) -> int:
    """Bytes of a layer's keys."""
    rows, heads, _, dim = view.keys.shape
    return rows * heads * view.stored * dim * view.keys.element_size()
