"""What the layers of a served decode step share: the seat of every row, and what it reads. Two launches, and no host
synchronisation. The reference is the plain torch of `seats`, which defines the terms.

The first launch reads the seats in one program a row, and the program that ends last writes them; between the two the
host may give seats to rows. Both write to buffers of the caller, whose places a CUDA graph may know.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from sparsekv.kernels.launch import power_of_two

SLOTS_AT_ONCE, PAGES_AT_ONCE, ROWS_AT_ONCE = 1024, 4096, 64
"""Slots or anchors, entries of a page table, and rows beside all seats that a program looks at together."""
WARPS = 4
NOWHERE = -2
"""The last slot of a free seat: no token's slot, and not that of a row without tokens."""


class SeatState(NamedTuple):
    """The seats, the last one always free: length, last, tail, used `[S + 1]` int64, table `[S + 1, blocks]` int32;
    arrived `[1]` int32: programs of a launch that have ended, zero between launches."""

    length: Tensor
    last: Tensor
    tail: Tensor
    used: Tensor
    table: Tensor
    arrived: Tensor


class SeatMatches(NamedTuple):
    """The rows of a step that have a seat, `[R]` each. single bool: rows of one new token that decode; own int64: its
    slot; known bool, seat int64: who has an index, and which; wants bool: who wants a seat or a longer index."""

    single: Tensor
    own: Tensor
    known: Tensor
    seat: Tensor
    wants: Tensor


def launch_follow(
    lengths: Tensor, starts: Tensor, table: Tensor, slots: Tensor, state: SeatState, unsorted: Tensor | None,
    found: SeatMatches, *, noted: int, step: int, page: int, dense_below: int,
    room: int,
) -> None:
    """`Seats.follow` of lengths `[R]`, starts `[R + 1]`, table `[R, blocks]`, slots `[T]`: changes the state, sets
    `unsorted [slots + 1]` at the first `noted` slots, and writes found; rows want a longer index that have outgrown
    `room`."""
    from sparsekv.runtime.vllm.seating_triton import follow_kernel

    rows, count = lengths.shape[0], state.length.shape[0] - 1
    if not rows:
        return
    # where there is nothing to note the kernel is the same, and writes nothing
    at = state.arrived if unsorted is None else unsorted
    follow_kernel[(rows,)](
        lengths, starts, slots, table, at, state, found, rows, slots.shape[0],
        0 if unsorted is None else noted, step, count, at.shape[0] - 1, table.stride(0), state.table.stride(0),
        table.shape[1], min(table.shape[1], state.table.shape[1]), dense_below, room, PAGE=page,
        SEATS=power_of_two(count + 1), TILE=ROWS_AT_ONCE, BLOCK=SLOTS_AT_ONCE,
        PAGES=min(PAGES_AT_ONCE, power_of_two(state.table.shape[1])), NOWHERE=NOWHERE, num_warps=WARPS)


def launch_lanes(
    lengths: Tensor, table: Tensor, known: Tensor, seat: Tensor, tail: Tensor,
    lanes: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], *, page: int, dense_below: int, sink: int,
    longest: int,
) -> None:
    """`Seats.metadata` of rows that sit where `known [R]` and `seat [R]` say, `tail [S + 1]`: writes lanes, a
    `DecodeMetadata`."""
    from sparsekv.runtime.vllm.seating_triton import lanes_kernel

    rows, size = lengths.shape[0], lanes[2].shape[1]
    if rows:
        lanes_kernel[(rows,)](
            lengths, table, known, seat, tail, *lanes, tail.shape[0] - 1, table.stride(0), table.shape[1], dense_below,
            sink, longest, size, PAGE=page, BLOCK=min(SLOTS_AT_ONCE, power_of_two(size)), num_warps=WARPS)
