"""A budget of everything gives the model's own tokens where its rotation changes with the length of the text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import COMMON, FAMILIES

from sparsekv.runtime.hf.attach import attach
from sparsekv.util.errors import SparseKVError

BORDER = 64
ROTATIONS: dict[str, dict[str, Any]] = {
    "longrope": {"rope_type": "longrope", "short_factor": [1.0 + 0.1 * i for i in range(8)],
                 "long_factor": [2.0 + i for i in range(8)], "original_max_position_embeddings": BORDER},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": BORDER},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": BORDER},
    "linear": {"rope_type": "linear", "factor": 4.0},
}
ALL = {"selector": "topk", "token_budget": 4096, "dense_below": 0}
QUICK = ("llama", "phi3", "qwen3")
SUPPORTED = [f for f in FAMILIES if f in (
    "llama", "qwen2", "qwen3", "mistral", "phi3", "gemma", "olmo", "olmo2", "glm4", "granite", "starcoder2",
    "qwen3_moe", "mixtral", "seed_oss")]


def model_of(family: str, rotation: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    own = {k: v for k, v in {**COMMON, **FAMILIES[family]}.items() if v is not ...}
    longest = BORDER if rotation == "dynamic" else 4 * BORDER
    config = AutoConfig.for_model(family, **{**own, "max_position_embeddings": longest, "initializer_range": 0.3})
    config.rope_parameters = {"rope_theta": 10000.0, "partial_rotary_factor": 1.0, **ROTATIONS[rotation]}
    if rotation == "longrope":
        config.original_max_position_embeddings = BORDER
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def text(length: int, rows: int = 1) -> torch.Tensor:
    return torch.randint(1, 97, (rows, length), generator=torch.Generator().manual_seed(1))


def error(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found - right).norm() / right.norm())


def cases() -> list[Any]:
    return [pytest.param(family, rotation, marks=() if family in QUICK and (rotation in ("longrope", "dynamic"))
                         else pytest.mark.slow) for family in SUPPORTED for rotation in ROTATIONS]


@torch.no_grad()
@pytest.mark.parametrize("family,rotation", cases())
def test_logits_across_the_border_are_the_models(family: str, rotation: str) -> None:
    """Passes of one's own, as transformers' cache gives them; longrope, where all is computed anew, by `generate`."""
    model = model_of(family, rotation)
    if rotation == "longrope":
        pytest.skip("its keys are computed anew, by generate")
    from transformers import DynamicCache

    ids, plain = text(BORDER + 8), DynamicCache(config=model.config)
    right = [model(ids[:, :BORDER - 6], past_key_values=plain).logits[:, -1:]]
    right += [model(ids[:, i:i + 1], past_key_values=plain).logits for i in range(BORDER - 6, BORDER + 8)]
    model(ids[:, :4])  # what tables remember of a longer text is gone
    with attach(model, **ALL) as attachment:
        cache = attachment.cache()
        found = [model(ids[:, :BORDER - 6], past_key_values=cache).logits[:, -1:]]
        found += [model(ids[:, i:i + 1], past_key_values=cache).logits for i in range(BORDER - 6, BORDER + 8)]
        assert attachment.report()["sparse_calls"]
    assert max(map(error, found, right)) < 1e-4


@torch.no_grad()
@pytest.mark.parametrize("family,rotation", cases())
def test_a_prompt_in_chunks_is_rotated_as_one_piece(family: str, rotation: str) -> None:
    model = model_of(family, rotation)
    from transformers import DynamicCache

    ids, plain = text(BORDER + 10), DynamicCache(config=model.config)
    model(ids[:, :-1], past_key_values=plain)
    right = model(ids[:, -1:], past_key_values=plain).logits
    model(ids[:, :4])
    with attach(model, **ALL) as attachment:
        found = attachment.step(ids[:, -1:], attachment.prefill(ids[:, :-1], chunk_size=20))
    assert error(found, right) < 1e-4


@torch.no_grad()
@pytest.mark.parametrize("family", [pytest.param(f, marks=() if f == "phi3" else pytest.mark.slow) for f in SUPPORTED])
@pytest.mark.parametrize("by", ["attachment", "model"])
@pytest.mark.parametrize("rows", [1, 2])
def test_an_answer_across_the_border_of_longrope_is_the_models(family: str, by: str, rows: int) -> None:
    """Against passes over the whole text: transformers' own `generate` drops the cache there, and with it the text."""
    if family != "phi3" and by == "model":
        pytest.skip("transformers drops the cache of Phi-3 alone")
    model, prompt = model_of(family, "longrope"), text(BORDER - 5, rows)
    with attach(model, **ALL) as attachment:
        if by == "attachment":
            made = attachment.generate(prompt, max_new_tokens=12)
        else:
            made = model.generate(prompt, max_new_tokens=12, do_sample=False)
        assert attachment.report()["sparse_calls"] == 2 * (11 - 1)  # one step reads all again
    for at in range(BORDER - 5, BORDER + 7):
        assert torch.equal(model(made[:, :at]).logits[:, -1].argmax(-1), made[:, at])


def test_an_earlier_turn_that_cannot_be_read_again_is_refused() -> None:
    model, prompt = model_of("phi3", "longrope"), text(BORDER - 10)
    with attach(model, **ALL) as attachment:
        cache = attachment.prefill(prompt)
        with pytest.raises(SparseKVError, match="rotates otherwise \\(longrope\\); give the whole text"):
            attachment.generate(prompt[:, :3], max_new_tokens=20, cache=cache)
        again = torch.cat([prompt, text(20)], dim=1)  # model.generate is given the whole text
        made = model.generate(again, past_key_values=cache, max_new_tokens=2, do_sample=False)
        assert torch.equal(made, attachment.generate(again, max_new_tokens=2))
