"""Replayed steps against steps taken as they are; without a GPU the same step on fixed storage, not captured."""

import copy
import functools
import gc
import signal
import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from tiny import make_model, prompt
from tiny_artifacts import artifacts

import sparsekv
from sparsekv.core.selectors import SELECTORS as ALL
from sparsekv.core.selectors.sketch import SketchRouter
from sparsekv.runtime.hf.attach import RunOptions
from sparsekv.runtime.hf.graph import raised_by_user
from sparsekv.runtime.process import NOW
from sparsekv.util.errors import SparseKVError

SELECTORS = {
    "dense": {"selector": "dense"}, "streaming": {"selector": "streaming"},
    "quest": {"selector": "quest", "token_budget": 40, "page_size": 4},
    "topk": {"selector": "topk", "token_budget": 0.2},
    "snapkv": {"selector": "snapkv", "token_budget": 20},
    "token_select": {"selector": "token_select", "token_budget": 20},
    "router": {"token_budget": 0.2}, "router+phi": {"token_budget": 0.2, "phi": True}, "probes": {"probes": 2},
    "sketch": {"selector": "sketch", "token_budget": 0.05}, "fixed": {"selector": "sketch", "fit": "fixed",
                                                                     "token_budget": 0.05, "phi": True},
    "all": {"selector": "sketch", "token_budget": 0.05, "candidates": 1.0},
}
STEPS = 40


@functools.cache
def model_on(device: str, family: str = "llama"):
    return make_model(family) if device == "cpu" else copy.deepcopy(make_model(family)).to(device)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def model(request):
    return model_on(request.param)


def ids_on(model, *args, **how) -> torch.Tensor:
    return prompt(*args, **how).to(model.device)


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    """To rounding: norms of a plan round elsewhere."""
    limit = 1e-4 if a.device.type == "cpu" else 2e-3
    torch.testing.assert_close(a, b, rtol=limit, atol=limit)


def attached(model, replays: bool, name: str, **options):
    options = {"dense_below": 0, **SELECTORS[name], **options}
    router, phi = artifacts(model)
    if name in ("router", "router+phi", "probes", "sketch", "fixed", "all"):
        options = {"selector": "router", **options, "router": router}
    if options.pop("phi", False):
        options["phi"] = phi
    return sparsekv.attach(model, decode_window=16, run=RunOptions(replays=replays), **options)


@torch.no_grad()
def logits_of(model, replays: bool, name: str, ids: torch.Tensor, after: int = 100, between=None, mask=None):
    """Logits of the tokens from `after` on, one a step, and the report."""
    with attached(model, replays, name) as attachment:
        cache = attachment.prefill(ids[:, :after], None if mask is None else mask[:, :after])
        found = []
        for t in range(after, ids.shape[1]):
            if between is not None:
                cache = between(cache, t) or cache
            how = {} if mask is None else {"attention_mask": mask[:, :t + 1],
                                           "position_ids": mask[:, :t + 1].sum(-1, keepdim=True) - 1}
            found.append(model(input_ids=ids[:, t:t + 1], past_key_values=cache, use_cache=True, **how).logits)
        return torch.cat(found, 1), attachment.report()


@pytest.mark.parametrize("name", SELECTORS)
def test_a_replayed_step_is_the_step_across_growth_of_the_mid_region(model, name: str) -> None:
    ids = ids_on(model, 100 + STEPS, batch=2)
    plain, before = logits_of(model, False, name, ids)
    replayed, report = logits_of(model, True, name, ids)
    if model.device.type == "cuda" and name in ("sketch", "all"):
        # a query is rounded to eight bits: where a plan's norm rounds elsewhere, one step may choose another near tie
        differs = (replayed - plain).abs().amax(-1).flatten() > 2e-3
        assert int(differs.sum()) <= 1
        replayed, plain = (x.flatten(0, 1)[~differs] for x in (replayed, plain))
    close(replayed, plain)
    assert before["replayed_steps"] == 0
    if name == "token_select":
        assert report["replayed_steps"] == 0 and "host" in report["not_replayed"]
        return
    assert report["replayed_steps"] >= STEPS - 4
    for key in ("sparse_calls", "dense_calls"):
        assert report[key] == before[key]
    # what chooses and completes is counted when a step is captured
    for key, limit in (("selectivity", 1e-5), ("bytes_share", 1e-2)):
        assert report[key] == (before[key] if before[key] is None else pytest.approx(before[key], rel=limit))


