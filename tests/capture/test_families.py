"""De-rotation and capture in every supported family, against the cache the model itself builds."""

import contextlib

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.gemma3.configuration_gemma3 import Gemma3Config, Gemma3TextConfig
from transformers.models.glm.configuration_glm import GlmConfig
from transformers.models.glm4.configuration_glm4 import Glm4Config
from transformers.models.gpt2.configuration_gpt2 import GPT2Config
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.mistral.configuration_mistral import MistralConfig
from transformers.models.phi3.configuration_phi3 import Phi3Config
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

from sparsekv.capture.run import CaptureConfig, run_capture
from sparsekv.capture.tap import AttentionCall, probe, tap
from sparsekv.core.rope import rotate, unrotate
from sparsekv.util.errors import SparseKVError

SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 97, "max_position_embeddings": 512,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 96}


FACTORS = {name: [value] * 8 for name, value in (("short_factor", 1.0), ("long_factor", 2.0))}
KINDS = {
    "default": {}, "linear": {"factor": 4.0}, "dynamic": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 64},
    "longrope": {**FACTORS, "original_max_position_embeddings": 64},
}
MODELS = {
    "llama": (LlamaConfig, {}), "qwen2": (Qwen2Config, {}), "qwen3": (Qwen3Config, {}),
    "mistral": (MistralConfig, {"sliding_window": None}), "phi3": (Phi3Config, {}),
    "gemma3": (Gemma3TextConfig, {"sliding_window": 16,
                                  "layer_types": ["sliding_attention", "full_attention", "full_attention"]}),
    "glm4": (Glm4Config, {}), "glm": (GlmConfig, {}),
}


def rope(model: str, kind: str, partial: float | None = None) -> dict:
    """Options that give a model this RoPE type; windows of the tests are longer than the trained length of 64."""
    found = {"rope_type": kind, "rope_theta": 10000.0, **KINDS[kind]}
    if partial is not None:
        found["partial_rotary_factor"] = partial
        found |= {name: value[:round(8 * partial)] for name, value in FACTORS.items() if name in found}
    extra = {"original_max_position_embeddings": 64} if model == "phi3" else {}
    if kind == "dynamic":
        extra["max_position_embeddings"] = 64
    if model == "gemma3":
        found = {"full_attention": found, "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0}}
    return {"rope_parameters": found, **extra}


# every model with every RoPE type that its configuration allows: Phi-3's allows default and longrope alone, Gemma 3
# with longrope fails in transformers itself at its second forward; a name without a type is the model's own default
FAMILIES = dict(MODELS) | {
    f"{name}-{kind}": (config, extra | rope(name, kind, 0.5 if name.startswith("glm") else None))
    for name, (config, extra) in MODELS.items() for kind in KINDS
    if kind != "default" and name != "glm" and (name != "phi3" or kind == "longrope")
    and (name, kind) != ("gemma3", "longrope")
} | {"phi3-partial-longrope": (Phi3Config, rope("phi3", "longrope", 0.5))}


class Words:
    """A tokenizer of single characters."""

    chat_template = None

    def __call__(self, text: str | list[str], **_: object) -> dict:
        if isinstance(text, list):
            return {"input_ids": [self(x)["input_ids"] for x in text]}
        return {"input_ids": [3 + ord(c) % 90 for c in text]}


def tiny(name: str):
    torch.manual_seed(0)
    config, extra = FAMILIES[name]
    model = AutoModelForCausalLM.from_config(config(**{**SIZES, **extra})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2.0)
    return model


def captured(model, folder, **extra):
    options = {"model": "tiny", "corpus": "embedded", "context_length": 120, "num_documents": 1,
               "queries_per_document": 24}
    return run_capture(CaptureConfig(output=str(folder), **(options | extra)), model=model, tokenizer=Words())


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("arithmetic", "chunk"), [("float32", 33), ("float32", 8192), ("bfloat16", 8192)])
def test_stored_keys_are_the_caches_keys_without_rope(name: str, arithmetic: str, chunk: int, tmp_path) -> None:
    model = tiny(name).to(getattr(torch, arithmetic))
    store = captured(model, tmp_path / "s", chunk_size=chunk)
    assert store.layers == ([1, 2] if name.startswith("gemma3") else [0, 1, 2])
    # in half precision two ways of computing attention differ by more than storing does: the same is taken for both
    same = tap(model, lambda call: None) if arithmetic == "bfloat16" else contextlib.nullcontext()
    compare_with_the_cache(model, store, same)


