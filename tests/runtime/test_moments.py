"""The untrained completions against the formulas on dense attention, and in a decode by name."""

from __future__ import annotations

import pytest
import torch
from tiny import make_model, prompt
from views import full_attention, make_view

import sparsekv
from sparsekv.core import offline
from sparsekv.core.estimators.centroid import CentroidCompletion
from sparsekv.core.selectors.topk import TopK
from sparsekv.errors import SparseKVError
from sparsekv.models import estimators
from sparsekv.runtime.attention import sparse_attention
from sparsekv.runtime.moments import MomentsCompletion, SamplingCompletion

CASES = [{}, {"batch": 3, "pads": (0, 5, 40)}, {"new": 4}, {"batch": 2, "pads": (2, 0), "new": 3}]


@pytest.mark.parametrize("per_query_head", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_moments_are_the_dense_estimator(case: dict, per_query_head: bool) -> None:
    before, queries, step = make_view(**case)
    selector = TopK(token_budget=9, per_query_head=per_query_head)
    selector.build(before)
    completion = MomentsCompletion(num_buckets=5, rank=3)
    completion.build(before)
    out = sparse_attention(step, queries, selector, completion).out
    tokens = selector.select(step, queries).as_tokens()
    count, last = queries.count, before.length
    for b in range(step.keys.shape[0]):
        start = int(step.regions.starts[b])
        q, keys, values = (x[b].double() for x in (queries.rot, step.keys[:, :, start:], step.values[:, :, start:]))
        place = torch.arange(last, last + count)[None] - start
        scene = offline.make_scene(q, keys, values, place, scale=step.scale, sink_size=3, window_size=10)
        mid = step.regions.mid_mask()[b, start:]
        visible = torch.arange(keys.shape[1]) <= place[..., None]
        scene = offline.Scene(scene.scores, values, visible & ~mid, (visible & mid), scene.full, scene.context)
        bucket = torch.zeros(keys.shape[:2], dtype=torch.long)
        bucket[:, :last - start] = torch.nn.functional.pad(completion.assignment[b, :, start:],
                                                           (0, last - start))[:, :last - start]
        basis = completion.basis[b].double()
        projected = (q @ basis.repeat_interleave(step.group, 0) * step.scale, keys @ basis)
        read = torch.zeros(scene.scores.shape, dtype=torch.bool)
        for t in range(count):
            for h in range(q.shape[0]):
                lists = tokens[b * count + t]
                own = lists[h if per_query_head else h // step.group]
                read[h, t, own[own >= 0] - start] = True
        logits = estimators.bucket_means(scene, bucket, 5, read, projected=projected)
        torch.testing.assert_close(out[b].double(), offline.output(scene, read, logits), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("case", CASES)
def test_a_sample_of_everything_is_full_attention(case: dict) -> None:
    before, queries, step = make_view(**case)
    for budget in (0, 9):
        selector = TopK(token_budget=budget, per_query_head=True)
        selector.build(before)
        completion = SamplingCompletion(samples=4000)
        completion.build(before)
        done = sparse_attention(step, queries, selector, completion)
        torch.testing.assert_close(done.out.double(), full_attention(step, queries), rtol=1e-4, atol=1e-4)


def test_the_sample_is_unbiased() -> None:
    before, queries, step = make_view(length=300)
    selector = TopK(token_budget=20)
    selector.build(before)
    selection = selector.select(step, queries)
    truth = SamplingCompletion(samples=30_000)
    truth.build(before)
    wanted = truth.partial(step, queries, selection)[1].exp()
    found = []
    for seed in range(300):
        before.layer_idx = seed
        completion = SamplingCompletion(samples=40)
        completion.build(before)
        found.append(completion.partial(step, queries, selection)[1].exp())
    mean, spread = torch.stack(found).mean(0), torch.stack(found).std(0)
    assert ((mean - wanted).abs() < 5 * spread / 300**0.5 + 0.02 * wanted).all()


def test_completions_of_equal_cost_cost_the_same() -> None:
    before, _, _ = make_view(length=400)
    costs = []
    for kind in (CentroidCompletion, MomentsCompletion, SamplingCompletion):
        completion = kind(tokens=33.0)
        completion.build(before)
        costs.append(completion.cost_tokens(before))
    assert all(31 <= c <= 33 for c in costs), costs


@pytest.mark.parametrize("completion", ["moments", "sampling"])
def test_they_decode_by_name(completion: str) -> None:
    model, ids = make_model(), prompt(120, 2)
    plain = model.generate(ids, max_new_tokens=6, do_sample=False)
    for budget, same in ((1.0, True), (0.1, False)):
        with sparsekv.attach(model, selector="topk", token_budget=budget, completion=completion, completion_tokens=20,
                             decode_window=2) as attachment:
            out = model.generate(ids, max_new_tokens=6, do_sample=False)
            assert attachment.report()["sparse_calls"]
        assert not same or torch.equal(out, plain)
    with pytest.raises(SparseKVError, match="sizes an untrained completion"):
        sparsekv.attach(model, selector="topk", token_budget=2, completion_tokens=3)
