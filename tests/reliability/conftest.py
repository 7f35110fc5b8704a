"""Models on disk and command lines as processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "tests" / room) for room in ("capture", "trainers", "runtime")]


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory) -> Path:
    """Folder of a tiny model with its tokenizer."""
    from tiny import save_model

    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def sparsekv():
    """Starts the command line in a process of its own: `sparsekv("capture", "--model", ...)`."""
    def start(*words: object, **variables: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-m", "sparsekv.cli", *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables})

    return start
