"""Tests decode sparsely however short their prompts are; `dense_below` has tests of its own. Without a GPU kernels run
under Triton's interpreter, which must be chosen before any module defines one."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def sparse_on_short_caches(monkeypatch) -> None:
    monkeypatch.setattr("sparsekv.runtime.decoding.DENSE_BYTES", {})
