"""Rotary options of a loaded model, on configurations alone and on one small model."""

import pytest
import torch
from transformers.models.gemma3.configuration_gemma3 import Gemma3TextConfig
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.phi3.configuration_phi3 import Phi3Config

from sparsekv.artifacts.hub.models import _set_rope, load_model
from sparsekv.util.errors import SparseKVError

YARN = {"rope_type": "yarn", "factor": 4.0}


def llama() -> LlamaConfig:
    return LlamaConfig(max_position_embeddings=128, rope_parameters={"rope_type": "default", "rope_theta": 1e4})


def test_a_factor_lengthens_the_context() -> None:
    config = llama()
    _set_rope(config, '{"rope_type": "yarn", "factor": 4.0}')
    assert config.max_position_embeddings == 512
    assert config.rope_parameters["original_max_position_embeddings"] == 128
    assert config.rope_parameters["rope_theta"] == 1e4 and config.rope_parameters["rope_type"] == "yarn"


def test_dynamic_scaling_begins_past_the_trained_length() -> None:
    config = llama()
    _set_rope(config, {"rope_type": "dynamic", "factor": 4.0})
    assert config.max_position_embeddings == 128


def test_parameters_by_kind_of_layer_are_those_of_the_global_layers() -> None:
    config = Gemma3TextConfig(max_position_embeddings=128)
    local = dict(config.rope_parameters["sliding_attention"])
    _set_rope(config, YARN)
    assert config.rope_parameters["full_attention"]["rope_type"] == "yarn" and "factor" not in config.rope_parameters
    assert config.rope_parameters["sliding_attention"] == local


@pytest.mark.parametrize(("given", "message"), [
    ({"factor": 2.0}, "no rope_type"), ("{", "is not JSON"), ("[1]", "must be a JSON object")])
def test_what_is_no_scaling_is_refused(given, message: str) -> None:
    with pytest.raises(SparseKVError, match=message):
        _set_rope(llama(), given)


def test_a_window_that_no_context_reaches_is_none(tmp_path, monkeypatch) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
             "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0}
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: None)
    for window, kept in ((256, None), (64, 64)):
        folder = tmp_path / str(window)
        AutoModelForCausalLM.from_config(Phi3Config(sliding_window=window, **shape)).save_pretrained(folder)
        model, _ = load_model(str(folder), device="cpu")
        assert model.config.sliding_window == kept
