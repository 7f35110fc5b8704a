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
def saved_model(tmp_path_factory, tokenizer):
    """Folder of the tiny model with its tokenizer."""
    from tiny import make_model

    folder = tmp_path_factory.mktemp("model")
    make_model().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
