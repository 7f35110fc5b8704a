"""Growing tensors: appended in place with room to spare, shared between forks until one of them writes."""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsekv.core.layer import take_rows
from sparsekv.core.rope import Layout, RopeTable
from sparsekv.runtime.hf.turns import Moves, move
from sparsekv.util.errors import SparseKVError


def page_locked(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An empty tensor in memory that the GPU reads and writes by itself: exactly so many pages, unlocked and given back
    with its last view. Raises SparseKVError where the system does not lock as much."""
    size = -(-max(1, math.prod(shape) * dtype.itemsize) // mmap.PAGESIZE) * mmap.PAGESIZE
    held = np.empty(size + mmap.PAGESIZE, dtype=np.uint8)
    first = -held.ctypes.data % mmap.PAGESIZE
    address, runtime = held.ctypes.data + first, torch.cuda.cudart()
    locked: list[Any] = []
    weakref.finalize(held, _unlock, address, locked).atexit = False  # before: an interrupt leaves nothing locked
    locked.append(runtime.cudaHostRegister(address, size, 0))
    if locked[0] != runtime.cudaError.success:
        raise SparseKVError(f"{size / 1e9:.3g} GB of CPU memory could not be locked for keys and values ({locked[0]}); "
                            "free memory, shorten prompt or answer, or keep keys on the GPU (placement='gpu')")
    return torch.from_numpy(held[first:first + math.prod(shape) * dtype.itemsize]).view(dtype).view(shape)


def _unlock(address: int, locked: list[Any]) -> None:
    """Once no kernel reads it. locked: what locking it returned, if it has."""
    runtime = torch.cuda.cudart()
    if locked == [runtime.cudaError.success]:
        try:
            torch.cuda.synchronize()
        finally:
            runtime.cudaHostUnregister(address)


class Growing:
    """A tensor `[..., n, d]` that grows along its last but one dimension, amortised: a step copies one token."""

    def __init__(self, reserve: int = 0, on_host: bool = False) -> None:
        """reserve: the first tensor has room for so many. on_host: in CPU memory, page-locked where there is a GPU."""
        self.reserve, self.on_host = reserve, on_host
        self.data: Tensor | None = None
        self.length = 0
        self.shared = False

    @property
    def view(self) -> Tensor:
        """The stored tokens, `[..., n, d]`; no copy."""
        assert self.data is not None
        return self.data[..., :self.length, :]

    def append(self, new: Tensor) -> Tensor:
        """Add `[..., m, d]` and return the view."""
        end = self.length + new.shape[-2]
        if self.data is None or self.shared or end > self.data.shape[-2]:
            room = end if self.data is None and end > 1 else end + max(64, end // 8)
            room = max(room, self.reserve)
            data = self.empty((*new.shape[:-2], room, new.shape[-1]), new)
            if self.data is not None and self.length:
                if self.on_host and new.is_cuda:
                    torch.cuda.synchronize(new.device)  # steps may still write what the CPU copies
                data[..., :self.length, :] = self.data[..., :self.length, :]
            self.data, self.shared = data, False
        self._write(self.data[..., self.length:end, :], new)
        self.length = end
        return self.view

    def empty(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """A tensor to store, for tensors like one."""
        if self.on_host and torch.cuda.is_available():
            return page_locked(shape, like.dtype)
        return torch.empty(shape, dtype=like.dtype, device="cpu" if self.on_host else like.device)

    def _write(self, target: Tensor, new: Tensor) -> None:
        """Copy from a device to its host head by head, each in one piece, so that nothing waits."""
        if not (self.on_host and new.is_cuda):
            target.copy_(new)
            return
        parts, rows = target.flatten(0, -3), new.detach().flatten(0, -3).contiguous()
        for i in range(len(rows)):
            parts[i].copy_(rows[i], non_blocking=True)

    @property
    def room(self) -> int:
        """Tokens that there is room for; none of them in a tensor that is shared."""
        return 0 if self.data is None or self.shared else self.data.shape[-2]

    def crop(self, length: int) -> None:
        self.length = min(self.length, length)

    def replace(self, data: Tensor) -> None:
        """Store another tensor; its rows must be as many as `view`'s."""
        self.data, self.length, self.shared = data, data.shape[-2], False

    def take_rows(self, index: Tensor) -> None:
        """Keep the chosen rows of the first dimension, in that order."""
        old, index = self.view, index.to(self.view.device)
        if not (self.on_host and torch.cuda.is_available()):
            self.replace(old[index])
            return
        torch.cuda.synchronize()  # steps may still write what the CPU copies
        data = self.empty((len(index), *old.shape[1:]), old)
        self.replace(torch.index_select(old.detach(), 0, index, out=data))

    def fork(self) -> Growing:
        """A copy that shares the tensor; whoever appends first makes it its own."""
        other = Growing(self.reserve, self.on_host)
        other.data, other.length = self.data, self.length
        self.shared = other.shared = self.data is not None
        return other

    def clear(self) -> None:
        self.data, self.length, self.shared = None, 0, False


class StoredLayer:
    """Keys and values `[B, Hkv, n, d]` of a layer of a cache in storage of ours, by the names that transformers' layers
    have; None before the first token."""

    stores: tuple[Growing, ...]
    """The tensors that a token is kept in."""

    @property
    def room(self) -> int:
        """Tokens that there is room for."""
        return min(store.room for store in self.stores)

    @property
    def data(self) -> Any:
        """The first tensor of the storage, which stands for all: another one means that all of it was moved."""
        return self.stores[0].data

    def split(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """Keys and values of tensors of the storage."""
        return tensors

    @property
    def keys(self) -> Any:
        return None if self.data is None else self.split([store.view for store in self.stores])[0]

    @keys.setter
    def keys(self, value: Any) -> None:
        self.set_store(0, value)

    @property
    def values(self) -> Any:
        return None if self.data is None else self.split([store.view for store in self.stores])[1]

    @values.setter
    def values(self, value: Any) -> None:
        self.set_store(1, value)

    def set_store(self, index: int, value: Any) -> None:
        """Set keys (0) or values (1) from outside: transformers' layers begin with None."""

    @property
    def whole(self) -> Sequence[Any]:
        """The whole storage of keys and of values, `[B, Hkv, slots, d]`."""
        return self.split([store.data for store in self.stores])


class GrowingRope(RopeTable):
    """The rotary tables of a cache, one for all layers that rotate alike, grown with it."""

    def __init__(self, layout: Layout, reserve: int = 0):
        self.layout: Layout = layout
        self.cos, self.sin = Growing(reserve=reserve), Growing(reserve=reserve)

    def tables(self) -> tuple[Tensor, Tensor]:
        return self.cos.view, self.sin.view

    def append(self, cos: Tensor, sin: Tensor, length: int, moves: Moves = ()) -> None:
        """Add the tables of new tokens, once: the first layer of a forward pass that gets here adds them. moves: of the
        rows, those of `SparseCache.moves`."""
        if self.cos.length != length:
            return
        batch = max(cos.shape[0], len(moves))
        for store, new in ((self.cos, cos), (self.sin, sin)):
            held = store.view.shape[0] if store.length else batch
            if held < batch:
                store.replace(store.view.expand(batch, -1, -1))
                store.shared = True
            move(store.append(new.expand(max(held, batch), -1, -1).float()), moves, new.shape[1])

    @property
    def length(self) -> int:
        """Tokens it has tables of."""
        return self.cos.length

    @property
    def room(self) -> int:
        """Tokens that there is room for."""
        return min(self.cos.room, self.sin.room)

    def whole(self) -> RopeTable:
        """Return all of the storage, as a replayed step reads it."""
        assert self.cos.data is not None and self.sin.data is not None
        return RopeTable(self.layout, self.cos.data, self.sin.data)

    def write(self, cos: Tensor, sin: Tensor, lengths: Tensor) -> None:
        """The tables `[B, 1, width]` of the last of `lengths [B]` tokens, in their place."""
        for data, new in zip(self.whole().tables(), (cos, sin), strict=True):
            data.index_copy_(1, lengths[:1] - 1, new[:data.shape[0]].to(data.dtype))

    def grown_to(self, length: int) -> None:
        """Tokens up to `length` were written."""
        self.cos.length = self.sin.length = length

    def fork(self) -> GrowingRope:
        other = GrowingRope(self.layout)
        other.cos, other.sin = self.cos.fork(), self.sin.fork()
        return other

    def take_rows(self, index: Tensor) -> None:
        for store in (self.cos, self.sin):
            if store.length and store.view.shape[0] > 1:
                store.replace(take_rows(store.view, index))
