"""README can be read in a minute; its links, those of the pages, and the tests that pages name lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted((ROOT / "docs").rglob("*.md"))
USED = ("start", "concepts", "train", "budget", "serve", "measure", "small-card", "prompts", "questions", "reference")


def test_readme_is_short_and_has_few_numbers_first() -> None:
    lines = README.splitlines()
    assert len(lines) <= 75
    assert len(re.findall(r"\d+(?:\.\d+)?", "\n".join(lines[:40]))) <= 20
    assert not re.search(r"\b(?=\w*\d)(?=\w*[a-f])[0-9a-f]{7}\b", README), "a commit"
    header = next(line for line in lines if line.startswith("| ") and "full attention" in line)
    assert header.strip("|").count("|") <= 3


@pytest.mark.parametrize("name", USED)
def test_a_page_to_use_it_is_short(name: str) -> None:
    assert len((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8").splitlines()) < 200


def test_pages_are_few_enough_to_read() -> None:
    pages = [p for p in ROOT.rglob("*.md") if {"log", ".venv", ".venv-vllm"}.isdisjoint(p.parts)]
    assert sum(len(p.read_text(encoding="utf-8").splitlines()) for p in pages) <= 5000


def test_benchmarks_are_few_enough_to_read() -> None:
    assert sum(len(p.read_text(encoding="utf-8").splitlines()) for p in (ROOT / "benchmarks").glob("*.py")) <= 5500


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_links_resolve(page: str) -> None:
    """`mkdocs build --strict` checks those of docs/."""
    for target in re.findall(r"\]\((?!http)([^)#]+)", (ROOT / page).read_text(encoding="utf-8")):
        assert (ROOT / target).exists(), target


def test_links_to_headings_hold_on_github_too() -> None:
    """mkdocs makes other anchors of a heading with signs in it: `, 1 %` becomes `-1`, on GitHub `-1-`."""
    def anchors(page: Path) -> set[str]:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^#+ (.+?) *$", text, re.M)}

    for page in PAGES:
        for target, anchor in re.findall(r"\]\((?!http)([^)#\s]*)#([^)\s]+)\)", page.read_text(encoding="utf-8")):
            there = (page.parent / target).resolve() if target else page
            assert there.suffix != ".md" or anchor in anchors(there), (page, target, anchor)


def test_named_tests_and_scripts_are_there() -> None:
    for page in PAGES:
        if "log" not in page.parts:
            text = page.read_text(encoding="utf-8")
            for name in re.findall(r"`((?:tests|benchmarks|examples|sparsekv)/[\w/.]+)`", text):
                assert (ROOT / name).exists(), (page, name)
