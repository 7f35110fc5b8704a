"""Commands as processes: stopped by signals, two at once, on disks that fail."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from forks import Fork
from training_child import train

from sparsekv.artifacts.phi import PhiArtifact
from sparsekv.capture.store.store import CaptureStore
from sparsekv.util.disk import only_writer
from sparsekv.util.errors import SparseKVError


def words(command: str, model: Path, store: Path, output: Path) -> list[object]:
    """A command line that takes seconds."""
    return [command, *{
        "capture": ["--model", model, "--corpus", "embedded", "--context-length", 512, "--num-documents", 30,
                    "--queries-per-document", 64, "--device", "cpu"],
        "eval": ["--model", model, "--tasks", "needle", "--lengths", "512,768", "--samples", 8, "--device", "cpu",
                 "--methods", "streaming,topk,quest"],
        "demo": ["--model", model, "--context-length", 512, "--num-documents", 40, "--phi-steps", 400, "--phi-width",
                 16, "--num-buckets", 16, "--device", "cpu"],
        "train-router": ["--capture", store, "--num-buckets", 8, "--scores", "mlp", "--max-steps", 30_000,
                         "--device", "cpu"],
        "train-phi": ["--capture", store, "--width", 16, "--batch-size", 8, "--keys-per-step", 32, "--max-steps",
                      20_000, "--device", "cpu"],
    }[command], "--output", output]


BEGUN: dict[str, Callable[[Path], bool]] = {
    "capture": lambda out: (out / "doc00000").is_dir(),
    "eval": lambda out: (out / "cells.jsonl").is_file() and len((out / "cells.jsonl").read_text().split("\n")) > 3,
    "demo": lambda out: (out / "capture" / "doc00000").is_dir(),
    "train-router": lambda out: (out / "metrics.csv").is_file(),
    "train-phi": lambda out: (out / "metrics.csv").is_file(),
}
"""When a command is in the middle of its work."""


def begun(process: Fork, command: str, output: Path) -> None:
    end = time.monotonic() + 200
    while process.poll() is None and not BEGUN[command](output) and time.monotonic() < end:
        time.sleep(0.01)


def finished(process: Fork) -> str:
    said = " ".join("\n".join(process.communicate()).split())
    assert "Traceback" not in said, said
    return said


SAID = {"capture": "finished documents are kept; the same command goes on (without --overwrite)",
        "eval": "what is finished is kept; the same command goes on with --resume",
        "demo": "run the same command with --overwrite to start again",
        "train-router": "the same command with --resume goes on", "train-phi": "the same command with --resume goes on"}


@pytest.mark.parametrize(("command", "number"), [
    ("capture", signal.SIGTERM), ("eval", signal.SIGINT), *(pytest.param(c, n, marks=pytest.mark.slow) for c, n in (
        ("capture", signal.SIGINT), ("eval", signal.SIGTERM), ("demo", signal.SIGTERM), ("demo", signal.SIGINT),
        ("train-router", signal.SIGTERM), ("train-router", signal.SIGINT)))])
def test_a_stopped_command_says_how_to_go_on(
    sparsekv, saved_model, store, tmp_path, command: str, number: int,
) -> None:
    line = words(command, saved_model, store, tmp_path / "out")
    process = sparsekv(*line)
    begun(process, command, tmp_path / "out")
    process.send_signal(number)
    said = finished(process)
    assert process.returncode == 128 + number and SAID[command] in said, said
    assert not (tmp_path / ".out.lock").exists()
    if command == "capture":
        with pytest.raises(SparseKVError, match="unfinished"):
            CaptureStore.open(tmp_path / "out")
        again = sparsekv(*line)
        finished(again)
        assert again.returncode == 0 and CaptureStore.open(tmp_path / "out").verify() == []
    if command == "eval":
        again = sparsekv(*line, "--resume")
        assert "results:" in finished(again) and again.returncode == 0


@pytest.mark.parametrize("command", ["capture", pytest.param("eval", marks=pytest.mark.slow),
                                     pytest.param("demo", marks=pytest.mark.slow),
                                     pytest.param("train-router", marks=pytest.mark.slow),
                                     pytest.param("train-phi", marks=pytest.mark.slow)])
def test_a_second_writer_is_refused_and_a_dead_one_is_forgotten(
    sparsekv, saved_model, store, tmp_path, command: str,
) -> None:
    line = words(command, saved_model, store, tmp_path / "out")
    first = sparsekv(*line)
    begun(first, command, tmp_path / "out")
    os.kill(first.pid, signal.SIGSTOP)  # as slow as can be
    try:
        second = sparsekv(*line, "--overwrite")
        said = finished(second)
        assert second.returncode == 1 and f"is being written by process {first.pid} on {os.uname().nodename}" in said
    finally:
        os.kill(first.pid, signal.SIGKILL)
        first.communicate()
    assert (tmp_path / ".out.lock").exists()
    third = sparsekv(*line, "--overwrite")
    while third.poll() is None and not (tmp_path / ".out.old").exists():
        time.sleep(0.01)
    begun(third, command, tmp_path / "out")
    third.send_signal(signal.SIGTERM)
    assert SAID[command] in finished(third) and third.returncode == 143


@pytest.mark.slow
def test_a_signal_to_several_processes(sparsekv, store, tmp_path) -> None:
    line = [*words("train-phi", store, store, tmp_path / "out"), "--devices", 2]
    process = sparsekv(*line)
    begun(process, "train-phi", tmp_path / "out")
    process.send_signal(signal.SIGTERM)
    said = finished(process)
    assert process.returncode == 143 and SAID["train-phi"] in said, said


def test_one_of_two_threads_writes(store, tmp_path) -> None:
    said: list[str] = []
    started, go = threading.Event(), threading.Event()

    def first() -> None:
        with only_writer(tmp_path / "out"):
            started.set()
            go.wait(60)

    thread = threading.Thread(target=first)
    thread.start()
    started.wait(60)
    with pytest.raises(SparseKVError, match=f"is being written by process {os.getpid()} on"):
        train("phi", str(store), str(tmp_path / "out"), max_steps=2)
    assert not (tmp_path / "out").exists()
    go.set()
    thread.join()
    train("phi", str(store), str(tmp_path / "out"), max_steps=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"] and not said


@pytest.mark.parametrize(("command", "room"), [
    ("capture", 150_000), ("train-phi", 24_576), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("eval", 4_096), ("demo", 150_000), ("train-router", 24_576), ("train-phi", 150_000)))])
def test_a_full_disk_is_one_sentence(sparsekv, saved_model, store, small_disk, command: str, room: int) -> None:
    (small_disk / "ballast").write_bytes(bytes((1 << 20) - room))
    process = sparsekv(*words(command, saved_model, store, small_disk / "out"))
    said = finished(process)
    assert process.returncode == 1 and "unexpected" not in said, said
    assert str(small_disk) in said and "GB free" in said, said
    assert not [f for f in small_disk.rglob(".*") if f.name.endswith((".tmp", ".lock")) and f.is_file()]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train-phi", *(pytest.param(c, marks=pytest.mark.slow) for c in (
    "capture", "eval", "train-router"))])
def test_a_full_temporary_folder_harms_none(sparsekv, saved_model, store, small_disk, tmp_path, command: str) -> None:
    (small_disk / "ballast").write_bytes(bytes((1 << 20) - 4096))
    line = words(command, saved_model, store, tmp_path / "out")
    short = {"capture": ["--num-documents", 2], "eval": ["--samples", 1], "train-router": ["--max-steps", 30],
             "train-phi": ["--max-steps", 30]}[command]
    process = sparsekv(*line, *short, TMPDIR=str(small_disk))
    said = finished(process)
    assert process.returncode == 0, said


@pytest.mark.parametrize("command", ["capture", "train-phi", *(pytest.param(c, marks=pytest.mark.slow) for c in (
    "demo", "eval", "train-router"))])
def test_a_folder_that_cannot_be_written_is_one_sentence(
    sparsekv, saved_model, store, tmp_path, command: str,
) -> None:
    for output in (Path("/proc/sparsekv-out"), tmp_path / "file" / "out"):
        (tmp_path / "file").touch()
        process = sparsekv(*words(command, saved_model, store, output))
        said = finished(process)
        assert process.returncode == 1 and "unexpected" not in said and str(output) in said, said


@pytest.mark.slow
@pytest.mark.parametrize("command", ["capture", *(pytest.param(c, marks=pytest.mark.slow) for c in (
    "eval", "train-phi"))])
def test_a_folder_that_vanishes_is_one_sentence(sparsekv, saved_model, store, tmp_path, command: str) -> None:
    """A training makes it again: its result is whole, or it says what is missing."""
    short = ["--max-steps", 600] if command == "train-phi" else []
    process = sparsekv(*words(command, saved_model, store, tmp_path / "out"), *short)
    begun(process, command, tmp_path / "out")
    for _ in range(20):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
    said = finished(process)
    if command == "train-phi" and process.returncode == 0:
        assert PhiArtifact.load(tmp_path / "out")
    else:
        assert process.returncode == 1 and "unexpected" not in said and str(tmp_path / "out") in said, said
