"""Every selector with every completion, alone and in a padded batch, on four families: it runs, it is finite, and where
everything is selected it is the plain model."""

from __future__ import annotations

import pytest
import torch
from tiny import MODELS, make_model, prompt
from tiny_artifacts import artifacts

import sparsekv
from sparsekv.core.selectors import SELECTORS

LENGTH, NEW = 70, 5
OPTIONS = {
    "dense": {}, "streaming": {}, "router": {"probes": 3}, "magicpig": {"bits": 3, "tables": 20},
    **{name: {"token_budget": 12} for name in ("random", "topk", "faiss", "token_select", "lfps", "quest", "snapkv",
                                               "pyramidkv")},
}
EVERYTHING = {
    "dense": {}, "router": {"probes": 8},
    **{name: {"token_budget": 1.0} for name in ("random", "topk", "faiss", "token_select", "snapkv")},
    "quest": {"token_budget": 10_000}, "pyramidkv": {"token_budget": 10_000, "beta": 1.0},
}


def test_every_selector_is_in_the_matrix():
    assert set(OPTIONS) == set(SELECTORS)


def inputs(batch: int) -> dict[str, torch.Tensor]:
    ids = prompt(LENGTH, batch)
    mask = torch.ones_like(ids)
    if batch > 1:
        mask[0, :7], mask[2, :30] = 0, 0
    return {"input_ids": torch.where(mask == 0, 0, ids), "attention_mask": mask}


GREEDY = {"max_new_tokens": NEW, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("name", SELECTORS)
def test_selector_with_every_completion(name: str, family: str, batch: int):
    model, given = make_model(family), inputs(batch)
    router, phi = artifacts(model)
    plain = model.generate(**given, **GREEDY)
    for completion in ("none", "phi", "centroid"):
        trained = {"router": router} if name == "router" else {}
        with sparsekv.attach(model, selector=name, completion=completion, phi=phi, **trained, **OPTIONS[name]) as a:
            out = model.generate(**given, **GREEDY)
            report = a.report()
        assert all(torch.isfinite(step).all() for step in out.logits)
        assert name == "dense" or (report["sparse_calls"] and report["selectivity_sparse"] <= 1.0)
        if name in EVERYTHING:
            with sparsekv.attach(model, selector=name, completion=completion, phi=phi, dense_layers=(), **trained,
                                 **EVERYTHING[name]) as a:
                out = model.generate(**given, **GREEDY)
            assert torch.equal(out.sequences, plain.sequences)
            worst = max((x - y).abs().max() for x, y in zip(out.logits, plain.logits, strict=True))
            assert worst < 2e-4 * max(x.abs().max() for x in plain.logits)
