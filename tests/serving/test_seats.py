"""Who is who by pages alone: what ends a seat, what keeps it, and that nobody gets another's index."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from paged import DECODE_WINDOW, DIM, GROUP, HEADS, PAGE, Engine, Request, full, step

from sparsekv.kernels import slots_at
from sparsekv.runtime.vllm.paged import LATER
from sparsekv.runtime.vllm.seats import IDLE, PATIENCE, SLACK, StepRows

Make = Callable[..., Engine]


@pytest.fixture(params=[False, True], ids=["torch", "triton"])
def make(request: pytest.FixtureRequest) -> Callable[..., Engine]:
    """Makes engines with seats in plain torch, and by the launches of a CUDA device."""
    if request.param:
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("on a CUDA device kernels take no tensors of a CPU")
    return partial(Engine, launches=request.param)


def decode(engine: Engine, requests: list[Request], steps: int) -> list[list[torch.Tensor | None]]:
    return [engine.step([(r, 1) for r in requests]) for _ in range(steps)]


def test_rows_that_change_places_keep_their_seats(make: Make) -> None:
    engine = make(seats=3)
    requests = [Request(s, 300, []) for s in range(3)]
    for r in requests:
        engine.step([(r, 70 + len(r.pages))])
    for order in ((0, 1, 2), (2, 0, 1), (1, 2), (2, 1, 0), (0,), (2, 1)):
        assert all(x is not None for x in decode(engine, [requests[i] for i in order], 1)[0])
    assert engine.seats.built == [0, 1, 2]


def test_beside_a_prompt_rows_decode_sparsely_and_keep_their_seats(make: Make) -> None:
    engine = make(seats=2)
    old, new = Request(1, 300, []), Request(2, 300, [])
    engine.step([(old, 100)])
    decode(engine, [old], 3)
    for _ in range(4):
        beside, prompt = engine.step([(old, 1), (new, 20)])
        assert beside is not None and prompt is None
    decode(engine, [old], 2)
    assert engine.seats.built == [0]


@pytest.mark.parametrize("length", [110, 111, 112])
def test_a_request_in_the_pages_of_a_dead_one_is_not_taken_for_it(length: int, make: Make) -> None:
    """The same pages, and one token more than the dead one had: all that a seat is known by, but for who wrote."""
    engine = make(budget=1.0, candidates=1.0)
    dead, heir = Request(1, 300, []), Request(2, 300, [])
    engine.step([(dead, 100)])
    decode(engine, [dead], 11)
    heir.pages = list(dead.pages)
    engine.step([(heir, length)])
    for _ in range(5):
        torch.testing.assert_close(decode(engine, [heir], 1)[0][0], full(heir), rtol=1e-4, atol=1e-5)
    assert engine.seats.built == [0, 1]


def test_a_prefix_hit_shares_pages_and_no_seat(make: Make) -> None:
    """The second request has the first one's full pages, computes the rest, and both go on."""
    engine = make(seats=2, budget=1.0, candidates=1.0)
    first = Request(1, 300, [])
    engine.step([(first, 100)])
    decode(engine, [first], 3)
    second = Request(1, 300, first.pages[:6])
    second.length = 6 * PAGE
    second.k = torch.cat([first.k[:6 * PAGE], Request(5, 300, []).k[6 * PAGE:]])
    engine.step([(second, 7)])
    for _ in range(20):
        outs = decode(engine, [first, second], 1)[0]
        for out, request in zip(outs, (first, second), strict=True):
            torch.testing.assert_close(out, full(request), rtol=1e-4, atol=1e-5)
    assert engine.seats.built == [0, 1]


def test_a_request_that_was_preempted_gets_a_new_index(make: Make) -> None:
    engine = make(seats=2, budget=1.0, candidates=1.0)
    request, other = Request(1, 300, []), Request(2, 300, [])
    engine.step([(request, 100)])
    decode(engine, [request], 5)
    pages, request.pages = request.pages, []
    request.length = 0
    engine.free += pages
    other.pages = list(pages[:3])
    engine.free = [p for p in engine.free if p not in other.pages]
    engine.step([(other, 40)])
    engine.step([(request, 105)])
    for _ in range(3):
        for out, r in zip(decode(engine, [request, other], 1)[0], (request, other), strict=True):
            torch.testing.assert_close(out, full(r), rtol=1e-4, atol=1e-5)


def test_with_other_pages_in_the_middle_the_index_is_not_used(make: Make) -> None:
    engine = make(seats=1)
    request = Request(1, 300, [])
    engine.step([(request, 100)])
    decode(engine, [request], 2)
    old, request.pages[2] = request.pages[2], engine.free.pop(0)
    engine.pool[request.pages[2]] = engine.pool[old]
    engine.seats.blind = True
    assert engine.step([(request, 1)]) == [None]


def test_a_prompt_of_one_token_more_is_a_prefill(make: Make) -> None:
    """The last token of a prompt, alone after a prefix hit or a chunk: no decode step yet."""
    engine = make()
    request = Request(1, 300, [])
    engine.step([(request, 100)])
    assert engine.step([(request, 1)], prefill=True) == [None]
    assert engine.step([(request, 1)], prefill=False)[0] is not None


