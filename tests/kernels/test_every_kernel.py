"""No kernel is forgotten: each has a quick case, slow ones and some of a GPU. test_compiled.py compiles each."""

from __future__ import annotations

from cases import Check, entry_kernels, of_kind

from sparsekv.kernels import attend_triton


def test_every_kernel_has_cases_of_every_kind() -> None:
    missing = {kind: sorted(set(entry_kernels()) - {name for case in of_kind(kind) for name in case.kernels})
               for kind in Check._fields}
    assert missing == {"quick": [], "slow": [], "gpu": []}, "add cases to tests/kernels/cases.py"


def test_cases_name_kernels_that_are_there() -> None:
    named = {name for kind in Check._fields for case in of_kind(kind) for name in case.kernels}
    assert named == set(entry_kernels())


def test_kernels_are_found_in_the_code() -> None:
    """Those that are launched, not what they call."""
    found = {function for module, function in entry_kernels().values() if module == attend_triton.__name__}
    assert found == {name for name in vars(attend_triton) if name.endswith("_kernel")}
    assert not {"attend.locate", "routing.bucket_runs", "seating.settle"} & set(entry_kernels())
