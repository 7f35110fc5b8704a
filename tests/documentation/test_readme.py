"""README's figures are those of the rows in docs/results/, and its links lead somewhere."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CASE = "coder-1.5b:ruler@16384"
METHODS = {"full attention": "full", "exact top-k": "topk", "sketch": "sketch",
           "sketch + untrained centroids": "sketch+centroid", "sketch + φ": "sketch+phi", "TokenSelect": "token_select",
           "LFPS": "lfps:alpha=0.1:fills=true"}
TIMED = {"full": "dense", "sketch": "sketch", "sketch+phi": "sketch_phi"}
COLUMNS = ("coder-16k-b24", "coder-30k-b1", "8b-128k-b1")
"""Cases of generate.json, by the first table's columns of times."""


@functools.cache
def load(file: str) -> list[dict[str, Any]]:
    return json.loads((ROOT / "docs" / "results" / f"{file}.json").read_text(encoding="utf-8"))


def rows(file: str, **fields: Any) -> list[dict[str, Any]]:
    """Rows of docs/results/FILE.json with these fields, of the commits that README names."""
    return [r for r in load(file) if r["commit"] in README and all(r.get(k) == v for k, v in fields.items())]


def lines(marker: str) -> Iterator[list[str]]:
    """Cells of the table lines between two markers that begin with a number or the name of a method."""
    for line in README.partition(f"<!-- {marker} -->")[2].partition("<!-- end")[0].splitlines():
        cells = [cell.strip(" *") for cell in line.strip("|").split("|")]
        if re.split(r",| \(", cells[0])[0] in METHODS or re.match(r"\d+k", cells[0]):
            yield cells


def numbers(cell: str) -> list[str]:
    return re.findall(r"-?\d+(?:\.\d+)?", cell.replace("−", "-"))


def shows(cell: str, *values: float) -> bool:
    """The cell's numbers are these values, to the digits that it has."""
    found = numbers(cell)
    return len(found) == len(values) and all(
        abs(float(x) - v) <= 0.51 * 10 ** -len(x.partition(".")[2]) for x, v in zip(found, values, strict=True))


def half(row: dict[str, Any]) -> float:
    return (row["high"] - row["low"]) / 2


def test_figures_of_the_first_table_are_in_the_rows() -> None:
    commit = re.findall(r"Points, bytes and errors are of .*commit (\w{7})", README)[0]
    commits = re.findall(r"Commits of the columns: (\w{7}), (\w{7}), (\w{7})", README)[0]
    most, = re.findall(r"\d+ prompts where", README)
    table = list(lines("first"))
    assert len(table) >= 5
    for name, points, read, error, *times in table:
        method = METHODS[re.split(r",| \(", name)[0]]
        budget = None if method == "full" else 0.01
        of = {"method": method, "budget": budget, "commit": commit}
        score, = rows("real", case=CASE, metric="score", **of)
        if method == "full":
            assert shows(points, 0, score["value"], half(score)) and shows(error, 0)
        else:
            change, = rows("real", case=CASE, metric="difference", against="full", **of)
            assert shows(points, change["value"], half(change)) and shows(read, 100 * score["bytes_share"]), name
            assert score["samples"] == int(re.findall(r"(\d+) prompts", f"{name}, {most}")[0]), name
            if error != "–":
                found, = rows("real", case=CASE.replace("ruler", "perplexity_prose"), metric="rel_err", **of)
                assert shows(error, found["value"]), name
        for cell, case, one in zip(times, COLUMNS, commits, strict=True):
            assert (cell == "–") == (method not in TIMED)
            if method in TIMED:
                values = [r["value"] for r in rows("generate", case=case, method=TIMED[method], metric="loop_ms",
                                                   commit=one) if "H200" in r["machine"]]
                assert any(shows(cell, value) for value in values), (name, case, values)


def test_figures_of_differences_are_in_the_rows() -> None:
    table = list(lines("facts"))
    assert len(table) >= 8
    for cells in table:
        if cells[0] in METHODS:
            method, against, budget, samples, points, interval, says = cells
            found = rows("real", case=CASE, metric="difference", method=METHODS[method], against=METHODS[against],
                         budget=int(numbers(budget)[0]) / 100, samples=int(samples))
            assert any(shows(points, r["value"]) and shows(interval, r["low"], r["high"]) and says == (
                "higher" if r["low"] > 0 else "lower" if r["high"] < 0 else "not significant") for r in found), cells
        else:
            length, _, samples, *points, place = cells
            for budget, cell in zip((0.01, 0.02), points, strict=True):
                found = [r for r in rows("real", metric="difference", method="sketch+phi", against="full",
                                         budget=budget, samples=int(samples))
                         if r["case"].endswith(f"ruler@{int(length[:-1]) * 1024}") and r["commit"] in place]
                assert any(shows(cell, r["value"], half(r)) for r in found), cells


@pytest.mark.parametrize(("words", "file", "metric", "methods"), [
    (r"a token takes ([\d.]+) ms .*own attention it takes ([\d.]+) ms", "serving", "token_ms",
     ("vllm_sparsekv", "vllm_fa3")),
    (r"after ([\d.]+) s on one H200. Full attention takes ([\d.]+) s", "prefill", "first_token_s",
     ("sparse@0.3", "dense"))])
def test_figures_of_sentences_are_in_the_rows(words: str, file: str, metric: str, methods: tuple[str, str]) -> None:
    found, = re.findall(words, " ".join(README.split()))
    for cell, method in zip(found, methods, strict=True):
        wanted = ("8b-128k-b1", metric, method)
        values = [r["value"] for r in load(file) if (r["case"], r["metric"], r["method"]) == wanted]
        assert any(shows(cell, value) for value in values), (cell, values)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_links_resolve(page: str) -> None:
    """`mkdocs build --strict` checks those of docs/."""
    for target in re.findall(r"\]\((?!http)([^)#]+)", (ROOT / page).read_text(encoding="utf-8")):
        assert (ROOT / target).exists(), target
