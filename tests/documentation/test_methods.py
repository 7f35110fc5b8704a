"""What pages say of methods and options is what the code says, and tables of results are those of the rows."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks import _methods, pages
from benchmarks._rows import RESULTS
from sparsekv.core.registry import SELECTOR_ROWS

AGAIN = "run `python benchmarks/pages.py`"
ROOT = pages.ROOT
DRAWN = {path.relative_to(ROOT).as_posix(): text for path, text in pages.pages().items()}


@pytest.mark.parametrize("page", _methods.PLACES)
def test_tables_of_methods_are_drawn_from_the_code(page: str) -> None:
    assert (ROOT / page).read_text(encoding="utf-8") == _methods.written(page), AGAIN


@pytest.mark.parametrize("page", DRAWN)
def test_tables_of_results_are_drawn_from_their_rows(page: str) -> None:
    assert (ROOT / page).read_text(encoding="utf-8") == DRAWN[page], AGAIN


def test_every_subject_is_shown(monkeypatch) -> None:
    asked, subject = set(), pages.subject
    monkeypatch.setattr(pages, "subject", lambda name: asked.add(name) or subject(name))
    pages.pages()
    assert {f.name.removesuffix(pages.SUFFIX) for f in RESULTS.glob(f"*{pages.SUFFIX}")} <= asked


def test_a_cell_refuses_rows_that_differ() -> None:
    row = {"case": "c", "value": 1.0, "machine": "m, torch 2", "commit": "a", "low": 0.5, "high": 2.5}
    rows = [row, {**row, "commit": "b"}]
    assert pages.Cell(where={"case": "c"}, spread="±").drawn(rows, {}) == "1.0 ± 1.0"
    assert pages.Cell(where={"case": "c"}, form="{:+.1f} %", scale=100, less=2.0).drawn(rows, {}) == "−100.0 %"
    assert pages.Cell(where={"case": "other"}).drawn(rows, {}) == pages.MISSING
    with pytest.raises(ValueError, match="expected one"):
        pages.Cell(where={"case": "c"}).drawn([row, {**row, "value": 2.0}], {})


def test_a_table_has_a_line_for_every_value_and_none_for_nothing(monkeypatch) -> None:
    def row(method: str, budget: float | None, value: float) -> dict:
        return {"method": method, "budget": budget, "value": value, "machine": "NVIDIA H200, torch 2",
                "commit": "a and b"}

    monkeypatch.setattr(pages, "subject", lambda name: [row("b", 0.01, 4.0), row("a", 0.01, 2.0), row("a", 0.02, 1.0)])
    table = pages.Table("T", "s", {"method": "method"}, [
        pages.Cell("1 %", {"budget": 0.01}), pages.Cell("ratio", {"budget": 0.02}, "{:.0f} ×", under={"budget": 0.01})],
        {"method": ("a", "b", "c")})
    assert table.drawn() == ["## T", "", "H200, commits a, b.", "", "| method | 1 % | ratio |", "| --- | ---: | ---: |",
                             "| a | 2.0 | 2 × |", "| b | 4.0 | – |", ""]
    assert b"<svg" in pages.picture(dataclasses.replace(table, chart="ms"))
    assert dataclasses.replace(table, where={"method": "none"}).drawn() == []


def test_every_paper_has_its_page() -> None:
    page = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    for name, row in SELECTOR_ROWS.items():
        assert f"`{name}" in page or row.source.startswith(("baseline", "this project")), name
