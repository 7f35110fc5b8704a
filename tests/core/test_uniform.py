"""Uniform samples of what is not read: unbiased mass, the same draws in every batch."""

from __future__ import annotations

import torch

from sparsekv.core.estimators import UniformEstimator
from sparsekv.core.layer import LayerView, Queries, Selection
from sparsekv.core.regions import Regions


def view_of(batch: int, length: int = 300) -> LayerView:
    torch.manual_seed(0)
    keys, values = torch.randn(2, batch, 2, length, 8, dtype=torch.float64)
    starts = torch.arange(batch) * 11
    return LayerView(keys, values, regions=Regions.at_prefill_end(starts, length - 20, 4, 16), scale=0.35,
                     num_query_heads=6)


def test_the_mean_of_many_draws_is_what_is_not_read() -> None:
    view, count = view_of(1), 4000
    queries = Queries(torch.randn(1, 6, 1, 8, dtype=torch.float64).expand(-1, -1, count, -1),
                      torch.arange(1000, 1000 + count))
    tokens = torch.stack([torch.arange(10, 60), torch.arange(100, 150)])[None].expand(count, -1, -1)
    out, lse = UniformEstimator(40).partial(view, queries, Selection(tokens=tokens))
    scores = (queries.rot[0, :, 0].reshape(2, 3, 8) @ view.keys[0].mT * 0.35).exp()
    scores[..., :4] = scores[..., 264:] = 0.0
    scores[0, :, 10:60] = scores[1, :, 100:150] = 0.0
    mass = lse.exp().mean(0).reshape(2, 3)
    assert torch.allclose(mass, scores.sum(-1), rtol=0.02)
    found = (lse.exp()[..., None] * out).mean(0).reshape(2, 3, 8)
    assert torch.allclose(found, scores @ view.values[0], atol=0.02 * float(scores.sum(-1).max()))


def test_a_row_draws_the_same_alone() -> None:
    view, alone = view_of(3), view_of(3)
    queries = Queries.last(torch.randn(3, 6, 2, 8, dtype=torch.float64), 300)
    drawn = UniformEstimator(30).drawn(view, queries).reshape(3, 2, 2, 30)
    alone.regions = view.regions.take_rows(torch.tensor([1]))
    one = UniformEstimator(30).drawn(alone, Queries.last(queries.rot[1:2], 300))
    assert torch.equal(drawn[1], one)
    assert drawn[1].unique(dim=0).shape[0] == 2 and not torch.equal(drawn[1, 0, 0], drawn[1, 0, 1])
    assert bool((drawn[2] >= view.regions.mid_first[2]).all() and (drawn[2] < view.regions.mid_last[2]).all())


def test_all_read_leaves_nothing() -> None:
    view = view_of(1)
    queries = Queries.last(torch.randn(1, 6, 1, 8, dtype=torch.float64), 300)
    _, lse = UniformEstimator(30).partial(view, queries, Selection(tokens=torch.arange(4, 264)[None, None]))
    assert bool(torch.isneginf(lse).all())
