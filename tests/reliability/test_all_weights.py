"""Weights in any place and of any kind are part of what identifies a model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import make_model, prompt, save_model
from tiny_artifacts import artifacts
from torch import nn

from sparsekv.artifacts.fingerprint import check_fingerprint, model_fingerprint
from sparsekv.artifacts.inspection import InspectConfig, inspect_path
from sparsekv.runtime.hf.attach import attach
from sparsekv.util.errors import SparseKVError


def changed(where: str) -> Any:
    """A model of which weights differ that no sample sees."""
    model = copy.deepcopy(make_model())
    weight = {"a row of the embedding": model.get_input_embeddings().weight,
              "the last value": model.model.layers[2].mlp.down_proj.weight}[where].data.reshape(-1)
    step = max(1, weight.numel() // 64)
    chosen = torch.arange(len(weight)) % step == 1 if where != "the last value" else (
        torch.arange(len(weight)) == len(weight) - 1)
    weight[chosen] += 1
    return model


@pytest.mark.parametrize("where", ["a row of the embedding", "the last value"])
def test_weights_that_no_sample_sees_are_found_by_all_bits(where: str, tmp_path: Path,
                                                           capsys: pytest.CaptureFixture[str]) -> None:
    other, (router, _) = changed(where), artifacts(make_model())
    router.config.model.update(model_fingerprint(make_model(), whole=True))
    attach(make_model(), router=router, all_bits=True).__enter__().__exit__()
    attach(other, router=router).__enter__().__exit__()  # a sample cannot tell, which is said
    with pytest.raises(SparseKVError, match="made for a model with bits"):
        attach(other, router=router, all_bits=True)
    router.save(tmp_path / "router")
    inspect_path(InspectConfig(path=str(tmp_path / "router"), model=str(save_model(tmp_path / "model"))))
    assert "all bits of" in capsys.readouterr().out
    other.save_pretrained(tmp_path / "model")
    with pytest.raises(SparseKVError, match="made for a model with bits"):
        inspect_path(InspectConfig(path=str(tmp_path / "router"), model=str(tmp_path / "model")))


def test_all_bits_are_of_one_arithmetic() -> None:
    router, _ = artifacts(make_model())
    router.config.model.update(model_fingerprint(make_model(), whole=True))
    half = copy.deepcopy(make_model()).to(torch.bfloat16)
    with pytest.raises(SparseKVError, match="cannot be compared with all bits of this model in bfloat16"):
        attach(half, router=router, all_bits=True)


class Packed(nn.Module):
    """A linear layer whose weight is a buffer of 8 bits."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.register_buffer("packed", (linear.weight.data * 20).round().clamp(-127, 127).to(torch.int8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.packed.to(x.dtype) / 20).T


def packed_model(seed: int) -> Any:
    model = copy.deepcopy(make_model())
    torch.manual_seed(seed)
    for layer in model.model.layers:
        nn.init.normal_(layer.mlp.up_proj.weight)
        layer.mlp.up_proj = Packed(layer.mlp.up_proj)
    return model


def test_weights_that_are_buffers_count() -> None:
    one, same, other = (model_fingerprint(packed_model(seed)) for seed in (1, 1, 2))
    check_fingerprint(one, same, "it")
    with pytest.raises(SparseKVError, match="weights"):
        check_fingerprint(one, other, "it")


def test_a_model_that_is_quantized_dynamically_has_its_own_arithmetic(tmp_path: Path) -> None:
    model = copy.deepcopy(make_model())
    model = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    found = model_fingerprint(model, whole=True)
    other = copy.deepcopy(make_model())
    nn.init.normal_(other.model.layers[1].mlp.up_proj.weight)
    other = torch.ao.quantization.quantize_dynamic(other, {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(SparseKVError, match="weights"):
        check_fingerprint(found, model_fingerprint(other), "it")


def test_a_first_parameter_of_whole_numbers_is_not_the_arithmetic(tmp_path: Path) -> None:
    model = copy.deepcopy(make_model())
    embedding = model.get_input_embeddings()
    table = embedding.weight.data

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter((table * 50).round().to(torch.int8), requires_grad=False)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.weight[ids].float() / 50

    model.set_input_embeddings(Whole())
    assert model_fingerprint(model)["dtype"] == "float32"
    with attach(model, selector="dense") as attachment:
        attachment.save_prefix(attachment.prefill(prompt(30)), tmp_path / "prefix")
        assert attachment.load_prefix(tmp_path / "prefix").get_seq_length() == 30


def test_weights_that_are_not_in_memory_are_one_sentence() -> None:
    with pytest.raises(SparseKVError, match="no weights in memory"):
        model_fingerprint(copy.deepcopy(make_model()).to("meta"))
