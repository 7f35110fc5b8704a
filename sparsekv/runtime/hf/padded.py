"""Prompts that were prefilled one by one, as the rows of one left-padded cache."""

from __future__ import annotations

from sparsekv.runtime.hf.cache import SparseCache, SparseLayer
from sparsekv.runtime.hf.storage import GrowingRope


def allocate(batch: SparseCache, like: SparseCache, rows: int, width: int, room: int, shortest: int) -> None:
    """Make an empty cache one of `rows` rows and `width` tokens, with space for `room` more, all zeros, of the kind of
    `like`; shortest: tokens of the shortest prompt that will be put there."""
    for new, old in zip(batch.layers, like.layers, strict=True):
        assert isinstance(new, SparseLayer) and isinstance(old, SparseLayer)
        new.lazy_initialization(old.keys, old.values)
        for store, like_it in zip(new.stores, old.stores, strict=True):
            part = like_it.view
            store.replace(store.empty((rows, part.shape[1], width + room, part.shape[3]), part).zero_())
            store.crop(width)
        if old.recent is not None:
            new.recent = old.recent.new_zeros(rows, old.recent.shape[1], min(old.recent.shape[2], shortest),
                                              old.recent.shape[3])
            new.recent_end = width
    for key, table in like.rope.items():
        new_table = batch.rope[key] = GrowingRope(table.layout)
        for store, part in ((new_table.cos, table.cos.view), (new_table.sin, table.sin.view)):
            store.replace(part.new_zeros(rows, width + room, part.shape[-1]))
            store.crop(width)


def put(batch: SparseCache, one: SparseCache, row: int, width: int) -> None:
    """Copy a prefilled prompt to the end of its row."""
    for new, old in zip(batch.layers, one.layers, strict=True):
        assert isinstance(new, SparseLayer) and isinstance(old, SparseLayer)
        first = width - old.keys.shape[2]
        new.keys[row, :, first:] = old.keys[0]
        new.values[row, :, first:] = old.values[0]
        if new.recent is not None and old.recent is not None:
            new.recent[row] = old.recent[0, :, -new.recent.shape[2]:]
    for key, table in one.rope.items():
        for store, part in ((batch.rope[key].cos, table.cos.view), (batch.rope[key].sin, table.sin.view)):
            store.view[row, width - part.shape[1]:] = part[0]


def own(cache: SparseCache) -> None:
    """Nobody else holds these tensors, though the cache was forked: append to them in place."""
    for layer in cache.layers:
        for store in layer.stores:  # type: ignore[union-attr]
            store.shared = False
    for table in cache.rope.values():
        table.cos.shared = table.sin.shared = False