@pytest.mark.parametrize("name", ["sketch", "fixed"])
def test_buckets_are_built_where_codes_alone_outgrow_them(model, name: str, monkeypatch) -> None:
    """Eight buckets of dimension 16, codes of five bytes: from 26 tokens on, by their bytes, as a server chooses."""
    monkeypatch.setattr(SketchRouter, "alone", False)
    found = {}
    for replays in (False, True):
        routed = []

        def between(cache, t, routed=routed) -> None:
            if cache.layers[1].state is not None:
                routed.append(cache.layers[1].state.selector.buckets is not None)

        found[replays], report = logits_of(model, replays, name, ids_on(model, 40 + STEPS, batch=2), 40, between)
        assert not routed[0] and routed[-1]
    assert report["replayed_steps"] >= STEPS - 5
    close(found[True], found[False])


@pytest.mark.parametrize("name", ["router+phi", "dense"])
def test_rows_padded_on_the_left(model, name: str) -> None:
    ids = ids_on(model, 130, batch=2)
    mask = torch.ones_like(ids)
    mask[0, :37] = 0
    plain, _ = logits_of(model, False, name, ids, mask=mask)
    replayed, report = logits_of(model, True, name, ids, mask=mask)
    close(replayed, plain)
    assert report["replayed_steps"] > 20


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> str:
    return request.param


@pytest.fixture
def little_room(monkeypatch) -> None:
    """Storage of a window is moved every 16 tokens."""
    monkeypatch.setattr("sparsekv.runtime.hf.sliding.ROOM", 16)


@pytest.mark.usefixtures("little_room")
@pytest.mark.parametrize(("family", "name", "after", "padded"), [
    pytest.param(family, name, *lengths, marks=() if (i + j + k) % 2 == 0 else pytest.mark.slow)
    for i, family in enumerate(("gemma3", "gpt_oss")) for j, name in enumerate(("router+phi", "sketch", "dense"))
    for k, lengths in enumerate(((7, 0), (100, 0), (100, 37), (30, 26)))])
def test_layers_with_a_window_are_planned(device: str, family: str, name: str, after: int, padded: int) -> None:
    """From before a window of 24 is full, and across moves of its storage; padding inside the window. Families in turn,
    the other half is slow."""
    model = model_on(device, family)
    ids = ids_on(model, after + STEPS, batch=2)
    mask = torch.ones_like(ids)
    mask[0, :padded] = 0
    mask = mask if padded else None
    plain, before = logits_of(model, False, name, ids, after, mask=mask)
    replayed, report = logits_of(model, True, name, ids, after, mask=mask)
    close(replayed, plain)
    assert before["replayed_steps"] == 0 and report["not_replayed"] is None
    assert report["replayed_steps"] >= STEPS - 8
    for key in ("sparse_calls", "dense_calls"):
        assert report[key] == before[key]


@pytest.mark.usefixtures("little_room")
@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
def test_a_window_is_the_models_own_whatever_happens_to_the_cache(device: str, family: str) -> None:
    """Against the model alone on the whole text: a fork, other rows, rows repeated, and a crop that was announced."""
    model, length = model_on(device, family), 60
    ids = ids_on(model, 140, batch=2)

    def steps(cache, count: int) -> None:
        nonlocal length
        for t in range(length, length + count):
            found = model(input_ids=ids[:, t:t + 1], past_key_values=cache, use_cache=True).logits
            close(found, want[:, t:t + 1])
        length += count

    with torch.no_grad():
        want = model(ids).logits
        with sparsekv.attach(model, selector="dense") as attachment:
            cache = attachment.prefill(ids[:, :length])
            steps(cache, 6)
            other = cache.fork()
            steps(cache, 3)
            length -= 3
            steps(other, 20)
            rows = torch.tensor([1, 0], device=ids.device)
            other.reorder_cache(rows)
            ids, want = ids[rows], want[rows]
            steps(other, 4)
            other.batch_repeat_interleave(2)
            ids, want = ids.repeat_interleave(2, 0), want.repeat_interleave(2, 0)
            steps(other, 4)
            if hasattr(other.layers[0], "activate_past_recording"):
                other.layers[0].activate_past_recording()
                steps(other, 7)
                other.crop(-5)
                length -= 5
                other.layers[0].record_past = False
                steps(other, 9)
            assert attachment.report()["not_replayed"] is None and attachment.report()["replayed_steps"] > 30
            length -= 3
            other.reset()
            model(input_ids=ids[:, :length], past_key_values=other, use_cache=True)
            steps(other, 5)


