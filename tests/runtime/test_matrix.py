"""Every selector on families that rotate, normalise or slide in their own way, in a padded batch: it runs, it is
finite, and where everything is selected it is the plain model. The quick suite has two families a selector in turn,
`slow` the other two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import attach, make_model, prompt
from tiny_artifacts import artifacts

from sparsekv.core.selectors import SELECTORS
from sparsekv.core.selectors.base import Spends

LENGTH, NEW = 70, 5
SAMPLES = ("streaming", "magicpig", "lfps")
"""Never read everything, whatever the budget."""
FAMILIES = ("qwen3", "gemma3", "gpt_oss", "glm4")
FLAT = {"pyramidkv": {"beta": 1.0}}
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}


def options(name: str, router: Any, budget: int) -> dict[str, Any]:
    given: dict[str, Any] = {"token_budget": budget} if SELECTORS[name].spends is not Spends.NOTHING else {}
    return given | ({"router": router} if SELECTORS[name].is_trained() else {})


@pytest.mark.parametrize(("name", "family"), [
    pytest.param(name, family, marks=() if (i + j) % 2 == 0 else pytest.mark.slow)
    for i, name in enumerate(SELECTORS) for j, family in enumerate(FAMILIES)])
def test_selector_on_family(name: str, family: str) -> None:
    model, ids = make_model(family), prompt(LENGTH, 3)
    mask = torch.ones_like(ids)
    mask[0, :7], mask[2, :30] = 0, 0
    given = {"input_ids": torch.where(mask == 0, 0, ids), "attention_mask": mask}
    router, phi = artifacts(model)
    with attach(model, selector=name, phi=phi, **options(name, router, 12)) as attachment:
        out = model.generate(**given, **GREEDY)
        report = attachment.report()
    assert all(torch.isfinite(step).all() for step in out.logits)
    assert name == "dense" or (report["sparse_calls"] and report["selectivity_sparse"] <= 1.0)
    if name in SAMPLES:
        return
    plain = model.generate(**given, **GREEDY)
    with attach(model, selector=name, phi=phi, dense_layers=(), **options(name, router, 10_000),
                         **FLAT.get(name, {})):
        out = model.generate(**given, **GREEDY)
    assert torch.equal(out.sequences, plain.sequences)
    worst = max((x - y).abs().max() for x, y in zip(out.logits, plain.logits, strict=True))
    assert worst < 2e-4 * max(x.abs().max() for x in plain.logits)
