"""A step of the runtime = the same step on captured tensors = the formulas written out, for every selector with every
estimator, and = the step over a server's pages for every selector that is served: in float64, with odd sizes, left
padding, groups of 1, 3, 4 and 8 heads, a mid region that grows and a chunk of several tokens. The quick suite has every
selector with every completion, groups in turn; `slow` has the other groups. `test_equivalence_gpu.py` does the same for
the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from literal import literal_step
from steps import CASES, CHUNK, COMPLETIONS, GROUPS, PADS, PROMPT, SIZES, cases, steps_of, tiny, trained

from sparsekv.core.estimators import ESTIMATORS, PhiEstimator
from sparsekv.core.layer import Queries
from sparsekv.core.offline import Window, request
from sparsekv.core.registry import SELECTOR_ROWS
from sparsekv.core.selectors import SELECTORS
from sparsekv.core.selectors.sketch import SketchRouter
from sparsekv.core.step import sparse_step
from sparsekv.kernels import dense_attention, slots_at
from sparsekv.runtime.hf.cache import HostLayer
from sparsekv.runtime.hf.offload import HostView
from sparsekv.runtime.vllm.index import LayerIndex, Room, build_seat, extend_seat
from sparsekv.runtime.vllm.paged import DecodeMetadata, UncodedSlots


def in_turn(cases: Sequence[str], completions: Sequence[str]) -> Any:
    """Parametrise by case, completion and group: a pair has one group in the quick suite, the others in `slow`."""
    return pytest.mark.parametrize(("case", "completion", "group"), [
        pytest.param(case, completion, group, marks=() if (i + j) % len(GROUPS) == k else pytest.mark.slow)
        for i, case in enumerate(cases) for j, completion in enumerate(completions) for k, group in enumerate(GROUPS)])


def close(case: str) -> dict[str, float]:
    """LFPS makes its scores in float32."""
    return {"rtol": 1e-6, "atol": 1e-6 if case.startswith("lfps") else 1e-7}


@in_turn(list(CASES), COMPLETIONS)
def test_a_step_is_the_formulas_written_out(case: str, completion: str, group: int, monkeypatch) -> None:
    taken, _ = steps_of(tiny(group, 10, torch.float64), case, completion, len(PADS), monkeypatch)
    first, last = taken[0], taken[-1]
    assert first.view.regions.tail_starts[0] < last.view.regions.tail_starts[0], "the mid region has not grown"
    assert last.queries.count == CHUNK
    for x in (first, last):
        assert x.step.out.dtype == torch.float64
        torch.testing.assert_close(x.step.out, literal_step(*x), **close(case))


@pytest.mark.parametrize("completion", COMPLETIONS)
@pytest.mark.parametrize("case", CASES)
def test_a_prompt_without_a_mid_region(case: str, completion: str, monkeypatch) -> None:
    for dtype, limit in ((torch.float64, 1e-7), (torch.bfloat16, 0.1)):
        taken, _ = steps_of(tiny(3, 10, dtype), case, completion, len(PADS), monkeypatch, prompt=8)
        assert not taken[0].view.regions.mid_sizes.any() and taken[-1].view.regions.mid_sizes.any()
        for x in (taken[0], taken[-1]):
            torch.testing.assert_close(x.step.out.double(), literal_step(*x), rtol=limit, atol=max(limit, 1e-6))


@pytest.mark.parametrize("placement", ["gpu", "offload"])
@pytest.mark.parametrize("case", ["sketch", "router-probes"])
@pytest.mark.filterwarnings("ignore:the maps of keys of these feature maps have ReZero blocks")
def test_maps_of_keys_with_blocks_complete_outside_the_kernel(case: str, placement: str, monkeypatch) -> None:
    """The completion paper's maps, two blocks one after the other, over a mid region that grows."""
    for group in (3, 4):
        taken, _ = steps_of(tiny(group, 10, torch.float64), case, "phi", len(PADS), monkeypatch, placement=placement,
                            key_blocks=2)
        assert taken[-1].estimator is not None and not taken[-1].estimator.in_kernel
        for x in (taken[0], taken[-1]):
            torch.testing.assert_close(x.step.out, literal_step(*x), **close(case))


