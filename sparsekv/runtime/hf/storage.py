"""Growing tensors: appended in place with room to spare, shared between forks until one of them writes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Growing:
    """A tensor `[..., n, d]` that grows along its last but one dimension, amortised: a step copies one token."""

    def __init__(self, pinned: bool = False, reserve: int = 0) -> None:
        """reserve: the first tensor has room for so many."""
        self.pinned, self.reserve = pinned, reserve
        self.data: Tensor | None = None
        self.length = 0
        self.shared = False

    @property
    def view(self) -> Tensor:
        """What is stored, `[..., n, d]`; no copy."""
        assert self.data is not None
        return self.data[..., :self.length, :]

    def append(self, new: Tensor) -> Tensor:
        """Add `[..., m, d]` and return the view."""
        end = self.length + new.shape[-2]
        if self.data is None or self.shared or end > self.data.shape[-2]:
            room = end if self.data is None and end > 1 else end + max(64, end // 8)
            room = max(room, self.reserve)
            data = torch.empty(*new.shape[:-2], room, new.shape[-1], dtype=new.dtype, device=new.device,
                               pin_memory=self.pinned)
            if self.data is not None and self.length:
                data[..., :self.length, :] = self.data[..., :self.length, :]
            self.data, self.shared = data, False
        self.data[..., self.length:end, :] = new
        self.length = end
        return self.view

    @property
    def room(self) -> int:
        """How many there is room for; none of them in a tensor that is shared."""
        return 0 if self.data is None or self.shared else self.data.shape[-2]

    def crop(self, length: int) -> None:
        self.length = min(self.length, length)

    def replace(self, data: Tensor) -> None:
        """Store another tensor; its rows must be as many as `view`'s."""
        self.data, self.length, self.shared = data, data.shape[-2], False

    def fork(self) -> Growing:
        """A copy that shares the tensor; whoever appends first makes it its own."""
        other = Growing(self.pinned, self.reserve)
        other.data, other.length = self.data, self.length
        self.shared = other.shared = self.data is not None
        return other

    def clear(self) -> None:
        self.data, self.length, self.shared = None, 0, False


class StoredLayer:
    """Keys and values `[B, Hkv, n, d]` of a layer of a cache in storage of ours, by the names that transformers' layers
    have; None before the first token."""

    _keys: Growing
    _values: Growing

    @property
    def keys(self) -> Any:
        return None if self._keys.data is None else self._keys.view

    @keys.setter
    def keys(self, value: Any) -> None:
        self._put(self._keys, value)

    @property
    def values(self) -> Any:
        return None if self._values.data is None else self._values.view

    @values.setter
    def values(self, value: Any) -> None:
        self._put(self._values, value)

    def _put(self, store: Any, value: Any) -> None:
        """transformers' layers begin with None here."""

    @property
    def whole(self) -> tuple[Tensor, Tensor]:
        """All of the storage of keys and of values, `[B, Hkv, slots, d]`."""
        assert self._keys.data is not None and self._values.data is not None
        return self._keys.data, self._values.data
