"""Sliding-window layers of a cache: what transformers' own keep, in storage that a planned step can write into."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from sparsekv.runtime.hf.storage import Growing, StoredLayer

ROOM = 512
"""Tokens that storage of a sliding window has room for beside the window: a plan lasts as many steps, about as long as
the mid region of the other layers stays as it is."""


class Trailing(Growing):
    """A tensor that grows as `Growing`, of which only the last tokens are kept. Single tokens are written in place, as
    long as there is room, so that a step on storage of fixed capacity can follow; then the kept ones are moved."""

    first = 0
    """Where the kept ones begin."""

    @property
    def view(self) -> Tensor:
        assert self.data is not None
        return self.data[..., self.first:self.length, :]

    def append(self, new: Tensor) -> Tensor:
        """Add `[..., m, d]` and return what was kept and what is new."""
        if self.data is None or new.shape[-2] > 1 or self.room <= self.length:
            both = new if self.data is None else torch.cat([self.view, new], dim=-2)
            self.replace(both)
            if new.shape[-2] == 1:
                self.make_room()
            return both
        self.data[..., self.length:self.length + 1, :] = new
        self.length += 1
        return self.view

    def keep(self, count: int) -> None:
        """Let go of all but the last `count`."""
        self.first = max(self.first, self.length - count)

    def make_room(self) -> None:
        """Move what is kept to storage of its own with room for `ROOM` more."""
        kept = self.view
        data = kept.new_empty(*kept.shape[:-2], kept.shape[-2] + ROOM, kept.shape[-1])
        data[..., :kept.shape[-2], :] = kept
        self.replace(data)
        self.length = kept.shape[-2]

    def replace(self, data: Tensor) -> None:
        super().replace(data)
        self.first = 0

    def fork(self) -> Trailing:
        other = Trailing(self.reserve)
        other.data, other.length, other.first = self.data, self.length, self.first
        self.shared = other.shared = self.data is not None
        return other

    def clear(self) -> None:
        super().clear()
        self.first = 0


class SlidingLayer(StoredLayer, DynamicSlidingWindowLayer):
    """Keys and values of a sliding-window layer: what transformers' own keeps, the last `window − 1` tokens, in storage
    that a planned step can write into. Slot 0 has the token at `offset`."""

    stores: tuple[Trailing, ...]

    def __init__(self, sliding_window: int) -> None:
        self.stores = Trailing(), Trailing()
        super().__init__(sliding_window=sliding_window)

    @property
    def offset(self) -> int:
        """The position of the token in slot 0."""
        return self.cumulative_length - self.stores[0].length

    @property
    def room(self) -> int:
        """The length of the cache at which the storage is full; 0 where it may not be written into."""
        slots = super().room
        return self.offset + slots if slots else 0

    def make_room(self) -> None:
        """Storage that the next tokens can be written into."""
        for store in self.stores:
            store.make_room()

    def grown_to(self, length: int) -> None:
        """Tokens up to `length` were written into the storage."""
        slots = length - self.offset
        for store in self.stores:
            store.length = slots
        self.cumulative_length = length
        self._let_go()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.cumulative_length += key_states.shape[-2]
        seen = self.stores[0].append(key_states), self.stores[1].append(value_states)
        self._let_go()
        return seen

    def fork(self) -> SlidingLayer:
        other = copy.copy(self)
        other.stores = tuple(store.fork() for store in self.stores)
        return other

    def set_store(self, index: int, value: Any) -> None:
        """transformers' layers begin with None, then with an empty tensor of one dimension."""
        store = self.stores[index]
        if value is None or value.dim() < 2:
            store.clear()
        else:
            store.replace(value)

    def _let_go(self) -> None:
        """Let go of what no later token sees, unless transformers asks for the past, to crop it."""
        if not getattr(self, "record_past", False):
            for store in self.stores:
                store.keep(self.sliding_window - 1)