def test_more_requests_than_seats(make: Make) -> None:
    """Those without one are attended to fully; a seat that is left goes to the next."""
    engine = make(seats=2)
    requests = [Request(s, 300, []) for s in range(3)]
    for r in requests:
        engine.step([(r, 80)])
    assert [x is None for x in decode(engine, requests, 1)[0]] == [False, False, True]
    decode(engine, requests, 3)
    left = requests[1:]
    decode(engine, left, PATIENCE)
    assert all(x is not None for x in decode(engine, left, 1)[0])


@pytest.mark.parametrize("make", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["torch", "triton"],
                         indirect=True)
def test_borders_move_at_once_although_the_host_sees_nothing(make: Make) -> None:
    """On CUDA the host counts the steps after which a tail may have outgrown its room, whoever waits for a seat; of
    most steps it asks nothing."""
    engine, exact = make(seats=2), make(seats=2)
    engine.seats.late = True
    both = [[Request(s, 400, []) for s in range(3)] for _ in range(2)]
    for which, requests in zip((engine, exact), both, strict=True):
        for r, prompt in zip(requests, (100, 93, 80), strict=True):
            which.step([(r, prompt)])
    for now in range(6 * DECODE_WINDOW):
        if now % 20 == 7:  # one of them waits a step
            for which, requests in zip((engine, exact), both, strict=True):
                decode(which, requests[1:], 1)
        for which, requests in zip((engine, exact), both, strict=True):
            decode(which, requests, 1)
        assert torch.equal(engine.seats.tail, exact.seats.tail), now
    joins = DECODE_WINDOW - DECODE_WINDOW // 2 + 1
    assert int(exact.seats.tail[0]) > 100 + 4 * joins - engine.seats.rule.window_size
    assert 8 < engine.seats.looks < 3 * DECODE_WINDOW


def test_rows_that_pad_a_batch_do_nothing(make: Make) -> None:
    engine = make()
    request = Request(1, 300, [])
    engine.step([(request, 100)])
    decode(engine, [request], 1)
    before = engine.seats.length.clone()
    batch = StepRows(torch.zeros(3, dtype=torch.int32), torch.zeros(4, dtype=torch.int32),
                  torch.zeros(3, engine.width, dtype=torch.int32), torch.full((3,), -1))
    found = engine.seats.serve(batch, engine.seats.follow(batch, decode=True), [engine.index])
    lanes = engine.seats.metadata(batch, found)
    assert not lanes.sparse.any() and not lanes.rest.any() and bool((lanes.anchors == -1).all())
    assert torch.equal(before, engine.seats.length)
    assert not step(engine.index, torch.randn(3, HEADS * GROUP, DIM), lanes, batch.block_table).any()


def test_a_tail_that_nobody_took_in_is_attended_to_fully_in_the_end(make: Make) -> None:
    """A row whose tail no longer fits the buffers is not decoded sparsely."""
    engine = make()
    request = Request(1, 400, [])
    engine.step([(request, 100)])
    decode(engine, [request], 1)
    engine.seats.blind = True
    sparse = [out[0] is not None for out in decode(engine, [request], DECODE_WINDOW + SLACK + 4)]
    assert sparse == [True] * (DECODE_WINDOW + SLACK) + [False] * 4


def test_a_server_of_short_requests_gives_its_seats_up_and_long_ones_get_them_again(make: Make) -> None:
    engine = make(seats=2)
    request = Request(0, 300, [])
    assert engine.seats.empty(short=True) and not engine.seats.empty(short=False)
    engine.step([(request, 100)])
    decode(engine, [request], 2)
    assert not any(engine.seats.empty(short=True) for _ in range(IDLE)), "a long request may be waiting"
    assert not engine.seats.empty(short=False)
    assert [engine.seats.empty(short=True) for _ in range(IDLE + 1)] == [False] * IDLE + [True]
    out = decode(engine, [request], 1)[0][0]
    assert len(engine.seats.built) == 2 and out is not None
    assert not engine.seats.empty(short=False) and not engine.seats.empty(short=True)


def test_what_waits_for_its_code(make: Make) -> None:
    """A few keys and those of decode steps; it ends with the index that takes them in, and begins with a new owner."""
    engine = make()
    request = Request(0, 400, [])
    engine.step([(request, LATER + 6)])
    slots = slots_at(torch.tensor([request.pages]), torch.arange(LATER + 6)[None], PAGE)[0]
    assert not engine.uncoded.at[slots].any()
    engine.step([(request, 40)])
    assert int(engine.uncoded.at[PAGE:-1].sum()) == engine.uncoded.at.shape[0] - 1 - PAGE - slots.shape[0]
    decode(engine, [request], 1)
    taken = engine.index.by_seat.buckets.order[0, 0, :int(engine.index.by_seat.buckets.offsets[0, 0, -1])].long()
    assert taken.shape[0] > slots.shape[0] and not engine.uncoded.at[taken].any()
    engine.uncoded.note(taken[:3], decode=True)
    assert engine.uncoded.at[taken[:3]].all() and not engine.uncoded.now
    engine.uncoded.note(torch.full((5,), -1), decode=True)
    assert not engine.uncoded.at[taken[3:]].any()
    before = engine.uncoded.at[:-1].clone()
    for decode_step in (True, False):  # what has no slot is the last entry's, which is nobody's
        engine.uncoded.note(torch.full((LATER + 1,), -1), decode=decode_step)
        assert bool(engine.uncoded.at[-1]) is decode_step and engine.uncoded.at[:-1].equal(before)
