"""The tables of methods in the documentation, drawn from their rows (`sparsekv/core/registry.py`)."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

from sparsekv.core.registry import ESTIMATOR_ROWS, PAPERS, SELECTOR_ROWS
from sparsekv.core.selectors import SELECTORS, Selector

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


PLACES = {"docs/papers.md": (sources,), "docs/runtime.md": (selectors, options, estimators)}
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
