"""The evaluation's tests use the runtime's tiny models, and a tokenizer of single characters."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "runtime"))


@pytest.fixture(scope="session")
def tokenizer():
    from tiny import make_tokenizer

    return make_tokenizer()


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory):
    """Folder of the tiny model with its tokenizer."""
    from tiny import save_model

    return save_model(tmp_path_factory.mktemp("model"))
