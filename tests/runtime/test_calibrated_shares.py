"""The shift of a completed step is that of the share of the context it reads."""

import dataclasses

import pytest
import torch
from tiny import attach, make_model
from tiny_artifacts import artifacts

from sparsekv.artifacts.phi import PhiArtifact

SHARES = [0.0, 0.02, 0.1]


@pytest.fixture
def made():
    model = make_model()
    router, phi = artifacts(model)
    layers, _, heads = phi.shift.shape
    shift = torch.tensor([0.0, -1.0, -3.0])[None, :, None].repeat(layers, 1, heads)
    config = dataclasses.replace(phi.config, read_shares=SHARES)
    gate = phi.gate.clone()
    gate[:, 1] = 0.0
    return model, router, PhiArtifact(config, phi.maps, shift, gate)


@pytest.mark.parametrize(("share", "shift"), [
    (0.0, 0.0), (0.01, -0.5), (0.02, -1.0), (0.06, -2.0), (0.1, -3.0), (0.5, -3.0)])
def test_shifts_are_interpolated_between_the_shares_measured(made, share: float, shift: float) -> None:
    offset = made[2].layer(0).at(share).offset
    assert torch.isneginf(offset[1]) and not offset.isnan().any()
    torch.testing.assert_close(offset.flatten()[0], torch.tensor(shift))


@pytest.mark.parametrize(("options", "shift"), [
    ({"selector": "streaming"}, 0.0), ({"selector": "topk", "token_budget": 0.02}, -1.0),
    ({"selector": "topk", "token_budget": 8}, -2.0), ({"selector": "router", "token_budget": 0.1}, -3.0),
    ({"selector": "router", "probes": 1}, -3.0)])
def test_a_step_takes_the_shift_of_what_it_reads(made, options: dict, shift: float) -> None:
    model, router, phi = made
    length = round(8 / 0.06)
    ids = torch.randint(1, 95, (1, length + 1), generator=torch.Generator().manual_seed(0))
    with attach(model, router=router if options["selector"] == "router" else None, phi=phi, completion="phi",
                         dense_below=0, **options) as attachment:
        cache = attachment.prefill(ids[:, :-1])
        model(ids[:, -1:], past_key_values=cache)
        offset = cache.layers[1].state.estimator.layer.offset
    torch.testing.assert_close(offset.flatten()[0], torch.tensor(shift), atol=0.02, rtol=0)


def test_a_layer_whose_gates_are_closed_is_not_completed(made) -> None:
    model, _, phi = made
    last = phi.config.layers[-1]
    gate = phi.gate.clone()
    gate[-1] = 0.0
    closed = PhiArtifact(phi.config, phi.maps, phi.shift, gate)
    assert closed.layer(last) is None and closed.layer(0) is not None
    ids = torch.randint(1, 95, (1, 120), generator=torch.Generator().manual_seed(0))
    found = []
    for maps in (closed, None):
        with attach(model, phi=maps, selector="topk", token_budget=0.1, dense_below=0, dense_layers=[
                i for i in phi.config.layers if i != last]) as attachment:
            cache = attachment.prefill(ids[:, :-1])
            found.append(model(ids[:, -1:], past_key_values=cache).logits)
            assert cache.layers[last].state.estimator is None
    assert torch.equal(*found)


def test_the_table_is_saved_and_loaded(made, tmp_path) -> None:
    made[2].save(tmp_path / "phi")
    loaded = PhiArtifact.load(tmp_path / "phi")
    assert loaded.config.read_shares == SHARES
    torch.testing.assert_close(loaded.shift, made[2].shift)
