"""README: every figure of it is in a row or on the page that explains it; it is short; pages are guides, not logs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks._first_page import card
from benchmarks._real_page import FIRST

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted((ROOT / "docs").rglob("*.md"))
METHODS = {"full attention": "full", "exact top-k": "topk", "sketch": "sketch",
           "sketch + untrained centroids": "sketch+centroid", "sketch + φ": "sketch+phi", "TokenSelect": "token_select",
           "LFPS": "lfps:alpha=0.1:fills=true", "Quest": "quest", "MagicPIG": "magicpig"}
"""What README calls a method, and what rows do."""
EXPLAINED = {
    "60 points": "docs/results/real.md", "8B": "docs/runtime.md",
    "1.5B": "docs/results/phi.md", "3.11": "pyproject.toml", "7 minutes": "docs/start.md",
    "1, 2 and 5 %": "docs/how-to/budget.md", "1 %": "docs/serving.md", "16k": "docs/how-to/prompts.md",
    "32k": "docs/how-to/prompts.md",
    "30k tokens": "docs/results/generate.md",
    "128k tokens": "docs/serving.md", "6.3 ms": "docs/serving.md", "8.8 ms": "docs/serving.md",
    "7.8": "docs/how-to/prompts.md", "1.0 to 1.5 points": "docs/how-to/prompts.md", "11.9": "docs/how-to/prompts.md"}
"""Figures of README's prose, and the page that has them too."""


def rows(name: str) -> list[dict[str, Any]]:
    return json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def between(name: str) -> str:
    return README.partition(f"<!-- {name} -->")[2].partition(f"<!-- end of {name} -->")[0]


def table(text: str) -> list[list[str]]:
    """The lines of a table, its header first."""
    lines = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| ---")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def budget_of(words: str) -> float | None:
    """`1 %` of a cell."""
    found = re.search(r"(\d+) %", words)
    return int(found[1]) / 100 if found else None


def shown(cell: str) -> float:
    """The number that a cell begins with."""
    found = re.match(r"[+−]?[\d.]+", cell)
    assert found is not None, cell
    return float(found[0].replace("−", "-"))


