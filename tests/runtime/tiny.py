"""Tiny random-weight models and prompts for the runtime's tests."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import torch

import sparsekv

VOCAB = 97
COMMON = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
          "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096, "pad_token_id": 0,
          "bos_token_id": None, "eos_token_id": None, "initializer_range": 0.3, "head_dim": 16}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "phi3": ("Phi3Config", {}),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 24, "query_pre_attn_scalar": 16, "layer_types": [
        "sliding_attention", "full_attention", "full_attention"]}),
    "gpt_oss": ("GptOssConfig", {"sliding_window": 24, "num_local_experts": 4, "num_experts_per_tok": 2,
                                 "layer_types": ["sliding_attention", "full_attention", "full_attention"]}),
    "glm4": ("Glm4Config", {"partial_rotary_factor": 0.5}),
}


@functools.cache
def _build(family: str, changes: tuple[tuple[str, Any], ...]):
    import transformers as t

    torch.manual_seed(7)
    name, own = FAMILIES[family]
    model = t.AutoModelForCausalLM.from_config(getattr(t, name)(**{**COMMON, **own, **dict(changes)})).eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(getattr(module, "sinks", None), torch.nn.Parameter):
                module.sinks += 20.0  # about the log mass of a short text
    return model


def make_model(family: str = "llama", **changes: Any):
    """One model a family, shared by the tests: every test leaves it as it was."""
    return _build(family, tuple(changes.items()))


@functools.cache
def observed_model(family: str = "llama"):
    """A model for tests that ask for hidden states: transformers leaves its hooks on it."""
    return copy.deepcopy(make_model(family))


def attach(model: Any, *artifacts: Any, **options: Any):
    """`sparsekv.attach`, sparse however short the prompts are: those of tests are, and full attention is faster."""
    return sparsekv.attach(model, *artifacts, **{"dense_below": 0, **options})


def prompt(length: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB, (batch, length), generator=generator)


def make_tokenizer():
    """Of single characters."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = ["<pad>", "\n", *(chr(c) for c in range(32, 32 + VOCAB - 3)), "<end>"]
    made = Tokenizer(models.WordLevel({c: i for i, c in enumerate(letters)}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<end>")


def save_model(folder: Path) -> Path:
    """The tiny model and its tokenizer in a folder."""
    make_model().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder
