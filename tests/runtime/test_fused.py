"""The step that is left to the kernels whole, run through their plain twins, against the step made of pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_generation import artifacts, prompt, tiny

import sparsekv
from sparsekv.core.estimators.phi import PhiCompletion
from sparsekv.core.selectors import base
from sparsekv.core.selectors.router import Router


def logits(model: Any, ids: torch.Tensor, mask: torch.Tensor, **options: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    with torch.inference_mode(), sparsekv.attach(model, dense_layers=(), decode_window=8, **options) as attachment:
        cache = attachment.prefill(ids[:, :100], attention_mask=mask[:, :100])
        steps = [model(ids[:, t:t + 1], attention_mask=mask[:, :t + 1], past_key_values=cache, use_cache=True).logits
                 for t in range(100, 140)]
        return torch.cat(steps, 1), attachment.report()


@pytest.mark.parametrize("name", ["llama", "glm4"])
@pytest.mark.parametrize("options", [
    {"probes": 3}, {"probes": 3, "scores": "mean_key"}, {"probes": 3, "completion": "none"}, {"token_budget": 12},
    {"selector": "topk", "token_budget": 9}, {"selector": "topk", "token_budget": 9, "per_query_head": True},
    {"selector": "streaming"},
], ids=str)
def test_a_step_in_one_launch_is_the_step_in_pieces(name: str, options: dict[str, Any], monkeypatch: Any) -> None:
    model = tiny(name)
    router, phi = artifacts(model, features=16)
    ids = prompt(length=140).expand(3, -1).clone()
    mask = torch.ones_like(ids)
    mask[1, :17] = 0
    if "selector" not in options:
        options = {"router": router, **options}
    calls = {"fused": 0, "routed": 0}

    def counted(kind: str, method: Any) -> Any:
        def call(*args: Any) -> Any:
            found = method(*args)
            calls[kind] += found is not None
            return found

        return call

    monkeypatch.setattr(PhiCompletion, "fused", counted("fused", PhiCompletion.fused))
    monkeypatch.setattr(Router, "routed", counted("routed", Router.routed))
    pieces, report = logits(model, ids, mask, phi=phi, **options)
    assert calls == {"fused": 0, "routed": 0}
    monkeypatch.setattr(base, "FUSED_DEVICES", ["cpu"])
    whole, same = logits(model, ids, mask, phi=phi, **options)
    assert (calls["fused"] > 0) == (options.get("completion") != "none")
    assert (calls["routed"] > 0) == ("probes" in options)
    torch.testing.assert_close(whole, pieces, rtol=1e-3, atol=1e-3)
    assert same["selectivity"] == pytest.approx(report["selectivity"], rel=1e-6)
