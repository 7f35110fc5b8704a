"""Killed at any moment, started again: the same bytes. Several processes: the same bytes."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sparsekv.capture.shard import checksum
from sparsekv.capture.store import CaptureStore
from sparsekv.errors import SparseKVError

CHILD = Path(__file__).parent / "capture_child.py"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def bytes_of(folder: Path) -> dict[str, str]:
    return {str(f.relative_to(folder)): checksum(f) for f in sorted(folder.rglob("*")) if f.is_file()}


def start(output: Path, documents: int, devices: int = 1, launcher: tuple[str, ...] = ()) -> subprocess.Popen:
    command = [sys.executable, *launcher, str(CHILD), str(output), str(documents), str(devices)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)


def finish(process: subprocess.Popen) -> None:
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, out + err


def kill_until_done(whole: Path, cut: Path, documents: int, kills: int, longest: float) -> int:
    """Kill `kills` times at random moments after the model is ready, then let it finish; how often it was cut short."""
    draw, interrupted = random.Random(0), 0
    for _ in range(kills):
        process = start(cut, documents)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(draw.uniform(0, longest))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        try:
            CaptureStore.open(cut)
        except SparseKVError:
            interrupted += 1
        else:
            assert bytes_of(cut) == bytes_of(whole)
            for file in sorted(cut.rglob("*"), reverse=True):
                file.unlink() if file.is_file() else file.rmdir()
    try:
        CaptureStore.open(cut)
    except SparseKVError:
        finish(start(cut, documents))
    return interrupted


def check_kills(tmp_path: Path, documents: int, kills: int) -> None:
    process = start(tmp_path / "whole", documents)
    assert process.stdout is not None
    process.stdout.readline()
    began = time.perf_counter()
    finish(process)
    took = time.perf_counter() - began
    interrupted = kill_until_done(tmp_path / "whole", tmp_path / "cut", documents, kills, 0.8 * took)
    assert interrupted >= kills // 2
    assert bytes_of(tmp_path / "cut") == bytes_of(tmp_path / "whole")


@pytest.mark.slow
def test_four_kills_leave_no_trace(tmp_path) -> None:
    check_kills(tmp_path, documents=40, kills=4)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_twenty_four_kills_leave_no_trace(tmp_path) -> None:
    check_kills(tmp_path, documents=40, kills=24)


def test_two_processes_write_the_same_store_as_one(tmp_path) -> None:
    finish(start(tmp_path / "one", 3))
    finish(start(tmp_path / "two", 3, devices=2))
    assert bytes_of(tmp_path / "two") == bytes_of(tmp_path / "one")


@pytest.mark.slow
def test_torchrun_writes_the_same_store_as_one(tmp_path) -> None:
    finish(start(tmp_path / "one", 3))
    launcher = ("-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=29731")
    finish(start(tmp_path / "two", 3, devices=2, launcher=launcher))
    assert bytes_of(tmp_path / "two") == bytes_of(tmp_path / "one")


def test_an_error_of_the_first_process_reaches_the_others(tmp_path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("precious")
    process = start(tmp_path / "full", 3, devices=2)
    _, err = process.communicate(timeout=200)
    assert process.returncode != 0 and "is not empty; choose another --output" in err
