"""Needle prompts, the tables drawn from rows, and the page they stand in."""

import re

from sparsekv.evaluation.figures import error_by_budget, mass_by_keys, training_curves
from sparsekv.evaluation.own_tasks import NEEDLE, QUESTION, make_needles
from sparsekv.evaluation.report import Figure, Table, write_report
from sparsekv.evaluation.scores import score_rows
from sparsekv.evaluation.tables import summary


class Letters:
    def __call__(self, text: str, **_: object) -> dict:
        return {"input_ids": [ord(c) for c in text]}


def test_needles_have_the_length_the_depth_and_the_number() -> None:
    needles = make_needles(Letters(), [ord("x")] * 700, length=400, count=4)
    for needle in needles:
        text, (number,) = "".join(map(chr, needle.prompt)), needle.targets
        assert len(text) == 400 and text.endswith(QUESTION) and text.count(number) == 1
        assert abs(text.index(number) / 400 - needle.depth) < 0.25
    assert len({tuple(n.targets) for n in needles}) == 4 and [n.index for n in needles] == [0, 1, 2, 3]
    deep = make_needles(Letters(), [ord("x")] * 100, length=400, count=2, depths=[0.0, 1.0])
    assert [n.depth for n in deep] == [0, 0, 1, 1] and deep[0].prompt[:20] == [ord(c) for c in NEEDLE[:20]]
    assert {len(n.prompt) for n in deep} == {400}


def test_the_table_is_drawn_from_the_rows() -> None:
    shared = {"method": "router+phi", "budget": 0.05, "tokens": 100, "seconds": 1.0}
    cells = [{**shared, "case": "needle@128", "indices": list(range(5)), "scores": [1.0, 1.0, 0.0, 0.0, 0.0],
              "answers": ["x"] * 5, "depths": [0.1, 0.1, 0.1, 0.5, 0.5], "read": 0.3}]
    cells += [{**shared, "case": "perplexity@128", "indices": [i], "losses": [loss], "errors": [error], "read": read}
              for i, (loss, error, read) in enumerate(((1.0, 0.1, 0.2), (3.0, 0.3, 0.4)))]
    rows = score_rows(cells)
    assert summary(rows) == [["router, 5 % + φ", "2 of 5", "7.39", "0.200", "30.0%"]]
    assert summary([r for r in rows if r["task"] == "needle"]) == [["router, 5 % + φ", "2 of 5", "–", "–", "–"]]
    found = {(r["metric"], r.get("depth")): r for r in rows}
    low = found["perplexity", None]["low"]
    assert abs(low - 2.71828) < 1e-4 and found["perplexity", None]["samples"] == 2
    assert 0 <= found["score", None]["low"] < 40 < found["score", None]["high"] <= 100
    assert found["needle", 0.1]["value"] == 2 / 3 and found["needle", 0.5]["samples"] == 2


def test_a_row_names_every_commit_of_its_cells() -> None:
    one = {"case": "a@128", "method": "full", "budget": None, "read": 1.0, "bytes": 1.0, "tokens": 100, "seconds": 1.0,
           "scores": [1.0]}
    cells = [{**one, "indices": [i], "origin": {"machine": "m", "command": "c", "commit": commit}}
             for i, commit in enumerate(("b", "a", "b"))]
    assert {r["commit"] for r in score_rows(cells)} == {"a and b"}
    assert {r["commit"] for r in score_rows(cells[::2])} == {"b"}


def test_the_report_is_one_file_with_every_figure(tmp_path) -> None:
    errors = {"topk": [0.2, 0.1], "streaming+phi": [0.3, 0.3]}
    figures = [error_by_budget([0.01, 0.1], errors),
               mass_by_keys([0.001, 0.1, 0.5, 1.0], {"first": [0.1, 0.5, 0.9, 1.0]}),
               training_curves({"router training": ([1, 2], [3.0, 2.0]), "phi training": ([1, 2], [3.0, 2.0])})]
    page = write_report(tmp_path / "r.html", "A <title>", "intro", [Table("t", ["a", "b"], [["1", "<2>"]], "note")],
                        [Figure(f"f{i}", svg, "caption") for i, svg in enumerate(figures)]).read_text()
    assert page.count("<svg") == 3 and "&lt;title&gt;" in page and "&lt;2&gt;" in page
    assert not re.findall(r'(?:src|href)="https?:', page)
    assert "exact top-k" in page and "currentColor" in page and "prefers-color-scheme: dark" in page
