import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run(script: str, timeout: int = 280) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, str(HERE / script)], capture_output=True, text=True, timeout=timeout,
                          env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_attend_equals_its_twin_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    assert "worst" in run("attend_interpreted.py")


def test_route_equals_its_twin_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    assert "fine" in run("route_interpreted.py")


def test_kernels_compile_for_sm80_sm89_sm90() -> None:
    pytest.importorskip("triton")
    assert run("attend_compiled.py").count("bytes shared") == 98


def test_completion_equals_its_twin_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    assert "fine" in run("completion_interpreted.py")


def test_indexing_and_votes_equal_their_twins_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    assert "fine" in run("indexing_interpreted.py")
