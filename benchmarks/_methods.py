"""The tables of methods, options and sizes in the documentation, drawn from the code that has them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from sparsekv.cli import COMMANDS, shown_options
from sparsekv.core.registry import ESTIMATOR_ROWS, PAPERS, SELECTOR_ROWS
from sparsekv.core.selectors import SELECTORS, Selector
from sparsekv.runtime.config import GROUP, SparseConfig
from sparsekv.runtime.vllm.settings import Serving
from sparsekv.trainers.estimate import GPU, ModelShape, estimate
from sparsekv.trainers.pipeline import ON_GPU, TrainConfig, _work, planned

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


def commands() -> list[list[str]]:
    """A line a command."""
    return [["command", "what it does"], *(
        [f"[`sparsekv {name}`]({'training-options.md' if name in TRAINING else ''}#sparsekv-{name.replace(' ', '-')})",
         row.help] for name, row in COMMANDS.items())]


def options_of(name: str) -> list[list[str]]:
    """A line an option of a command; those of sparse decoding are in `attach`."""
    row = COMMANDS[name]
    config = getattr(import_module(row.module), row.config)
    return _fields([f for f in shown_options(config) if f.metadata["typer"].get("rich_help_panel") != GROUP], flag=True)


def sizes() -> list[list[str]]:
    """A line a model: what `sparsekv train` takes on one GPU of 80 GB, by the formulas of its estimate."""
    lines = [["", "windows, length [tokens]", "capture on disk [GB]", "artifacts [GB]", "memory, capture [GB]",
              "memory, training [GB] (layers at once)", "capture [s]", "router [s]", "φ [s]", "quality cards [s]"]]
    for name, (shape, longest) in SIZES.items():
        plan = planned(TrainConfig("m", "c", "o"), ON_GPU, shape, longest, 80_000_000_000)
        found, layers = estimate(shape, _work(plan), GPU), plan.layer_group or shape.layers
        lines.append([name, f"{plan.documents}, {plan.context_length:,}" if plan.context_length >= 10_000
                      else f"{plan.documents}, {plan.context_length}",
                      *(f"{x:.0f}" if x >= 10 else f"{x:.1f}" for x in (
                          found.store / 1e9, found.artifacts / 1e9, found.capture_memory / 1e9)),
                      f"{found.training_memory(layers) / 1e9:.0f} ({layers})",
                      *(f"{x:.0f}" for x in (found.capture_seconds, found.router_seconds, found.phi_seconds,
                                             found.card_seconds + found.text_seconds))])
    return lines


def _fields(found: Sequence[Any], flag: bool = False) -> list[list[str]]:
    lines = [["option", "default", "what it says"]]
    for field in found:
        about = field.metadata["help"]
        plain = field.default in (None, MISSING) or callable(field.default)
        typer = field.metadata["typer"]
        name = typer["names"][0] if typer.get("names") else (
            field.name.upper() if typer.get("argument") else f"--{field.name.replace('_', '-')}")
        default = "needed" if flag and field.default is MISSING and field.default_factory is MISSING else (
            "" if plain else f"`{field.default}`")
        lines.append([f"`{name if flag else field.name}`", default,
                      (about() if callable(about) else about).replace("|", "\\|").replace("\n", " ")])
    return lines


TRAINING = ("train", "capture", "train-router", "train-phi")
"""Commands whose options have a page of their own."""
SIZES = {"SmolLM2-135M": (ModelShape(134_515_008, 30, 30, 9, 3, 64, 1536, 2), 8192),
         "Llama-3.2-1B": (ModelShape(1_235_814_400, 16, 16, 32, 8, 64, 8192, 2), 131_072),
         "Llama-3.1-8B": (ModelShape(8_030_000_000, 32, 32, 32, 8, 128, 14336, 2), 131_072),
         "Qwen3-8B": (ModelShape(8_190_735_360, 36, 36, 32, 8, 128, 12288, 2), 40_960),
         "Qwen3-32B": (ModelShape(32_762_123_264, 64, 64, 64, 8, 128, 25600, 2), 40_960),
         "Llama-3.1-70B": (ModelShape(70_553_706_496, 80, 80, 64, 8, 128, 28672, 2), 131_072)}
"""Models and their longest context [tokens]."""
PLACES: dict[str, dict[str, Callable[[], list[list[str]]]]] = {
    "docs/papers.md": {"sources": sources}, "docs/train.md": {"sizes": sizes}, "docs/serve.md": {"vllm": vllm},
    "docs/reference.md": {"attach": attach, "selectors": selectors, "options": options, "estimators": estimators},
    "docs/commands.md": {"commands": commands, **{n: partial(options_of, n) for n in COMMANDS if n not in TRAINING}},
    "docs/training-options.md": {name: partial(options_of, name) for name in TRAINING}}
"""Pages, and the tables in them: each between `<!-- methods: NAME -->` and `<!-- end -->`."""


def written(page: str) -> str:
    """A page of `PLACES` with its tables as the rows are now."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for name, draw in PLACES[page].items():
        header, *lines = draw()
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
