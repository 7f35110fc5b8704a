"""Model files that say what no model is are refused in one sentence, before anything of such a size is built."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile import config_file, drawn, gguf_file, loads, sound_model
from tiny import make_tokenizer
from ways import fresh_model

from sparsekv.artifacts.hub.models import load_config
from sparsekv.capture.config import CaptureConfig
from sparsekv.capture.run import run_capture
from sparsekv.util.errors import SparseKVError


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sound_model(tmp_path_factory.mktemp("sound"))


def test_thirty_drawn_files_are_sentences_or_models(sound: Path, tmp_path: Path) -> None:
    assert drawn(sound, tmp_path, 30) == []


@pytest.mark.slow
def test_three_hundred_drawn_files_are_sentences_or_models(sound: Path, tmp_path: Path) -> None:
    assert drawn(sound, tmp_path, 300, first=1000) == []


def test_the_sound_files_load(sound: Path, tmp_path: Path) -> None:
    assert loads(sound) and loads(gguf_file(tmp_path / "tiny.gguf"))


@pytest.mark.parametrize("name,value", [
    ("num_attention_heads", 0), ("head_dim", 0), ("head_dim", "x"), ("num_hidden_layers", 10**9), ("vocab_size", -1),
    ("rope_parameters", [1]), ("eos_token_id", list(range(10**6))), ("num_labels", 10**9), ("num_hidden_layers", 900),
    ("num_key_value_heads", 0), ("hidden_size", 10**6)])
def test_a_size_that_no_model_has_is_named(sound: Path, tmp_path: Path, name: str, value: Any) -> None:
    folder = config_file(sound, tmp_path / "model", random.Random(0))
    raw = json.loads((sound / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, name: value}))
    with pytest.raises(SparseKVError, match=r"could not load a model from .* config.json"):
        load_config(str(folder))
    assert not loads(folder)


def test_weights_that_are_no_numbers_stop_a_capture_with_layer_and_head(tmp_path: Path) -> None:
    model = fresh_model()
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[20] = float("nan")  # the second query head
    (tmp_path / "a.txt").write_text("many words " * 200)
    config = CaptureConfig(model="tiny", corpus=str(tmp_path / "a.txt"), output=str(tmp_path / "store"),
                           context_length=128, num_documents=1, queries_per_document=8, device="cpu")
    with pytest.raises(SparseKVError, match=r"layer 1 .*query head 1"):
        run_capture(config, model=model, tokenizer=make_tokenizer())
    assert not (tmp_path / "store" / "doc00000").exists()
