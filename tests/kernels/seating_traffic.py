"""A CUDA device's launches against plain torch: long runs of decode batches in which requests come and go, after each
of which all that is known of the seats and all that the layers read is the same."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

from sparsekv.runtime.vllm.paged import UncodedSlots
from sparsekv.runtime.vllm.seats import SeatMatches, SeatRule, Seats, StepRows

PAGE, BLOCKS, LONGEST = 4, 400, 120


class Request:
    def __init__(self, pages: list[int], length: int):
        self.pages, self.length = pages, length


class Traffic:
    """Requests of which some take part in every step. What happens to pages is mostly worse than in a server."""

    def __init__(self, seed: int, most: int):
        self.random, self.most = random.Random(seed), most
        self.requests: list[Request] = []

    def pages(self, count: int) -> list[int]:
        return [self.random.randrange(1, BLOCKS) for _ in range(count)]

    def change(self) -> None:
        """Somebody leaves or comes: new, in the pages of a dead one, or with all of a living one's full pages."""
        r = self.random
        if self.requests and r.random() < 0.1:
            self.requests.pop(r.randrange(len(self.requests)))
        if len(self.requests) < self.most and r.random() < 0.5:
            self.requests.append(Request(self.pages(LONGEST // PAGE), r.choice([0, 1, 9, 23, 30, 41, 64])))
        if self.requests and r.random() < 0.1:
            dead = r.choice(self.requests)
            self.requests.remove(dead)
            self.requests.append(Request(list(dead.pages), max(1, dead.length + r.choice([-2, -1, 0, 0, 1]))))
        whole = [q for q in self.requests if q.length % PAGE == 0]
        if whole and len(self.requests) < self.most and r.random() < 0.7:
            one = r.choice(whole)
            first = one.length // PAGE
            one.pages[first:] = self.pages(len(one.pages) - first)
            self.requests.append(Request(one.pages[:first] + self.pages(len(one.pages) - first), one.length))
        self.requests = [q for q in self.requests if q.length + 1 < LONGEST]

    def batch(self, width: int) -> StepRows:
        """Their next tokens, in any order, some rows of padding behind them."""
        r = self.random
        self.change()
        rows = [q for q in self.requests if r.random() < 0.9]
        if r.random() < 0.2:
            r.shuffle(rows)
        if rows and r.random() < 0.05:
            r.choice(rows).pages[r.randrange(6)] = r.randrange(1, BLOCKS)
        padded = r.randrange(4)
        count = len(rows) + padded
        for q in rows:
            q.length += 1
        table = torch.zeros(count, width, dtype=torch.int32)
        for row, q in enumerate(rows):
            held = q.pages[:min(width, -(-q.length // PAGE))]
            table[row, :len(held)] = torch.tensor(held, dtype=torch.int32)
        slots = [q.pages[(q.length - 1) // PAGE] * PAGE + (q.length - 1) % PAGE for q in rows]
        if slots and r.random() < 0.1:  # a row whose token has no place, or another's, or where another's last one lies
            q = r.choice(rows)
            last = max(0, q.length - 2)
            slots[r.randrange(len(slots))] = r.choice([-1, slots[0], q.pages[last // PAGE] * PAGE + last % PAGE])
        starts = list(range(len(rows) + 1)) + [len(rows)] * padded
        if rows and r.random() < 0.05:  # a row without a token
            starts[len(rows):] = [len(rows) - 1] * (padded + 1)
        slots += [-1] * r.choice([0, padded, 2 * padded])
        return StepRows(torch.tensor([q.length for q in rows] + [0] * padded, dtype=torch.int32),
                     torch.tensor(starts, dtype=torch.int32), table, torch.tensor(slots, dtype=torch.int64))


def written(seats: Seats) -> list[torch.Tensor]:
    """What a step's launches write beside the state, of all rows that there may be."""
    found, lanes = seats.kept[seats.most]
    return [*found, *lanes]


def junk(x: torch.Tensor) -> bool | int:
    return True if x.dtype == torch.bool else -7


def same(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert torch.equal(found.cpu().long(), expected.long()), f"{what}: {found.tolist()} for {expected.tolist()}"


class Asking(Seats):
    """Seats of which the host asks in every step."""

    def _asks(self, found: SeatMatches) -> bool:
        return bool(found.wants.any())


def check_seating(run: tuple[int, ...], device: str) -> None:
    """run: seed, seats, the most requests, entries of a page table, tokens below which a row reads all, steps."""
    seed, count, most, width, below, steps = run
    places = SeatRule(3, 6, 5, below, PAGE)
    one, two = (Asking(count, places, LONGEST, torch.device(d), most + 5) for d in ("cpu", device))
    two.launches = True
    for seats in (one, two):
        seats.uncoded = UncodedSlots(BLOCKS * PAGE, seats.device)
    traffic, sparse, many = Traffic(seed, most), 0, 0
    for step in range(steps):
        batch = traffic.batch(width)
        there = StepRows(*(x.to(device) for x in batch[:4]))
        two._kept(0)
        for x in written(two):
            x.fill_(junk(x))
        if step % 7 == 0:
            for seats in (one, two):
                seats.uncoded.at.fill_(False)
        # the host serves many steps or few, and does not see some
        serves = traffic.random.random() < (0.2 if seed % 2 else 0.8)
        new = batch.slot_mapping[:0] if step % 10 == 9 else batch.slot_mapping
        results: list[list[torch.Tensor]] = []
        for seats, own in ((one, batch), (two, there)):
            found = seats.follow(own, new=new.to(seats.device), decode=True)
            first = [x.clone() for x in found]
            if serves:
                found = seats.serve(own, found, [])
            results.append([*first, found.known, found.seat, *seats.metadata(own, found)])
        names = ("single own known seat wants served sits sparse lane anchors places rest anchored").split()
        for name, expected, got in zip(names, results[0], results[1], strict=True):
            same(got, expected, f"step {step}, {name}")
        for name in ("length", "last", "tail", "table"):
            same(getattr(two, name), getattr(one, name), f"step {step}, {name} of the seats")
        same(two.used[:-1], one.used[:-1], f"step {step}, used")
        same(two.uncoded.at, one.uncoded.at, f"step {step}, unsorted")
        assert not two.arrived.any()
        rows = batch.seq_lens.shape[0]
        assert all(bool((x[rows:] == junk(x)).all()) for x in written(two)), "rows behind the batch's"
        sparse += int(results[0][7].sum())
        many += int(torch.bincount(results[0][3][results[0][2]], minlength=1).max() > 1)
    assert sparse > steps / 10, "hardly a row decodes sparsely"
    assert many or seed, "no two rows are ever found in one seat"


def empty_batch(device: str) -> None:
    """A batch without rows is nothing."""
    seats = Seats(2, SeatRule(3, 6, 5, 0, PAGE), LONGEST, torch.device(device), 4)
    seats.launches = True
    batch = StepRows(*(torch.zeros(*s, dtype=torch.int32, device=device) for s in ((0,), (1,), (0, 9), (0,))))
    assert seats.metadata(batch, seats.follow(batch, new=batch.slot_mapping, decode=True)).sparse.shape == (0,)


def usual_steps() -> Iterator[tuple[Seats, StepRows]]:
    """Six steps of one request on a CUDA device, with its seats."""
    seats = Seats(2, SeatRule(3, 6, 5, 0, PAGE), LONGEST, torch.device("cuda"), 4)
    seats.uncoded = UncodedSlots(BLOCKS * PAGE, seats.device)
    table = torch.arange(1, 31, dtype=torch.int32, device="cuda")[None]
    batches = [StepRows(*(torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([n], [0, 1])), table,
                        torch.tensor([PAGE + n - 1], device="cuda")) for n in range(30, 36)]
    for batch in batches:
        yield seats, batch
