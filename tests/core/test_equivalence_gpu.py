"""What the runtime gives through the kernels = the formulas written out, for the tokens that it read: every selector
with every estimator on a CUDA device, in float32 closely, in bfloat16 loosely."""

from __future__ import annotations

import pytest
import torch
from literal import literal_step
from steps import CASES, CHUNK, COMPLETIONS, GROUPS, PADS, steps_of, tiny

pytestmark = pytest.mark.gpu
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""Largest relative error of a head's output; what is left of an estimate once the tokens that are read are taken out
is the difference of two sums."""


@pytest.fixture(autouse=True)
def no_tf32():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("dtype", list(LIMITS), ids=str)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("completion", COMPLETIONS)
@pytest.mark.parametrize("case", CASES)
def test_the_kernels_step_is_the_formulas_written_out(
    case: str, completion: str, group: int, dtype: torch.dtype, monkeypatch,
) -> None:
    if CASES[case][0] == "faiss":
        pytest.importorskip("faiss")
    taken, _ = steps_of(tiny(group, 16, dtype, "cuda"), case, completion, len(PADS), monkeypatch)
    first, last = taken[0], taken[-1]
    assert first.view.regions.tail_starts[0] < last.view.regions.tail_starts[0] and last.queries.count == CHUNK
    for x in (first, last):
        assert x.step.out.dtype == dtype and x.step.out.is_cuda
        out, truth = x.step.out.double().cpu(), literal_step(*x)
        error = (out - truth).norm(dim=-1) / truth.norm(dim=-1)
        assert float(error.max()) < LIMITS[dtype], f"{float(error.max()):.1e}"
        assert float((out - truth).norm() / truth.norm()) < LIMITS[dtype] / 4
