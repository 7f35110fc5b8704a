"""Keys and values in CPU memory: a step reads the selected ones over the bus by a kernel; the rest never moves."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from sparsekv.core.layer import CacheLayer, Queries, Selection
from sparsekv.core.regions import Regions
from sparsekv.core.selectors.base import Selector
from sparsekv.kernels import (
    Anchored,
    CompletionQuery,
    HotRows,
    KeyBuckets,
    attend_tokens,
    fetch_rows,
    gather_rows,
)
from sparsekv.util.memory import free_host_memory, free_memory

SPARE = 64
"""Tokens that `Near` has room for beyond the longest tail."""
GROWTH = 4096
"""Tokens that a tail is made room for at once, beyond the length of its cache: a longer one is filled anew."""
HOT, HOT_SHARE = 4, 0.5
"""Rows that were read lately and stay on the device, times those that a step reads; and what they take of the device's
free memory, at most."""


class Room(NamedTuple):
    """The memory of the device that rows read lately may take: `size` bytes a layer, and `times` the rows that a step
    reads at most; None: as many as there are bytes."""

    size: float = 0.0
    times: int | None = HOT

    def slots(self, listed: int, data: Tensor, stored: int) -> int:
        """How many slots that is beside `data [B, Hkv, slots, 2d]`, for the lists of a step and of so many tokens in
        all."""
        rows, heads, _, width = data.shape
        slots = min(int(self.size / (rows * heads * (width * data.element_size() + 16))), stored)  # 16: of the table
        return slots if self.times is None else min(slots, self.times * listed)

    @classmethod
    def of(cls, kv_memory: float | str | None, here: int, device: torch.device, layers: int) -> Room:
        """The room of each of so many layers: four times what a step reads, or what `kv_memory` [GB] leaves beside
        `here` bytes of other layers' keys and values; of what is free at most half."""
        free = HOT_SHARE * (free_memory(device) if device.type == "cuda" else free_host_memory())
        if kv_memory is None or isinstance(kv_memory, str):
            return cls(free / layers)
        return cls(max(0.0, min(free, 1e9 * kv_memory - here)) / layers, None)


class Near:
    """Copies on the device of what a step reads, `data [B, Hkv, hot + lists + sinks + tail, 2d]`: rows that were read
    lately, as many as `room` says; what a step reads and found no place among them; the sinks of every row, the last
    one next to the tail; and all tokens from `first` on, the tail and the answer so far. Shared by a view and the plans
    of its steps, which write new tokens here. A row of the mid region is written once, so that no copy is ever old."""

    def __init__(self, hot_room: Room = Room()):
        self.lists, self.hot_room = 0, hot_room
        self.data: Tensor | None = None
        self.hot: HotRows | None = None
        self.sinks = self.first = 0
        self.edges: tuple[Tensor, Tensor]
        """The slots where sinks and tail of every row begin, `[B]`."""

    @property
    def room(self) -> int:
        """The length of the cache at which it is full."""
        return 0 if self.data is None else self.data.shape[2] - self.shift

    @property
    def front(self) -> int:
        """The slots before the sinks."""
        return self.lists + (0 if self.hot is None else self.hot.held.shape[2])

    @property
    def shift(self) -> int:
        """The way from a token of tail or answer to its slot."""
        return self.front + self.sinks - self.first

    def fill(self, stored: Tensor, regions: Regions, longest: int) -> None:
        """Fill the slots from keys and values `[B, Hkv, n, 2d]` in CPU memory; longest: tokens that the tail may
        have. Of rows that were read lately there are none then."""
        device, length = regions.starts.device, stored.shape[2]
        self.first, self.sinks, self.data = regions.edges[2], regions.sinks, None
        sinks = regions.mid_first[:, None] - torch.arange(self.sinks, 0, -1, device=device)
        sinks = torch.where(sinks >= regions.starts[:, None], sinks, -1)
        tail = torch.arange(self.first, length, device=device)
        index = torch.cat([sinks, tail.expand(len(sinks), -1)], dim=1)[:, None].expand(-1, stored.shape[1], -1)
        slots = self.sinks + max(length - self.first, min(longest, length + GROWTH)) + SPARE
        self.data = stored.new_empty(*stored.shape[:2], self.front + slots, stored.shape[3], device=device)
        self.data[:, :, :self.front].zero_()
        if self.hot is not None:
            self.hot = self.hot.emptied()
        fetch_rows(stored, index, self.data[:, :, self.front:])
        tail_starts = regions.tail_starts + self.shift
        self.edges = tail_starts - (regions.mid_first - regions.starts), tail_starts

    def append(self, new: Tensor, past: int) -> None:
        """New tokens `[B, Hkv, n, 2d]` on the device, after `past`; where there is no room, it is filled anew later."""
        end = past + new.shape[2]
        if self.data is None or end > self.room:
            self.data = None
        else:
            self.data[:, :, past + self.shift:end + self.shift] = new.detach()

    def make_lists(self, count: int, stored: int) -> None:
        """Room for so many listed tokens, and not for many more, and for rows that were read lately of `stored` in
        all."""
        assert self.data is not None
        if self.lists // 4 <= count <= self.lists:
            return
        (rows, heads), kept, front = self.data.shape[:2], self.data[:, :, self.front:], self.front
        slots = self.hot_room.slots(count, kept, stored)
        self.lists, self.hot = count, HotRows.empty(rows, heads, slots, kept.device) if slots else None
        data = kept.new_empty(rows, heads, self.front + kept.shape[2], kept.shape[3])
        data[:, :, :self.front].zero_()
        data[:, :, self.front:] = kept
        self.data, more = data, self.front - front
        self.edges = self.edges[0] + more, self.edges[1] + more

    def fresh(self) -> Near:
        """Another with as much room, of rows that were read lately at most `HOT` times those of a step."""
        return Near(self.hot_room._replace(times=HOT))


