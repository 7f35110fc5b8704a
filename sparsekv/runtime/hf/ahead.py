"""Prompts in chunks over keys in CPU memory: those of the next layer cross the bus while this one attends."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Coming(NamedTuple):
    """The first tokens of a layer on their way to the device, `data [B, Hkv, room, 2d]`; event: when they are there."""

    layer: Any
    tokens: int
    data: Tensor
    event: Any


class Ahead:
    """Keys and values of a cache's layers in CPU memory, one layer after the other, whole, on the device that attends:
    two layers of them lie there at most. What is stored of a layer must not change between two reads, but by tokens
    that are appended: a cache that is cut or reordered calls `stop`."""

    def __init__(self) -> None:
        self.coming: Coming | None = None
        self._stream: Any = None

    def read(self, layers: list[Any], index: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Keys and values `[B, Hkv, n, d]` of all tokens of a layer. The next one that lies in CPU memory and does not
        have this pass's tokens yet begins to come."""
        layer, held = layers[index], self.coming
        if held is None or held.layer is not layer or held.data.device != device:
            self.stop()
            held = Coming(layer, 0, self._room(layer, device, layer.both.shape[2]), None)
        if held.event is not None:
            torch.cuda.current_stream(device).wait_event(held.event)
        self.coming = None
        copy(layer.both, held.data, held.tokens, layer.both.shape[2])
        following = next((x for x in layers[index + 1:] if hasattr(type(x), "both")), None)
        if following is not None and 0 < following.get_seq_length() < layer.get_seq_length():
            self.coming = self._start(following, device, layer.get_seq_length())
        keys, values = held.data[:, :, :layer.both.shape[2]].chunk(2, dim=-1)
        return keys, values

    def stop(self) -> None:
        """Let go of what is coming; its memory is for others once it is there."""
        if self.coming is not None and self.coming.event is not None:
            torch.cuda.current_stream(self.coming.data.device).wait_event(self.coming.event)
        self.coming = None

    def __del__(self) -> None:
        try:
            self.stop()
        except Exception:  # at exit CUDA and the names of modules may be gone
            pass

    def _start(self, layer: Any, device: torch.device, length: int) -> Coming:
        tokens, data = layer.get_seq_length(), self._room(layer, device, length)
        if device.type != "cuda":
            copy(layer.both, data, 0, tokens)
            return Coming(layer, tokens, data, None)
        if self._stream is None or self._stream.device != device:
            self._stream = torch.cuda.Stream(device)
        # after all that had this memory before, and all that writes these tokens
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            copy(layer.both, data, 0, tokens)
            return Coming(layer, tokens, data, self._stream.record_event())

    def _room(self, layer: Any, device: torch.device, length: int) -> Tensor:
        """As many tokens as the storage has room for, so that every chunk takes memory of one size."""
        rows, heads, stored, width = layer.data.shape
        return torch.empty(rows, heads, max(stored, length), width, dtype=layer.data.dtype, device=device)


def copy(source: Tensor, target: Tensor, first: int, last: int) -> None:
    """Tokens `first … last − 1` of `[B, Hkv, N, d]` from page-locked memory, head by head, each in one piece."""
    for there, here in zip(source.flatten(0, 1), target.flatten(0, 1), strict=True):
        here[first:last].copy_(there[first:last], non_blocking=True)
