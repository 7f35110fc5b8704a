"""The completion's mass, blended with that of the mean score: what a step computes is what calibration measured."""

import dataclasses

import pytest
import torch
from views import make_view

from sparsekv.artifacts.phi import PhiArtifact, PhiLayer
from sparsekv.models.feature_map import FeatureMap, Maps
from sparsekv.models.offline import Scene, blended, make_scene
from sparsekv.runtime.completion import PhiCompletion
from sparsekv.runtime.selectors.base import Selection


def layer(heads_q: int, heads_kv: int, dim: int, *, centred: bool = False) -> PhiLayer:
    torch.manual_seed(0)
    sizes = [(heads_q, 12)] + ([(heads_kv, 6)] * 2 if centred else [(heads_kv, 12)])
    maps = Maps(*(FeatureMap(h, dim, r, 16).weights() for h, r in sizes)).map(torch.Tensor.detach)
    offsets = torch.randn(1, heads_q)
    offsets[0, 1] = float("-inf")
    return PhiLayer(maps, offsets, blends=torch.tensor([[0.3, 0.5, 0.0, 1.0]]))


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("listed", [0, 7])
def test_a_step_gives_the_blended_estimate(centred: bool, listed: int) -> None:
    before, queries, step = make_view(batch=2, pads=(0, 21), new=3)
    maps = layer(4, 2, 8, centred=centred)
    completion = PhiCompletion(maps)
    completion.build(before)
    tokens = torch.full((6, 2, listed), -1)
    for row in range(2):
        first, last = int(step.regions.mid_first[row]), int(step.regions.mid_last[row])
        for t in range(3):
            for head in range(2):
                some = max(0, listed - head)
                tokens[3 * row + t, head, :some] = torch.randperm(last - first)[:some] + first
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
        expected = maps.estimate(scene, logits, read, 0.0).masked_fill(~mid | read, float("-inf"))
        rows = slice(3 * row, 3 * row + 3)
        torch.testing.assert_close(lse[rows].mT, expected.logsumexp(-1))
        weights = expected.softmax(-1).nan_to_num(0.0).reshape(2, -1, step.length)
        right = (weights @ values).reshape(4, 3, 8)
        live = [0, 2, 3]
        torch.testing.assert_close(out[rows].transpose(0, 1)[live], right[live], rtol=1e-4, atol=1e-5)


def test_the_mean_key_grows_with_the_mid_region() -> None:
    before, _, step = make_view(batch=2, pads=(0, 21), new=30)
    completion = PhiCompletion(layer(4, 2, 8))
    completion.build(before)
    grown = step.regions.moved(step.length - 8)
    view = step.__class__(**{**step.__dict__, "regions": grown})
    completion.extend(view, before.regions)
    whole = PhiCompletion(layer(4, 2, 8))
    whole.build(view)
    torch.testing.assert_close(completion.mean_key, whole.mean_key)
    torch.testing.assert_close(completion.size, whole.size)
    completion.take_rows(torch.tensor([1]))
    torch.testing.assert_close(completion.mean_key, whole.mean_key[1:])


def test_all_of_the_way_is_the_mass_of_the_mean_score() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(4, 9, 8), torch.randn(2, 60, 8), torch.randn(2, 60, 8)
    scene = make_scene(q, k, v, torch.arange(51, 60)[None], scale=0.5, sink_size=3, window_size=5)
    moved = blended(scene, torch.randn(4, 9, 60), None, torch.ones(4))
    alike = torch.where(scene.mid, scene.scores, 0).sum(-1, keepdim=True) / scene.mid.sum(-1, keepdim=True)
    same = alike.expand(-1, -1, 60).masked_fill(~scene.mid, float("-inf"))
    torch.testing.assert_close(moved.masked_fill(~scene.mid, float("-inf")).logsumexp(-1), same.logsumexp(-1))
    assert bool((same.logsumexp(-1) <= scene.scores.masked_fill(~scene.mid, float("-inf")).logsumexp(-1)).all())


def test_blends_are_saved_interpolated_and_optional(tmp_path) -> None:
    from tiny import make_model
    from tiny_artifacts import artifacts

    _, phi = artifacts(make_model())
    layers, _, heads = phi.shift.shape
    phi.errors = torch.rand(layers, 1, 2, 3, heads)
    phi.config = dataclasses.replace(phi.config, blend_grid=[0.0, 1.0], shift_grid=[-1.0, 0.0, 1.0])
    phi.save(tmp_path / "phi")
    loaded = PhiArtifact.load(tmp_path / "phi")
    assert torch.equal(loaded.blend, phi.blend) and torch.equal(loaded.errors, phi.errors)
    assert loaded.config.blend_grid == [0.0, 1.0] and loaded.layer(1).errors.shape == (1, 2, 3, heads)
    _, plain = artifacts(make_model(), blended=False)
    plain.save(tmp_path / "plain")
    assert PhiArtifact.load(tmp_path / "plain").layer(0).blend is None
    between = layer(4, 2, 8)._replace(offsets=torch.zeros(2, 4), shares=(0.0, 0.1), blends=torch.tensor([[0.0], [1.0]]))
    torch.testing.assert_close(between.at(0.025).blend, torch.tensor([0.25]))
