"""The completion's mass, capped by that of normal scores: what a step computes is what calibration measured."""


import pytest
import torch
from views import make_view

from sparsekv.artifacts.phi import PhiArtifact, PhiLayer
from sparsekv.core.estimators.phi import PhiCompletion
from sparsekv.core.offline import Scene, capped, make_scene, scene_cap, top_k
from sparsekv.core.selectors.base import Selection
from sparsekv.kernels.reference import factored, mass_cap, read_bound
from sparsekv.models.feature_map import FeatureMap, Maps


def layer(heads_q: int, heads_kv: int, dim: int, *, centred: bool = False) -> PhiLayer:
    torch.manual_seed(0)
    sizes = [(heads_q, 12)] + ([(heads_kv, 6)] * 2 if centred else [(heads_kv, 12)])
    maps = Maps(*(FeatureMap(h, dim, r, 16).weights() for h, r in sizes)).map(torch.Tensor.detach)
    offsets = torch.randn(1, heads_q)
    offsets[0, 1] = float("-inf")
    return PhiLayer(maps, offsets, capped=True)


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("share", [0.0, 1 / 31])
def test_a_step_gives_the_capped_estimate(centred: bool, share: float) -> None:
    before, queries, step = make_view(batch=2, pads=(0, 31), new=3)
    maps = layer(4, 2, 8, centred=centred)
    completion = PhiCompletion(maps)
    completion.build(before)
    listed = [round(share * int(n)) for n in step.regions.context]
    completion.reads(step, share)
    tokens = torch.full((6, 2, max(listed)), -1)
    for row in range(2):
        first, last = int(step.regions.mid_first[row]), int(step.regions.mid_last[row])
        for t in range(3):
            for head in range(2):
                tokens[3 * row + t, head, :listed[row]] = torch.randperm(last - first)[:listed[row]] + first
    out, lse = completion.partial(step, queries, Selection(tokens=tokens))
    for row in range(2):
        first, last = int(step.regions.mid_first[row]), int(step.regions.mid_last[row])
        keys, values = step.keys[row], step.values[row]
        asked = queries.rot[row]
        mid = (torch.arange(step.length) >= first) & (torch.arange(step.length) < last)
        scores = (asked.reshape(2, -1, 8) @ keys.mT).reshape(4, 3, -1) * step.scale
        centre = keys[:, first:last].mean(1) if centred else None
        log_q, log_k = maps.maps.log_phi_q(asked, centre, step.scale), maps.maps.log_phi_k(keys, centre)
        logits = torch.stack([torch.logsumexp(log_q[h][:, None] + log_k[h // 2][None], -1) for h in range(4)])
        read = torch.zeros(4, 3, step.length, dtype=torch.bool)
        for t in range(3):
            for head in range(4):
                read[head, t, [int(i) for i in tokens[3 * row + t, head // 2] if i >= 0]] = True
        scene = Scene(scores, values, ~mid.expand(1, 3, -1), mid.expand(1, 3, -1), torch.zeros(4, 3, 8),
                      torch.full((1, 3), step.length))
        expected = maps.estimate(scene, logits, read, share).masked_fill(~mid | read, float("-inf"))
        rows = slice(3 * row, 3 * row + 3)
        torch.testing.assert_close(lse[rows].mT, expected.logsumexp(-1))
        weights = expected.softmax(-1).nan_to_num(0.0).reshape(2, -1, step.length)
        right = (weights @ values).reshape(4, 3, 8)
        live = [0, 2, 3]
        torch.testing.assert_close(out[rows].transpose(0, 1)[live], right[live], rtol=1e-4, atol=1e-5)


def test_the_moments_grow_with_the_mid_region() -> None:
    before, _, step = make_view(batch=2, pads=(0, 21), new=30)
    completion = PhiCompletion(layer(4, 2, 8))
    completion.build(before)
    completion.reads(before, 0.1)
    grown = step.regions.moved(step.length - 8)
    view = step.__class__(**{**step.__dict__, "regions": grown})
    completion.extend(view, before.regions)
    whole = PhiCompletion(layer(4, 2, 8))
    whole.build(view)
    whole.reads(view, 0.1)
    for row, (first, last) in enumerate(zip(grown.mid_first, grown.mid_last, strict=True)):
        keys = step.scale * step.keys[row, :, first:last]
        torch.testing.assert_close(whole.moments.key[row], keys.mean(1))
        torch.testing.assert_close(whole.covariance[row], torch.stack([k.T.cov(correction=0) for k in keys]))
    torch.testing.assert_close(completion.covariance, whole.covariance)
    for mine, right in zip(completion.moments, whole.moments, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5)
    completion.take_rows(torch.tensor([1]))
    torch.testing.assert_close(completion.moments.key, whole.moments.key[1:])


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


def test_what_is_above_the_cap_comes_down_to_it() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(4, 9, 8), torch.randn(2, 60, 8), torch.randn(2, 60, 8)
    scene = make_scene(q, k, v, torch.arange(51, 60)[None], scale=0.5, sink_size=3, window_size=5)
    logits, read = torch.randn(4, 9, 60) + torch.linspace(-3, 3, 9)[:, None], top_k(scene, 0.1, shared=False)
    rest = scene.mid & ~read
    before, after = (x.masked_fill(~rest, float("-inf")).logsumexp(-1) for x in (logits, capped(scene, logits, read)))
    cap = scene_cap(scene, read)
    assert 0.2 < float((before > cap).float().mean()) < 0.8
    torch.testing.assert_close(after, torch.minimum(before, cap))
    truth = scene.scores.masked_fill(~rest, float("-inf")).logsumexp(-1)
    assert float((cap - truth).abs().mean()) < 0.15
    assert torch.equal(capped(scene, logits, None), logits)


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


def test_the_cap_is_saved_and_optional(tmp_path) -> None:
    from tiny import make_model
    from tiny_artifacts import artifacts

    for limited in (True, False):
        _, phi = artifacts(make_model(), capped=limited)
        phi.save(tmp_path / "phi")
        loaded = PhiArtifact.load(tmp_path / "phi")
        assert loaded.layer(1).capped == limited
        assert loaded.cache_tokens == phi.config.num_features * 18 / 32 + limited * 9
    between = layer(4, 2, 8)._replace(offsets=torch.tensor([[0.0], [1.0]]).expand(2, 4), shares=(0.0, 0.1))
    torch.testing.assert_close(between.at(0.025).offset, torch.full((4,), 0.25))
