"""Decoders of many families from tiny random configs: what `attach` and `capture` do with each. `python
tests/reliability/families.py` draws the table of docs/families.md."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "families.md"
BEGIN, END = "<!-- families -->\n", "<!-- end of families -->"

COMMON: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": None, "head_dim": 16}
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
          "qk_rope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 3, "head_dim": ...}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SLIDES = ["sliding_attention", "full_attention", "full_attention"]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen2": {}, "qwen3": {}, "mistral": {"sliding_window": None}, "phi3": {}, "gemma": {},
    "gemma3_text": {"sliding_window": 24, "query_pre_attn_scalar": 16, "layer_types": SLIDES},
    "olmo": {}, "olmo2": {}, "olmo3": {"sliding_window": 24, "layer_types": SLIDES}, "glm": {}, "glm4": {},
    "granite": {}, "cohere": {}, "cohere2": {"sliding_window": 24, "layer_types": SLIDES}, "starcoder2": {
        "sliding_window": None}, "qwen3_moe": EXPERTS, "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 32},
    "mixtral": {"sliding_window": None, "num_local_experts": 4}, "smollm3": {"no_rope_layers": [1, 1, 0]},
    "nemotron": {}, "ernie4_5": {}, "seed_oss": {}, "exaone4": {
        "sliding_window": 24, "layer_types": SLIDES}, "phi": {}, "stablelm": {},
    "persimmon": {}, "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24, "layer_types": SLIDES},
    # refused
    "mistral with a window": {"sliding_window": 32}, "gemma2": {},
    "deepseek_v2": LATENT, "deepseek_v3": LATENT, "llama4_text": {}, "qwen3_next": {
        **EXPERTS, "num_hidden_layers": 4, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "shared_expert_intermediate_size": 32},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]}, "minimax": {"num_local_experts": 4},
    "gpt_neox": {}, "falcon": {"head_dim": ..., "num_kv_heads": 2, "new_decoder_architecture": True}, "bloom": {
        "head_dim": ...}, "mamba": {},
}
"""Options of a tiny config beside COMMON by model type; `...` leaves one of those out."""


class Verdict(NamedTuple):
    """layers: those that decode sparsely, of how many; attach, capture: what each says where it refuses, else empty.
    error: relative L2 error of six steps' logits against the model alone, with a budget of everything."""

    layers: tuple[int, int]
    attach: str
    capture: str
    error: float


def make(name: str) -> Any:
    """The tiny random model."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    given = {k: v for k, v in {**COMMON, **FAMILIES[name]}.items() if v is not ...}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name.split()[0], **given)).eval()


def judge(name: str) -> Verdict:
    """Any other exception than a refusal comes out."""
    import torch

    from sparsekv.capture.tap import probe
    from sparsekv.runtime.hf.attach import attach
    from sparsekv.util.errors import SparseKVError

    model = make(name)
    ids = torch.randint(1, 97, (1, 80), generator=torch.Generator().manual_seed(1))
    attached = captured = ""
    sparse, error = 0, 0.0
    try:
        with torch.no_grad(), attach(model, selector="topk", token_budget=1.0, dense_below=0, dense_layers=()) as made:
            cache = made.prefill(ids)
            steps = [model(ids[:, i:i + 1], past_key_values=cache, use_cache=True).logits for i in range(6)]
            sparse = made.report()["sparse_calls"] // 6
        with torch.no_grad():
            alone = model(torch.cat([ids, ids[:, :6]], dim=1)).logits[:, 80:]
        error = float((torch.cat(steps, dim=1) - alone).norm() / alone.norm())
    except SparseKVError as refusal:
        attached = str(refusal)
    try:
        probe(model)
    except SparseKVError as refusal:
        captured = str(refusal)
    return Verdict((sparse, model.config.get_text_config().num_hidden_layers), attached, captured, error)


def wrong(name: str) -> str | None:
    """A word where a family is neither right nor refused, at both doors."""
    try:
        found = judge(name)
    except Exception as error:
        return f"{name}: {type(error).__name__}: {error}"
    if found.attach:
        return None if found.capture else f"{name}: refused at attach and captured"
    return None if found.layers[0] and found.error < 1e-4 else f"{name}: {found}"


def row(name: str) -> str:
    """A line of the table."""
    found = judge(name)

    def reason(text: str) -> str:
        return f"refused: {text.partition(' is not supported: ')[2].partition('. Expected')[0]}" if text else "yes"

    attached = reason(found.attach) if found.attach else f"{found.layers[0]} of {found.layers[1]} layers"
    return f"| `{name}` | {attached} | {reason(found.capture)} |"


def table(text: str) -> dict[str, str]:
    """Lines of the page's table, by family."""
    lines = text.partition(BEGIN)[2].partition(END)[0].splitlines()
    return {line.split("`")[1]: line for line in lines if line.startswith("| `")}


if __name__ == "__main__":
    page = PAGE.read_text()
    head = "| model type | decodes sparsely | captured |\n| --- | --- | --- |\n"
    drawn = head + "\n".join(row(name) for name in FAMILIES) + "\n"
    before, after = page.partition(BEGIN)[0], page.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{drawn}\n{END}{after}")
    sys.stdout.write(drawn)
