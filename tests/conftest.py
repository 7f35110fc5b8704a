"""Without a GPU kernels run under Triton's interpreter, which must be chosen before any module defines one. Every
process computes with one thread, however files are dealt out to them (`pytest -n`). Models and captures that several
files read are made once a session, whichever process asks first; a test that changes one copies it."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from forks import Forks

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start
torch.set_num_threads(1)
sys.path += [str(Path(__file__).parent / room) for room in ("capture", "trainers", "runtime")]


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], object]], Path]:
    """`once(name, make)`: the folder that `make(folder)` filled, once a session over all of its processes."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "once"

    def made(name: str, make: Callable[[Path], object]) -> Path:
        folder, done = shared / name, shared / f"{name}.made"
        shared.mkdir(exist_ok=True)
        with (shared / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)
                make(folder)
                done.touch()
        return folder

    return made


@pytest.fixture(scope="session")
def saved_model(once) -> Path:
    """Folder of a tiny model with its tokenizer."""
    from tiny import save_model

    return once("model", save_model)


@pytest.fixture(scope="session")
def store(once) -> Path:
    """A capture of four windows of 160 tokens, of a model whose attention is far from uniform."""
    from test_families import captured
    from test_training import sharp

    return once("store", lambda folder: captured(
        sharp(), folder, num_documents=4, context_length=160, queries_per_document=32))


class Said(NamedTuple):
    """The end of a command line: its exit status, standard output, and standard error in one line."""

    status: int
    out: str
    err: str


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """Runs a command line in this process: `cli("inspect", path)`."""
    def run(*words: object) -> Said:
        from sparsekv.cli import main

        monkeypatch.setattr(sys, "argv", ["sparsekv", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        said = capsys.readouterr()
        return Said(int(stop.value.code or 0), said.out, " ".join(said.err.split()))

    return run


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Starts command lines as processes that import nothing anew: `forks.start("-m", "sparsekv.cli", ...)`."""
    server = Forks()
    yield server
    server.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """An empty disk of one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = os.geteuid() == 0 and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True).returncode == 0
    if not mounted:
        pytest.skip("only root mounts a small disk")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)
