"""φ's mass fitted to a request: the best shift for its last queries, row by row, for as long as it lasts."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from tiny import make_model
from tiny_artifacts import artifacts

import sparsekv
from sparsekv.artifacts.phi import PhiArtifact
from sparsekv.core.offline import capped, make_scene, output, relative_error, top_k
from sparsekv.models.feature_map import log_kernel
from sparsekv.runtime.request_fit import LASTS, PRIOR, QUERIES

SHIFTS = [round(-3 + 0.2 * i, 1) for i in range(31)]
SHARES = [0.0, 0.1]
LENGTHS = (150, 131)


@pytest.fixture(params=[False, True])
def made(request):
    model = make_model()
    _, phi = artifacts(model, centred=request.param)
    layers, _, heads = phi.shift.shape
    config = dataclasses.replace(phi.config, read_shares=SHARES, shift_grid=SHIFTS)
    generator = torch.Generator().manual_seed(3)
    best = torch.randn(layers, len(SHARES), 1, heads, generator=generator)
    errors = 0.3 + 0.02 * (torch.tensor(SHIFTS)[:, None] - best).square()
    shift = torch.tensor(SHIFTS)[errors.argmin(2)]
    return model, PhiArtifact(config, phi.maps, shift, torch.ones(layers, heads), None, errors)


def prompts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, 95, (1, n + 1), generator=generator) for n in LENGTHS]


def decoded(model, phi, budget: float, ids: torch.Tensor, mask: torch.Tensor | None = None):
    """The cache after one decoded token."""
    chosen = {"selector": "topk", "token_budget": budget} if budget else {"selector": "streaming"}
    with sparsekv.attach(model, phi=phi, dense_below=0, **chosen) as attachment:
        cache = attachment.prefill(ids[:, :-1], None if mask is None else mask[:, :-1])
        model(ids[:, -1:], past_key_values=cache, attention_mask=mask)
    return cache


@pytest.mark.parametrize("budget", [0.0, 0.05, 0.1])
def test_it_is_the_best_of_the_grid(made, budget: float) -> None:
    model, phi = made
    cache = decoded(model, phi, budget, prompts()[0])
    layer, length = cache.layers[1], LENGTHS[0]
    completion, maps = layer.state.completion, phi.layer(1)
    queries, keys = layer.recent[0, :, -QUERIES:].float(), layer.keys[0, :, :length].float()
    columns = torch.arange(length - QUERIES, length)[None]
    scene = make_scene(queries, keys, layer.values[0, :, :length].float(), columns, scale=queries.shape[-1] ** -0.5,
                       sink_size=4, window_size=int(length - layer.state.regions.mid_last))
    centre = None if completion.centre is None else completion.centre[0]
    scale = queries.shape[-1] ** -0.5
    log_q, log_k = maps.maps.log_phi_q(queries, centre, scale), maps.maps.log_phi_k(keys, centre)
    logits = log_kernel(log_q.reshape(keys.shape[0], -1, log_q.shape[-1]), log_k).reshape(scene.scores.shape)
    read = None if budget == 0.0 else top_k(scene, budget)
    lowered = capped(scene, logits, read)
    errors = torch.stack([relative_error(scene, output(scene, read, lowered + shift)) for shift in SHIFTS])
    best = (errors + PRIOR * maps.at(budget).errors[0]).argmin(0)
    torch.testing.assert_close(completion.fitted[0], torch.tensor(SHIFTS)[best])
    assert bool((completion.fitted[0] != maps.at(budget).offset).any())


def test_rows_of_a_padded_batch_have_their_own(made) -> None:
    model, phi = made
    alone = [decoded(model, phi, 0.1, ids) for ids in prompts()]
    width = max(LENGTHS) + 1
    ids = torch.cat([torch.nn.functional.pad(x, (width - x.shape[1], 0)) for x in prompts()])
    mask = torch.stack([(torch.arange(width) >= width - 1 - n).long() for n in LENGTHS])
    both = decoded(model, phi, 0.1, ids, mask)
    for layer in (1, 2):
        found = both.layers[layer].state.completion.fitted
        for row, cache in enumerate(alone):
            expected = cache.layers[layer].state.completion.fitted
            assert torch.equal(found[row], expected[0])
    layer = both.layers[1].state
    second = layer.completion.fitted[1].clone()
    layer.take_rows(torch.tensor([1]))
    assert torch.equal(layer.completion.fitted[0], second)


def test_it_is_part_of_what_a_step_computes_and_can_be_switched_off(made) -> None:
    model, phi = made
    ids = prompts()[0]
    logits = []
    for fit in (True, False):
        with sparsekv.attach(model, phi=phi, selector="topk", token_budget=0.05, dense_below=0, fit_request=fit) as a:
            cache = a.prefill(ids[:, :-1])
            logits.append(model(ids[:, -1:], past_key_values=cache).logits)
            assert (cache.layers[1].state.completion.fitted is not None) == fit
    assert not torch.allclose(*logits)
    plain = PhiArtifact(phi.config, phi.maps, phi.shift, phi.gate)
    with sparsekv.attach(model, phi=plain, selector="topk", token_budget=0.05, dense_below=0) as a:
        cache = a.prefill(ids[:, :-1])
        torch.testing.assert_close(model(ids[:, -1:], past_key_values=cache).logits, logits[1])


def test_it_ends_after_a_while(made) -> None:
    model, phi = made
    cache = decoded(model, phi, 0.05, prompts()[0])
    state, layer = cache.layers[1].state, cache.layers[1]
    view, completion = SimpleNamespace(length=layer.recent_end + LASTS), state.completion
    fitted, calibrated = completion.fitted, completion.layer.offset
    assert completion._offset(view) is fitted
    view.length += 1
    assert torch.equal(completion._offset(view), calibrated)
    torch.testing.assert_close(completion._offset(view, 3), torch.stack([fitted[0], fitted[0], calibrated]))
    view.length += 2
    assert torch.equal(completion._offset(view, 3), calibrated)


def test_a_closed_gate_stays_closed(made) -> None:
    model, phi = made
    phi.gate[:, 0] = 0.0
    cache = decoded(model, phi, 0.05, prompts()[0])
    offset = cache.layers[1].state.completion.fitted
    assert torch.isneginf(offset[0, 0]) and bool(offset[0, 1:].isfinite().all())


def test_the_errors_are_saved_and_loaded(made, tmp_path) -> None:
    phi = made[1]
    phi.save(tmp_path / "phi")
    loaded = PhiArtifact.load(tmp_path / "phi")
    assert loaded.config.shift_grid == SHIFTS
    torch.testing.assert_close(loaded.errors, phi.errors)
    torch.testing.assert_close(loaded.layer(1).at(0.05).errors, phi.errors[1].mean(0, keepdim=True))