def compare_with_the_cache(model, store, attention=None) -> None:
    """Keys and values of the store are those of the model's own cache, RoPE removed, rounded once. Arithmetic in
    another order moves one number in a thousand over the edge between two roundings; a relative error of 1e-4 moves
    one in a hundred."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), attention or contextlib.nullcontext():
        model(store.tokens(0)[None], past_key_values=cache, use_cache=True)
    for layer in store.layers:
        item = store.read(layer, 0)
        keys, values = (x[0].float() for x in (cache.layers[layer].keys, cache.layers[layer].values))
        assert same_numbers(item.keys_pre, unrotate(keys, item.cos, item.sin, item.layout))
        assert same_numbers(item.values, values)
        assert float((item.keys_rot() - keys).norm() / keys.norm()) < 2e-3


def same_numbers(stored: torch.Tensor, exact: torch.Tensor) -> bool:
    exact = exact.to(torch.bfloat16)
    close = (stored.float() - exact.float()).norm() < 1e-3 * exact.float().norm()
    return stored.dtype == exact.dtype and bool(close) and float((stored != exact).float().mean()) < 0.003


def test_a_language_model_inside_another_is_captured(tmp_path) -> None:
    """Gemma 3 from 4B on: the decoder is a part of a model that also sees images."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Gemma3Config(
        text_config=SIZES | FAMILIES["gemma3"][1], vision_config={
            "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
            "image_size": 28, "patch_size": 14})).eval()
    store = captured(model, tmp_path / "s", chunk_size=33)
    assert store.layers == [1, 2]
    compare_with_the_cache(model, store)


@pytest.mark.parametrize("name", ["llama", "glm4", "phi3-partial-longrope"])
@pytest.mark.parametrize("chunk", [8192, 33])
def test_statistics_equal_a_dense_computation(name: str, chunk: int, tmp_path) -> None:
    model = tiny(name)
    store = captured(model, tmp_path / "s", chunk_size=chunk)
    sink, window = 4, 16
    calls: dict[int, AttentionCall] = {}
    with torch.no_grad(), tap(model, lambda call: calls.setdefault(call.layer, call)):
        model(store.tokens(0)[None])
    for layer in store.layers:
        item, call = store.read(layer, 0), calls[layer]
        queries, keys = call.query[0][:, item.query_positions], call.key[0].double().repeat_interleave(2, 0)
        cos, sin = item.cos[item.query_positions], item.sin[item.query_positions]
        assert same_numbers(item.queries_pre, unrotate(queries, cos, sin, item.layout))
        scores = torch.einsum("htd,hnd->htn", queries.double(), keys) * item.scale
        column, place = torch.arange(120), item.query_positions[:, None]
        scores = scores.masked_fill(column > place, float("-inf"))
        mass = scores.softmax(-1)
        mid = (column >= sink) & (column <= place - window)
        middle = torch.where(mid, mass, 0.0)
        p = middle / middle.sum(-1, keepdim=True).clamp(min=1e-300)
        entropy = torch.special.entr(p).sum(-1) / mid.sum(-1).clamp(min=2).double().log()
        best = scores[..., sink:].max(-1)
        found = {k: v.double() for k, v in item.statistics.items()}
        close = {"rtol": 2e-4, "atol": 2e-4}
        torch.testing.assert_close(found["lse"], scores.logsumexp(-1), **close)
        torch.testing.assert_close(found["lse_mid"], scores.masked_fill(~mid, float("-inf")).logsumexp(-1), **close)
        torch.testing.assert_close(found["mass_mid"], middle.sum(-1), **close)
        torch.testing.assert_close(found["mass_sink"], mass[..., :sink].sum(-1), **close)
        torch.testing.assert_close(found["mass_tail"], torch.where(mid, 0.0, mass)[..., sink:].sum(-1), **close)
        torch.testing.assert_close(found["top1_score"], best.values, **close)
        assert torch.equal(found["top1_position"].long(), best.indices + sink)
        torch.testing.assert_close(found["entropy_mid"], torch.where(mid.sum(-1) >= 2, entropy, 0.0), **close)


def test_rotation_and_back_for_both_layouts() -> None:
    torch.manual_seed(0)
    x, angle = torch.randn(2, 5, 16), torch.rand(5, 8) * 6
    for layout, full in (("half", torch.cat([angle, angle], -1)), ("interleaved", angle.repeat_interleave(2, -1))):
        cos, sin = full.cos() * 1.3, full.sin() * 1.3
        turned = rotate(x, cos, sin, layout)
        assert float((turned - x).abs().max()) > 0.1
        torch.testing.assert_close(unrotate(turned, cos, sin, layout), x)


def test_a_model_without_rotary_attention_is_refused_by_name() -> None:
    config = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=97, bos_token_id=1, eos_token_id=1)
    with pytest.raises(SparseKVError, match="GPT2LMHeadModel is not supported"):
        probe(AutoModelForCausalLM.from_config(config))


def test_the_model_is_left_as_it_was(tmp_path) -> None:
    model = tiny("llama")
    ids = torch.arange(3, 40)[None]
    before, implementation = model(ids).logits, model.config._attn_implementation
    captured(model, tmp_path / "s")
    assert model.config._attn_implementation == implementation
    assert torch.equal(model(ids).logits, before)
    assert not any(m._forward_pre_hooks for m in model.modules())
