"""Killed at any moment, started again: the same bytes. Several processes: the same bytes."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sparsekv.store.shard import checksum

CHILD = Path(__file__).parent / "capture_child.py"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def bytes_of(folder: Path) -> dict[str, str]:
    return {str(f.relative_to(folder)): checksum(f) for f in sorted(folder.rglob("*")) if f.is_file()}


def start(
    output: Path, documents: int, devices: int = 1, machines: int = 1, launcher: tuple[str, ...] = (), **variables: str,
) -> subprocess.Popen:
    command = [sys.executable, *launcher, str(CHILD), str(output), *map(str, (documents, devices, machines))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env=ENVIRONMENT | variables)


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
def test_a_disk_full_for_one_process_is_said_by_both_and_two_go_on(tmp_path) -> None:
    finish(start(tmp_path / "one", 4))
    process = start(tmp_path / "full", 4, devices=2, FULL_AT="doc00001")
    _, said = process.communicate(timeout=200)
    assert process.returncode != 0 and "process 1: could not write to" in said and "No space left on device" in said
    assert {"doc00000", "doc00002"} <= {f.name for f in (tmp_path / "full").iterdir()}
    finish(start(tmp_path / "full", 4, devices=2))
    assert bytes_of(tmp_path / "full") == bytes_of(tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_torchrun_writes_the_same_store_as_one(devices: int, tmp_path) -> None:
    """Its number of processes counts, named by --devices or not."""
    finish(start(tmp_path / "one", 3))
    launcher = ("-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}")
    finish(start(tmp_path / "two", 3, devices=devices, launcher=launcher))
    assert bytes_of(tmp_path / "two") == bytes_of(tmp_path / "one")


@pytest.mark.slow
def test_two_machines_write_the_same_store_as_one(tmp_path) -> None:
    finish(start(tmp_path / "one", 3))
    port = free_port()
    both = [start(tmp_path / "two", 3, 1, 2, launcher=(
        "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", f"--node_rank={rank}",
        "--master_addr=127.0.0.1", f"--master_port={port}")) for rank in range(2)]
    for process in both:
        finish(process)
    assert bytes_of(tmp_path / "two") == bytes_of(tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_slurm_writes_the_same_store_as_one(devices: int, tmp_path) -> None:
    """Two tasks as srun starts them; what it says of them is in its variables."""
    finish(start(tmp_path / "one", 3))
    common = {"SLURM_JOB_ID": "4321", "SLURM_JOB_NAME": "capture", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2",
              "SLURM_NNODES": "1", "SLURM_NODEID": "0", "SLURM_NODELIST": "127.0.0.1", "MASTER_PORT": str(free_port())}
    both = [start(tmp_path / "two", 3, devices, SLURM_PROCID=str(task), SLURM_LOCALID=str(task), **common)
            for task in range(2)]
    for process in both:
        finish(process)
    assert bytes_of(tmp_path / "two") == bytes_of(tmp_path / "one")


@pytest.mark.slow
def test_numbers_that_do_not_fit_the_launcher_are_refused(tmp_path) -> None:
    process = start(tmp_path / "s", 3, devices=3, SLURM_JOB_ID="1", SLURM_JOB_NAME="capture", SLURM_NTASKS="2",
                    SLURM_NTASKS_PER_NODE="2", SLURM_NNODES="1", SLURM_NODEID="0", SLURM_PROCID="0", SLURM_LOCALID="0",
                    SLURM_NODELIST="127.0.0.1")
    _, said = process.communicate(timeout=200)
    assert process.returncode != 0 and "SparseKVError: the processes could not be joined: You set `devices=3`" in said
    assert not (tmp_path / "s").exists()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def test_an_error_of_the_first_process_reaches_the_others(tmp_path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("precious")
    process = start(tmp_path / "full", 3, devices=2)
    _, err = process.communicate(timeout=200)
    assert process.returncode != 0 and "is not empty; choose another --output" in err
