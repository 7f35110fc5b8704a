"""A row of a batch is decoded as it would be alone, and what is counted of it is what it read."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny import make_model, prompt
from views import built, make_view

import sparsekv
from sparsekv.core.estimators.centroid import CentroidEstimator
from sparsekv.core.selectors import SELECTORS

ALL = {"dense_below": 0, "dense_layers": ()}


@torch.no_grad()
def logits(ids: torch.Tensor, pad: int, read: int, **options: object) -> torch.Tensor:
    """Of the last row's tokens after the first `read` of a prompt whose last row has `pad` of padding, `[T, V]`."""
    model = copy.deepcopy(make_model()).double()
    mask = torch.ones_like(ids)
    mask[-1, :pad] = 0
    with sparsekv.attach(model, **ALL, **options) as attachment:
        cache, made = attachment.prefill(ids[:, :read], mask[:, :read]), []
        for i in range(read, ids.shape[1]):
            places = (mask[:, :i + 1].cumsum(-1) - 1)[:, -1:]
            made.append(model(ids[:, i:i + 1], attention_mask=mask[:, :i + 1], position_ids=places,
                              past_key_values=cache, use_cache=True).logits[-1, -1])
    return torch.stack(made)


@pytest.mark.parametrize(("pad", "read", "options"), [
    (30, 40, {"selector": "topk", "token_budget": 4, "decode_window": 16}),  # shorter than the window
    (20, 40, {"selector": "streaming", "window_size": 32, "decode_window": 16}),
    (60, 120, {"selector": "lfps", "token_budget": 0.1, "fills": True, "decode_window": 16}),
    (60, 120, {"selector": "token_select", "token_budget": 12, "vote": "hard", "decode_window": 16})], ids=str)
def test_a_padded_row_is_decoded_as_alone(pad: int, read: int, options: dict) -> None:
    ids = prompt(read + 40, 2, seed=1)
    both, alone = logits(ids, pad, read, **options), logits(ids[1:, pad:], 0, read - pad, **options)
    assert float((both - alone).abs().max() / alone.abs().max()) < 1e-9


def test_rows_with_nothing_to_choose_from_go_on() -> None:
    ids, model = prompt(40, 2), make_model()
    mask = torch.ones_like(ids)
    mask[1, :30] = 0
    with torch.no_grad(), sparsekv.attach(model, selector="lfps", token_budget=8, fills=True, **ALL) as attachment:
        cache = attachment.prefill(ids, mask)
        mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
        model(ids[:, :1], past_key_values=cache, attention_mask=mask, use_cache=True)
        cache.batch_select_indices(torch.tensor([1]))
        mask = torch.cat([mask, mask.new_ones(2, 1)], 1)[1:]
        assert model(ids[1:, :1], past_key_values=cache, attention_mask=mask, use_cache=True).logits.isfinite().all()


@torch.no_grad()
def test_shares_that_are_read_do_not_depend_on_how_many_rows_are_alike() -> None:
    found = []
    for rows in (1, 4):
        ids = prompt(60, 1).expand(rows, -1)
        with sparsekv.attach(make_model(), selector="topk", token_budget=4, dense_below=66) as attachment:
            cache = attachment.prefill(ids)
            for _ in range(12):
                attachment.step(ids[:, :1], cache)
            report = attachment.report()
        assert report["dense_calls"] and report["sparse_calls"]
        found.append(report["selectivity"])
    assert found[0] == pytest.approx(found[1])


def test_a_sample_that_is_completed_does_not_stand_for_all() -> None:
    """With a bucket a key the estimate is exact: sample and estimate together are full attention."""
    ids = prompt(70, 1, seed=2)
    exact, found = (logits(ids, 0, 66, **o) for o in (
        {"selector": "dense"}, {"selector": "magicpig", "token_budget": 10, "completion": CentroidEstimator(1000)}))
    assert float((found - exact).abs().max() / exact.abs().max()) < 1e-9


def test_what_quest_reads_is_its_budget_whatever_page_the_sink_ends_in() -> None:
    for seed, sink in enumerate((0, 4, 4, 4, 12, 12, 16)):
        before, queries, step = make_view(length=200, sink=sink, window=16, dim=16, new=8, seed=seed)
        selector = built(SELECTORS["quest"](token_budget=20), before)
        assert int(selector.select(step, queries).counts().float().min()) == 20


def test_pyramidkv_says_what_its_layer_reads() -> None:
    told = []
    for layer in range(3):
        before, _, _ = make_view(length=400, layer_idx=layer)
        selector = built(SELECTORS["pyramidkv"](token_budget=0.2, beta=20), before)
        told.append(selector.read_share(before))
        read = float(selector.budget[0]) / 400
        assert told[-1] == pytest.approx(read, abs=0.01)
    assert told[0] > told[1] > told[2]
