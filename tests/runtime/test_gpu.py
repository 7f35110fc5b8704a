"""Generation on a CUDA device, where attention goes through the Triton kernels."""

import copy

import pytest
import torch
from tiny import attach, make_model, prompt
from tiny_artifacts import artifacts

from sparsekv.runtime.hf.attach import RunOptions

pytestmark = pytest.mark.gpu
GREEDY = {"max_new_tokens": 9, "do_sample": False}


def fresh(family: str = "llama"):
    """A model that may be moved and cast."""
    return copy.deepcopy(make_model(family))


@pytest.mark.parametrize("name", ["llama", "qwen3", "glm4"])
def test_everything_selected_is_the_plain_model_on_the_gpu(name: str) -> None:
    model = fresh(name).cuda()
    ids = prompt(200).cuda()
    plain = model.generate(ids, **GREEDY)
    router, phi = artifacts(model)
    for options in ({"selector": "topk", "token_budget": 1.0}, {"router": router, "probes": 8},
                    {"router": router, "probes": 8, "phi": phi},
                    {"selector": "topk", "token_budget": 1.0, "per_query_head": True}):
        with attach(model, dense_layers=(), **options) as attachment:
            assert torch.equal(model.generate(ids, **GREEDY), plain)
        assert attachment.report()["sparse_calls"] > 0


def test_sparse_logits_on_the_gpu_are_those_of_the_cpu() -> None:
    model, ids = fresh(), prompt(200)
    router, phi = artifacts(model)

    def logits() -> torch.Tensor:
        device = model.device
        with attach(model, router=router, phi=phi, probes=2,
                             run=RunOptions(sparse_chunks=True)) as attachment:
            cache = attachment.prefill(ids[:, :150].to(device))
            return model(ids[:, 150:].to(device), past_key_values=cache, use_cache=True).logits.float().cpu()

    with torch.inference_mode():
        here = logits()
        model.cuda()
        there = logits()
    torch.testing.assert_close(there, here, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("completion", ["none", "phi", "centroid"])
@pytest.mark.parametrize(("selector", "scores"), [("router", "mlp"), ("router", "mean_key"), ("sketch", "mlp")])
def test_rows_fetched_from_the_host_give_the_same_logits(selector: str, scores: str, completion: str) -> None:
    """Buckets are scored in float32 on either device: every step gives the same. Sketches are scored in whole numbers
    and weights in float16 on a CUDA device and in float32 on the CPU, and of the tokens of one bin the first are read,
    so that a score between two bins changes what is read. With offload scores are of the GPU: up to a tenth of the
    steps may differ. With the CPU's up to half may, since the sketch is random: tokens of one bin are far from the
    same, and what is read once changes the keys of later layers. A fault changes them all."""
    model, ids = fresh().cuda(), prompt(200).cuda()
    router, phi = artifacts(model, scores=scores)
    logits = {}
    for placement in ("gpu", "offload", "cpu"):
        with torch.inference_mode(), attach(
                model, router=router, phi=phi, selector=selector, completion=completion, token_budget=20,
                decode_window=16, placement=placement) as attachment:
            cache = attachment.prefill(ids[:, :100], chunk_size=40)
            steps = [model(ids[:, t:t + 1], past_key_values=cache, use_cache=True).logits for t in range(100, 160)]
            assert attachment.report()["sparse_calls"] > 0
            logits[placement] = torch.cat(steps, 1)[0]
    for placement in ("offload", "cpu"):
        same = torch.isclose(logits[placement], logits["gpu"], rtol=1e-2, atol=1e-2).all(-1)
        limit = {"offload": 6, "cpu": 30}[placement] if selector == "sketch" else 0
        assert int((~same).sum()) <= limit, f"{placement}: {(~same).nonzero().flatten()}"


@pytest.mark.parametrize("completion", ["none", "phi"])
def test_steps_over_host_memory_are_captured(completion: str) -> None:
    """Rows of two lengths, a prompt in chunks, borders that move, and a fork that goes on: as with keys on the GPU."""
    model = fresh().cuda()
    router, phi = artifacts(model, scores="mean_key")
    ids = torch.cat([prompt(200), prompt(200).flip(1)]).cuda()
    mask = torch.ones_like(ids)
    mask[0, :37] = 0
    logits: dict[str, torch.Tensor] = {}
    for placement in ("gpu", "offload"):
        with torch.inference_mode(), attach(
                model, router=router, phi=phi, selector="router", completion=completion, token_budget=20,
                decode_window=16, placement=placement) as attachment:
            cache = attachment.prefill(ids[:, :120], mask[:, :120], chunk_size=50)
            steps = [model(ids[:, t:t + 1], attention_mask=mask[:, :t + 1], past_key_values=held).logits
                     for held in (cache.fork(), cache) for t in range(120, 170)]
            report = attachment.report()
            assert report["captures"] >= 4 and report["not_replayed"] is None, report
            logits[placement] = torch.cat(steps, 1)
    torch.testing.assert_close(logits["offload"], logits["gpu"], rtol=1e-3, atol=1e-3)


def test_a_prefill_in_chunks_in_half_precision_is_the_prefill() -> None:
    model, ids = fresh().to("cuda", torch.bfloat16), prompt(300).cuda()
    with torch.inference_mode(), attach(model, selector="topk", token_budget=20) as attachment:
        whole, cut = (attachment.prefill(ids, chunk_size=size).layers[2].keys.float() for size in (300, 70))
    assert (whole - cut).norm() <= 0.03 * whole.norm()
