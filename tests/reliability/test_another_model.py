"""Same weights, other attention: an artifact is refused where the model rotates, slides, scales or caps otherwise; what
an old fingerprint does not say is not compared."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import transformers as t
from tiny import make_model, prompt
from tiny_artifacts import artifacts

from sparsekv.artifacts.fingerprint import check_fingerprint, model_fingerprint
from sparsekv.runtime.hf.attach import attach
from sparsekv.util.errors import SparseKVError


def rope(**changes: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **changes}}


def changed(**config: Any) -> Any:
    """The tiny model's weights under another config."""
    model = make_model()
    made = t.AutoModelForCausalLM.from_config(t.LlamaConfig(**{**model.config.to_dict(), **config})).eval()
    made.load_state_dict(model.state_dict())
    return made


OTHERS = {
    "base": rope(rope_theta=500000.0), "linear": rope(rope_type="linear", factor=2.0),
    "yarn": rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=4096),
    "dynamic": rope(rope_type="dynamic", factor=2.0)}


@pytest.mark.parametrize("name", OTHERS)
def test_another_rotation_is_refused(name: str) -> None:
    router, phi = artifacts(make_model())
    for given in ({"router": router}, {"selector": "topk", "phi": phi}):
        with pytest.raises(SparseKVError, match=r"was made for a model with rope .*this model has rope"):
            attach(changed(**OTHERS[name]), token_budget=8, **given)


def test_another_scale_is_refused() -> None:
    model = changed()
    router, _ = artifacts(make_model())
    router.check(model)
    for layer in model.model.layers:
        layer.self_attn.scaling *= 2
    with pytest.raises(SparseKVError, match=r"was made for a model with scale 0\.25; this model has scale 0\.5"):
        router.check(model)


def test_windows_and_caps_are_in_the_fingerprint() -> None:
    def attention(kind: type, **config: Any) -> dict[str, Any]:
        torch_model = t.AutoModelForCausalLM.from_config(kind(**{
            "vocab_size": 97, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0,
            **config}))
        return model_fingerprint(torch_model)["attention"]

    assert attention(t.MistralConfig, sliding_window=64) == {"scale": 0.25, "window": 64, "softcap": None}
    assert attention(t.MistralConfig, sliding_window=None)["window"] is None
    assert attention(t.MistralConfig, sliding_window=512)["window"] is None  # no context is as long
    assert attention(t.Gemma3TextConfig, sliding_window=64, query_pre_attn_scalar=64, layer_types=[
        "sliding_attention", "full_attention"]) == {"scale": 0.125, "window": [64, None], "softcap": None}
    assert attention(t.Gemma2Config, attn_logit_softcapping=30.0)["softcap"] == 30.0
    assert attention(t.Qwen2Config, use_sliding_window=False, sliding_window=64)["window"] is None


def test_what_an_old_fingerprint_does_not_say_is_not_compared() -> None:
    found = model_fingerprint(make_model())
    old = copy.deepcopy(found)
    del old["attention"], old["weights_float16"], old["dtype"]
    check_fingerprint(old, found, "it")
    check_fingerprint(found, old, "it")
    for said in ({}, {"rope_theta": 10000}, {"rope_type": "default", "rope_theta": 10000.0, "new_in_a_version": 3}):
        check_fingerprint({**old, "rope": said}, found, "it")
    with pytest.raises(SparseKVError, match="rope"):
        check_fingerprint({**old, "rope": {"rope_theta": 20000.0}}, found, "it")


def test_an_artifact_of_before_attaches() -> None:
    model = make_model()
    router, phi = artifacts(model)
    for artifact in (router, phi):
        artifact.config.model.pop("attention", None)
    with attach(model, router=router, phi=phi, token_budget=8):
        model.generate(prompt(60), max_new_tokens=2, do_sample=False)
