"""A step of the runtime = the same step on captured tensors = the formulas written out, for every selector with every
estimator: in float64, with odd sizes, left padding, groups of 1, 3, 4 and 8 heads and a mid region that grows. On a GPU
the same for the kernels. A selector that is registered is in here without a line."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from literal import literal_step
from tiny_artifacts import artifacts

import sparsekv
from sparsekv.core.layer import Queries
from sparsekv.core.offline import Window, request
from sparsekv.core.selectors import SELECTORS
from sparsekv.core.step import LayerState, sparse_step

PROMPT, STEPS, BUDGET = 91, 14, 13
GROUPS = (1, 3, 4, 8)
PADS = (0, 7, 30)
COMPLETIONS = ("none", "phi", "centroid")


@functools.cache
def tiny(group: int, kv_heads: int = 2, dim: int = 10):
    import transformers as t

    torch.manual_seed(3)
    config = t.LlamaConfig(
        vocab_size=61, hidden_size=kv_heads * group * dim, intermediate_size=48, num_hidden_layers=2, head_dim=dim,
        num_attention_heads=kv_heads * group, num_key_value_heads=kv_heads, max_position_embeddings=512,
        pad_token_id=0, bos_token_id=None, eos_token_id=None, initializer_range=1.2 * (kv_heads * group * dim)**-0.5)
    return t.AutoModelForCausalLM.from_config(config).eval().double()


def trained(model):
    """A router and feature maps in the model's precision; the maps' sums differ by few orders of magnitude."""
    router, phi = artifacts(model, features=16)
    phi.maps = phi.maps.map(lambda w: 0.5 * w.to(next(model.parameters()).dtype))
    return router, phi


def options(name: str) -> dict:
    return {"token_budget": BUDGET} if SELECTORS[name].spends_budget else {}


def steps_of(model, name: str, completion: str, batch: int, monkeypatch) -> list:
    """Decode with the runtime; what every sparse step of the last layer saw and gave, with the cache."""
    device = next(model.parameters()).device
    router, phi = (a.to(device) for a in trained(model))
    taken = []
    step = LayerState.step

    def spied(self, queries):
        found = step(self, queries)
        taken.append((self.view.fork(), queries, found, self.selector.fork(),
                      None if self.estimator is None else self.estimator.fork()))
        return found

    monkeypatch.setattr(LayerState, "step", spied)
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(1, 61, (batch, PROMPT + STEPS), generator=generator).to(device)
    mask = torch.ones_like(ids)
    for row, pad in enumerate(PADS[:batch]):
        mask[row, :pad] = 0
    given = {"router": router} if SELECTORS[name].artifact_kind else {}
    torch.manual_seed(0)
    with torch.inference_mode(), sparsekv.attach(
            model, selector=name, completion=completion, phi=phi, decode_window=6, window_size=9, sink_size=3,
            dense_below=0, **given, **options(name)) as attachment:
        cache = attachment.prefill(ids[:, :PROMPT], attention_mask=mask[:, :PROMPT])
        for t in range(PROMPT, PROMPT + STEPS):
            model(ids[:, t:t + 1], attention_mask=mask[:, :t + 1], past_key_values=cache, use_cache=True)
    return [taken, cache]


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("completion", COMPLETIONS)
@pytest.mark.parametrize("name", [n for n in SELECTORS if n != "dense"])
def test_runtime_offline_and_formulas_agree(name: str, completion: str, group: int, monkeypatch) -> None:
    model = tiny(group)
    taken, _ = steps_of(model, name, completion, len(PADS), monkeypatch)
    assert taken[0][0].regions.tail_starts[0] < taken[-1][0].regions.tail_starts[0], "the mid region has not grown"
    for view, queries, step, selector, estimator in (taken[0], taken[-1]):
        truth = literal_step(view, queries, step, selector, estimator)
        assert step.out.dtype == torch.float64
        # scores of LFPS are made in float32
        torch.testing.assert_close(step.out, truth, rtol=1e-6, atol=1e-6 if name == "lfps" else 1e-7)

    taken, cache = steps_of(model, name, completion, 1, monkeypatch)
    layer, view = cache.layers[1], taken[0][0]
    seen = [x for x in taken if x[0].regions.tail_starts[0] == view.regions.tail_starts[0]]
    assert len(seen) > 3
    window = Window(
        layer.keys[0], layer.values[0], torch.cat([layer.recent, *(x[1].rot for x in seen)], dim=2)[0],
        torch.arange(PROMPT - layer.recent.shape[2], PROMPT + len(seen)), view.scale, 3, 9, view.rope, 1, 2)
    offline = request(window, PROMPT, len(seen))
    router, phi = trained(model)
    fresh = copy.copy(SELECTORS[name]())
    for option, value in options(name).items():
        setattr(fresh, option, value)
    if SELECTORS[name].artifact_kind:
        fresh.artifact = router
    fresh.validate()
    made = None
    if completion != "none":
        made = sparsekv.core.estimators.PhiEstimator(phi.layer(1)) if completion == "phi" else (
            sparsekv.core.estimators.CentroidEstimator())
    torch.manual_seed(0)
    state = offline.build(fresh, made)
    for t, (_, queries, step, _, _) in enumerate(seen):
        alone = Queries(offline.queries.rot[:, :, t:t + 1], offline.queries.lengths[t:t + 1], window.rope)
        torch.testing.assert_close(alone.rot, queries.rot)
        torch.manual_seed(0)
        found = sparse_step(offline.view, alone, *state)
        if t == 0 or name != "magicpig":  # which draws anew at every step
            torch.testing.assert_close(found.out, step.out, rtol=1e-6, atol=1e-6 if name == "lfps" else 1e-7)
