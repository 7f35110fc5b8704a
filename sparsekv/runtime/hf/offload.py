"""Keys and values in CPU memory: what a step reads of them is gathered and copied; the rest never moves."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from sparsekv.core.layer import LayerView, Queries, Selection
from sparsekv.core.streams import beside
from sparsekv.kernels import Anchored, CompletionQuery, attend_gathered, gather_from_host, gather_rows, merge
from sparsekv.runtime.hf.storage import Growing


@dataclass
class HostView(LayerView):
    """A layer whose keys and values lie in CPU memory while it decodes on a device, where its anchors are: the sink
    `[B, Hkv, s, d]`, and everything from the tail on. While it is built or grown, keys and values are on the device."""

    in_place = False
    sink: Any = None
    near: Any = None
    first_near: int = 0
    asked: tuple[Selection, Tensor] | None = None
    """The last selection and its tokens."""
    fetched: Any = None
    """Listed tokens, and their keys and values on the device."""

    def keep_anchors(self, keys: Tensor, values: Tensor) -> None:
        """keys, values: all of the layer so far, on the device."""
        self.first_near = self.regions.edges[2]
        self._keep_sink(keys, values)
        self.near = Growing(), Growing()
        self.append(*(x[:, :, self.first_near:] for x in (keys, values)))

    def _keep_sink(self, keys: Tensor, values: Tensor) -> None:
        slots = torch.arange(self.regions.sinks, device=self.device) + self.regions.starts[:, None]
        index = slots.clamp(max=max(keys.shape[2] - 1, 0))[:, None].expand(-1, keys.shape[1], -1)
        self.sink = tuple(gather_rows(x, index) for x in (keys, values))

    def append(self, keys: Tensor, values: Tensor) -> None:
        """New tokens, on the device."""
        for store, new in zip(self.near, (keys, values), strict=True):
            store.append(new)

    def moved(self) -> None:
        first = self.regions.edges[2]
        if self.sink[0].shape[2] < self.regions.sinks:  # it was longer than the prompt
            self._keep_sink(self.keys, self.values)
        for store in self.near:
            store.replace(store.view[:, :, first - self.first_near:].clone())
        self.first_near = first

    def crop(self, length: int) -> None:
        super().crop(length)
        for store in self.near:
            store.crop(length - self.first_near)

    def take_rows(self, index: Tensor) -> None:
        super().take_rows(index)
        self.sink = tuple(x[index] for x in self.sink)
        for store in self.near:
            store.replace(store.view[index])

    def fork(self) -> Self:
        other = copy.copy(self)
        other.near = tuple(store.fork() for store in self.near)
        return other

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """Keys and values on the device for as long as the block lasts: for what is grown, which reads all of them."""
        held = self.keys, self.values
        try:
            self.keys, self.values = (x.to(self.device) for x in held)
            yield
        finally:
            self.keys, self.values = held

    def listed(self, selection: Selection) -> Tensor:
        """The same tensor for the same selection: exact part and estimate ask for it one after the other."""
        if self.asked is None or self.asked[0] is not selection:
            self.asked = selection, super().listed(selection)
        return self.asked[1]

    def gather(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """A list that is asked for again is fetched once."""
        if self.fetched is None or self.fetched[0] is not tokens:
            index = self.by_head(tokens)
            self.fetched = tokens, tuple(_fetch(x, index).reshape(*tokens.shape, x.shape[-1])
                                         for x in (self.keys, self.values))
        return self.fetched[1]

    def attend(
        self, queries: Queries, selection: Selection, completion: CompletionQuery | None = None,
        anchored: Anchored | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The selection is fetched from the host while the anchors on the device are attended to."""
        assert completion is None, "features of keys in CPU memory are not kept: an estimate is a part of its own"
        assert anchored is None, "anchors are attended to here"
        tokens = self.listed(selection)
        with beside(self.device) as join:
            keys, values = self.gather(tokens)
        anchors = self._attend_anchors(queries)
        join()
        chosen = attend_gathered(queries.folded, keys, values, tokens >= 0, self.scale, selection.log_weights)
        return merge(*(torch.stack(x) for x in zip(anchors, chosen, strict=True)))

    def _attend_anchors(self, queries: Queries) -> tuple[Tensor, Tensor]:
        bounds, device = self.bounds(queries), self.device
        keys, values = (queries.per_query(torch.cat([s, n.view[:, :, :self.length - self.first_near]], dim=2))
                        for s, n in zip(self.sink, self.near, strict=True))
        starts, tails, lengths = (bounds[name][:, None] for name in ("starts", "tail_starts", "lengths"))
        sink = starts + torch.arange(self.sink[0].shape[2], device=device)
        near = torch.arange(self.first_near, self.length, device=device)
        used = torch.cat([sink < torch.minimum(tails, lengths), (near >= tails) & (near < lengths)], dim=1)
        return attend_gathered(queries.folded, keys, values, used[:, None].expand(-1, keys.shape[1], -1), self.scale)


def _fetch(source: Tensor, index: Tensor) -> Tensor:
    """Rows of a host tensor `[B, Hkv, N, d]` by index `[Q, Hkv, K]` on the device, there: `[Q, Hkv, K, d]`."""
    if index.is_cuda and source.is_pinned() and index.shape[0] == source.shape[0]:
        return gather_from_host(source, index)
    return gather_rows(source, index.cpu(), pinned=index.is_cuda).to(index.device, non_blocking=True)
