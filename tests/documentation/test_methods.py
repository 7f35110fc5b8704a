"""What pages say of methods is what their rows say, and tables and pages are those of the rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import tables
from benchmarks._methods import PLACES, ROOT, written
from sparsekv.core.registry import SELECTOR_ROWS

AGAIN = "run `python benchmarks/tables.py`"


@pytest.mark.parametrize("page", PLACES)
def test_tables_of_methods_are_drawn_from_their_rows(page: str) -> None:
    assert (ROOT / page).read_text(encoding="utf-8") == written(page), f"{AGAIN[:-1]} methods`"


@pytest.mark.parametrize("page", tables.PLACES)
def test_tables_of_results_are_drawn_from_their_rows(page: str) -> None:
    assert (ROOT / page).read_text(encoding="utf-8") == tables.written(page), AGAIN


@pytest.mark.parametrize("name", tables.PAGES)
def test_pages_of_results_are_drawn_from_their_rows(name: str) -> None:
    assert (tables.RESULTS / f"{name}.md").read_text(encoding="utf-8") == tables.PAGES[name](), AGAIN


def test_every_paper_has_its_page() -> None:
    page = Path(ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    for name, row in SELECTOR_ROWS.items():
        assert f"`{name}" in page or row.source.startswith(("baseline", "this project")), name
