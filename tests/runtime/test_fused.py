"""What of a planned step is one launch each: taken where it gives the model's own, in every family."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny import FAMILIES, attach, make_model, prompt

from sparsekv.runtime import hooks
from sparsekv.runtime.fused import ROTATION, Fused

ROTATED = {"llama", "qwen2", "qwen3", "mistral", "phi3", "gemma3"}
"""Families whose rotation turns the halves of whole heads against each other."""

GATED = {"llama", "qwen2", "qwen3", "mistral"}
"""Families whose MLP has a gate of its own with a SiLU."""


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_with_fewer_launches_is_the_step(family: str, dtype: torch.dtype) -> None:
    model = make_model(family)
    if model.dtype != dtype:
        model = copy.deepcopy(model).to(dtype)
    ids, found = prompt(60, 2), []
    for used in (False, True):
        with torch.no_grad(), attach(model, selector="streaming") as attachment:
            fused = hooks.seat_of(attachment).layers.fused
            fused.used = used
            cache = attachment.prefill(ids[:, :50])
            found.append(torch.cat([attachment.step(ids[:, t:t + 1], cache) for t in range(50, 60)], 1))
            assert attachment.report()["not_replayed"] is None
            assert not any("forward" in m.__dict__ for m in (*fused.norms, *fused.gates))
    limit = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(found[1], found[0], rtol=limit, atol=limit)
    norms, gates = {type(m) for m in fused.norms}, {type(m) for m in fused.gates}
    taken = {key[0] for key, kernel in fused.known.items() if kernel is not None}
    assert norms and norms <= taken and gates <= taken and bool(gates) == (family in GATED)
    assert any(getattr(x, "__name__", "") == ROTATION for x in taken) == (family in ROTATED)


def test_what_gives_something_else_stays_the_models_own() -> None:
    class OddRMSNorm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = torch.nn.Parameter(torch.ones(8)), 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * x / x.abs().mean(-1, keepdim=True)

    norm, x = OddRMSNorm(), torch.randn(3, 8)
    model = torch.nn.Sequential(norm)
    fused = Fused(model, norm)
    fused.used = True
    for _ in range(3):
        fused.put()
        assert torch.equal(model(x), norm.weight * x / x.abs().mean(-1, keepdim=True))
        fused.restore()
    assert list(fused.known.values()) == [None] and "forward" not in norm.__dict__
