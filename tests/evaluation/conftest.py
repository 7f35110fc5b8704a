"""A tokenizer of single characters."""

import pytest


@pytest.fixture(scope="session")
def tokenizer():
    from tiny import make_tokenizer

    return make_tokenizer()

