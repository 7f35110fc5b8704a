"""Every kernel compiles for GPUs that are not here, and fits their shared memory and registers. One process compiles
for all tests of a worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cases import entry_kernels

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def compiled() -> Iterator[Callable[[str, str], dict[str, Any]]]:
    """Answers of compiled.py."""
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    with subprocess.Popen([sys.executable, str(Path(__file__).parent / "compiled.py")], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True, env=clean) as process:
        assert process.stdin is not None and process.stdout is not None
        asked, said = process.stdin, process.stdout

        def ask(kind: str, kernel: str) -> dict[str, Any]:
            print(kind, kernel, file=asked, flush=True)
            return json.loads(said.readline() or '{"builds": 0, "failed": "the process has ended"}')

        yield ask
        asked.close()


@pytest.mark.parametrize("kernel", entry_kernels())
def test_a_kernel_compiles(kernel: str, compiled: Callable[[str, str], dict[str, Any]]) -> None:
    """For one architecture, in half precision."""
    assert compiled("quick", kernel) == {"builds": 1, "failed": None}


@pytest.mark.slow
@pytest.mark.parametrize("kernel", entry_kernels())
def test_a_kernel_compiles_for_sm80_sm89_sm90(kernel: str, compiled: Callable[[str, str], dict[str, Any]]) -> None:
    """In every size and type that decides what a program holds."""
    found = compiled("slow", kernel)
    assert found["failed"] is None and found["builds"] >= 1
