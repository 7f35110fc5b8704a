"""Several layers' selectors and estimators built at once: layers that are built alike stand side by side as heads of
one layer, since a head is what it is by itself. A short prompt is some hundred launches then, not that many a layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsekv.core.layer import CacheLayer, LayerView, RowState, heads_apart
from sparsekv.kernels import Sketch

STACKED_BYTES = 1 << 30
"""Keys that stand side by side at once: they are copied there. A layer with as many is built by itself."""
SUMMED_BYTES = 1 << 28
"""The same of estimators, for which values are copied too."""


class SideBySide(LayerView):
    """Layers with the same regions, shapes and scale as one layer of all their heads, in that order. Keys are copied
    once; values a span at a time, and `values` holds none."""

    def __init__(self, layers: Sequence[CacheLayer]):
        one, queries = layers[0], [layer.recent_queries for layer in layers if layer.recent_queries is not None]
        keys = joined((layer.keys_at(0, layer.stored) for layer in layers), len(layers))
        super().__init__(keys, keys[:, :, :0], **{
            **one.described(), "num_query_heads": len(layers) * one.num_query_heads,
            "recent_queries": torch.cat(queries, dim=1) if queries else None})
        self.layers, self.side_by_side, self.in_place = layers, len(layers), one.in_place  # type: ignore[misc]

    def values_at(self, first: int, last: int) -> Tensor:
        return joined((layer.values_at(first, last) for layer in self.layers), len(self.layers))

    def numbers(self, first: int, last: int) -> Tensor | None:
        return self.layers[0].numbers(first, last)

    def encoded(self, known: Tensor | None, sketch: Sketch, width: int, last: int) -> Tensor | None:
        return None if self.layers[0].keeps_codes else super().encoded(known, sketch, width, last)

    def codes_at(self, codes: Tensor | None, first: int, last: int, step: int) -> Tensor:
        if codes is not None:
            return super().codes_at(codes, first, last, step)
        return joined((layer.codes_at(None, first, last, step) for layer in self.layers), len(self.layers))


def build_alike(layers: Sequence[CacheLayer], parts: Sequence[RowState], at_once: int) -> None:
    """Build every layer's selector, or estimator, over it; of layers that are built alike in one go."""
    for group in alike(layers, parts, at_once):
        some, (first, *others) = [layers[i] for i in group], [parts[i] for i in group]
        if not others:
            first.prepare(some[0])
            first.build(some[0])
            continue
        view, whole = SideBySide(some), first.of_heads(others, some)
        whole.prepare(view)
        whole.build(view)
        states = [heads_apart(getattr(whole, name), len(group)) for name in whole.row_state]
        for one, *values in zip((first, *others), *states, strict=True):
            one.take_heads(whole, dict(zip(whole.row_state, values, strict=True)))


def alike(layers: Sequence[CacheLayer], parts: Sequence[RowState], at_once: int) -> Iterator[list[int]]:
    """Group the layers that are built together: those of one kind, as many as `at_once` bytes of keys."""
    groups: dict[object, list[int]] = {}
    for i, (layer, part) in enumerate(zip(layers, parts, strict=True)):
        kind = part.stacks_by(layer) if len(layers) > 1 else None
        same = (i,) if kind is None else (
            kind, type(layer), id(layer.regions), layer.shape, layer.dtype, layer.device, layer.scale,
            layer.num_query_heads, id(layer.rope), layer.recent_end, layer.completion_tokens,
            None if layer.recent_queries is None else layer.recent_queries.shape)
        groups.setdefault(same, []).append(i)
    for group in groups.values():
        yield from in_pieces(group, key_bytes(layers[group[0]]), at_once)


def in_pieces(layers: Sequence[Any], size: int, at_once: int) -> Iterator[Any]:
    """Layers of `size` bytes of keys each, as many as `at_once` bytes at once, in pieces of nearly one size."""
    pieces = -(-len(layers) // max(1, at_once // max(1, size)))
    for first in range(pieces):
        yield layers[first * len(layers) // pieces:(first + 1) * len(layers) // pieces]


def key_bytes(layer: CacheLayer) -> int:
    """Bytes of a layer's keys."""
    rows, heads, stored, dim = layer.shape
    return rows * heads * stored * dim * layer.dtype.itemsize


def joined(parts: Iterable[Tensor], count: int) -> Tensor:
    """Copy so many tensors `[B, H, ...]` into one of all heads; each is made when its place is written, and let go
    then."""
    whole: list[Tensor] = []
    for i, part in enumerate(parts):
        heads = part.shape[1]
        if not i:
            whole.append(part.new_empty(part.shape[0], count * heads, *part.shape[2:]))
        whole[0].narrow(1, i * heads, heads).copy_(part)
    return whole[0]
