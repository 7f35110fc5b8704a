"""The Triton kernels of `seating.py`; importing this module imports Triton. What changes from step to step is not
specialised on: nothing is compiled while requests are served."""

import triton
import triton.language as tl


@triton.jit
def settle(
    lengths, slots, seats, outputs, rows, tokens, step, count,
    SEATS: tl.constexpr, TILE: tl.constexpr, NOWHERE: tl.constexpr,
):
    """How far the seats are after this step: those found have the row's length, those in whose last slot a token is
    written have none. Of several rows with one seat the last one counts. What other programs have just written is read
    past the caches that they do not share."""
    s = tl.arange(0, SEATS)
    there = s < count
    length = tl.load(seats.length + s, mask=there, other=0)
    last = tl.load(seats.last + s, mask=there, other=NOWHERE)
    gone = tl.zeros([SEATS], tl.int32)
    for first in range(0, tokens, TILE):
        at = first + tl.arange(0, TILE)
        slot = tl.load(slots + at, mask=at < tokens, other=-1)
        gone = tl.maximum(gone, tl.max((slot[:, None] == last[None, :]).to(tl.int32), 0))
    owner = tl.full([SEATS], -1, tl.int32)
    for first in range(0, rows, TILE):
        row = first + tl.arange(0, TILE)
        inside = row < rows
        found = tl.load(outputs.known + row, mask=inside, other=0, cache_modifier=".cg").to(tl.int1)
        where = tl.load(outputs.seat + row, mask=inside, other=-1, cache_modifier=".cg")
        sits = found[:, None] & (where[:, None] == s[None, :])
        owner = tl.maximum(owner, tl.max(tl.where(sits, row[:, None], -1), 0))
    owned = there & (owner >= 0)
    length = tl.where(there & (gone == 0), length, 0)
    last = tl.where(there & (gone == 0), last, NOWHERE)
    new_length = tl.load(lengths + owner, mask=owned, other=0).to(tl.int64)
    new_last = tl.load(outputs.own + owner, mask=owned, other=0, cache_modifier=".cg")
    tl.store(seats.length + s, tl.where(owned, new_length, length), mask=s <= count)
    tl.store(seats.last + s, tl.where(owned, new_last, last), mask=s <= count)
    tl.store(seats.used + s, tl.zeros([SEATS], tl.int64) + step, mask=owned)


