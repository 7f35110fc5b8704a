"""A served layer over pages against the selectors of the core over a cache: the same tokens, the same output."""

from __future__ import annotations

import pytest
import torch
from paged import (
    DECODE_WINDOW,
    DIM,
    GROUP,
    HEADS,
    PAGE,
    SCALE,
    SINK,
    WINDOW,
    Engine,
    Request,
    full,
    maps,
    rope,
    router,
    selector,
    untrained,
)

from sparsekv.artifacts.phi import PhiLayer
from sparsekv.core.estimators import CentroidEstimator, Estimator, PhiEstimator
from sparsekv.core.index import RouterLayer
from sparsekv.core.layer import LayerView, Queries
from sparsekv.core.regions import Regions, TailRule
from sparsekv.core.step import LayerState, build
from sparsekv.runtime.vllm.paged import Scales
from sparsekv.runtime.vllm.summaries import OwnMeans


class Attached:
    """The same request decoded by the core, as `attach` does."""

    def __init__(self, request: Request, made: RouterLayer, budget: int | float, candidates: float | None,
                 completes: PhiLayer | OwnMeans | None = None):
        self.request = request
        past = request.length - 1
        regions = Regions.at_prefill_end(torch.zeros(1, dtype=torch.long), past, SINK, WINDOW)
        view = LayerView(*self._cache(past), regions=regions, scale=SCALE, num_query_heads=HEADS * GROUP, rope=rope())
        estimator: Estimator | None = None if completes is None else (
            CentroidEstimator() if isinstance(completes, OwnMeans) else PhiEstimator(completes))
        chooses = selector(made, budget, candidates)
        chooses.alone = False  # as requests of a server choose
        build(view, chooses, estimator)
        self.state = LayerState(view, chooses, estimator, TailRule(WINDOW, DECODE_WINDOW))

    def _cache(self, length: int) -> list[torch.Tensor]:
        return [x[None, :length].transpose(1, 2) for x in (self.request.k, self.request.v)]

    def step(self) -> torch.Tensor:
        length, view = self.request.length, self.state.view
        view.keys, view.values = self._cache(length)
        self.state.advance(length - 1, length)
        q = self.request.q[None, length - 1:length].transpose(1, 2)
        return self.state.step(Queries.last(q, length, view.rope)).out[0, :, 0]


ROUTERS = [("mean_key", "rot", True), ("mean_key", "pre", True), ("mlp", "pre", True), ("mlp", "rot", False),
           ("mean_key", "rot", False)]
BUDGETS = [(20, 0.3, False), (0.1, None, False), (20, 0.3, True), (0.1, None, True)]
QUICK = {(0, 2), (1, 1), (2, 3), (3, 0), (4, 2)}
"""Every router and every budget once: places in the two lists."""


@pytest.mark.parametrize(("steps", "kind", "budget", "candidates", "completed"), [
    *((60, ROUTERS[i], *BUDGETS[j]) for i, j in sorted(QUICK)),
    *(pytest.param(120, kind, *budget, marks=pytest.mark.slow) for kind in ROUTERS for budget in BUDGETS)], ids=str)
def test_a_served_layer_gives_what_attach_gives(
    steps: int, kind: tuple[str, str, bool], budget: int | float, candidates: float | None, completed: bool,
) -> None:
    """Three requests, one of them short, over a decode that moves the border of the mid region several times and lets
    it double; without a share of candidates from all codes at first, and from buckets then."""
    made, completes = router(*kind), maps() if completed else None
    engine = Engine(seats=3, budget=budget, candidates=candidates, made=made, completes=completes)
    requests = [Request(seed, 400, [], flat=completes is not None) for seed in range(3)]
    for request, prompt in zip(requests, (150, 31, 77), strict=True):
        engine.step([(request, prompt)])
    attached: list[Attached] = []
    apart = 0.0
    for step in range(steps):
        found = engine.step([(r, 1) for r in requests])
        if not step:
            attached = [Attached(r, made, budget, candidates, completes) for r in requests]
            bare = Attached(requests[0], made, budget, candidates)
        for mine, theirs in zip(found, attached, strict=True):
            assert mine is not None
            torch.testing.assert_close(mine, theirs.step(), rtol=1e-4, atol=1e-5)
        apart = max(apart, float((found[0] - bare.step()).abs().max()))
    assert (apart > 0.1) == (completes is not None), "completion makes a difference, and nothing else does"


@pytest.mark.parametrize(("candidates", "completes", "scales"), [
    (0.3, OwnMeans(HEADS, DIM), None), (None, None, None), (1.0, maps(), None),
    (None, OwnMeans(HEADS, DIM), Scales(0.3, 0.07))])
def test_without_training_a_layer_gives_what_attach_gives(
    candidates: float | None, completes: PhiLayer | OwnMeans | None, scales: Scales | None,
) -> None:
    """As above, with two seats for three requests that have a prompt in common, in the same pages."""
    made = untrained()
    engine = Engine(seats=2, budget=12, candidates=candidates, made=made, completes=completes, scales=scales)
    requests = [Request(seed, 400, [], flat=True, scales=scales) for seed in range(3)]
    shared = 5 * PAGE
    for request in requests[1:]:
        request.k[:shared], request.v[:shared] = requests[0].k[:shared], requests[0].v[:shared]
    engine.step([(requests[0], 150)])
    for request, prompt in zip(requests[1:], (107, 122), strict=True):
        request.pages, request.length = requests[0].pages[:5], shared
        engine.step([(request, prompt - shared)])

    def decode(batch: list[Request], steps: int) -> None:
        attached: list[Attached] = []
        for _ in range(steps):
            found = engine.step([(r, 1) for r in batch])
            attached = attached or [Attached(r, made, 12, candidates, completes) for r in batch]
            for mine, theirs in zip(found, attached, strict=True):
                assert mine is not None
                torch.testing.assert_close(mine, theirs.step(), rtol=1e-4, atol=1e-4)

    decode(requests[:2], 60)
    decode(requests[2:], 20)
    assert engine.seats.built[:3] == [0, 1, 0]