@pytest.mark.parametrize("change", ["crop", "fork", "reorder"])
def test_what_happens_to_the_cache_between_steps_is_seen(model, change: str) -> None:
    def between(cache, t):
        if t == 110 and change == "crop":
            cache.crop(-3)
        if t == 115 and change == "fork":
            return cache.fork()
        if t == 120 and change == "reorder":
            cache.reorder_cache(torch.tensor([1, 0], device=cache.layers[0].keys.device))
        return None

    ids = ids_on(model, 140, batch=2)
    plain, _ = logits_of(model, False, "router", ids, between=between)
    replayed, report = logits_of(model, True, "router", ids, between=between)
    close(replayed, plain)
    assert report["replayed_steps"] > 20


def test_both_doors_give_the_same_answer_and_a_second_turn_goes_on(model) -> None:
    ids = ids_on(model, 90)
    tokens = {}
    for replays in (False, True):
        with attached(model, replays, "router") as attachment, torch.no_grad():
            whole = model.generate(ids, max_new_tokens=40, do_sample=False)
            lean = attachment.generate(ids, max_new_tokens=40)
            cache = attachment.cache()
            first = attachment.generate(ids, max_new_tokens=20, cache=cache)
            turn = torch.cat([first[:, -1:], ids_on(model, 7, seed=5)], 1)
            second = attachment.generate(turn, max_new_tokens=20, cache=cache)
            assert torch.equal(whole, lean)
            tokens[replays] = torch.cat([first, second], 1)
    assert torch.equal(tokens[True], tokens[False])


def test_rows_end_by_themselves_and_text_is_streamed(model) -> None:
    class Streamer:
        def __init__(self):
            self.seen, self.ended = [], False

        def put(self, value):
            self.seen.append(value)

        def end(self):
            self.ended = True

    ids = ids_on(model, 60, batch=2)
    with attached(model, True, "router") as attachment:
        free = attachment.generate(ids, max_new_tokens=12)
        eos = int(free[0, 64])
        for lean in (attachment.generate(ids, max_new_tokens=12, eos_token_id=eos, pad_token_id=3),
                     model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False,
                                    eos_token_id=eos, pad_token_id=3)):
            row = free[0, 60:].tolist()
            assert lean[0, 60:60 + row.index(eos) + 1].tolist() == row[:row.index(eos) + 1]
            assert set(lean[0, 61 + row.index(eos):].tolist()) <= {3}
        streamer = Streamer()
        alone = attachment.generate(ids[:1], max_new_tokens=12, eos_token_id=eos, streamer=streamer)
        assert streamer.ended and torch.cat([x.reshape(-1) for x in streamer.seen]).equal(alone[0].cpu())
        drawn = [attachment.generate(ids, max_new_tokens=8, temperature=1.5, seed=s) for s in (1, 1, 2)]
        assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


def test_a_hook_that_reads_values_is_told_and_obeyed(model) -> None:
    ids = ids_on(model, 120)
    seen = []
    handle = model.model.layers[1].mlp.register_forward_hook(lambda *a: seen.append(1))
    try:
        _, report = logits_of(model, True, "router", ids)
    finally:
        handle.remove()
    assert report["replayed_steps"] == 0 and "hook" in report["not_replayed"] and len(seen) > 20


def test_a_model_once_asked_for_hidden_states_is_planned(model) -> None:
    """transformers leaves its recording hooks on the layers for good."""
    asked, ids = copy.deepcopy(model), ids_on(model, 110)
    asked(ids, output_hidden_states=True)
    assert any(module._forward_hooks for module in asked.modules())
    (found, report), (wanted, never) = (logits_of(x, True, "router", ids) for x in (asked, model))
    assert report["replayed_steps"] == never["replayed_steps"] > 0 and report["not_replayed"] is None
    assert torch.equal(found, wanted)


