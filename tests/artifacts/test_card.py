"""The quality card names heads; artifacts written before load, or are refused in one sentence."""

import pytest
import torch

from sparsekv.artifacts.card import describe, heads_best_dense
from sparsekv.artifacts.format import save_artifact
from sparsekv.artifacts.phi import PhiArtifact
from sparsekv.artifacts.router import RouterArtifact
from sparsekv.models.feature_map import FeatureMap, FeatureMaps
from sparsekv.util.errors import SparseKVError

MODEL = {"architecture": "LlamaForCausalLM", "num_layers": 2, "num_query_heads": 4, "num_kv_heads": 2, "head_dim": 8,
         "rope": {}, "weights": "0"}
COMMON = {"model": MODEL, "layers": [0, 1], "sink_size": 4, "window_size": 16}


def test_heads_best_left_dense() -> None:
    shares = {"per_head": {"mass_share@0.05": [[0.9, 0.4], [0.6, 0.7]]}, "mass_share@0.05": 0.65}
    assert heads_best_dense("router", [3, 7], shares) == {3: [1]}
    errors = {"per_head": {"sink_tail + phi error": [[0.1, 0.2], [0.6, 0.51]]}}
    assert heads_best_dense("phi", [3, 7], errors) == {7: [0, 1]}
    assert heads_best_dense("phi", [3], {}) == {}
    assert describe(shares) == ["  mass_share@0.05: 0.650"]


def old_router(folder, dtype: str, **changed: str) -> dict[str, torch.Tensor]:
    """A router as version 0.1 wrote it; returns its query model as it was."""
    torch.manual_seed(0)
    config = {"kind": "router", **COMMON, "num_buckets": 5, "key_space": "pre", "scores": "mlp",
              "router_scope": "kv_head", "weights_dtype": dtype,
              "provenance": {"options": {"residual": True, "long_range": 1024, "sketch_wide": 1}}} | changed
    weights = {"w1": torch.randn(2, 2, 8, 6) * torch.logspace(-4, 2, 6), "b1": torch.randn(2, 2, 6),
               "w2": torch.randn(2, 2, 6, 5), "b2": torch.randn(2, 2, 5)}
    tensors = {"centroids": torch.nn.functional.normalize(torch.randn(2, 2, 5, 8), dim=-1)}
    for name, weight in weights.items():
        name = f"query_model.{name}"
        if dtype == "float8" and ".w" in name:
            tensors |= {name: weight.to(torch.float8_e4m3fn), f"{name}.scale": torch.ones_like(weight[..., :1, :])}
        else:
            tensors[name] = weight.to(torch.bfloat16) if dtype == "bfloat16" and ".w" in name else weight
    save_artifact(folder, config, tensors)
    return weights


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-9), ("bfloat16", 4e-3)])
def test_query_models_in_fewer_bits_still_load(tmp_path, dtype: str, limit: float) -> None:
    weights = old_router(tmp_path / "a", dtype)
    loaded = RouterArtifact.load(tmp_path / "a")
    for name, weight in weights.items():
        found = getattr(loaded.weights, name)
        assert found.dtype == torch.float32
        assert float(((found - weight).norm(dim=-2) / weight.norm(dim=-2)).max()) < limit
    loaded.save(tmp_path / "b")
    assert torch.equal(RouterArtifact.load(tmp_path / "b").weights.w1, loaded.weights.w1)


@pytest.mark.parametrize(("dtype", "changed", "message"), [
    ("float8", {}, "has a query model in float8, which this version does not read: .* train it again"),
    ("float32", {"scores": "hybrid"}, "has hybrid scores, which this version does not read: .* train it again"),
    ("float32", {"router_scope": "query_head"}, "has one query model a query head, which this version does not read")])
def test_routers_of_a_kind_that_is_gone_are_refused(tmp_path, dtype: str, changed: dict, message: str) -> None:
    old_router(tmp_path / "a", dtype, **changed)
    with pytest.raises(SparseKVError, match=message):
        RouterArtifact.load(tmp_path / "a")


def sketched(folder, **changed) -> RouterArtifact:
    config = {"kind": "router", **COMMON, "num_buckets": 5, "key_space": "rot", "scores": "mean_key",
              "sketch_bytes": 3, "sketch_wide": 1, **changed}
    torch.manual_seed(0)
    tensors = {"centroids": torch.randn(2, 2, 5, 8), "sketch.keys": torch.randn(2, 2, 8, 5),
               "sketch.centre": torch.randn(2, 2, 5), "sketch.queries": torch.randn(2, 2, 8, 5)}
    save_artifact(folder, config, tensors)
    return RouterArtifact.load(folder)


def test_a_router_with_sketches_is_saved_and_loaded(tmp_path) -> None:
    made = sketched(tmp_path / "a")
    assert "sketches of 3 bytes a key" in made.summary()
    made.to("cpu").save(tmp_path / "b")
    again = RouterArtifact.load(tmp_path / "b")
    assert again.layer(1).sketch_bytes == 3
    assert all(torch.equal(x, y[1]) for x, y in zip(again.layer(1).sketch, made.sketch, strict=True))
    old_router(tmp_path / "c", "float32")
    plain = RouterArtifact.load(tmp_path / "c")
    assert plain.sketch is None and plain.layer(0).sketch is None and "no sketches" in plain.summary()


@pytest.mark.parametrize(("changed", "message"), [
    ({"sketch_bytes": 9}, "is damaged: a sketch of 9 bytes with 1 channels of 8 bits has 17 channels; expected 1 to 8"),
    ({"sketch_wide": 4}, "has 4 channels of 8 bits; expected 0 to 3"),
    ({"sketch_wide": 2}, r"tensor sketch.keys has shape \(2, 2, 8, 5\), expected \(2, 2, 8, 4\)"),
    ({"sketch_bytes": "3"}, "sketch_bytes is '3', expected int")])
def test_sketches_that_cannot_be_are_refused(tmp_path, changed: dict, message: str) -> None:
    with pytest.raises(SparseKVError, match=message):
        sketched(tmp_path / "a", **changed)


def test_feature_maps_with_the_errors_of_all_shifts_still_load(tmp_path) -> None:
    maps = FeatureMaps(*(FeatureMap(2 * heads, 8, 6, 4, blocks).weights() for heads, blocks in ((4, 1), (2, 0)))).map(
        lambda w: w.detach().unflatten(0, (2, -1)))
    config = {"kind": "phi", **COMMON, "num_features": 6, "width": 4, "key_width": 4, "read_shares": [0.0, 0.05],
              "shift_grid": [-1.0, 0.0, 1.0], "capped": True}
    tensors = {**maps.named(), "shift": torch.randn(2, 2, 4), "gate": torch.ones(2, 4),
               "errors": torch.rand(2, 2, 3, 4)}
    save_artifact(tmp_path / "a", config, tensors)
    loaded = PhiArtifact.load(tmp_path / "a")
    assert loaded.config.capped and torch.equal(loaded.layer(1).offsets, tensors["shift"][1])
    half = loaded.layer(0).at(0.025)
    torch.testing.assert_close(half.offset, tensors["shift"][0].mean(0))
