"""Points where a paper's text decides what a selector does, and that every rival uses the budget it is given."""

from __future__ import annotations

import math

import pytest
import torch
from views import built, make_view

from benchmarks._peers import PEERS
from sparsekv.core.baselines.lfps import GAMMA, OBSERVED
from sparsekv.core.baselines.lfps_table import ScoreTable
from sparsekv.core.selectors import SELECTORS
from sparsekv.evaluation.methods import parse_methods

BUDGETED = {name: dict(parse_methods([method], [0.02])[0].options) for name, method in PEERS.items()} | {"topk": {}}
"""The rivals as the quality table has them."""


def table_of(scores: torch.Tensor) -> ScoreTable:
    table = ScoreTable(1, len(scores), scores.device)
    table.data[0, :len(scores)] = scores
    table.recount()
    return table


def test_lfps_proposes_more_where_the_kurtosis_is_higher() -> None:
    """LFPS §4.2: "a higher kurtosis … allocates a larger index budget"; and a larger α a smaller one."""
    places = (torch.arange(4096) + 0.5) / 4096
    normal = torch.distributions.Normal(0.0, 1.0).icdf(places)
    kurtoses, thresholds, proposed = [], [], []
    for sigma in (0.3, 0.6, 0.9, 1.2, 1.5):
        scores = (sigma * normal).exp()
        scores = scores / scores.sum()
        away = (scores - scores.mean()).double()
        kurtoses.append(float(away.pow(4).mean() / away.square().mean().square()))
        table = table_of(scores)
        thresholds.append(float((table.threshold(0.3) - table.mean) / scores.std()))
        proposed.append(int((scores > table.threshold(0.3)[0]).sum()))
        counts = [int((scores > table.threshold(a)[0]).sum()) for a in (0.1, 0.2, 0.3, 0.4)]
        assert counts == sorted(counts, reverse=True)
    assert kurtoses == sorted(kurtoses) and kurtoses[-1] > 50 * kurtoses[0]
    assert thresholds == sorted(thresholds, reverse=True)
    assert proposed == sorted(proposed) and proposed[0] == 0 < proposed[-1]


@pytest.mark.parametrize("peaks", [1, 5, 40])
def test_the_threshold_of_lfps_on_equal_peaks(peaks: int) -> None:
    """Of p equal peaks over nothing, `n/kurtosis` is about p."""
    scores = torch.zeros(4000)
    scores[:peaks] = 1 / peaks
    table = table_of(scores)
    std = math.sqrt(1 / (peaks * 4000))
    assert float(table.threshold(0.2) - table.mean) == pytest.approx(0.2 * 2.2 * std * math.sqrt(peaks), rel=0.03)


def test_the_tables_of_lfps_begin_in_the_unit_they_are_updated_in() -> None:
    """Vertical and slash together hold one attention (equation 10: half of it each), before and after updates."""
    before, queries, step = make_view(length=300, heads_q=2)
    selector = built(SELECTORS["lfps"](token_budget=20, alpha=0.0, per_query_head=True), before)
    begun = [float(t.sums[0].mean()) for t in (selector.vertical, selector.slash)]
    want = (1 - GAMMA**OBSERVED) / 2
    assert begun[0] == pytest.approx(want, rel=1e-3) and begun[1] == pytest.approx(want, rel=1e-3)
    for _ in range(60):
        selector.select(step, queries)
    for table in (selector.vertical, selector.slash):
        assert float((table.sums[0] * table.scale).mean()) == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize("case", [{}, {"batch": 3, "pads": (0, 5, 60)}, {"new": 3}])
def test_streaming_llm_reads_the_most_recent_tokens(case) -> None:
    before, queries, step = make_view(**case)
    got = built(SELECTORS["streaming_llm"](token_budget=11), before).select(step, queries).as_tokens()
    for row in range(got.shape[0]):
        b = row // queries.count
        first, last = int(step.regions.mid_first[b]), int(step.regions.mid_last[b])
        assert {int(i) for i in got[row, 0] if i >= 0} == set(range(max(first, last - 11), last))


def test_quest_leaves_its_first_layers_dense() -> None:
    assert [SELECTORS["quest"](dense_first=2).serves(i) for i in range(4)] == [False, False, True, True]
    assert all(SELECTORS["quest"]().serves(i) for i in range(4))


@pytest.mark.parametrize("share", [0.02, 0.05, 0.1])
@pytest.mark.parametrize("name", BUDGETED)
def test_a_rival_uses_its_budget(name: str, share: float) -> None:
    """At least four fifths of it, mean over heads, steps and layers, on keys with structure: some directions in common,
    a sink, and queries near the keys that they look for."""
    spent = []
    for layer in range(4):
        before, queries, step = make_view(length=1200, new=8, window=16, sink=4, dim=16, layer_idx=layer, seed=layer)
        for view in (before, step):
            view.keys[:, :, 4:] += 2 * view.keys[:, :, 4:5]
        selector = built(SELECTORS[name](token_budget=share, **BUDGETED[name]), before)
        budget = math.ceil(share * 1200)
        spent.append(float(selector.select(step, queries).counts().float().mean()) / budget)
    assert 0.8 <= sum(spent) / len(spent) <= 1.01


def test_magicpig_takes_fewer_bits_for_a_larger_budget() -> None:
    before, _, _ = make_view(length=1200, dim=16, batch=2, pads=(0, 300))
    bits = [built(SELECTORS["magicpig"](token_budget=k), before).used_bits.float().mean() for k in (12, 60, 240)]
    assert bits[0] > bits[1] > bits[2] >= 1
    assert int(built(SELECTORS["magicpig"](), before).used_bits[0, 0]) == 10
    assert int(built(SELECTORS["magicpig"](bits=6, token_budget=9), before).used_bits.unique()) == 6