@triton.jit(do_not_specialize=["rows", "tokens", "noted", "step"])
def follow_kernel(
    lengths, starts, slots, table, unsorted, seats, found, rows, tokens, noted, step, count, nobody, table_row,
    seat_row, width, blocks, dense_below, room,
    PAGE: tl.constexpr, SEATS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, PAGES: tl.constexpr,
    NOWHERE: tl.constexpr,
):
    """One program a row. The last of all to finish writes the seats, when no program reads them."""
    # grid: (rows,), R of them
    # lengths   [R] int32           tokens of a row, this step's included
    # starts    [R + 1] int32       where the queries of a row begin
    # slots     [tokens] int64      of the new tokens, negative = none
    # table     [R, width] int32    pages of a row; stride table_row
    # unsorted  [nobody + 1] bool   set at the first `noted` slots
    # seats     `SeatState` of count seats and nobody's: read by all programs, written by the last; stride seat_row
    # found     `SeatMatches`, written: [R]
    row = tl.program_id(0)
    length = tl.load(lengths + row).to(tl.int64)
    end = tl.load(starts + row + 1)
    mine = tl.load(slots + tl.minimum(tl.maximum(end - 1, 0), tokens - 1), mask=tokens > 0, other=-1).to(tl.int64)
    alone = (end - tl.load(starts + row) == 1) & (length >= 2) & (mine >= 0)
    pages = table + row.to(tl.int64) * table_row
    place = tl.maximum(length - 2, 0)
    before = tl.load(pages + tl.minimum(place // PAGE, width - 1)).to(tl.int64) * PAGE + place % PAGE
    # a seat that has the token before this one, unless another request writes there in this step
    s = tl.arange(0, SEATS)
    there = s < count
    hit = (tl.load(seats.length + s, mask=there, other=-2) == length - 1) & (
        tl.load(seats.last + s, mask=there, other=NOWHERE) == before)
    chosen = tl.min(tl.where(hit, s, SEATS), 0)
    written = tl.zeros([BLOCK], tl.int32)
    new = tl.where(row == 0, noted, 0)
    for first in range(0, tokens, BLOCK):
        at = first + tl.arange(0, BLOCK)
        slot = tl.load(slots + at, mask=at < tokens, other=-1)
        written |= (slot == before).to(tl.int32)
        tl.store(unsorted + tl.where(slot < 0, nobody, slot), 1, mask=at < new)
    matched = alone & (chosen < SEATS) & (tl.max(written, 0) == 0)
    chosen = tl.where(matched, chosen, 0)
    # the pages of its index
    tail = tl.load(seats.tail + chosen)
    compared = tl.where(matched, tl.minimum(blocks, tl.cdiv(tail, PAGE)), 0).to(tl.int32)
    own_pages = seats.table + chosen.to(tl.int64) * seat_row
    other = tl.zeros([PAGES], tl.int32)
    for first in range(0, compared, PAGES):
        at = first + tl.arange(0, PAGES)
        inside = at < compared
        page = tl.load(pages + at, mask=inside, other=0)
        other |= (page != tl.load(own_pages + at, mask=inside, other=0)).to(tl.int32)
    sits = matched & (tl.max(other, 0) == 0)
    tl.store(found.single + row, alone)
    tl.store(found.own + row, mine)
    tl.store(found.known + row, sits)
    tl.store(found.seat + row, chosen.to(tl.int64))
    tl.store(found.wants + row, tl.where(sits, length - 1 >= tail + room, alone & (length >= dense_below)))
    tl.debug_barrier()
    if tl.atomic_add(seats.arrived, 1, sem="acq_rel", scope="gpu") == rows - 1:
        settle(lengths, slots, seats, found, rows, tokens, step, count, SEATS=SEATS, TILE=TILE, NOWHERE=NOWHERE)
        tl.store(seats.arrived, 0)


@triton.jit
def lanes_kernel(
    lengths, table, known, seat, tail, sparse, lane, anchors, places, rest, anchored, count, table_row, width,
    dense_below, sink, longest, size, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):
    """One program a row: its lane, of `size` anchors."""
    # grid: (R,)
    # lengths   [R] int32          tokens of a row
    # table     [R, width] int32   pages of a row; stride table_row
    # known     [R] bool           rows that have a seat
    # seat      [R] int64          which
    # tail      [count + 1] int64  first token of a seat's tail
    # sparse    [R] bool           written: rows that decode sparsely
    # lane      [R] int64          written: the seat, or count for nobody's
    # anchors   [R, size] int32    written: slots, -1 = none
    # places    [R] int64          written: of a row's last token
    # rest      [R] int32          written: tokens that a row reads beside its lane, 0 of a sparse one
    # anchored  [R] int64          written: anchors
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + row).to(tl.int64)
    where = tl.load(seat + row)
    first_of_tail = tl.load(tail + where)
    taken = tl.load(known + row).to(tl.int1) & (length >= dense_below) & (length - first_of_tail <= longest)
    tl.store(sparse + row, taken)
    tl.store(lane + row, tl.where(taken, where, count))
    tl.store(places + row, tl.maximum(length - 1, 0))
    tl.store(rest + row, tl.where(taken, 0, length).to(tl.int32))
    sink_end, end = tl.where(taken, first_of_tail, 0), tl.where(taken, length, 0)
    anchors_used = tl.zeros([BLOCK], tl.int32)
    for first in range(0, size, BLOCK):
        step = first + tl.arange(0, BLOCK)
        place = tl.where(step < sink, step, first_of_tail + step - sink)
        used = (step < size) & (place < tl.where(step < sink, sink_end, end))
        page = tl.load(table + row * table_row + tl.minimum(place // PAGE, width - 1), mask=used, other=0)
        slot = page.to(tl.int64) * PAGE + place % PAGE
        anchors_used += used.to(tl.int32)
        tl.store(anchors + row * size + step, tl.where(used, slot, -1).to(tl.int32), mask=step < size)
    tl.store(anchored + row, tl.sum(anchors_used, 0).to(tl.int64))