def only(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The one row of README's model, on the card and of the commit that README names."""
    found = [r for r in found if r["case"].startswith(f"{FIRST[0]}:")
             and f"{card(r)}." in between("first").partition("errors are of ")[2]]
    assert len(found) == 1, found
    return found[0]


def test_the_table_is_in_the_rows() -> None:
    header, *lines = table(between("first"))
    first = budget_of(header[0])
    real = [r for r in rows("real") if r["case"].endswith((f":ruler@{FIRST[1]}", f":perplexity_prose@{FIRST[1]}"))]
    assert len(lines) >= 5
    for name, points, read, error, *_ in lines:
        name, _, more = name.replace(" (scores every key)", "").strip("*").partition(",")
        method = METHODS[name]
        budget = None if method == "full" else budget_of(more) or first
        metric = "score" if method == "full" else "difference"
        one = only([r for r in real if (r["metric"], r["method"], r["budget"]) == (metric, method, budget)
                    and r.get("against", "full") == "full"])
        assert shown(points.removeprefix("0 (score ")) == pytest.approx(one["value"], abs=0.051)
        assert shown(points.partition("± ")[2]) == pytest.approx((one["high"] - one["low"]) / 2, abs=0.051)
        if method != "full":
            one = only([r for r in real if (r["metric"], r["method"], r["budget"]) == ("score", method, budget)])
            assert f", {one['samples']} prompts" in name + more or f" {one['samples']} prompts" in between("first")
            assert shown(read) == pytest.approx(100 * one["bytes_share"], abs=0.051)
        if error not in ("–", "0"):
            one = only([r for r in real if (r["metric"], r["method"], r["budget"]) == ("rel_err", method, first)])
            assert shown(error) == pytest.approx(one["value"], abs=0.00051)


COLUMNS = {
    "a token, this model, one request of 30k [ms]": ("generate", "coder-30k-b1", "loop_ms", 0.051),
    "a token, this model, 24 requests of 16k [ms]": ("generate", "coder-16k-b24", "loop_ms", 0.051),
    "a token, an 8B shape, one request of 128k [ms]": ("generate", "8b-128k-b1", "loop_ms", 0.051),
    "a step of one layer, 8B shape, 128k [µs]": ("decode", "32x8-128k-b1", "us", 0.51)}
"""Headers of times: file, case and metric of the rows, and half the last digit."""
TIMED = {"full attention": ("dense", "sdpa_cudnn"), "sketch": ("sketch", "sparse_sketch"),
         "sketch + φ": ("sketch_phi", "sparse_sketch_phi")}


def test_the_times_of_a_column_are_in_the_rows_of_one_card_and_commit() -> None:
    header, *lines = table(between("first"))
    assert len(header) > 4
    for number, name in enumerate(header[4:], start=4):
        file, case, metric, digit = COLUMNS[name]
        timed = {line[0].strip("*"): shown(line[number]) for line in lines if line[number] != "–"}
        assert set(timed) == set(TIMED)
        runs: dict[tuple[str, str], dict[str, float]] = {}
        for r in rows(file):
            if r["case"].partition(",")[0] == case and r["metric"] == metric and r["commit"] in between("first"):
                runs.setdefault((r["machine"], r["commit"]), {})[r["method"]] = r["value"]
        for (machine, _), run in runs.items():  # torch's own attention is of the same card, at a commit that is named
            run.update({m: v for (other, _), others in runs.items() if other == machine for m, v in others.items()
                        if m.startswith("sdpa") and m not in run})
        assert any(all(value == pytest.approx(run.get(TIMED[m][file == "decode"], -1.0), abs=digit)
                       for m, value in timed.items()) for run in runs.values()), name


def test_differences_are_in_the_rows() -> None:
    real = [r for r in rows("real") if r["case"].startswith(FIRST[0]) and r["metric"] == "difference"
            and r["case"].endswith(f":ruler@{FIRST[1]}")]
    _, *lines = table(between("facts").partition("| sketch + φ at")[0])
    assert len(lines) >= 5
    for method, against, budget, samples, points, interval, says in lines:
        elsewhere = method.endswith("†")  # of another run of the same model
        found = [r for r in real if (r["method"], r["against"], r["budget"], not r["case"].startswith(f"{FIRST[0]}:"))
                 == (METHODS[method.strip(" †")], METHODS[against.strip(" †")], budget_of(budget), elsewhere)]
        low, high = (float(x.replace("−", "-")) for x in interval.split(" to "))
        assert any(shown(points) == pytest.approx(r["value"], abs=0.051) and low == pytest.approx(r["low"], abs=0.051)
                   and high == pytest.approx(r["high"], abs=0.051) and r["samples"] == int(samples)
                   for r in found), (method, against, points)
        assert says == ("higher" if low > 0 else "lower" if high < 0 else "not significant")


def test_other_runs_and_lengths_are_in_the_rows() -> None:
    header, *lines = table("".join(between("facts").partition("| sketch + φ at")[1:]))
    budgets = [budget_of(name) for name in header[3:5]]
    assert len(lines) == 3
    for length, windows, prompts, *points, place in lines:
        long = length == windows == "32k"
        found = [r for r in rows("real") if r["metric"] == "difference" and r["method"] == "sketch+phi"
                 and r["case"] == f"{FIRST[0]}{'-32k' if long else ''}:ruler@{int(length[:-1]) * 1024}"
                 and r["against"] == "full" and r["samples"] == int(prompts) and card(r) == f"one {place}"]
        for budget, said in zip(budgets, points, strict=True):
            one, = [r for r in found if r["budget"] == budget]
            assert shown(said) == pytest.approx(one["value"], abs=0.051)
            assert shown(said.partition("± ")[2]) == pytest.approx((one["high"] - one["low"]) / 2, abs=0.051)


def test_the_times_of_a_server_are_of_its_rows() -> None:
    times = {r["method"]: r["value"] for r in rows("serving")
             if r["case"] == "8b-128k-b1" and r["metric"] == "token_ms"}
    words = README.partition("vLLM serves with")[2].partition("\n\n")[0]
    assert f"{times['vllm_sparsekv']:.1f} ms" in words and f"{times['vllm_fa3']:.1f} ms" in words


def test_no_other_figure_stands_in_readme_that_no_page_explains() -> None:
    prose = README
    for name in ("first", "facts"):
        prose = prose.replace(between(name), "")
    prose = re.sub(r"^```.*?^```", "", prose, flags=re.DOTALL | re.MULTILINE)
    prose = re.sub(r"!?\[[^]]*\]\([^)]*\)", "", prose)
    for figure, page in EXPLAINED.items():
        assert figure in README and figure in (ROOT / page).read_text(encoding="utf-8"), (figure, page)
        prose = prose.replace(figure, "")
    assert not re.findall(r"(?<![\w.])\d[\d.,]*\w*", prose.replace("Apache-2.0", "")), "a figure without its page"


def test_readme_is_short_and_its_links_lead_somewhere() -> None:
    assert len(README.splitlines()) <= 120
    for target in re.findall(r"\]\((?!http)([^)#]+)", README):
        assert (ROOT / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_a_page_is_no_longer_than_250_lines_but_its_tables(page: Path) -> None:
    lines = [line for line in page.read_text(encoding="utf-8").splitlines() if not line.startswith("|")]
    assert len(lines) <= 250


GUIDES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md",
          *(p for p in PAGES if p.parent.name not in ("log", "results") and p.stem != "changelog")]
HISTORY = ("no longer", "of before", "without more words", "unless told", "used to be", "before this", "until now")
"""What only the log says."""


def prose(page: Path) -> str:
    """A page without code, tables, headings and the addresses of links."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    text = "\n".join(line for line in text.splitlines() if not line.startswith(("|", "#", "<")))
    return re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "", text))


@pytest.mark.parametrize("page", GUIDES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_a_sentence_of_a_guide_has_few_figures(page: Path) -> None:
    text = prose(page)
    if page == ROOT / "README.md" or page.stem == "index":
        text = re.sub(r"^- \w+: .*$", "", text, flags=re.MULTILINE)  # where the rows of the table are from
    for sentence in re.split(r"(?<=[.:;])\s+|\n\n|\n- ", text):
        figures = re.findall(r"(?<![\w.\-])[−+]?\d[\d.,]*\w*", sentence)
        assert len(figures) <= 4, f"three numbers make a table: {sentence}"


@pytest.mark.parametrize("page", [*GUIDES, *sorted((ROOT / "docs" / "results").glob("*.md"))],
                         ids=lambda p: p.relative_to(ROOT).as_posix())
def test_history_stands_in_the_log_alone(page: Path) -> None:
    for words in HISTORY:
        assert words not in prose(page), f"{words!r} is history"


@pytest.mark.parametrize("folder", ["sparsekv", "benchmarks", "examples"])
def test_history_stands_in_no_comment(folder: str) -> None:
    for file in sorted((ROOT / folder).rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        for words in ("without more words", "unless told", "of before,", "of before.", "of now", "until now"):
            assert words not in text, f"{file.relative_to(ROOT)}: {words!r} is history"
