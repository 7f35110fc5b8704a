"""The tables of methods and options in the documentation, drawn from their rows (`sparsekv/core/registry.py`) and from
the fields of `SparseConfig`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from sparsekv.core.registry import ESTIMATOR_ROWS, PAPERS, SELECTOR_ROWS
from sparsekv.core.selectors import SELECTORS, Selector
from sparsekv.runtime.config import SparseConfig
from sparsekv.runtime.vllm.settings import Serving

ROOT = Path(__file__).resolve().parent.parent


def sources() -> list[list[str]]:
    """A line a paper: what comes from it."""
    found: dict[str, list[str]] = {}
    for name, row in (*SELECTOR_ROWS.items(), *ESTIMATOR_ROWS.items()):
        first = row.source.partition(";")[0]
        paper = next((p for p in PAPERS if first.startswith(p)), re.split(r" §|,|:", first)[0])
        found.setdefault(paper, []).append(f"`{name}`")
    titles = {paper: title if paper.endswith("paper") else f"{paper}: {title}" for paper, title in PAPERS.items()}
    return [["here", "source"], *([", ".join(names), titles.get(paper, paper)] for paper, names in found.items())]


def selectors() -> list[list[str]]:
    """A line a selector: source, what it reads, where it runs."""
    return [["selector", "source", "reads", "`offload`", "vLLM"], *(
        [f"`{name}`", row.source, row.reads, "" if SELECTORS[name].scores_keys else "yes", "yes" if row.served else ""]
        for name, row in SELECTOR_ROWS.items())]


def options() -> list[list[str]]:
    """A line an option of selectors: whose it is, what it is without it, what it does."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for name, kind in SELECTORS.items():
        for option in fields(kind):
            if option.metadata and option.name not in Selector.option_names():
                about = option.metadata["help"].replace("|", "\\|")
                found.setdefault((option.name, json.dumps(option.default), about), []).append(f"`{name}`")
    return [["option", "of", "default", "what it does"], *(
        [f"`{name}`", ", ".join(whose), "" if default == "null" else default.strip('"'), about]
        for (name, default, about), whose in found.items())]


def estimators() -> list[list[str]]:
    """A line an estimator: source, what stands for what is not read, what must have been trained."""
    return [["completion", "source", "what stands for what is not read", "trained"], *(
        [f"`{name}`", row.source, row.stands, "yes" if row.needs else ""] for name, row in ESTIMATOR_ROWS.items())]


def attach() -> list[list[str]]:
    """A line an option of sparse decoding."""
    return _fields(fields(SparseConfig))


def vllm() -> list[list[str]]:
    """A line an option that only vLLM has."""
    known = {field.name for field in fields(SparseConfig)}
    return _fields([field for field in fields(Serving) if field.name not in known])


def _fields(found: Sequence[Any]) -> list[list[str]]:
    lines = [["option", "default", "what it says"]]
    for field in found:
        about, default = field.metadata["help"], "" if field.default in (None, MISSING) else f"`{field.default}`"
        lines.append([f"`{field.name}`", default, (about() if callable(about) else about).replace("|", "\\|")])
    return lines


PLACES = {"docs/papers.md": (sources,), "docs/runtime.md": (attach, selectors, options, estimators),
          "docs/serving.md": (vllm,)}
"""Pages, and the tables in them: each between `<!-- methods: NAME -->` and `<!-- end -->`."""


def written(page: str) -> str:
    """A page of `PLACES` with its tables as the rows are now."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for draw in PLACES[page]:
        name, (header, *lines) = draw.__name__, draw()
        table = "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |")
                          for line in (header, ["---"] * len(header), *lines))
        head, start, rest = text.partition(f"<!-- methods: {name} -->\n")
        if not start or "<!-- end -->" not in rest:
            raise ValueError(f"{page} has no place for the table {name!r}; expected <!-- methods: {name} --> and "
                             "<!-- end -->")
        text = f"{head}{start}\n{table}\n\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
    return text


def write() -> None:
    for page in PLACES:
        (ROOT / page).write_text(written(page), encoding="utf-8")
