"""Generation under `attach` against the plain model, on tiny random-weight models in float32."""

from __future__ import annotations

import pytest
import torch
from tiny import MODELS, make_model, prompt

import sparsekv


@pytest.mark.parametrize("family", MODELS)
def test_everything_selected_generates_the_same_tokens(family):
    model = make_model(family)
    ids = prompt(60)
    plain = model.generate(ids, max_new_tokens=24, do_sample=False, output_logits=True, return_dict_in_generate=True)
    with sparsekv.attach(model, selector="topk", token_budget=1.0, dense_layers=()) as attachment:
        ours = model.generate(ids, max_new_tokens=24, do_sample=False, output_logits=True,
                              return_dict_in_generate=True)
        report = attachment.report()
    assert torch.equal(plain.sequences, ours.sequences)
    assert max((a - b).abs().max() for a, b in zip(plain.logits, ours.logits, strict=True)) < 1e-4
    assert report["sparse_calls"] > 0 and report["selectivity"] == pytest.approx(1.0)
    again = model.generate(ids, max_new_tokens=24, do_sample=False)
    assert torch.equal(plain.sequences, again)
