"""Killed at any moment, started again: the same bytes. Several processes: the same bytes."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from capture_child import bytes_of
from forks import Fork, Forks

CHILD = Path(__file__).parent / "capture_child.py"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}


def start(
    output: Path, documents: int, devices: int = 1, launcher: tuple[str, ...] = (), **variables: str,
) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, *launcher, str(CHILD), str(output), str(documents), str(devices)],
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT | variables)


def finish(process: subprocess.Popen | Fork) -> str:
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, out + err[-3000:]
    return out


@pytest.fixture(scope="module")
def runs(tmp_path_factory, forks: Forks) -> tuple[Path, str, str]:
    """Two commands side by side: captures that are killed, and a capture by two processes, one of which starts the
    other. Their folder and what they said."""
    folder = tmp_path_factory.mktemp("restart")
    (folder / "full").mkdir()
    (folder / "full" / "thesis.txt").write_text("precious")
    both = forks.start(CHILD, "kill", folder, 6, 8), forks.start(CHILD, folder / "two", 6, 2, folder / "full")
    killed, two = map(finish, both)
    return folder, killed, two


def test_killed_at_random_moments_the_store_is_the_same(runs) -> None:
    """8 SIGKILLs; every store that was cut short and finished later equals the uninterrupted one byte for byte."""
    assert runs[1].startswith("ok: 8 kills")


@pytest.mark.slow
def test_killed_24_times_the_store_is_the_same(forks: Forks, tmp_path) -> None:
    assert finish(forks.start(CHILD, "kill", tmp_path, 6, 24)).startswith("ok: 24 kills")


def test_two_processes_write_the_same_store_as_one(runs) -> None:
    assert bytes_of(runs[0] / "two") == bytes_of(runs[0] / "one")


def test_an_error_of_the_first_process_reaches_the_others(runs) -> None:
    folder, _, said = runs
    assert said.count("is not empty; choose another --output") == 2
    assert [f.name for f in (folder / "full").iterdir()] == ["thesis.txt"]


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
    both = [start(tmp_path / "two", 3, launcher=(
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
