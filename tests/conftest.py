"""Tests decode sparsely however short their prompts are; `dense_below` has tests of its own."""

import pytest


@pytest.fixture(autouse=True)
def sparse_on_short_caches(monkeypatch) -> None:
    monkeypatch.setattr("sparsekv.runtime.decoding.DENSE_BYTES", {})
