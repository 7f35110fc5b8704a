"""One checkpoint is one model, in whatever arithmetic it is loaded; another one is not."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))

from tiny import make_model, prompt

from sparsekv.artifacts.fingerprint import check_fingerprint, model_fingerprint
from sparsekv.runtime.hf.attach import attach
from sparsekv.util.errors import SparseKVError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def loaded(checkpoint: torch.dtype, dtype: torch.dtype):
    """The tiny model as a checkpoint in one arithmetic, loaded in another."""
    return copy.deepcopy(make_model()).to(checkpoint).to(dtype)


@pytest.mark.parametrize("here", DTYPES, ids=str)
@pytest.mark.parametrize("made", DTYPES, ids=str)
@pytest.mark.parametrize("checkpoint", DTYPES, ids=str)
def test_arithmetics_of_one_checkpoint_are_one_model(
    checkpoint: torch.dtype, made: torch.dtype, here: torch.dtype,
) -> None:
    expected, found = (model_fingerprint(loaded(checkpoint, dtype)) for dtype in (made, here))
    assert expected["dtype"] == str(made).removeprefix("torch.")
    if checkpoint == torch.float32 and {made, here} == {torch.bfloat16, torch.float16}:  # rounded once and twice
        with pytest.raises(SparseKVError, match=rf"made in {expected['dtype']} and this model is in {found['dtype']}: "
                                                rf".* load the model in float32 or {expected['dtype']}"):
            check_fingerprint(expected, found, "it")
    else:
        check_fingerprint(expected, found, "it")
    before = {k: v for k, v in expected.items() if k not in ("dtype", "weights_float16")}
    if found["weights"] == before["weights"]:
        check_fingerprint(before, found, "it")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_other_weights_are_another_model(dtype: torch.dtype) -> None:
    model = loaded(torch.float32, dtype)
    before = model_fingerprint(model)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.02)
    with pytest.raises(SparseKVError, match="made for a model with weights"):
        check_fingerprint(before, model_fingerprint(model), "it")


def test_the_last_rows_of_a_matrix_count() -> None:
    model = loaded(torch.float32, torch.float32)
    before = model_fingerprint(model)
    with torch.no_grad():
        weight = model.model.layers[1].mlp.up_proj.weight
        weight[len(weight) // 2:].mul_(1.02)
    with pytest.raises(SparseKVError, match="made for a model with weights"):
        check_fingerprint(before, model_fingerprint(model), "it")


def test_a_prefix_of_another_arithmetic_is_refused_by_name(tmp_path) -> None:
    models = {dtype: loaded(torch.bfloat16, dtype) for dtype in DTYPES}
    for dtype, model in models.items():
        with attach(model, selector="dense") as attachment:
            attachment.save_prefix(attachment.prefill(prompt(30)), tmp_path / str(dtype))
            for other in DTYPES:
                if other == dtype:
                    assert attachment.load_prefix(tmp_path / str(other)).get_seq_length() == 30
                elif (path := tmp_path / str(other)).exists():
                    with pytest.raises(SparseKVError, match=rf"holds keys in {str(other)[6:]} and this model is in "
                                                            rf"{str(dtype)[6:]}"):
                        attachment.load_prefix(path)
