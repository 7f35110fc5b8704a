"""Which request has which seat: requests that decode sparsely, known by their pages.

A step's metadata name no request. But a request alone writes the page it is in. So a row is a seat's request if it has
one token more than the seat had at its last step, and its token before this one lies in the slot that the request wrote
then. If another row has written there since, the seat ends; if the pages of the index are others, the row is not its
request. All of it is compared on the device, for every row with every seat. A row that is not found is attended to
fully: a wrong guess of the host's costs time and never a wrong token. The host learns of rows that want a seat at once
on a CPU; on a CUDA device it looks at the first decode batch after another one, and else at what the step before left
behind. It counts the steps after which a tail may have outgrown its room, and looks then: borders move where those of
`attach` do.

What is written here in plain torch is done for a decode batch on a CUDA device by two launches (`seating`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sparsekv.core.regions import Regions, TailRule
from sparsekv.kernels import slots_at
from sparsekv.runtime.vllm.index import LayerIndex, build_seat, extend_seat
from sparsekv.runtime.vllm.paged import DecodeMetadata, UncodedSlots
from sparsekv.runtime.vllm.seating import NOWHERE, SeatMatches, SeatState, launch_follow, launch_lanes

SLACK = 64
"""Tokens that a tail may grow beyond its room before the row is attended to fully."""
PATIENCE = 16
"""Steps for which no row without a seat asks again when all seats were taken."""
NEVER = 1 << 62
IDLE = 64
"""Batches of short requests in a row after which the seats are given up."""


@dataclass(frozen=True)
class SeatRule:
    """The division of a request, and the length from which it decodes sparsely [tokens]."""

    sink_size: int
    window_size: int
    decode_window: int
    dense_below: int
    page: int

    @property
    def tails(self) -> TailRule:
        """The rule by which the oldest of a tail join the mid region."""
        return TailRule(self.window_size, self.decode_window)

    @property
    def room(self) -> int:
        """Tokens of the longest tail."""
        return self.tails.longest


class StepRows(NamedTuple):
    """The rows of a step, as vLLM has them: seq_lens `[R]`, this step's tokens included; query_start_loc `[R + 1]`;
    block_table `[R, blocks]`; slot_mapping `[T]` of the new tokens, -1 = none; is_prefilling: of the first rows,
    whether their prompt goes on, on the CPU."""

    seq_lens: Tensor
    query_start_loc: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    is_prefilling: Tensor | None = None


def rows_of(batch: StepRows, matches: SeatMatches, rows: Tensor) -> tuple[StepRows, SeatMatches, Tensor]:
    """Take some rows `[n]` of a batch, each of one new token, and where these are among the new tokens, `[n]`."""
    tokens = batch.query_start_loc[rows + 1].long() - 1
    part = StepRows(batch.seq_lens[rows], torch.arange(rows.shape[0] + 1, device=rows.device), batch.block_table[rows],
                    batch.slot_mapping[tokens])
    return part, SeatMatches(*(x[rows] for x in matches)), tokens


class Seats:
    """Seats `0 … count − 1`; seat `count` is where rows without one write to. most: the most rows of a decode batch on
    a CUDA device, whose metadata lie in buffers that stay."""

    def __init__(self, count: int, rule: SeatRule, longest: int, device: torch.device, most: int = 0):
        self.count, self.rule, self.device, self.most = count, rule, device, most
        self.launches = self.late = device.type == "cuda"
        self.kept: dict[int, tuple[SeatMatches, DecodeMetadata]] = {}

        def full(value: int, *shape: int) -> Tensor:
            return torch.full((count + 1, *shape), value, dtype=torch.int64, device=device)

        self.length, self.last, self.tail, self.used = full(0), full(NOWHERE), full(0), full(-1)
        self.table = torch.zeros(count + 1, -(-longest // rule.page), dtype=torch.int32, device=device)
        self.arrived = torch.zeros(1, dtype=torch.int32, device=device)
        self.steps = 0
        self.asked, self.quiet_until = False, 0
        self.outgrows = [NEVER] * count
        self.waiting: tuple[Tensor, torch.cuda.Event] | None = None
        self.rows = 0
        self.taken, self.idle = False, 0
        self.uncoded: UncodedSlots | None = None

    def empty(self, short: bool) -> bool:
        """Return whether a batch needs no seats: its requests are too short for one, and no seat is taken. After some
        such batches in a row the seats are given up: a long request that comes back later gets a new index."""
        self.idle = self.idle + 1 if short else 0
        if self.taken and self.idle > IDLE:
            self.leave()
        return short and not self.taken

    def leave(self) -> None:
        """The seat is free."""
        self.length.zero_()
        self.last.fill_(NOWHERE)
        self.outgrows = [NEVER] * self.count
        self.taken, self.asked = False, False

    def follow(self, batch: StepRows, *, new: Tensor | None = None, decode: bool = False) -> SeatMatches:
        """Find the rows of a batch among the seats, whatever else is in it, and note how far they are. new: the first
        of the batch's slots, those that get keys; decode: no row has more than one."""
        self.steps += 1
        going_on = batch.is_prefilling is not None and bool(batch.is_prefilling.any())
        if self.launches and decode and not going_on:
            return self._launch_follow(batch, 0 if new is None else new.shape[0])
        if self.uncoded is not None and new is not None:
            self.uncoded.note(new, decode=decode)
        lengths = batch.seq_lens.long()
        slots, rows = batch.slot_mapping.long(), lengths.shape[0]
        # another request writes where a seat's request has its last token: the seat's has ended
        gone = (slots[:, None] == self.last[None]).any(0)
        self.length.masked_fill_(gone, 0)
        self.last.masked_fill_(gone, NOWHERE)
        counts = batch.query_start_loc.diff()
        if slots.shape[0]:
            own = slots[(batch.query_start_loc[1:].long() - 1).clamp(0, slots.shape[0] - 1)]
        else:
            own = torch.full((rows,), -1, device=self.device)
        single = (counts == 1) & (lengths >= 2) & (own >= 0)
        if batch.is_prefilling is not None and going_on:
            prefills = batch.is_prefilling[:rows]
            prefills = torch.nn.functional.pad(prefills, (0, rows - prefills.shape[0]))
            single = single & ~prefills.to(self.device, non_blocking=True)
        before = slots_at(batch.block_table, (lengths - 2).clamp(min=0)[:, None], self.rule.page)
        match = single[:, None] & (self.length[None] == lengths[:, None] - 1) & (self.last[None] == before)
        match[:, self.count] = False
        known, seat = match.any(1), match.int().argmax(1)
        width = min(batch.block_table.shape[1], self.table.shape[1])
        inside = torch.arange(width, device=self.device) * self.rule.page < self.tail[seat][:, None]
        same = (self.table[seat, :width] == batch.block_table[:, :width]) | ~inside
        known = known & same.all(1)
        self._note(torch.where(known, seat, self.count), lengths, own)
        outgrown = lengths - 1 >= self.tail[seat] + self.rule.room
        wants = torch.where(known, outgrown, single & (lengths >= self.rule.dense_below))
        return SeatMatches(single, own, known, seat, wants)

    def serve(self, batch: StepRows, matches: SeatMatches, indices: Sequence[LayerIndex]) -> SeatMatches:
        """Seats for the rows that want one and longer indices for those whose tail has outgrown its room."""
        if not self._asks(matches):
            return matches
        lengths = batch.seq_lens.long()
        known, seat = matches.known.clone(), matches.seat.clone()
        sizes = lengths.tolist()
        for row in (matches.wants & matches.known).nonzero()[:, 0].tolist():
            self._move(int(seat[row]), batch.block_table[row:row + 1], sizes[row], indices)
        if self.steps < self.quiet_until:
            return matches
        free = self._free()
        for row in (matches.wants & ~matches.known).nonzero()[:, 0].tolist():
            if not free:
                self.quiet_until = self.steps + PATIENCE
                break
            own_seat = free.pop(0)
            self._sit(own_seat, batch.block_table[row:row + 1], sizes[row], indices)
            known[row], seat[row] = True, own_seat
            self._note(seat[row:row + 1], lengths[row:row + 1], matches.own[row:row + 1])
        return matches._replace(known=known, seat=seat)

    def metadata(self, batch: StepRows, matches: SeatMatches) -> DecodeMetadata:
        """Describe the rows of a decode batch to the layers."""
        rule = self.rule
        width = rule.room + SLACK
        if self.launches:
            kept = self._kept(batch.seq_lens.shape[0])[1]
            launch_lanes(batch.seq_lens, batch.block_table, matches.known, matches.seat, self.tail, kept,
                         page=rule.page, dense_below=rule.dense_below, sink=rule.sink_size, longest=width)
            return kept
        lengths = batch.seq_lens.long()
        tail = self.tail[matches.seat]
        sparse = matches.known & (lengths >= rule.dense_below) & (lengths - tail <= width)
        step = torch.arange(rule.sink_size + width, device=self.device)
        sink = step < rule.sink_size
        positions = torch.where(sink, step, tail[:, None] + step - rule.sink_size)
        used = sparse[:, None] & (positions < torch.where(sink, tail[:, None], lengths[:, None]))
        anchors = torch.where(used, slots_at(batch.block_table, positions, rule.page), -1).int()
        return DecodeMetadata(sparse, torch.where(sparse, matches.seat, self.count), anchors,
                              (lengths - 1).clamp(min=0), torch.where(sparse, 0, lengths).int(), used.sum(1))

    def _launch_follow(self, batch: StepRows, new: int) -> SeatMatches:
        rows, rule, uncoded = batch.seq_lens.shape[0], self.rule, self.uncoded
        matches = self._kept(rows)[0]
        if uncoded is not None:
            uncoded.now = False
        launch_follow(batch.seq_lens, batch.query_start_loc, batch.block_table, batch.slot_mapping,
                      SeatState(self.length, self.last, self.tail, self.used, self.table, self.arrived),
                      None if uncoded is None else uncoded.at, matches, noted=new, step=self.steps,
                      page=rule.page, dense_below=rule.dense_below, room=rule.room)
        return matches

    def _kept(self, rows: int) -> tuple[SeatMatches, DecodeMetadata]:
        """Return the description of a decode batch of so many rows, in buffers that a graph may know."""
        assert rows <= self.most, f"{rows} rows, buffers for {self.most}"

        def full(kind: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(self.most, *shape, dtype=kind, device=self.device)

        if not self.kept:
            bit, whole, half = torch.bool, torch.int64, torch.int32
            anchors = self.rule.sink_size + self.rule.room + SLACK
            self.kept[self.most] = (
                SeatMatches(full(bit), full(whole), full(bit), full(whole), full(bit)),
                DecodeMetadata(full(bit), full(whole), full(half, anchors), full(whole), full(half), full(whole)))
        if rows not in self.kept:
            matches, metadata = self.kept[self.most]
            self.kept[rows] = (SeatMatches(*(x[:rows] for x in matches)),
                               DecodeMetadata(*(x[:rows] for x in metadata)))
        return self.kept[rows]

    def _asks(self, matches: SeatMatches) -> bool:
        """Decide whether to assign seats in this step. While all are taken, only rows that have one are served."""
        rows = matches.wants.shape[0]
        fresh = not self.asked or rows != self.rows
        self.asked, self.rows = True, rows
        if fresh:
            self.quiet_until = 0
        quiet = self.steps < self.quiet_until
        if not self.late:
            return bool((matches.wants & matches.known if quiet else matches.wants).any())
        due = self.steps >= min(self.outgrows)
        if fresh or due:
            self.waiting = None
            self._count_steps()
            return bool(matches.wants.any())
        return not quiet and self._left_behind(matches.wants) and bool(matches.wants.any())

    def _left_behind(self, wants: Tensor) -> bool:
        """Return whether a row wanted a seat at an earlier step, as far as the device's copy has arrived."""
        arrived = self.waiting is None or self.waiting[1].query()
        late = arrived and self.waiting is not None and bool(self.waiting[0].any())
        if arrived:
            copy = torch.empty(wants.shape[0], dtype=torch.bool, pin_memory=True)
            copy.copy_(wants, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self.waiting = (copy, event)
        return late

    def _count_steps(self) -> None:
        """Count the steps after which a tail may have outgrown its room: a request gets a token a step at most."""
        length, tail, used = torch.stack([self.length, self.tail, self.used])[:, :self.count].tolist()
        room = self.rule.room
        self.outgrows = [self.steps + max(1, t + room - n + 1) if n and u == self.steps else NEVER
                         for n, t, u in zip(length, tail, used, strict=True)]

    def other_batch(self) -> None:
        """A batch that is not all decode: the next one that is may have new rows."""
        self.asked = False

    def _note(self, seat: Tensor, lengths: Tensor, own: Tensor) -> None:
        # filled, not set: a number that is set by an index is copied to the device, and the host waits for it
        self.length[seat] = lengths
        self.last[seat] = own
        self.used.index_fill_(0, seat, self.steps)
        self.length[self.count].fill_(0)
        self.last[self.count].fill_(NOWHERE)

    def _free(self) -> list[int]:
        """Seats that no row of this step has, empty ones first, then the least recently used."""
        used, length = self.used.tolist(), self.length.tolist()
        free = [s for s in range(self.count) if used[s] < self.steps]
        return sorted(free, key=lambda s: (length[s] > 0, used[s]))

    def _sit(self, seat: int, table: Tensor, length: int, indices: Sequence[LayerIndex]) -> None:
        past = length - 1
        tail = max(0, past - self.rule.window_size)
        slots = self._slots(table, tail)
        self.taken = True
        build_seat(indices, seat, slots, self._regions(past, tail))
        self._seated(seat, table, tail, slots)
        self.outgrows[seat] = self.steps + max(1, tail + self.rule.room - past)

    def _move(self, seat: int, table: Tensor, length: int, indices: Sequence[LayerIndex]) -> None:
        """The oldest of a tail join the mid region as they would have if the host had looked at every step."""
        past, tail, rule = length - 1, int(self.tail[seat]), self.rule
        while past >= (outgrown := tail + rule.room):
            old, tail = self._regions(outgrown + 1, tail), rule.tails.moved_to(outgrown)
            slots = self._slots(table, tail)
            extend_seat(indices, seat, slots, old, self._regions(outgrown + 1, tail))
            self._seated(seat, table, tail, slots)
        self.outgrows[seat] = self.steps + tail + rule.room - past

    def _regions(self, length: int, tail: int) -> Regions:
        """Return the regions of a request of so many tokens whose tail begins there."""
        starts = torch.zeros(1, dtype=torch.int64, device=self.device)
        return Regions.of_equal_rows(starts, length, self.rule.sink_size, length - tail)

    def _seated(self, seat: int, table: Tensor, tail: int, slots: Tensor) -> None:
        """The index of a seat is of these pages and of these slots, whose keys have codes in every layer."""
        if self.uncoded is not None:
            self.uncoded.at.index_fill_(0, slots, False)
        width = min(table.shape[1], self.table.shape[1])
        self.table[seat, :width] = table[0, :width]
        self.tail[seat].fill_(tail)

    def _slots(self, table: Tensor, tail: int) -> Tensor:
        """Slots of the tokens before a tail, `[N]`."""
        return slots_at(table, torch.arange(tail, device=self.device)[None], self.rule.page)[0]
