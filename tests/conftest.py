"""Tests decode sparsely however short their prompts are; `dense_below` has tests of its own. Without a GPU kernels run
under Triton's interpreter, which must be chosen before any module defines one. Where files are dealt out to processes
(`pytest -n`), each computes with one thread."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def sparse_on_short_caches(monkeypatch) -> None:
    monkeypatch.setattr("sparsekv.runtime.decoding.DENSE_BYTES", {})
