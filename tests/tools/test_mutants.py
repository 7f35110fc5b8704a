"""The faults that `mutants.py` plants can be planted in the code as it is."""

from pathlib import Path

from mutants import ROOT, near, planted, read_table


def test_every_fault_can_be_planted_and_has_tests_near_it() -> None:
    faults, table = read_table([])
    assert len(faults) >= 40
    for fault in faults:
        assert planted(fault) != (ROOT / fault["file"]).read_text(encoding="utf-8")
        assert near(fault, table, Path(__file__).parents[1])
