"""Where a store may lie: remote URLs, small disks, folders that cannot be written."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from test_families import captured, tiny

from sparsekv.capture.run import CaptureConfig, run_capture
from sparsekv.capture.store.place import RemotePlace
from sparsekv.capture.store.store import CaptureStore
from sparsekv.util.errors import SparseKVError


def test_a_remote_store_holds_the_same_as_a_local_one(tmp_path) -> None:
    import fsspec

    model, memory = tiny("llama"), fsspec.filesystem("memory")
    local = captured(model, tmp_path / "local", num_documents=2)
    remote = captured(model, "memory://bucket/store", num_documents=2)
    try:
        assert remote.manifest == local.manifest and remote.verify() == []
        for a, b in ((local.read(2, 1), remote.read(2, 1)),
                     (local.read(0, 0, kv_heads=slice(1, 2)), remote.read(0, 0, kv_heads=slice(1, 2)))):
            assert torch.equal(a.keys_rot(), b.keys_rot()) and torch.equal(a.queries_rot(), b.queries_rot())
            assert torch.equal(a.values, b.values) and torch.equal(a.statistics["lse"], b.statistics["lse"])
        with pytest.raises(SparseKVError, match="already holds a capture store"):
            captured(model, "memory://bucket/store", num_documents=2)
        memory.rm("/bucket/store/doc00001/layer001.safetensors")
        again = CaptureStore.open("memory://bucket/store")
        assert again.verify() == ["doc00001/layer001.safetensors: missing"]
    finally:
        memory.rm("/bucket", recursive=True)


def test_a_remote_capture_goes_on_where_it_stopped(tmp_path, monkeypatch) -> None:
    import fsspec

    model, commit = tiny("llama"), RemotePlace.commit
    local = captured(model, tmp_path / "local", num_documents=2)

    def breaks(self: RemotePlace, folder: Path, document: str) -> None:
        if document == "doc00001":
            raise OSError(104, "Connection reset by peer")
        commit(self, folder, document)

    monkeypatch.setattr(RemotePlace, "commit", breaks)
    with pytest.raises(SparseKVError, match="Connection reset by peer"):
        captured(model, "memory://half/store", num_documents=2)
    monkeypatch.undo()
    try:
        assert captured(model, "memory://half/store", num_documents=2).manifest == local.manifest
    finally:
        fsspec.filesystem("memory").rm("/half", recursive=True)


def test_documents_on_their_way_to_a_remote_store_must_fit_here(tmp_path, monkeypatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(SparseKVError, match=r"documents on their way to .* set TMPDIR to another folder"):
        captured(tiny("llama"), "memory://small/store")


def test_a_file_url_is_the_folder(tmp_path) -> None:
    captured(tiny("llama"), f"file://{tmp_path}/s")
    assert CaptureStore.open(tmp_path / "s").verify() == []


def test_an_unknown_protocol_is_refused() -> None:
    with pytest.raises(SparseKVError, match="cannot be reached"):
        CaptureStore.open("nowhere://bucket/store")


def test_a_disk_that_fills_up_keeps_what_is_finished(small_disk, tmp_path, monkeypatch) -> None:
    model = tiny("llama")
    with pytest.raises(SparseKVError, match="use fewer documents or layers"):
        captured(model, small_disk / "s", num_documents=24)
    assert list(small_disk.iterdir()) == []
    # another program takes the space after the check
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(SparseKVError, match=r"No space left on device.*Finished documents are kept"):
        captured(model, small_disk / "s", num_documents=24)
    finished = sorted(f.name for f in (small_disk / "s").glob("doc*"))
    assert finished and finished[0] == "doc00000"
    with pytest.raises(SparseKVError, match="unfinished"):
        CaptureStore.open(small_disk / "s")
    subprocess.run(["mount", "-o", "remount,size=16m", str(small_disk)], check=True)
    assert captured(model, small_disk / "s", num_documents=24).verify() == []


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path, monkeypatch) -> None:
    if os.geteuid():
        tmp_path.chmod(0o500)
        output = tmp_path / "s"
    else:
        output = Path("/proc/sparsekv-store")  # not even root writes there
        usage = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(SparseKVError, match=r"could not write .* GB free"):
        captured(tiny("llama"), output)


def test_a_missing_model_is_refused_before_anything_is_written(tmp_path) -> None:
    with pytest.raises(SparseKVError, match="no model at"):
        run_capture(CaptureConfig(model="/no/such/model", corpus="embedded", output=str(tmp_path / "s")))
    assert not (tmp_path / "s").exists()
