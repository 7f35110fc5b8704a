"""From which length caches decode sparsely: the lines through two times, faked ones and real ones, and what is kept."""

from __future__ import annotations

import json

import pytest
import torch
from tiny import make_model, prompt
from tiny_artifacts import artifacts

import sparsekv
from sparsekv.runtime import break_even
from sparsekv.runtime.break_even import NEVER, Times, dense_rule

GREEDY = {"do_sample": False, "max_new_tokens": 9, "min_new_tokens": 9}


@pytest.fixture(autouse=True)
def short_and_empty(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(break_even, "LENGTHS", {"cpu": (50, 200), "cuda": (50, 200)})
    monkeypatch.setattr(break_even.KEPT, "known", {})


@pytest.fixture
def timer(monkeypatch):
    """A timer by formulas of the length; its calls."""
    calls = []

    def install(full, sparse):
        def times(shape, selector, estimator, sinks, window, length):
            calls.append((shape, length))
            return full(shape.rows * length), sparse(shape.rows * length)

        monkeypatch.setattr(break_even, "_step_times", times)
        return calls

    return install


@pytest.mark.parametrize(("full", "sparse", "found"), [
    ((10.0, 40.0), (20.0, 20.0), 50 + 50), ((10.0, 40.0), (30.0, 20.0), 50 + 75), ((10.0, 40.0), (9.0, 9.0), 50),
    ((10.0, 40.0), (20.0, 60.0), NEVER), ((10.0, 10.0), (11.0, 11.0), NEVER), ((10.0, 40.0), (50.0, 50.0), 50 + 200)])
def test_two_lines_cross_where_both_take_as_long(full, sparse, found) -> None:
    times = Times((50, 200), full, sparse)
    assert times.break_even == found
    if found not in (50, NEVER):
        at = [x[0] + (x[1] - x[0]) / 150 * (found - 50) for x in (full, sparse)]
        assert at[0] == pytest.approx(at[1])


def test_a_cache_decodes_sparsely_from_the_length_that_was_timed(timer) -> None:
    model = make_model()
    router, phi = artifacts(model)
    calls = timer(lambda tokens: 0.5 * tokens, lambda tokens: 45.0)  # 90 tokens of one row, 30 of each of three
    for rows, length, sparse in ((1, 40, 0), (1, 76, 0), (1, 85, 4), (1, 120, 8), (3, 76, 8)):
        with sparsekv.attach(model, router=router, phi=phi, token_budget=0.2) as attachment:
            model.generate(prompt(length, rows), **GREEDY)
            report = attachment.report()
        # two layers; steps over caches of length + 1 to length + 8 tokens
        assert report["sparse_calls"] == 2 * sparse, (rows, length)
        assert report["sparse_from"] == (None if length == 40 else 90 if rows == 1 else 50)
        assert ("as long as" if length == 40 else "full attention 25 µs at 50 tokens" if rows == 1 else "75 µs") in (
            report["sparse_why"])
    # once a number of rows, at both lengths
    assert [(shape.rows, length) for shape, length in calls] == [(1, 50), (1, 200), (3, 50), (3, 200)]


def test_what_was_timed_is_kept_on_disk_by_all_that_it_depends_on(timer, monkeypatch) -> None:
    model = make_model()
    router, _ = artifacts(model)
    calls = timer(lambda tokens: 0.5 * tokens, lambda tokens: 45.0)

    def report(**options):
        monkeypatch.setattr(break_even.KEPT, "known", {})  # another process
        with sparsekv.attach(model, router=router, **options) as attachment:
            model.generate(prompt(120), **GREEDY)
            return attachment.report()

    assert report(token_budget=0.2)["sparse_calls"] == 16 and len(calls) == 2
    kept = json.loads(break_even.KEPT.file().read_text())
    (key, times), = kept.items()
    assert times == [[50, 200], [25.0, 100.0], [45.0, 45.0]]
    assert "token_budget=0.2" in key and "rows=1" in key and "cpu" in key and torch.__version__ in key
    assert report(token_budget=0.2)["sparse_from"] == 90 and len(calls) == 2
    report(token_budget=0.3)
    assert len(calls) == 4 and len(json.loads(break_even.KEPT.file().read_text())) == 2
    for damage in ("no json", "[]", json.dumps({key: 3}), json.dumps({key: [times[0], ["x", None], times[2]]})):
        break_even.KEPT.file().write_text(damage)
        assert report(token_budget=0.2)["sparse_from"] == 90
    assert len(calls) == 12
    break_even.KEPT.file().unlink()
    break_even.KEPT.file().mkdir()  # cannot be written: timed every time
    for _ in range(2):
        assert report(token_budget=0.2)["sparse_from"] == 90
    assert len(calls) == 16


@pytest.mark.parametrize("options", [
    {"token_budget": 0.2}, {"selector": "topk", "token_budget": 5}, {"selector": "router", "probes": 2},
    {"selector": "quest", "token_budget": 0.2, "completion": "centroid"}, {"selector": "snapkv", "token_budget": 9},
    {"selector": "token_select", "token_budget": 9}], ids=str)
@pytest.mark.parametrize("space", ["rot", "pre"])
def test_both_are_timed_whatever_decodes(options: dict, space: str) -> None:
    model = make_model()
    router, phi = artifacts(model, space=space)
    trained = {"router": router, "phi": phi} if options.get("selector", "router") == "router" and (
        "completion" not in options) else {}
    state = torch.get_rng_state()
    with sparsekv.attach(model, **trained, **options) as attachment:
        model.generate(prompt(60, 2), **GREEDY)
        report, times = attachment.report(), attachment.decoding.rule.times
    assert torch.equal(torch.get_rng_state(), state)
    assert times is not None and min(*times.full, *times.sparse) > 0 and times.lengths == (50, 200)
    sparse = 16 if times.break_even <= 61 else 0 if times.break_even > 68 else report["sparse_calls"]
    assert report["sparse_calls"] == sparse


def test_what_is_given_is_not_timed(timer) -> None:
    model = make_model()
    router, _ = artifacts(model)
    calls = timer(lambda tokens: 1.0, lambda tokens: 1.0)
    for options, said, found in (
            ({"router": router, "dense_below": 70}, "dense_below=70 was given", 70),
            ({"router": router, "placement": "cpu"}, "keys and values lie in CPU memory", 0),
            ({"selector": "dense"}, "no layer decodes sparsely", None)):
        with sparsekv.attach(model, **options) as attachment:
            model.generate(prompt(80), **GREEDY)
            report = attachment.report()
        assert (report["sparse_why"], report["sparse_from"], calls) == (said, found, [])


def test_a_served_batch_has_a_measured_length() -> None:
    token = 2 * 8 * 128 * 2
    rule = dense_rule(None, token_bytes=token, device="cuda")
    assert (rule.shortest, rule.together) == (11_597, 46_387) and "190 MB" in rule.why and "4096 bytes" in rule.why
    assert dense_rule(None, token_bytes=token, device="cpu")[:2] == (7813, 0)
    assert dense_rule(9, token_bytes=token)[:3] == (9, 0, "dense_below=9 was given")
