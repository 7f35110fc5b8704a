"""What pages say of methods is what their rows say, and tables of results in them are those of the rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import tables
from benchmarks._methods import PLACES, ROOT, written
from sparsekv.core.registry import SELECTOR_ROWS


@pytest.mark.parametrize("page", PLACES)
def test_tables_of_methods_are_drawn_from_their_rows(page: str) -> None:
    assert (ROOT / page).read_text(encoding="utf-8") == written(page), "run `python benchmarks/tables.py methods`"


@pytest.mark.parametrize("page", tables.tables())
def test_tables_of_results_are_drawn_from_their_rows(page: str) -> None:
    assert (ROOT / page).read_text(encoding="utf-8") == tables.written(page), "run `python benchmarks/tables.py`"


def test_every_paper_has_its_page() -> None:
    page = Path(ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    for name, row in SELECTOR_ROWS.items():
        assert f"`{name}" in page or row.source.startswith(("baseline", "this project")), name
