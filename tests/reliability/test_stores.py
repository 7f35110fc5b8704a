"""A training reads what a capture wrote, and goes on from what it wrote itself, or says what changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_families import captured
from test_training import sharp
from training_child import stopped, train

from sparsekv.capture.store import manifest as manifests
from sparsekv.capture.store.manifest import MANIFEST, sealed
from sparsekv.capture.store.shard import checksum
from sparsekv.capture.store.store import CaptureStore
from sparsekv.trainers.fit import check_checkpoint
from sparsekv.util.errors import SparseKVError

SIZES = {"num_documents": 3, "context_length": 120, "queries_per_document": 24}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, Path]:
    """Two stores of models of one shape."""
    folder, other = tmp_path_factory.mktemp("stores"), sharp()
    with torch.no_grad():
        next(other.parameters()).mul_(1.5)
    captured(sharp(), folder / "one", **SIZES)
    captured(other, folder / "other", **SIZES)
    return {name: folder / name for name in ("one", "other")}


@pytest.fixture
def store(made, tmp_path) -> Path:
    return Path(shutil.copytree(made["one"], tmp_path / "store"))


def refused(store: Path, match: str, output: str = "out", **options: Any) -> None:
    with pytest.raises(SparseKVError, match=match) as error:
        train("phi", str(store), str(store.parent / output), **{"max_steps": 2, **options})
    assert "\n" not in str(error.value)


def recorded(store: Path, shard: str) -> None:
    """The manifest says what the shard now is: as if the damage had been there when the store was made."""
    content = json.loads((store / MANIFEST).read_text())
    del content["sha256"]
    content["shards"][shard] = {"bytes": (store / shard).stat().st_size, "sha256": checksum(store / shard)}
    (store / MANIFEST).write_text(json.dumps(sealed(content)))


@pytest.mark.parametrize("known", [False, True], ids=["unknown to the manifest", "known to the manifest"])
@pytest.mark.parametrize(("one", "other", "said"), [
    ("doc00000/layer001.safetensors", "doc00001/layer001.safetensors", "of document"),
    ("doc00000/layer001.safetensors", "doc00000/layer002.safetensors", "of layer '2'"),
    ("doc00000/rotary.safetensors", "doc00002/rotary.safetensors", "of document")])
def test_swapped_shards_are_found(store, known: bool, one: str, other: str, said: str) -> None:
    first = (store / one).read_bytes()
    (store / one).write_bytes((store / other).read_bytes())
    (store / other).write_bytes(first)
    if known:
        for shard in (one, other):
            recorded(store, shard)
    refused(store, said if known else r"layer001.*contents changed|rotary.*contents changed")


def test_a_shard_of_another_model_is_found(made, store) -> None:
    shard = "doc00000/layer001.safetensors"
    shutil.copyfile(made["other"] / shard, store / shard)
    refused(store, "contents changed")
    recorded(store, shard)
    refused(store, r"layer001.* \(it is of model '[0-9a-f]{32}'\)")


@pytest.mark.parametrize("damage", ["zeros", "relabelled", "cut", "missing", "grown"])
def test_damaged_shards_are_found(store, damage: str) -> None:
    shard = store / "doc00001" / "layer000.safetensors"
    data = bytearray(shard.read_bytes())
    if damage == "zeros":
        data[-2048:] = bytes(2048)
    elif damage == "relabelled":
        assert b'"BF16"' in data
        data = data.replace(b'"BF16"', b'"F16" ')
    elif damage == "cut":
        del data[-1]
    elif damage == "grown":
        data += b"\0"
    shard.write_bytes(data)
    if damage == "missing":
        shard.unlink()
    refused(store, {"zeros": "contents changed", "relabelled": "contents changed", "missing": "missing"}.get(
        damage, "bytes, expected"))
    if damage == "relabelled":
        recorded(store, "doc00001/layer000.safetensors")
        refused(store, r"keys_pre is torch.float16 .*, expected torch.bfloat16")


CHANGES: list[tuple[str, Any]] = [
    ("format_version", "2"), ("format_version", 0), ("format_version", float("nan")), ("format_version", None),
    ("model", None), ("model", {}), ("layers", None), ("layers", {}), ("layers", {"x": {}}), ("layers", {"0": None}),
    ("layers", {"7": {"layout": "half", "rotary": 0, "scale": 0.25}}), ("context_length", None), ("context_length", 1),
    ("context_length", 119), ("context_length", 10**400), ("shards", None), ("shards", {}), ("shards", {"a": 1}),
    ("documents", None), ("documents", []), ("documents", [1]), ("documents", [{}]), ("config", None), ("config", {}),
    ("config.sink_size", -1), ("config.window_size", "16"), ("config.queries_per_document", 23),
    ("config.storage_dtype", "float8"), ("model.num_kv_heads", 0), ("model.num_kv_heads", 1),
    ("model.num_query_heads", 8), ("model.head_dim", 8), ("model.num_layers", 2), ("model.weights", "0" * 32),
    ("layers.1", {"layout": "spiral", "rotary": 0, "scale": 0.25}), ("complete", "yes"),
    ("layers.1", {"layout": "half", "rotary": 9, "scale": 0.25}), ("layers.1", {"layout": "half", "rotary": 0}),
    ("layers.1", {"layout": "half", "rotary": 0, "scale": float("inf")})]


@pytest.mark.parametrize("hashed", ["hashed", "format 1", "stale hash"])
def test_manifests_that_say_something_else_are_refused(store, hashed: str) -> None:
    """With the checksum of what they say, without one as format 1 has it, and with that of another content."""
    good = json.loads((store / MANIFEST).read_text())
    before = good.pop("sha256")
    for name, value in CHANGES:
        content = json.loads(json.dumps(good))
        if hashed == "format 1":
            content["format_version"] = 1
        *within, last = name.split(".")
        part = content
        for key in within:
            part = part[key]
        part[last] = value
        content = sealed(content) if hashed == "hashed" else content
        (store / MANIFEST).write_text(json.dumps(content | ({"sha256": before} if hashed == "stale hash" else {})))
        refused(store, r"damaged|unfinished|has no|needs|only a part")
    for text in (b"", b"[1]", b"{", b"\xff\xfe\x00", b"[" * 100_000, b'{"a": ' * 100_000, b'{"a": 1, "a": 1}'):
        (store / MANIFEST).write_bytes(text)
        refused(store, "is damaged")
    (store / MANIFEST).write_text(json.dumps({**good, "sha256": before, "context_length": 121}))
    refused(store, "its checksum is another")
    assert not list((store.parent / "out").glob("*"))


def test_a_large_store_is_sampled_and_verified_whole_where_asked(store, capsys, monkeypatch) -> None:
    shards = CaptureStore.open(store).manifest["shards"]
    monkeypatch.setattr(manifests, "SAMPLE_BYTES", sum(about["bytes"] for about in shards.values()) // 2)
    CaptureStore.open(store).check()
    assert "of 12 shards are compared; --verify compares all" in capsys.readouterr().err
    unread = set(shards) - set(manifests.sample(shards, 0))
    assert unread and set(manifests.sample(shards, 1)) != set(manifests.sample(shards, 0))
    victim = store / max(unread)
    victim.write_bytes(victim.read_bytes()[:-4] + b"\1\2\3\4")
    CaptureStore.open(store).check()
    refused(store, "contents changed", verify=True)


def test_flipped_parts_of_an_interrupted_training_are_named(store) -> None:
    def interrupted(kind: str, method: str, **options: Any) -> Path:
        output = store.parent / f"{kind}-{method}"
        with stopped(method):
            train(kind, str(store), str(output), max_steps=4, **options)
        return output

    for output, kind in ((interrupted("phi", "finish"), "phi"), (interrupted("router", "fit"), "router")):
        for part in (output / "parts").iterdir():
            good = part.read_bytes()
            start = 8 + int.from_bytes(good[:8], "little")
            for at in (9, start // 2, start + 5, len(good) - 3):
                part.write_bytes(good[:at] + bytes([good[at] ^ 16]) + good[at + 1:])
                with pytest.raises(SparseKVError, match=r"is damaged \(.*; delete it, and the same command"):
                    train(kind, str(store), str(output), max_steps=4, resume=True)
            part.write_bytes(good)
            tensors = load_file(part)
            save_file({k: t + 1 for k, t in tensors.items()}, part)
            with pytest.raises(SparseKVError, match="its checksum differs"):
                train(kind, str(store), str(output), max_steps=4, resume=True)
            part.write_bytes(good)
    parts = sorted((store.parent / "phi-finish" / "parts").iterdir())
    shutil.copyfile(parts[0], parts[1])
    with pytest.raises(SparseKVError, match=rf"{parts[1].name}' is damaged \(its checksum differs"):
        train("phi", str(store), str(store.parent / "phi-finish"), max_steps=4, resume=True)
    train("router", str(store), str(store.parent / "router-fit"), max_steps=4, resume=True)


def test_flipped_checkpoints_are_found(store) -> None:
    output = store.parent / "phi"
    with stopped("keep"):
        train("phi", str(store), str(output), max_steps=5)
    checkpoint = next((output / "checkpoints").iterdir())
    good = checkpoint.read_bytes()
    held = torch.load(checkpoint, weights_only=True)
    for at in range(100, len(good), len(good) // 60):
        checkpoint.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1:])
        try:
            check_checkpoint(checkpoint)
        except SparseKVError as error:
            assert "cannot be read; delete it" in str(error)
        else:  # padding between the records
            now = torch.load(checkpoint, weights_only=True)
            assert all(torch.equal(t, now["state_dict"][k]) for k, t in held["state_dict"].items())
    checkpoint.write_bytes(good)
    check_checkpoint(checkpoint)
    other = checkpoint.with_name("phi-layer007-heads000-001.ckpt")
    shutil.copyfile(checkpoint, other)
    with pytest.raises(SparseKVError, match=r"it is of phi-layer000"):
        check_checkpoint(other)
