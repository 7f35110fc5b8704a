"""The kernels behind capture's statistics: equal to the plain-torch twin in float64, and compiled for real GPUs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.parametrize("script", ["mass_interpreted.py", "mass_compiled.py"])
def test_attention_mass(script: str) -> None:
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, str(Path(__file__).parent / script)], capture_output=True, text=True,
                          env=clean, check=False)
    assert done.returncode == 0 and done.stdout.strip().endswith("ok"), done.stdout + done.stderr
