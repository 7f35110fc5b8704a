"""Killed at any moment, started again: the same bytes. Several processes: the same bytes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparsekv.capture.shard import checksum

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


def test_killed_at_random_moments_the_store_is_the_same(tmp_path) -> None:
    """24 SIGKILLs; every store that was cut short and finished later equals the uninterrupted one byte for byte."""
    command = [sys.executable, str(CHILD), "kill", str(tmp_path), "6", "24"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=False, timeout=280)
    assert done.returncode == 0 and done.stdout.startswith("ok"), done.stdout + done.stderr[-3000:]


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
