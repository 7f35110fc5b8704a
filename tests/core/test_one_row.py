"""A selector that somebody else wrote: one class and one row, in this file, and it is everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import pytest
import test_equivalence as equivalence
import torch
from steps import cases
from typer.testing import CliRunner

from sparsekv.cli import app
from sparsekv.core.layer import LayerView, Queries, Selection
from sparsekv.core.registry import SELECTOR_ROWS, SelectorRow, register
from sparsekv.core.selectors import SELECTORS, Selector


@dataclass(eq=False)
class EveryThird(Selector):
    """Every third token of the mid region, as many as the budget pays for."""

    name: ClassVar[str] = "third"
    row_state: ClassVar[tuple[str, ...]] = ("kept",)

    def build(self, view: LayerView) -> None:
        number = torch.arange(self.widest, device=view.device)
        places = view.regions.mid_first[:, None] + 3 * number
        inside = (places < view.regions.mid_last[:, None]) & (number < self.budget[:, None])
        self.kept = torch.where(inside, places, -1)[:, None].expand(-1, view.num_kv_heads, -1)

    def select(self, view: LayerView, queries: Queries) -> Selection:
        return Selection(tokens=queries.per_query(self.kept))


ROW = SelectorRow("third", EveryThird, "every third token", "this test", label="every third", colour="#13579b",
                  lane="rival", usual=True, diagnosed=True)


@pytest.fixture
def registered() -> Iterator[None]:
    register(ROW)
    yield
    del SELECTOR_ROWS[ROW.name]


@pytest.fixture
def rows(registered) -> list[dict]:
    from sparsekv.evaluation.scores import score_rows

    return score_rows([
        {"case": f"{task}@4096", "method": method, "budget": None if method == "full" else budget, "indices": [0, 1],
         "scores": [0.5, 0.7], "read": 0.03, "cache_tokens": 9.0, "tokens": 4000, "seconds": 1.0}
        for task in ("niah_single_1", "niah_single_2") for method in ("full", "third", "router+phi")
        for budget in (0.02, 0.05)])


def test_it_stands_in_a_table_with_its_paper(rows) -> None:
    from sparsekv.evaluation.tables import methods_table, report_tables

    tables, _ = report_tables(rows)
    (lane_b,) = (t for t in tables if "Lane B" in t.title)
    assert [line[0] for line in lane_b.rows] == ["full", "third", "router+phi"]
    assert any(r["against"] == "third" for r in rows if r["metric"] == "difference"), "a system that router + φ meets"
    assert ["third: every third token", "this test"] in methods_table(rows).rows


def test_it_is_drawn_in_its_colour_by_its_label(rows) -> None:
    from sparsekv.evaluation.figures import score_by_budget

    svg = score_by_budget(rows, "ruler@4096")
    assert ROW.colour in svg and f">{ROW.label}<" in svg


@pytest.mark.parametrize("command", [["generate"], ["eval"]])
def test_help_names_it(command: list[str], registered) -> None:
    shown = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "300", "TERMINAL_WIDTH": "300"})
    assert shown.exit_code == 0 and " third" in shown.output


def test_it_is_measured_and_shown_like_any_other(registered) -> None:
    from sparsekv.evaluation.demo_report import shown
    from sparsekv.evaluation.methods import parse_methods, usual_methods

    assert {"third", "third+phi"} <= set(usual_methods(("phi",))) and "third" in {m.name for m in shown()}
    assert parse_methods(["third+centroid"], [0.1])[0].artifacts == []


def test_its_steps_are_the_formulas_written_out(registered, monkeypatch) -> None:
    assert "third" in cases()
    for completion in equivalence.COMPLETIONS:
        equivalence.test_a_step_is_the_formulas_written_out("third", completion, 3, monkeypatch)
        equivalence.test_a_step_on_captured_tensors_is_that_of_the_runtime("third", completion, 3, monkeypatch)


def test_a_name_is_given_once(registered) -> None:
    for name in ("third", "full", "none", "phi"):
        with pytest.raises(ValueError, match="is taken"):
            register(SelectorRow(name, EveryThird, "", ""))


@pytest.mark.parametrize("name", SELECTORS)
def test_a_row_is_of_its_class(name: str) -> None:
    kind, row = SELECTORS[name], SELECTOR_ROWS[name]
    assert kind.name == name and bool(row.needs) == kind.is_trained()
