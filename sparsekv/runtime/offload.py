"""Keys and values in CPU memory: what a step reads of them is gathered and copied; the rest never moves."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from sparsekv.core.regions import Regions
from sparsekv.core.rows import attend_gathered, gather_rows
from sparsekv.core.selectors.base import LayerView, Selection, fold
from sparsekv.kernels import merge
from sparsekv.runtime.cache import SparseLayer
from sparsekv.runtime.storage import Growing


class HostLayer(SparseLayer):
    """A layer whose keys and values lie in CPU memory, page-locked where there is a GPU.

    The first chunk of a prefill is returned as it came, on the device; afterwards `update` returns the host tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        pinned = torch.cuda.is_available()
        self._keys, self._values = Growing(pinned), Growing(pinned)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        first = self.get_seq_length() == 0
        host = super().update(key_states.cpu(), value_states.cpu())
        if self.state is not None and self.state.resident is not None:
            self.state.resident.append(key_states, value_states)
        return (key_states, value_states) if first else host


class Resident:
    """The anchors of an offloaded layer on the device: sink `[B, Hkv, s, d]`, and everything from the tail on."""

    def __init__(self, view: LayerView, keys: Tensor, values: Tensor):
        """view: the layer at the end of its prefill; keys, values: all of it so far, on the device."""
        regions = view.regions
        self.start = int(regions.tail_starts.min())
        slots = torch.arange(regions.sink_size, device=view.device) + regions.starts[:, None]
        index = slots.clamp(max=max(view.length - 1, 0))[:, None].expand(-1, view.num_kv_heads, -1)
        self.sink = (gather_rows(view.keys, index), gather_rows(view.values, index))
        self.near = (Growing(), Growing())
        for store, source in zip(self.near, (keys, values), strict=True):
            store.append(source[:, :, self.start:])

    def append(self, keys: Tensor, values: Tensor) -> None:
        for store, new in zip(self.near, (keys, values), strict=True):
            store.append(new)

    def trim(self, regions: Regions) -> None:
        """Let go of what joined the index."""
        start = int(regions.tail_starts.min())
        for store in self.near:
            store.replace(store.view[:, :, start - self.start:].clone())
        self.start = start

    def crop(self, length: int) -> None:
        for store in self.near:
            store.crop(length - self.start)

    def take_rows(self, index: Tensor) -> None:
        self.sink = (self.sink[0][index], self.sink[1][index])
        for store in self.near:
            store.replace(store.view[index])

    def fork(self) -> Resident:
        other: Resident = object.__new__(Resident)
        other.start, other.sink = self.start, self.sink
        other.near = (self.near[0].fork(), self.near[1].fork())
        return other

    def attend(
        self, q: Tensor, view: LayerView, starts: Tensor, tails: Tensor, lengths: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Partial attention over the anchors: q `[Q, Hq, d]`."""
        count = q.shape[0] // view.keys.shape[0]
        keys, values = (fold(torch.cat([s, n.view[:, :, :view.length - self.start]], dim=2), count)
                        for s, n in zip(self.sink, self.near, strict=True))
        sink = starts[:, None] + torch.arange(view.regions.sink_size, device=q.device)
        near = torch.arange(self.start, view.length, device=q.device).expand(q.shape[0], -1)
        used = torch.cat([sink < torch.minimum(tails, lengths)[:, None],
                          (near >= tails[:, None]) & (near < lengths[:, None])], dim=1)
        used = used[:, None].expand(-1, keys.shape[1], -1)
        return attend_gathered(q, keys, values, used, view.scale)


def fetch_rows(view: LayerView, index: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of the host's keys and values: index `[Q, Hkv, K]` on the device -> two `[Q, Hkv, K, d]` on the device."""
    if index.is_cuda and view.keys.is_pinned() and index.shape[0] == view.keys.shape[0]:
        from sparsekv.runtime.host_gather import gather_from_host

        return gather_from_host(view.keys, index), gather_from_host(view.values, index)
    host = index.cpu()
    rows = []
    for source in (view.keys, view.values):
        found = gather_rows(source, host, pinned=index.is_cuda)
        rows.append(found.to(index.device, non_blocking=True))
    return rows[0], rows[1]


def offloaded_attention(
    q: Tensor, view: LayerView, selection: Selection, starts: Tensor, tails: Tensor, lengths: Tensor,
) -> tuple[Tensor, Tensor]:
    """As `exact_attention`: the selection is fetched from the host while the anchors on the device are attended to."""
    assert view.resident is not None
    tokens = selection.as_tokens()
    rows, heads, width = tokens.shape
    if width == 0:
        return view.resident.attend(q, view, starts, tails, lengths)
    index = tokens.clamp(min=0).reshape(rows, view.num_kv_heads, -1)
    with beside(index) as arrived:
        selection.rows = fetch_rows(view, index)
    anchors = view.resident.attend(q, view, starts, tails, lengths)
    arrived(selection.rows)
    keys, values = (x.reshape(rows, heads, width, -1) for x in selection.rows)
    chosen = attend_gathered(q, keys, values, tokens >= 0, view.scale, selection.log_weights)
    return merge(torch.stack([anchors[0], chosen[0]]), torch.stack([anchors[1], chosen[1]]))


@contextlib.contextmanager
def beside(index: Tensor) -> Iterator[Callable[[Iterable[Tensor]], None]]:
    """On a CUDA device, what is launched inside runs beside what follows, on a stream of its own, until its results are
    given to the function that the block yields. It may read `index`."""
    if not index.is_cuda:
        yield lambda results: None
        return
    current, other = torch.cuda.current_stream(index.device), _stream(index.device)

    def arrived(results: Iterable[Tensor]) -> None:
        current.wait_stream(other)
        for tensor in results:
            tensor.record_stream(current)

    other.wait_stream(current)
    index.record_stream(other)
    with torch.cuda.stream(other):
        yield arrived


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