@pytest.mark.parametrize("completes", [None, maps()])
@pytest.mark.parametrize("scales", [Scales(), Scales(0.3, 0.07)])
def test_a_float8_cache_is_read_with_its_scales(scales: Scales, completes: PhiLayer | None) -> None:
    """What the core gives over the same keys and values in float32, whether a row decodes sparsely or not."""
    made = router()
    engine = Engine(seats=1, budget=12, candidates=0.5, made=made, completes=completes, scales=scales)
    request, other = (Request(seed, 300, [], flat=completes is not None, scales=scales) for seed in (1, 2))
    engine.step([(request, 120)])
    engine.step([(other, 60)])
    attached = None
    for _ in range(40):
        out, none = engine.step([(request, 1), (other, 1)])
        attached = attached or Attached(request, made, 12, 0.5, completes)
        assert out is not None and none is None
        torch.testing.assert_close(out, attached.step(), rtol=1e-4, atol=1e-4)


def test_codes_of_a_prompt_are_of_keys_before_they_are_rounded() -> None:
    scales = Scales(0.5, 1.0)
    engine, exact = Engine(scales=scales), Engine()
    for which in (engine, exact):
        which.step([(Request(1, 300, []), 120)])
    assert torch.equal(engine.index.pages.codes, exact.index.pages.codes)
    engine.uncoded.at.fill_(True)
    engine.index.pages.encode_in(torch.arange(PAGE, 120))
    differ = (engine.index.pages.codes != exact.index.pages.codes).float().mean()
    assert 0.001 < differ < 0.3, "of rounded ones some differ"


def test_borders_lie_where_those_of_attach_do() -> None:
    """Beside a prompt, and where several moves come at once, since the host has not looked."""
    made = router()
    engine = Engine(seats=2, budget=20, candidates=0.3, made=made)
    one, two = Request(1, 400, []), Request(2, 400, [])
    engine.step([(one, 120)])
    engine.step([(one, 1)])
    attached = Attached(one, made, 20, 0.3)
    attached.step()
    for step in range(5 * DECODE_WINDOW):
        engine.seats.blind = 2 * DECODE_WINDOW < step < 4 * DECODE_WINDOW
        out = engine.step([(one, 1), (two, 3)] if step < 2 * DECODE_WINDOW else [(one, 1)])[0]
        expected = attached.step()
        assert out is not None
        if not engine.seats.blind:
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_a_seat_that_changes_hands_completes_by_its_own_summary() -> None:
    """One seat for two requests: whoever has none is attended to fully, which the engine checks. One of them goes,
    comes back in other pages, and is summarised anew."""
    made, completes = router(), maps()
    engine = Engine(seats=1, budget=12, made=made, completes=completes)
    one, two = (Request(seed, 400, [], flat=True) for seed in (1, 2))
    attached: Attached | None = None

    def decode(batch: list[Request], seated: Request, *, anew: bool) -> None:
        nonlocal attached
        for step in range(20):
            outs = engine.step([(r, 1) for r in batch])
            if anew and not step:
                attached = Attached(seated, made, 12, 0.5, completes)
            assert attached is not None
            for request, out in zip(batch, outs, strict=True):
                assert (out is not None) == (request is seated)
                if out is not None:
                    torch.testing.assert_close(out, attached.step(), rtol=1e-4, atol=1e-5)

    engine.step([(one, 120)])
    engine.step([(two, 90)])
    decode([one, two], one, anew=True)
    decode([two], two, anew=True)
    decode([two, one], two, anew=False)
    engine.free = engine.free + one.pages  # preempted: all of it is computed again
    one.pages, length, one.length = [], one.length, 0
    engine.step([(one, length)])
    decode([one], one, anew=True)


@pytest.mark.parametrize("completes", [None, maps()])
def test_with_all_tokens_it_is_full_attention(completes: PhiLayer | None) -> None:
    engine = Engine(budget=1.0, candidates=1.0, completes=completes)
    request = Request(1, 300, [])
    for chunk in (60, 40):
        engine.step([(request, chunk)])
    for _ in range(40):
        out = engine.step([(request, 1)])[0]
        torch.testing.assert_close(out, full(request), rtol=1e-4, atol=1e-5)


def test_pages_in_any_order_make_no_difference() -> None:
    outs = []
    for pages in ([], [40, 3, 17, 22, 5, 60, 8, 9, 31, 2]):
        engine = Engine(budget=16)
        request = Request(1, 300, list(pages))
        engine.free = [p for p in engine.free if p not in pages]
        engine.step([(request, 9 * PAGE)])
        outs.append([engine.step([(request, 1)])[0] for _ in range(10)])
    for a, b in zip(*outs, strict=True):
        assert torch.equal(a, b)


def test_a_short_row_is_left_to_full_attention() -> None:
    engine = Engine(dense_below=100)
    short, long = Request(1, 300, []), Request(2, 300, [])
    engine.step([(short, 95), (long, 120)])
    sparse = [[x is not None for x in engine.step([(short, 1), (long, 1)])] for _ in range(10)]
    assert sparse == [[False, True]] * 4 + [[True, True]] * 6
