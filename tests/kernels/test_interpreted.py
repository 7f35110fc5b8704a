"""The kernels under Triton's interpreter: odd sizes, several queries a row, poisoned outputs."""

from __future__ import annotations

from typing import Any

import checks
import pytest
import torch
from cases import FEW_PROGRAMS, Case, cases
from seating_traffic import empty_batch

from sparsekv.kernels import attend

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="test_kernels_gpu.py runs them on the device")


@pytest.mark.parametrize("case", cases("quick"))
def test_kernels(case: Case, run: Any) -> None:
    assert run(case, "cpu", **FEW_PROGRAMS) == case.kernels


@pytest.mark.slow
@pytest.mark.parametrize("case", cases("slow"))
def test_kernels_of_all_shapes(case: Case, run: Any) -> None:
    assert run(case, "cpu", **FEW_PROGRAMS) <= case.kernels


def test_a_launch_of_completed_attention_has_room() -> None:
    """128 dimensions, units and features, by queries a list, size of a number, and shared memory: keys at once."""
    blocks = {}
    for room in (101_376, 166_912, 232_448):  # sm_89, sm_80, sm_90
        for size in (2, 4):
            for group in (1, 4, 8, 16):
                how = attend.completed_launch(128, 128, 128, group, size, room)
                blocks[room, size, group] = how.block if how else 0
                assert how is None or attend.completed_bytes(how, 128, 128, 128, group, size) <= room
    assert [blocks[101_376, 2, group] for group in (1, 4, 8, 16)] == [32, 32, 16, 0]
    assert [blocks[166_912, 2, group] for group in (1, 4, 8, 16)] == [128, 128, 128, 32]
    assert [blocks[232_448, 2, group] for group in (1, 4, 8, 16)] == [128] * 4
    assert [blocks[232_448, 4, group] for group in (1, 4, 8, 16)] == [16] * 4
    assert attend.completed_launch(256, 128, 128, 4, 2, 232_448) is None


def test_attention_that_has_no_room_is_its_twin(run: Any) -> None:
    wide = attend.COMPLETED_DIM + 8
    case = Case(checks.check_completed, frozenset(), ((3, wide, 40, 20, 71), torch.float32), {}, {})
    assert run(case, "cpu") == set()


def test_bins() -> None:
    checks.check_bins()


def test_seats_of_a_batch_without_rows() -> None:
    empty_batch("cpu")
