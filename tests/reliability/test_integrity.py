"""What is loaded is what was written: flipped bits, damaged records, diverged tensors are refused in one sentence."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from sparsekv.artifacts.checks import check_digest, digest, parse_object
from sparsekv.artifacts.format import CONFIG, TENSORS, save_artifact
from sparsekv.artifacts.phi import PhiArtifact, PhiArtifactConfig
from sparsekv.artifacts.router import RouterArtifact, RouterArtifactConfig
from sparsekv.kernels import QueryModel
from sparsekv.models.feature_map import FeatureMap, FeatureMaps
from sparsekv.runtime.hf.cache import SparseCache
from sparsekv.runtime.hf.prefix import load_prefix, save_prefix
from sparsekv.runtime.hf.storage import GrowingRope
from sparsekv.util.errors import SparseKVError

MODEL: dict[str, Any] = {
    "architecture": "LlamaForCausalLM", "num_layers": 2, "num_query_heads": 4, "num_kv_heads": 2, "head_dim": 8,
    "rope": {"rope_type": "default", "rope_theta": 10000.0}, "weights": "0123456789abcdef0123456789abcdef"}
COMMON: dict[str, Any] = {"model": MODEL, "layers": [0, 1], "sink_size": 4, "window_size": 16,
                          "provenance": {"seed": 0, "lr": 1e-05}, "quality": {"mass_share@0.05": 0.625}}
KINDS = {"router": RouterArtifact, "phi": PhiArtifact}
FLIPS = 300


def router() -> RouterArtifact:
    generator = torch.Generator().manual_seed(0)
    sizes = {"w1": (2, 2, 8, 6), "b1": (2, 2, 6), "w2": (2, 2, 6, 5), "b2": (2, 2, 5)}
    weights = QueryModel(**{k: torch.randn(*size, generator=generator) for k, size in sizes.items()})
    config = RouterArtifactConfig(num_buckets=5, key_space="pre", scores="mlp", **COMMON)
    return RouterArtifact(config, torch.randn(2, 2, 5, 8, generator=generator), weights)


def phi() -> PhiArtifact:
    torch.manual_seed(0)
    maps = FeatureMaps(*(FeatureMap(2 * heads, 8, 6, 4, blocks).weights() for heads, blocks in ((4, 1), (2, 0)))).map(
        lambda w: w.detach().unflatten(0, (2, -1)))
    return PhiArtifact(PhiArtifactConfig(num_features=6, width=4, key_width=4, **COMMON), maps, torch.zeros(2, 1, 4),
                       torch.ones(2, 4))


def empty_cache() -> SparseCache:
    return SparseCache(LlamaConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2))


def filled_cache() -> SparseCache:
    torch.manual_seed(0)
    cache = empty_cache()
    for layer in cache.layers:
        layer.update(torch.randn(1, 2, 20, 8), torch.randn(1, 2, 20, 8))
        layer.remember_queries(torch.randn(1, 4, 10, 8), 20)
    cache.rope[None] = GrowingRope("half")
    cache.rope[None].append(torch.randn(1, 20, 8), torch.randn(1, 20, 8), 0)
    return cache


def written(kind: str, folder: Path) -> Path:
    """The folder or file of a sound thing of this kind."""
    if kind in KINDS:
        (router() if kind == "router" else phi()).save(folder / kind)
    else:
        save_prefix(filled_cache(), folder / kind, MODEL)
    return folder / kind


def loaded(kind: str, path: Path) -> Any:
    return KINDS[kind].load(path) if kind in KINDS else load_prefix(empty_cache(), path, MODEL, "cpu")


def refused(kind: str, path: Path, match: str = ".") -> None:
    with pytest.raises(SparseKVError, match=match) as error:
        loaded(kind, path)
    assert "\n" not in str(error.value)


def unnoticed(kind: str, path: Path, file: Path, flips: int = FLIPS) -> list[int]:
    """Which of random bits of a file change and load all the same."""
    sound, found, rng = file.read_bytes(), [], random.Random(0)
    for bit in rng.sample(range(8 * len(sound)), flips):
        data = bytearray(sound)
        data[bit // 8] ^= 1 << bit % 8
        file.write_bytes(data)
        try:
            loaded(kind, path)
        except SparseKVError as error:
            assert "\n" not in str(error)
        else:
            if file.name != CONFIG or json.loads(data) != json.loads(sound):  # 1e-05 and 1E-05 are one number
                found.append(bit)
    file.write_bytes(sound)
    loaded(kind, path)
    return found


@pytest.mark.parametrize("name", [CONFIG, TENSORS])
@pytest.mark.parametrize("kind", KINDS)
def test_flipped_bits_of_an_artifact_are_noticed(kind: str, name: str, tmp_path) -> None:
    path = written(kind, tmp_path)
    assert not unnoticed(kind, path, path / name)


def test_flipped_bits_of_a_prefix_are_noticed(tmp_path) -> None:
    path = written("prefix", tmp_path)
    assert not unnoticed("prefix", path, path)
    header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    start = path.read_bytes()[:header]
    for bit in random.Random(1).sample(range(8 * header), FLIPS):
        data = bytearray(start)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bytes(data) + path.read_bytes()[header:])
        refused("prefix", path)


TEXTS = (b"", b"[1, 2]", b"{", b"\xff\xfe\x00", b"[" * 100_000, b'{"a": ' * 100_000, b'{"a": 1, "a": 1}')
MODELS = [("model", value) for value in (
    None, {}, [], {**MODEL, "num_kv_heads": 0}, {**MODEL, "num_query_heads": 0}, {**MODEL, "num_kv_heads": 3},
    {**MODEL, "head_dim": -8}, {**MODEL, "num_layers": "2"}, {**MODEL, "num_layers": 2.0}, {**MODEL, "weights": None},
    {**MODEL, "rope": 1}, {**MODEL, "head_dim": True})]
VERSIONS = [("format_version", value) for value in (
    0, -1, "2", "x", None, float("nan"), float("inf"), 1.0, True, [1], 10**400, 99)]
LAYERS = [("layers", value) for value in (
    None, "01", 7, {}, [], [1, 0], [0, 0], [0, 2], [-1, 0], [0], [0.0, 1.0], ["0", "1"], [0, 10**400], [[0], [1]])]
SIZES = [(name, value) for name in ("sink_size", "window_size") for value in (
    None, -1, 2.5, "4", float("nan"), True, 2**31, 10**400)]
OWN = {
    "router": [("num_buckets", 0), ("num_buckets", "5"), ("num_buckets", 6), ("num_buckets", 10**400),
               ("key_space", "post"), ("key_space", []), ("scores", None), ("scores", "best"), ("scores", ["mlp"])],
    "phi": [("num_features", 0), ("num_features", 7.0), ("num_features", 8), ("width", -4), ("width", None),
            ("width", 5), ("key_width", 5), ("key_width", "4"), ("query_blocks", 2),
            ("centred", "yes"), ("centred", True), ("capped", 1), ("read_shares", []),
            ("read_shares", [0.0, 0.1]), ("read_shares", [float("nan")]), ("read_shares", [2]), ("read_shares", 0.0),
            ("read_shares", [0, 10**400])],
}
ARTIFACT = [("kind", None), ("kind", []), ("kind", "other"), ("provenance", []), ("quality", None), *VERSIONS, *MODELS,
            *LAYERS, *SIZES]


@pytest.mark.parametrize("hashed", [True, False], ids=["hashed", "format 1"])
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_configs_are_refused(kind: str, hashed: bool, tmp_path) -> None:
    """With the checksum of what they say, and without one, as version 1 wrote them."""
    path = written(kind, tmp_path)
    config = json.loads((path / CONFIG).read_text())
    del config["sha256"]
    if not hashed:
        config["format_version"] = 1
    tensors = load_file(path / TENSORS)

    def put(changed: dict[str, Any]) -> None:
        checksum = {"sha256": digest(changed, tensors)} if hashed else {}
        (path / CONFIG).write_text(json.dumps({**changed, **checksum}))

    put(config)
    loaded(kind, path)
    for name, value in [*ARTIFACT, *OWN[kind]]:
        put({**config, name: value})
        refused(kind, path)
    for name in ("kind", "format_version", *(n for n in config if n in ("model", "layers", "sink_size", "scores",
                                                                        "num_buckets", "num_features", "width"))):
        put({k: v for k, v in config.items() if k != name})
        refused(kind, path)
    for text in TEXTS:
        (path / CONFIG).write_bytes(text)
        refused(kind, path)
    (path / CONFIG).write_text(json.dumps({**config, "format_version": 2}))
    refused(kind, path, "checksum")
    put(config)
    (path / TENSORS).unlink()
    refused(kind, path, "could not be read")


@pytest.mark.parametrize("kind", KINDS)
def test_artifacts_whose_files_are_of_two_trainings_are_refused(kind: str, tmp_path) -> None:
    path = written(kind, tmp_path)
    tensors = load_file(path / TENSORS)
    name = min(tensors)
    save_file({**tensors, name: tensors[name] + 1}, path / TENSORS)
    refused(kind, path, "checksum")
    save_file({**tensors, name: tensors[name].double()}, path / TENSORS)
    refused(kind, path, "checksum")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("kind", KINDS)
def test_diverged_tensors_are_neither_saved_nor_loaded(kind: str, value: float, tmp_path) -> None:
    path = written(kind, tmp_path)
    config = json.loads((path / CONFIG).read_text())
    del config["sha256"]
    tensors = load_file(path / TENSORS)
    name = max(tensors)
    tensors[name].view(-1)[3] = value
    with pytest.raises(SparseKVError, match=f"NaN or infinite values in tensor {name}: the training diverged"):
        save_artifact(tmp_path / "new", config, tensors)
    assert not (tmp_path / "new").exists()
    save_file(tensors, path / TENSORS)
    (path / CONFIG).write_text(json.dumps({**config, "format_version": 1}))
    refused(kind, path, f"NaN or infinite values in tensor {name}")


def test_sums_past_the_range_are_still_finite(tmp_path) -> None:
    made = router()
    made.centroids.fill_(3e38)
    made.save(tmp_path)
    assert torch.equal(RouterArtifact.load(tmp_path).centroids, made.centroids)


def test_tensors_of_whole_numbers_are_refused(tmp_path) -> None:
    path = written("router", tmp_path)
    config = json.loads((path / CONFIG).read_text())
    tensors = {k: t.int() for k, t in load_file(path / TENSORS).items()}
    save_artifact(path, {k: v for k, v in config.items() if k != "sha256"}, tensors)
    refused("router", path, "expected floating point")


def prefix_parts(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    with safe_open(path, framework="pt") as file:
        meta = json.loads(file.metadata()["sparsekv"])
    del meta["sha256"]
    return meta, load_file(path)


@pytest.mark.parametrize("hashed", [True, False], ids=["hashed", "format 1"])
def test_damaged_prefixes_are_refused(hashed: bool, tmp_path) -> None:
    path = written("prefix", tmp_path)
    meta, tensors = prefix_parts(path)
    if not hashed:
        meta["format_version"] = 1

    def put(meta: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        checksum = {"sha256": digest(meta, tensors)} if hashed else {}
        save_file(tensors, path, {"sparsekv": json.dumps({**meta, **checksum})})

    put(meta, tensors)
    want = filled_cache()
    for layer, kept in zip(loaded("prefix", path).layers, want.layers, strict=True):
        assert torch.equal(layer.keys, kept.keys) and torch.equal(layer.recent, kept.recent)
    records = [("length", value) for value in (None, 0, -1, 21, 19, "20", 20.0, float("nan"), 10**400)]
    records += [("rope", value) for value in (None, [], {"0": None}, {"0": []}, {"0": [None, "spiral"]}, {"1": [
        None, "half"]}, {"0": [["a"], "half"]}, {"0": [None, []]})]
    records += [("recent_end", value) for value in (None, [], {}, {"0": "20", "1": 20}, {"0": 20, "1": 21}, {
        "0": 20, "1": 3}, {"0": 20, "1": float("nan")})]
    for name, value in [*records, *VERSIONS, *MODELS, ("model", {**MODEL, "num_layers": 3})]:
        put({**meta, name: value}, tensors)
        refused("prefix", path)
    for name in meta:
        put({k: v for k, v in meta.items() if k != name}, tensors)
        refused("prefix", path)
    for name, tensor in tensors.items():
        changed: list[dict[str, torch.Tensor]] = [{name: tensor[..., :3].clone()}, {name: tensor[0].clone()},
                                                  {name: tensor.int()}, {name: torch.full_like(tensor, torch.nan)}]
        for change in changed:
            put(meta, {**tensors, **change})
            refused("prefix", path)
        if not name.endswith("recent"):
            put(meta, {k: t for k, t in tensors.items() if k != name})
            refused("prefix", path)
    for text in ("", "[1]", "{", "[" * 100_000):
        save_file(tensors, path, {"sparsekv": text})
        refused("prefix", path)
    refused("prefix", tmp_path)
    for content in (b"", b"\0" * 8, b"\xff" * 100, path.read_bytes()[:500]):
        path.write_bytes(content)
        refused("prefix", path)


def test_a_refused_prefix_leaves_the_cache_empty_and_a_failed_save_no_file(tmp_path) -> None:
    path = written("prefix", tmp_path)
    meta, tensors = prefix_parts(path)
    save_file({k: t for k, t in tensors.items() if k != "1.values"}, path,
              {"sparsekv": json.dumps({**meta, "format_version": 1})})
    cache = empty_cache()
    with pytest.raises(SparseKVError, match=r"1\.values has shape None"):
        load_prefix(cache, path, MODEL, "cpu")
    assert cache.get_seq_length() == 0
    cache = filled_cache()
    cache.layers[1].values[0, 0, 0, 0] = torch.nan
    with pytest.raises(SparseKVError, match=r"NaN or infinite values in tensor 1\.values"):
        save_prefix(cache, tmp_path / "new", MODEL)
    (tmp_path / "file").touch()
    with pytest.raises(SparseKVError, match="could not write"):
        save_prefix(filled_cache(), tmp_path / "file" / "new", MODEL)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "prefix"]


def test_nesting_of_any_depth_is_a_sentence() -> None:
    for depth in (40, 60, 500, *range(950, 1010), 5000):
        for opens, closes in (("[", "]"), ('{"a":', "}")):
            text = f'{{"format_version": 2, "x": {opens * depth}1{closes * depth}}}'
            with pytest.raises(SparseKVError):
                check_digest(parse_object(text, "it"), {}, "it")


def test_a_forked_process_hashes_too() -> None:
    """Threads that hash stay behind in the parent."""
    tensors = {"a": torch.randn(3_000_000)}
    want = digest({"format_version": 3}, tensors)
    child = os.fork()
    if child == 0:
        os._exit(0 if digest({"format_version": 3}, tensors) == want else 1)
    assert os.waitpid(child, 0)[1] == 0
