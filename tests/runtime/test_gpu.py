"""Generation on a CUDA device, where attention goes through the Triton kernels."""

import pytest
import torch
from test_generation import GREEDY, artifacts, prompt, tiny

import sparsekv

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["llama", "qwen3", "glm4"])
def test_everything_selected_is_the_plain_model_on_the_gpu(name: str) -> None:
    model = tiny(name).cuda()
    ids = prompt(length=200).cuda()
    plain = model.generate(ids, **GREEDY)
    router, phi = artifacts(model)
    for options in ({"selector": "topk", "token_budget": 1.0}, {"router": router, "probes": 8},
                    {"router": router, "probes": 8, "phi": phi},
                    {"selector": "topk", "token_budget": 1.0, "per_query_head": True}):
        with sparsekv.attach(model, dense_layers=(), **options) as attachment:
            assert torch.equal(model.generate(ids, **GREEDY), plain)
        assert attachment.report()["sparse_calls"] > 0


def test_sparse_logits_on_the_gpu_are_those_of_the_cpu() -> None:
    model, ids = tiny("llama"), prompt(length=200)
    router, phi = artifacts(model)

    def logits() -> torch.Tensor:
        device = model.device
        with sparsekv.attach(model, router=router, phi=phi, probes=2, sparse_chunks=True) as attachment:
            cache = attachment.prefill(ids[:, :150].to(device))
            return model(ids[:, 150:].to(device), past_key_values=cache, use_cache=True).logits.float().cpu()

    with torch.inference_mode():
        here = logits()
        model.cuda()
        there = logits()
    torch.testing.assert_close(there, here, rtol=1e-2, atol=1e-2)
