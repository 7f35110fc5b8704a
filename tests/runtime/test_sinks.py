"""gpt-oss: learned sinks in the normalisation of dense and sparse layers, against transformers' own eager attention."""

from __future__ import annotations

import pytest
import torch
from tiny import attach, make_model, prompt
from tiny_artifacts import artifacts

from sparsekv.capture.tap import probe
from sparsekv.runtime.hf.attach import RunOptions
from sparsekv.util.errors import SparseKVError

EVERYTHING = {"selector": "topk", "token_budget": 1.0, "dense_layers": ()}


@pytest.fixture
def model():
    return make_model("gpt_oss")


def close(found: torch.Tensor, want: torch.Tensor) -> None:
    """To a relative error of 1e-5."""
    assert (found - want).norm() < 1e-5 * want.norm()


@torch.no_grad()
@pytest.mark.parametrize("chunk", [None, 1, 7, 33])
@pytest.mark.parametrize("padded", [False, True])
def test_prompt_and_steps_are_the_models_own(model, chunk: int | None, padded: bool) -> None:
    ids = prompt(80, 3)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :9], mask[2, :41] = 0, 0
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    want = model(ids, attention_mask=mask, position_ids=places).logits
    with attach(model, **EVERYTHING) as attachment:
        close(model(ids, attention_mask=mask, position_ids=places).logits[mask.bool()], want[mask.bool()])
        cache = attachment.prefill(ids[:, :70], mask[:, :70] if padded else None, chunk_size=chunk)
        steps = [model(ids[:, t:t + 1], attention_mask=mask[:, :t + 1], position_ids=places[:, t:t + 1],
                       past_key_values=cache).logits for t in range(70, 80)]
        report = attachment.report()
    close(torch.cat(steps, 1), want[:, 70:])
    assert report["sparse_calls"] == 2 * 10 and report["selectivity_sparse"] == pytest.approx(1.0)


@torch.no_grad()
@pytest.mark.parametrize("how", [
    {"placement": "offload", "selector": "quest"}, {"placement": "cpu"},
    {"selector": "token_select", "token_budget": 1000}, {"run": RunOptions(sparse_chunks=True, compares=True)}])
def test_wherever_keys_lie_and_however_it_is_read(model, how: dict) -> None:
    ids = prompt(90)
    want = model(ids).logits[:, 70:]
    with attach(model, **{**EVERYTHING, **how}) as attachment:
        cache = attachment.prefill(ids[:, :70])
        found = [model(part, past_key_values=cache).logits for part in ids[:, 70:85].split(5, dim=1)]
        found += [model(ids[:, t:t + 1], past_key_values=cache).logits for t in range(85, 90)]
        report = attachment.report()
    close(torch.cat(found, 1), want)
    assert report["sparse_calls"] > 0 and (report["rel_err"] is None or report["rel_err"] < 1e-5)


@torch.no_grad()
def test_an_estimate_is_merged_before_the_sink(model) -> None:
    """What an estimate leaves out of the normalisation would be seen: everything is read, nothing is left to it."""
    ids = prompt(80, 2)
    router, phi = artifacts(model)
    want = model.generate(ids, max_new_tokens=12, do_sample=False)
    with attach(model, router=router, phi=phi, probes=8, dense_layers=()) as attachment:
        assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False), want)
        assert torch.equal(attachment.generate(ids, max_new_tokens=12), want)


def test_a_prompt_has_gradients_of_the_sinks(model) -> None:
    ids, sinks = prompt(40), model.model.layers[1].self_attn.sinks
    grads = []
    for options in (None, {"selector": "dense"}):
        model.zero_grad()
        if options is None:
            model(ids).logits.square().sum().backward()
        else:
            with attach(model, **options):
                model(ids).logits.square().sum().backward()
        grads.append(sinks.grad.clone())
    model.zero_grad()
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-3, atol=1e-4 * float(grads[0].abs().max()))


def test_capture_refuses_in_one_sentence(model) -> None:
    with pytest.raises(SparseKVError, match="not supported: learned attention sinks") as refused:
        probe(model)
    assert "\n" not in str(refused.value)
