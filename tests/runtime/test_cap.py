"""The completion's mass, capped by that of normal scores, and the moments of the mid region that say what that is."""

from __future__ import annotations

import pytest
import torch
from tiny import make_model
from tiny_artifacts import artifacts
from views import make_view

from sparsekv.artifacts.phi import PhiArtifact, PhiLayer
from sparsekv.core.estimators import PhiEstimator
from sparsekv.core.selectors import SELECTORS
from sparsekv.core.step import build
from sparsekv.kernels import factored, mass_cap, read_bound
from sparsekv.models.feature_map import FeatureMap, FeatureMaps


def layer(heads_q: int = 4, heads_kv: int = 2, dim: int = 8, *, centred: bool = False, capped: bool = True) -> PhiLayer:
    torch.manual_seed(0)
    sizes = [(heads_q, 12)] + ([(heads_kv, 6)] * 2 if centred else [(heads_kv, 12)])
    maps = FeatureMaps(*(FeatureMap(h, dim, r, 16, blocks=not i).weights() for i, (h, r) in enumerate(sizes)))
    maps = maps.map(torch.Tensor.detach)
    maps = maps._replace(key=maps.key._replace(b_out=maps.key.b_out - 2.7))  # a mass about that of the keys
    return PhiLayer(maps, torch.randn(1, heads_q), capped=capped)


def test_what_is_above_the_cap_comes_down_to_it() -> None:
    before, queries, step = make_view(batch=2, pads=(0, 31), new=9)

    def masses(capped: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        selector, estimator = SELECTORS["topk"](token_budget=0.1), PhiEstimator(layer(capped=capped))
        build(before, selector, estimator)
        _, lse = estimator.partial(step, queries, selector.select(step, queries))
        return lse, estimator.query(step, queries).cap

    (lowered, cap), (free, none) = masses(True), masses(False)
    assert none is None
    assert 0.2 < float((free > cap).float().mean()) < 0.8
    torch.testing.assert_close(lowered, torch.minimum(free, cap))


@pytest.mark.parametrize("centred", [False, True])
def test_the_moments_grow_with_the_mid_region(centred: bool) -> None:
    before, _, step = make_view(batch=2, pads=(0, 21), new=30)
    estimator, whole = PhiEstimator(layer(centred=centred)), PhiEstimator(layer(centred=centred))
    estimator.build(before)
    estimator.set_read_share(before, 0.1)
    old, step.regions = step.regions, step.regions.moved(step.length - 8, step.length)
    estimator.extend(step, old)
    estimator.set_read_share(step, 0.1)
    whole.build(step)
    whole.set_read_share(step, 0.1)
    for row, (first, last) in enumerate(zip(step.regions.mid_first, step.regions.mid_last, strict=True)):
        keys = step.scale * step.keys[row, :, first:last]
        torch.testing.assert_close(whole.state.moments.key[row], keys.mean(1))
        torch.testing.assert_close(whole.covariance[row], torch.stack([k.T.cov(correction=0) for k in keys]))
    torch.testing.assert_close(estimator.covariance, whole.covariance)
    for mine, right in zip(estimator.state.moments, whole.state.moments, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5)
    estimator.take_rows(torch.tensor([1]))
    torch.testing.assert_close(estimator.state.moments.key, whole.state.moments.key[1:])


def test_a_mid_region_that_has_doubled_has_its_mean_key_taken_anew() -> None:
    for tail_start, anew in ((50, False), (90, True)):
        before, _, view = make_view(length=40, new=60)
        estimator = PhiEstimator(layer(centred=True))
        estimator.build(before)
        estimator.set_read_share(before, 0.1)
        old, view.regions = view.regions, view.regions.moved(tail_start, view.length)
        estimator.extend(view, old)
        end = tail_start if anew else 30
        torch.testing.assert_close(estimator.centre, view.keys[:, :, 3:end].mean(2))


def test_the_mass_of_normal_scores() -> None:
    """Against the sum itself, for scores that are as normal as numbers can be: the quantiles of the distribution."""
    count = 200_001
    quantiles = torch.special.ndtri((torch.arange(count).double() + 0.5) / count)
    size = torch.tensor(float(count)).double()
    for spread, share in ((0.1, 0.001), (1.0, 0.01), (2.0, 0.01), (3.0, 0.05), (4.0, 0.5)):
        scores = 0.7 + spread * quantiles
        left = scores[: count - round(share * count)]
        found = mass_cap(scores.mean(), scores.var(correction=0), size, read_bound(torch.tensor(share).double()))
        torch.testing.assert_close(found, left.logsumexp(0), atol=0.01, rtol=0)
    assert bool(torch.isposinf(mass_cap(size, size, size, read_bound(torch.zeros(1)))))


def test_a_covariance_in_a_few_rows() -> None:
    torch.manual_seed(0)
    keys = torch.randn(3, 400, 24) @ torch.randn(3, 24, 24) * torch.logspace(0, -2, 24)
    covariance = torch.stack([k.T.cov(correction=0) for k in keys])
    whole, nothing = factored(covariance, 24)
    torch.testing.assert_close(whole.mT @ whole, covariance, rtol=1e-3, atol=1e-3)
    assert float(nothing.abs().max()) < 1e-3
    rows, left = factored(covariance, 6)
    assert rows.shape == (3, 6, 24) and bool((left >= 0).all())
    torch.testing.assert_close((rows.mT @ rows).diagonal(dim1=-2, dim2=-1) + left,
                               covariance.diagonal(dim1=-2, dim2=-1))
    error = (rows.mT @ rows + torch.diag_embed(left) - covariance).norm() / covariance.norm()
    assert float(error) < 0.2
    same = torch.ones(2, 5, 5)  # of rank one: nothing is left after a row
    rows, left = factored(same, 3)
    torch.testing.assert_close(rows[:, 0], torch.ones(2, 5))
    assert bool((rows[:, 1:] == 0).all()) and bool((left == 0).all())


@pytest.mark.parametrize("capped", [True, False])
def test_the_cap_is_saved_and_optional(tmp_path, capped: bool) -> None:
    _, phi = artifacts(make_model(), capped=capped)
    phi.save(tmp_path / "phi")
    loaded = PhiArtifact.load(tmp_path / "phi")
    assert loaded.layer(1).capped == capped
    assert loaded.cache_tokens == phi.config.num_features * 18 / 32 + capped * 9