@in_turn(list(CASES), COMPLETIONS)
def test_a_step_on_captured_tensors_is_that_of_the_runtime(case: str, completion: str, group: int, monkeypatch) -> None:
    model = tiny(group, 10, torch.float64)
    taken, cache = steps_of(model, case, completion, 1, monkeypatch)
    layer, view = cache.layers[1], taken[0].view
    before = [x for x in taken if x.view.regions.tail_starts[0] == view.regions.tail_starts[0]]
    assert len(before) > 3
    window = Window(
        layer.keys[0], layer.values[0], torch.cat([layer.recent, *(x.queries.rot for x in before)], dim=2)[0],
        torch.arange(PROMPT - layer.recent.shape[2], PROMPT + len(before)), view.scale, SIZES["sink_size"],
        SIZES["window_size"], view.rope, 1, 2)
    offline = request(window, PROMPT, len(before))
    router, phi = trained(model)
    name, options = cases()[case]
    selector = SELECTORS[name](**options, **({"layer": router.layer(1)} if SELECTORS[name].is_trained() else {}))
    kind = ESTIMATORS.get(completion)
    torch.manual_seed(0)
    maps = [phi.layer(1)] if kind is not None and issubclass(kind, PhiEstimator) else []
    state = offline.build(selector, None if kind is None else kind(*maps))
    for t, x in enumerate(before):
        alone = Queries(offline.queries.rot[:, :, t:t + 1], offline.queries.lengths[t:t + 1], window.rope)
        torch.testing.assert_close(alone.rot, x.queries.rot)
        torch.manual_seed(0)
        found = sparse_step(offline.view, alone, *state)
        if t == 0 or name != "magicpig":  # which draws anew at every step
            torch.testing.assert_close(found.out, x.step.out, **close(case))


HELD = [case for case, (name, _) in CASES.items() if not SELECTORS[name].scores_keys]


@pytest.mark.parametrize("completion", COMPLETIONS)
@pytest.mark.parametrize("case", HELD)
def test_a_step_over_host_memory_is_that_of_the_runtime(case: str, completion: str, monkeypatch) -> None:
    """Rows of several lengths, fetched to slots beside sinks and tail: the formulas, and what a step reads of keys that
    lie beside the queries."""
    model = tiny(3, 10, torch.float64)
    here, _ = steps_of(model, case, completion, len(PADS), monkeypatch)
    there, cache = steps_of(model, case, completion, len(PADS), monkeypatch, placement="offload")
    assert isinstance(cache.layers[1], HostLayer) and isinstance(there[0].view, HostView)
    for x, y in zip(here, there, strict=True):
        torch.testing.assert_close(y.step.out, x.step.out, **close(case))
    torch.testing.assert_close(there[-1].step.out, literal_step(*there[-1]), **close(case))


SERVED = [case for case, (name, options) in CASES.items()
          if SELECTOR_ROWS[name].served and "probes" not in options and options.get("fit") != "fitted"]
PAGE = 4


@in_turn(SERVED, ["none", "phi"])
def test_a_step_over_pages_is_that_of_the_runtime(case: str, completion: str, group: int, monkeypatch) -> None:
    """The same request, its keys in pages in any order: built at the same prefill, grown at the same steps. Beside it
    in the batch a row that reads all it has."""
    monkeypatch.setattr(SketchRouter, "alone", False)  # as requests of a server choose
    model = tiny(group, 10, torch.float64)
    taken, cache = steps_of(model, case, completion, 1, monkeypatch)
    keys, values = (x[0].transpose(0, 1) for x in (cache.layers[1].keys, cache.layers[1].values))
    name, options = cases()[case]
    total, first = keys.shape[0], taken[0].view
    table = torch.randperm(-(-total // PAGE), generator=torch.Generator().manual_seed(1))[None].int() + 1
    slots = slots_at(table, torch.arange(total)[None], PAGE)[0]
    pool = torch.full((table.shape[1] + 1, PAGE, keys.shape[1], 2 * keys.shape[2]), float("nan"), dtype=keys.dtype)
    pool.flatten(0, 1)[slots] = torch.cat([keys, values], dim=-1)
    pool[0] = 0.0  # nobody's
    router, phi = trained(model)
    selector = SELECTORS[name](layer=router.layer(1), **options)
    index = LayerIndex(selector, pool.transpose(1, 2), Room(2, total), UncodedSlots(pool.shape[0] * PAGE, keys.device),
                       scale=first.scale, rope=first.rope, maps=None if completion == "none" else phi.layer(1))
    regions = first.regions.grown(PROMPT)
    build_seat([index], 1, slots[:int(regions.mid_last)], regions)
    for x in (x for x in taken if x.queries.count == 1):
        now, length = x.view.regions, int(x.queries.lengths[0])
        if now.tail_starts > regions.tail_starts:
            extend_seat([index], 1, slots[:int(now.mid_last)], regions, now)
        regions = now
        anchors = torch.cat([slots[:now.sink_size], slots[int(now.tail_starts):length]])[None].int()
        lanes = DecodeMetadata(torch.tensor([False, True]), torch.tensor([2, 1]), anchors.expand(2, -1),
                      torch.tensor([length - 1] * 2), torch.tensor([length, 0], dtype=torch.int32),
                      torch.tensor([0, anchors.shape[1]]))
        q = x.queries.rot[:, :, 0].expand(2, -1, -1)
        out = index.step(q, lanes, table.expand(2, -1), torch.full_like(q, float("nan")))
        torch.testing.assert_close(out[1], x.step.out[0, :, 0], **close(case))
        whole = dense_attention(q[:1, :, None], *(y[None, :length].transpose(1, 2) for y in (keys, values)),
                                scale=first.scale)
        torch.testing.assert_close(out[:1], whole[:, :, 0])
    assert regions.tail_starts > first.regions.tail_starts, "the mid region has not grown"