def test_beams_are_not_captured(model) -> None:
    ids = ids_on(model, 80)
    with attached(model, True, "router") as attachment:
        beams = model.generate(ids, max_new_tokens=8, num_beams=3, do_sample=False)
        assert attachment.report()["replayed_steps"] == 0
    with attached(model, False, "router"):
        assert torch.equal(model.generate(ids, max_new_tokens=8, num_beams=3, do_sample=False), beams)


def state_of(model):
    return ({k: v for k, v in model.__dict__.items() if k in ("forward", "generate")},
            model.config._attn_implementation, [len(m._forward_pre_hooks) for m in model.modules()],
            [m.__dict__.get("layer_idx") for m in model.modules()], ["forward" in m.__dict__ for m in model.modules()])


def test_attachments_nest_leave_in_any_order_and_leave_the_model_as_it_was(model) -> None:
    ids = ids_on(model, 100)
    before = state_of(model)
    with attached(model, True, "router"):
        alone = model.generate(ids, max_new_tokens=12, do_sample=False)
    outer, inner = attached(model, True, "router"), attached(model, True, "streaming")
    with outer:
        with inner:
            other = model.generate(ids, max_new_tokens=12, do_sample=False)
        assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False), alone)
    with attached(model, True, "streaming"):
        assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False), other)
    outer.__enter__()
    inner.__enter__()
    outer.__exit__()
    assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False), other)
    inner.__exit__()
    assert state_of(model) == before


@dataclass(eq=False)
class Faulty(ALL["streaming"]):
    """Fails in steps that are planned: `fail` is called with the number of the step."""

    fail: Callable[[int], None] = lambda step: None
    count: int = 0

    def select(self, view, queries):
        if NOW.plan is not None:
            self.count += 1
            self.fail(self.count)
        return super().select(view, queries)


def faulty(model, fail: Callable[[int], None]):
    return sparsekv.attach(model, selector=Faulty(fail=fail), decode_window=16, dense_layers=(0, 1), dense_below=0)


def test_a_model_that_cannot_be_planned_is_told_once_and_decoded_layer_by_layer(model) -> None:
    """A failure in torch's own code, as of a model that wants more of its cache than a plan gives."""
    ids = ids_on(model, 120)
    before = state_of(model)

    def fail(step: int) -> None:
        torch.nn.functional.interpolate(torch.zeros(1, 1, 2), size=3, scale_factor=2)

    with faulty(model, lambda step: None):
        wanted = model.generate(ids, max_new_tokens=9, do_sample=False)
    with pytest.warns(UserWarning, match="decodes layer by layer, its step failed: only one of size") as caught:
        with faulty(model, fail) as attachment:
            assert torch.equal(model.generate(ids, max_new_tokens=9, do_sample=False), wanted)
    assert sum("its step failed" in str(w.message) for w in caught) == 1
    report = attachment.report()
    assert report["replayed_steps"] == 0 and "only one of size" in report["not_replayed"]
    assert state_of(model) == before


class Late(Exception):
    """What a user stops a step with."""


@pytest.mark.parametrize("error", [Late, RuntimeError, KeyboardInterrupt, TimeoutError])
@pytest.mark.parametrize("at", [1, 3])
def test_what_is_raised_inside_a_step_comes_out_and_the_cache_goes_on(model, error: type, at: int) -> None:
    if model.device.type == "cuda":
        pytest.skip("a graph that is replayed calls nothing")
    ids = ids_on(model, 100)
    before = state_of(model)

    def fail(step: int) -> None:
        if step == at:
            raise error("enough")

    with warnings.catch_warnings(), faulty(model, fail) as attachment:
        warnings.simplefilter("error")
        cache = attachment.cache(140)
        attachment.generate(ids, max_new_tokens=1, cache=cache)
        length = cache.get_seq_length()
        with pytest.raises(error, match="enough"):
            attachment.generate(ids[:, :1], max_new_tokens=9, cache=cache)
        assert cache.get_seq_length() == length + at - 1
        attachment.generate(ids[:, :1], max_new_tokens=9, cache=cache)
        assert attachment.report()["not_replayed"] is None
    assert state_of(model) == before


