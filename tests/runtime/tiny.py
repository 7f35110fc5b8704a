"""Tiny random-weight models and prompts for the runtime's tests."""

from __future__ import annotations

import functools

import torch

VOCAB = 97
COMMON = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
          "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096, "pad_token_id": 0,
          "bos_token_id": None, "eos_token_id": None, "initializer_range": 0.3}


@functools.cache
def _build(family: str):
    import transformers as t

    torch.manual_seed(7)
    config: object
    if family == "llama":
        config = t.LlamaConfig(**COMMON, head_dim=16)
    elif family == "qwen3":
        config = t.Qwen3Config(**COMMON, head_dim=16)
    elif family == "gemma3":
        config = t.Gemma3TextConfig(**COMMON, head_dim=16, sliding_window=24, query_pre_attn_scalar=16,
                                    layer_types=["sliding_attention", "full_attention", "full_attention"])
    elif family == "glm4":
        config = t.Glm4Config(**COMMON, head_dim=16, partial_rotary_factor=0.5)
    else:
        raise ValueError(family)
    return t.AutoModelForCausalLM.from_config(config).eval()


MODELS = ("llama", "qwen3", "gemma3", "glm4")


def make_model(family: str = "llama"):
    """One model a family, shared by the tests: every test leaves it as it was."""
    return _build(family)


def prompt(length: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB, (batch, length), generator=generator)
