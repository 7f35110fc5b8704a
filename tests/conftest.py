"""Without a GPU kernels run under Triton's interpreter, which must be chosen before any module defines one. Where files
are dealt out to processes (`pytest -n`), each computes with one thread."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start
    torch.set_num_threads(1)


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