def test_whose_error_it_is() -> None:
    def handler(number: int, frame: object) -> None:
        raise RuntimeError("deadline")

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with pytest.raises(RuntimeError) as late:
            signal.raise_signal(signal.SIGALRM)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert raised_by_user(late.value) and raised_by_user(Late())
    with pytest.raises(RuntimeError) as own:
        torch.nn.functional.linear(torch.zeros(2, 3), torch.zeros(2, 2))
    assert raised_by_user(own.value)  # raised by this file
    assert not raised_by_user(torch.OutOfMemoryError("no room"))
    with pytest.raises(RuntimeError) as torchs:
        torch.einsum("ij,jk->ik", torch.zeros(2, 3), torch.zeros(2, 2))
    assert not raised_by_user(torchs.value)


@torch.no_grad()
def test_a_cache_filled_by_hand_decodes_alike(model) -> None:
    ids, found = ids_on(model, 130), []
    with attached(model, False, "topk") as attachment:
        filled = attachment.prefill(ids[:, :100])
    for replays in (False, True):
        with attached(model, replays, "topk") as attachment:
            cache = attachment.cache()
            for new, old in zip(cache.layers, filled.layers, strict=True):
                new.update(old.keys.clone(), old.values.clone())
            found.append(torch.cat([
                model(input_ids=ids[:, t:t + 1], past_key_values=cache, use_cache=True).logits
                for t in range(100, 130)], 1))
    close(found[1], found[0])


@torch.no_grad()
def test_an_attachment_that_comes_again_plans_with_the_models_rotation(model) -> None:
    """A query model asks for queries without RoPE: a step needs the tables of its own token."""
    ids, found = ids_on(model, 160), []
    for replays in (False, True):
        attachment = attached(model, replays, "router")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with attachment:
                cache = attachment.prefill(ids[:, :100])
                model(input_ids=ids[:, 100:101], past_key_values=cache, use_cache=True)
            with attachment:
                found.append(torch.cat([
                    model(input_ids=ids[:, t:t + 1], past_key_values=cache, use_cache=True).logits
                    for t in range(101, 160)], 1))
        taken = attachment.report()["replayed_steps"]
        assert taken == 0 or (replays and taken >= 54)
        assert all(table.length == 160 for table in cache.rope.values())
    close(found[1], found[0])


def test_inference_mode_comes_and_goes(model) -> None:
    ids = ids_on(model, 90)
    with attached(model, True, "router") as attachment:
        for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
            with mode():
                found = model.generate(ids, max_new_tokens=12, do_sample=False)
        assert attachment.report()["not_replayed"] is None and attachment.report()["replayed_steps"] >= 27
    with attached(model, False, "router"):
        assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False), found)


def test_a_model_is_not_kept_alive() -> None:
    model = copy.deepcopy(make_model())
    with attached(model, True, "router") as attachment:
        attachment.generate(prompt(90), max_new_tokens=6)
    gone = weakref.ref(model)
    del model, attachment
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(("ids", "given", "message"), [
    (prompt(20)[0], {}, r"rows and tokens, found \[20\]"), ([[1, 2]], {}, "rows and tokens, found list"),
    (prompt(20), {"max_new_tokens": 2.5}, "whole number from 1 to 9223372036854775807, found 2.5"),
    (prompt(20), {"max_new_tokens": 0}, "whole number from 1 to 9223372036854775807, found 0"),
    (prompt(20), {"temperature": float("nan")}, "finite number from 0 on, found nan")])
def test_what_cannot_be_generated_is_one_sentence(ids, given: dict, message: str) -> None:
    with attached(make_model(), True, "streaming") as attachment, pytest.raises(SparseKVError, match=message):
        attachment.generate(ids, **given)


def test_an_attachment_is_entered_first() -> None:
    with pytest.raises(SparseKVError, match="enter it first"):
        attached(make_model(), True, "router").prefill(prompt(20))


def test_a_second_thread_is_refused_and_may_share(model) -> None:
    ids = ids_on(model, 100)
    said: list[str] = []
    with attached(model, True, "router") as attachment:
        alone = attachment.generate(ids, max_new_tokens=10)
        shared = []

        def other() -> None:
            try:
                attached(model, True, "streaming").__enter__()
            except SparseKVError as error:
                said.append(str(error))
            shared.append(attachment.generate(ids, max_new_tokens=10))

        threads = [threading.Thread(target=other) for _ in range(3)]
        for thread in threads:
            thread.start()
        mine = attachment.generate(ids, max_new_tokens=10)
        for thread in threads:
            thread.join()
    assert len(said) == 3 and all("another thread" in s for s in said)
    assert all(torch.equal(x, alone) for x in [mine, *shared])