@dataclass(eq=False)
class HostView(CacheLayer):
    """A layer whose keys and values lie in CPU memory, `both [B, Hkv, N, 2d]`, while it decodes on a device: a step
    fetches those of the selected ones that do not lie there yet to slots beside sinks and tail, and attends to
    slots."""

    both: Tensor
    longest: int = 0
    """Tokens of the longest tail."""
    near: Near = field(default_factory=Near)
    counts: Tensor | None = None
    """Rows that steps listed, and those of them that came over the bus, `[2]` int64, added to."""
    ends: dict[int, Tensor] = field(default_factory=dict)
    """By a shift to slots, the slots after the queries `[Q]`, where a plan has counted them for all layers."""
    fetched: tuple[Any, Tensor, Tensor] | None = None
    """The last selection, its tokens and their slots."""
    _moved: tuple[Tensor, Tensor] | None = None
    _on_device: bool = False

    in_place: ClassVar[bool] = True

    @property
    def shape(self) -> tuple[int, int, int, int]:
        rows, heads, stored, width = self.both.shape
        return rows, heads, stored, width // 2

    @property
    def dtype(self) -> torch.dtype:
        return self.both.dtype

    @property
    def keys(self) -> Tensor:
        """The keys where they lie; on the device while the layer is built or grown, for methods that read them so."""
        return self._tensors()[0]

    @property
    def values(self) -> Tensor:
        """The values, as `keys`."""
        return self._tensors()[1]

    def keys_at(self, first: int, last: int, step: int = 1) -> Tensor:
        return read(self.both[..., :self.head_dim], self.device, first, last, step)

    def values_at(self, first: int, last: int) -> Tensor:
        return read(self.both[..., self.head_dim:], self.device, first, last)

    def gather(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """A list that was fetched for attention is not fetched again."""
        if self.fetched is None or self.fetched[1] is not tokens:
            self._fetch(None, tokens)
        assert self.near.data is not None and self.fetched is not None
        both = gather_rows(self.near.data, self.by_head(self.fetched[2]))
        keys, values = both.reshape(*tokens.shape, -1).chunk(2, dim=-1)
        return keys, values

    def attend(
        self, queries: Queries, selection: Selection, completion: CompletionQuery | None = None,
        anchored: Anchored | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert anchored is None and not selection.contiguous
        tokens, slots = self._fetch(selection, self.listed(selection))
        near = self.near
        if completion is not None and isinstance(completion.keys, KeyBuckets):
            completion = completion._replace(keys=KeyBuckets(self._of_slots(completion.keys.number, tokens,
                                                                                  slots)))
        assert near.data is not None
        keys, values = near.data.chunk(2, dim=-1)
        ends = self.ends.get(near.shift)
        starts, tail_starts = (queries.per_query(x) for x in near.edges)
        return attend_tokens(
            queries.folded, keys, values, slots, scale=self.scale, sink_size=near.sinks, starts=starts,
            tail_starts=tail_starts, lengths=queries.lengths + near.shift if ends is None else ends,
            log_weights=selection.log_weights, completion=completion)

    def listed(self, selection: Selection) -> Tensor:
        """Return one tensor for one selection: exact part and estimate ask for it one after the other."""
        if self.fetched is None or self.fetched[0] is not selection:
            return super().listed(selection)
        return self.fetched[1]

    @staticmethod
    def lists(selector: Selector) -> bool:
        """Return whether what it selects is a list of a length that is known beforehand, and no buckets, whose tokens
        are counted here."""
        return not selector.reads_without_budget

    def moved(self) -> None:
        self.near.fill(self.both, self.regions, self.longest)

    def settle(self) -> None:
        """Put what a step reads on the device."""
        if self.near.data is None:
            self.moved()

    def take_rows(self, index: Tensor) -> None:
        super().take_rows(index)
        self.near, self.fetched = self.near.fresh(), None

    def fork(self) -> Self:
        other = copy.copy(self)
        other.near, other.fetched = self.near.fresh(), None
        return other

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """`keys` and `values` on the device for as long as the block lasts, copied if they are asked for."""
        try:
            self._on_device = True
            yield
        finally:
            self._on_device, self._moved = False, None

    def _tensors(self) -> tuple[Tensor, Tensor]:
        if not self._on_device:
            keys, values = self.both.chunk(2, dim=-1)
            return keys, values
        if self._moved is None:
            self._moved = self.keys_at(0, self.both.shape[2]), self.values_at(0, self.both.shape[2])
        return self._moved

    def _of_slots(self, number: Tensor, tokens: Tensor, slots: Tensor) -> Tensor:
        """Look up what is known by token, `[B or 1, Hkv, N]`, by the slots that listed tokens `[Q, H, K]` lie in."""
        (rows, heads_kv), (count, heads, width) = self.both.shape[:2], tokens.shape
        tokens, slots = (x.reshape(rows, count // rows, heads_kv, heads // heads_kv, width).transpose(1, 2).flatten(2)
                         for x in (tokens, slots))
        known = number.new_zeros(rows, heads_kv, self.near.front + 1)  # the last one is of no token
        if not number.shape[2]:
            return known
        listed = number.expand(rows, -1, -1).gather(2, tokens.long().clamp(min=0))
        return known.scatter_(2, torch.where(slots < 0, self.near.front, slots).long(), listed)

    def _fetch(self, selection: Selection | None, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Listed tokens `[Q, H, K]` to slots before the sinks, and their slots."""
        near = self.near
        near.make_lists(tokens.numel() // (self.both.shape[0] * self.both.shape[1]), self.both.shape[2])
        assert near.data is not None
        slots = fetch_rows(self.both, tokens, near.data, near.hot, self.counts)
        self.fetched = selection, tokens, slots
        return tokens, slots


def read(part: Tensor, device: torch.device, first: int = 0, last: int | None = None, step: int = 1) -> Tensor:
    """Every `step`-th token of `first … last − 1` of keys or values `[B, Hkv, N, d]`, read by the device where they lie
    elsewhere: after all that it was given to write there."""
    if part.device == device:
        return part[:, :, first:last:step]
    tokens = range(part.shape[2])[first:last:step]
    out = part.new_empty(*part.shape[:2], len(tokens), part.shape[3], device=device)
    index = torch.arange(tokens.start, tokens.stop, tokens.step, device=device)
    fetch_rows(part, index.expand(*part.shape[:2], -1), out)
    return out
