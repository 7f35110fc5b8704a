"""The store: resume, integrity, bad input."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from capture_child import bytes_of
from safetensors.torch import load_file, save_file
from test_families import Words, captured, tiny

from sparsekv.artifacts.inspection import InspectConfig, inspect_path
from sparsekv.capture.config import parse_layers
from sparsekv.capture.corpus import make_windows, read_documents
from sparsekv.capture.store.manifest import MANIFEST
from sparsekv.capture.store.place import place
from sparsekv.capture.store.shard import ShardWriter, checksum
from sparsekv.capture.store.store import CaptureStore
from sparsekv.util.errors import SparseKVError


def test_verify_names_a_flipped_bit_and_a_missing_shard(tmp_path) -> None:
    store = captured(tiny("llama"), tmp_path / "s", num_documents=2)
    assert store.verify() == []
    victim = tmp_path / "s" / "doc00001" / "layer002.safetensors"
    data = bytearray(victim.read_bytes())
    data[-100] ^= 4
    victim.write_bytes(data)
    (tmp_path / "s" / "doc00000" / "layer001.safetensors").unlink()
    assert store.verify() == ["doc00000/layer001.safetensors: missing",
                              "doc00001/layer002.safetensors: contents changed (checksum differs)"]
    with pytest.raises(SparseKVError, match=r"layer001\.safetensors.*is missing"):
        store.read(1, 0)
    victim.write_bytes(data[:200])
    with pytest.raises(SparseKVError, match=r"layer002\.safetensors.*is damaged"):
        store.read(2, 1)


def test_a_slice_of_heads_is_the_slice(tmp_path) -> None:
    store = captured(tiny("llama"), tmp_path / "s")
    whole, part = store.read(1, 0), store.read(1, 0, kv_heads=slice(1, 2))
    assert torch.equal(part.keys_pre, whole.keys_pre[1:2])
    assert torch.equal(part.queries_pre, whole.queries_pre[2:4])
    assert torch.equal(part.statistics["lse"], whole.statistics["lse"][2:4])


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux says what is mapped")
def test_reading_a_head_leaves_the_other_heads_on_disk(tmp_path) -> None:
    writer = ShardWriter(tmp_path / "big.safetensors", {"keys_pre": (torch.float32, (8, 1 << 18, 4))})
    writer.write("keys_pre", torch.ones(8, 1 << 18, 4))
    size = writer.close()["bytes"]
    keys = place(tmp_path).open_shard("big.safetensors").read("keys_pre", slice(3, 5))
    assert keys.sum() == 1 << 21
    maps = Path("/proc/self/smaps").read_text().split("big.safetensors")[1:]
    touched = sum(1024 * int(re.search(r"Rss: *([0-9]+) kB", part)[1]) for part in maps)
    assert 0.24 * size < touched < 0.35 * size


@pytest.mark.parametrize("made", [{"key_fraction": 0.5}, {"query_sampling": "long_range"}, {"kv_heads": [1]}])
def test_stores_of_earlier_options_are_refused(made: dict, tmp_path) -> None:
    captured(tiny("llama"), tmp_path / "s")
    manifest = tmp_path / "s" / "manifest.json"
    content = json.loads(manifest.read_text())
    content |= {"format_version": 1, "kv_heads": made.pop("kv_heads", [0, 1])}
    content["config"] |= {"key_fraction": 1.0, "query_sampling": "uniform"} | made
    manifest.write_text(json.dumps(content))
    with pytest.raises(SparseKVError, match=r"only a part of the keys or heads, .* capture again with this version"):
        CaptureStore.open(tmp_path / "s")


def test_a_store_of_another_dtype_with_top_keys_still_loads(tmp_path, capsys) -> None:
    """An earlier version could write float32 or float16, and tensors that none read."""
    now = captured(tiny("llama"), tmp_path / "s")
    manifest, shard = tmp_path / "s" / "manifest.json", "doc00000/layer001.safetensors"
    tensors = {n: t.float() if t.dtype == torch.bfloat16 else t for n, t in load_file(tmp_path / "s" / shard).items()}
    expected = now.read(1, 0)
    save_file(tensors | {"top_positions": torch.zeros(4, 24, 3, dtype=torch.int32)}, tmp_path / "s" / shard)
    content = json.loads(manifest.read_text())
    content["config"] |= {"storage_dtype": "float32", "key_fraction": 1.0, "query_sampling": "uniform", "top_keys": 3}
    content["shards"][shard] = {"bytes": (tmp_path / "s" / shard).stat().st_size,
                                "sha256": checksum(tmp_path / "s" / shard)}
    manifest.write_text(json.dumps(content | {"format_version": 1, "kv_heads": [0, 1]}))
    store = CaptureStore.open(tmp_path / "s")
    item = store.read(1, 0, kv_heads=slice(1, 2))
    assert item.keys_pre.dtype == torch.float32 and torch.equal(item.keys_rot(), expected.keys_rot()[1:])
    assert torch.equal(item.queries_rot(), expected.queries_rot()[2:])
    assert torch.equal(item.query_positions, expected.query_positions)
    assert item.statistics.keys() == expected.statistics.keys()
    inspect_path(InspectConfig(path=str(tmp_path / "s"), verify=True))
    assert "float32" in capsys.readouterr().out


@pytest.mark.parametrize("damage", ["newer", "broken", "artifact", "none"])
def test_damaged_stores_are_refused(damage: str, tmp_path) -> None:
    captured(tiny("llama"), tmp_path / "s")
    manifest = tmp_path / "s" / "manifest.json"
    if damage == "newer":
        content = json.loads(manifest.read_text())
        content["format_version"] = 99
        manifest.write_text(json.dumps(content))
        message = "has format 99"
    elif damage == "broken":
        manifest.write_text("{]")
        message = "is damaged"
    elif damage == "artifact":
        manifest.rename(tmp_path / "s" / "config.json")
        message = "looks like an artifact"
    else:
        shutil.rmtree(tmp_path / "s")
        message = "no capture store"
    with pytest.raises(SparseKVError, match=message):
        CaptureStore.open(tmp_path / "s")


def test_bad_outputs_and_options_are_refused(tmp_path) -> None:
    model = tiny("llama")
    captured(model, tmp_path / "s")
    with pytest.raises(SparseKVError, match="already holds a capture store; add --overwrite"):
        captured(model, tmp_path / "s")
    captured(model, tmp_path / "s", overwrite=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("precious")
    for overwrite in (False, True):
        with pytest.raises(SparseKVError, match="choose another --output"):
            captured(model, tmp_path / "other", overwrite=overwrite)
    assert (tmp_path / "other" / "thesis.txt").read_text() == "precious"
    for options, message in (({"split": "x"}, "unknown split"), ({"dataset_options": "[1]"}, "are no JSON object"),
                             ({"layers": "0-9"}, "names layer 9; this model has layers 0 to 2"),
                             ({"layers": "a"}, "not understood"),
                             ({"dataset_options": "{"}, "are no JSON object"), ({"window_size": 117}, "leave no mid"),
                             ({"num_documents": 10_000}, "corpus is too short")):
        with pytest.raises(SparseKVError, match=message):
            captured(model, tmp_path / "new", **options)
        assert not (tmp_path / "new").exists()
    assert parse_layers("0-2,5") == [0, 1, 2, 5]


def test_a_disk_too_small_is_refused_before_anything_is_written(tmp_path, monkeypatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(SparseKVError, match="use fewer documents or layers"):
        captured(tiny("llama"), tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_train_and_heldout_text_never_overlap(tmp_path) -> None:
    def sources(split: str, corpus: str = "embedded") -> set[str]:
        return {d.source for d in read_documents(corpus, split=split)}

    assert sources("train").isdisjoint(sources("heldout"))
    assert sources("train") | sources("heldout") == sources("all")
    (tmp_path / "one.txt").write_text("".join(chr(97 + i % 26) for i in range(1000)) + "END")
    train, held = (next(iter(read_documents(str(tmp_path / "one.txt"), split=s))).text for s in ("train", "heldout"))
    assert len(train) == 802 and held.endswith("END") and len(train) + len(held) == 1003


def test_windows_depend_on_the_seed_only() -> None:
    def windows(seed: int, **extra: object) -> list[list[int]]:
        found = make_windows(read_documents("embedded"), Words(), length=300, count=4, seed=seed, **extra)
        return [w.tokens for w in found]

    assert windows(1) == windows(1) != windows(2)
    assert all(len(w) == 300 for w in windows(1, pack=False))


@pytest.mark.parametrize(("name", "content", "message"), [
    ("empty.txt", "", "holds no text"), ("bad.jsonl", "{]", "could not read"),
    ("other.jsonl", '{"body": "x"}', "has no text column"), ("latin.txt", None, "could not read")])
def test_bad_corpora_are_refused(name: str, content: str | None, message: str, tmp_path) -> None:
    file = tmp_path / name
    file.write_bytes(b"\xff\xfe\x00caf\xe9") if content is None else file.write_text(content)
    with pytest.raises(SparseKVError, match=message):
        list(read_documents(str(file)))
    with pytest.raises(SparseKVError, match="no file at"):
        list(read_documents(str(tmp_path / "missing.txt")))


def test_jsonl_and_parquet_are_read(tmp_path) -> None:
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": "two"}\n')
    pyarrow.parquet.write_table(pyarrow.table({"body": ["three"]}), tmp_path / "b.parquet")
    assert [d.text for d in read_documents(str(tmp_path / "*.jsonl"))] == ["one", "two"]
    assert [d.text for d in read_documents(str(tmp_path / "b.parquet"), text_column="body")] == ["three"]


@pytest.mark.parametrize("where", ["local", "memory://inspected/s"])
def test_inspect_says_what_is_wrong_with_a_store(where: str, tmp_path, capsys) -> None:
    fsspec = pytest.importorskip("fsspec")
    folder = str(tmp_path / "s") if where == "local" else where
    files, root = fsspec.core.url_to_fs(folder)
    try:
        captured(tiny("llama"), folder, num_documents=2)
        inspect_path(InspectConfig(path=folder, verify=True))
        assert "verified: 8 shards are sound" in capsys.readouterr().out
        cut, flipped = f"{root}/doc00000/layer000.safetensors", f"{root}/doc00001/layer002.safetensors"
        files.pipe_file(cut, files.cat_file(cut)[:-1])
        data = bytearray(files.cat_file(flipped))
        data[len(data) // 2] ^= 1
        files.pipe_file(flipped, bytes(data))
        files.rm(f"{root}/doc00000/rotary.safetensors")
        with pytest.raises(SparseKVError, match="is damaged") as found:
            inspect_path(InspectConfig(path=folder, verify=True))
        said = str(found.value)
        assert all(name in said for name in (
            "doc00000/layer000.safetensors: ", " bytes, expected ", "doc00000/rotary.safetensors: missing",
            "doc00001/layer002.safetensors: contents changed")) and len(said.splitlines()) == 4
        with pytest.raises(SparseKVError, match=r"layer000\.safetensors .* is damaged \(its size"):
            CaptureStore.open(folder).read(0, 0)
    finally:
        if where != "local":
            files.rm("/inspected", recursive=True)


def test_a_capture_does_not_go_on_with_another_model_or_text(tmp_path) -> None:
    """The options are the same, the weights or the corpus are not: nothing is mixed, nothing lost."""
    model, other = tiny("llama"), tiny("llama")
    with torch.no_grad():
        next(other.parameters()).mul_(1.5)
    text = tmp_path / "text.txt"
    text.write_text("abcdef " * 200)
    options = {"num_documents": 2, "corpus": str(text)}

    captured(model, tmp_path / "s", **options)
    whole = json.loads((tmp_path / "s" / MANIFEST).read_text())  # and now as if its last file were missing
    begun = {name: whole[name] for name in ("format_version", "config", "model")}
    place(str(tmp_path / "s")).write_json(MANIFEST, {**begun, "complete": False})
    before = bytes_of(tmp_path / "s")
    with pytest.raises(SparseKVError, match=r"the unfinished capture .* was made for a model with"):
        captured(other, tmp_path / "s", **options)
    text.write_text("ABCDEF " * 200)
    with pytest.raises(SparseKVError, match=r"doc00000 of the unfinished capture .* holds other text than the corpus"):
        captured(model, tmp_path / "s", **options)
    assert bytes_of(tmp_path / "s") == before
    text.write_text("abcdef " * 200)
    assert captured(model, tmp_path / "s", **options).verify() == []
