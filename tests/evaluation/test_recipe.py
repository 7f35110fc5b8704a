"""The recipe for the paper's models: its commands are the command line's, its table has the paper's figures."""

import importlib.util
import json
from dataclasses import fields
from importlib import import_module
from pathlib import Path

from sparsekv.cli import COMMANDS

PATH = Path(__file__).parents[2] / "examples" / "quality_recipe.py"
spec = importlib.util.spec_from_file_location("quality_recipe", PATH)
recipe = importlib.util.module_from_spec(spec)
spec.loader.exec_module(recipe)


def test_every_command_and_option_exists(tmp_path) -> None:
    steps = recipe.commands(recipe.MODELS[0], 8192, "books.txt", tmp_path, 5)
    assert [words[0] for _, words in steps] == ["capture", "train-router", "train-phi", "eval"]
    for _, (name, *words) in steps:
        row = COMMANDS[name]
        known = {f.name for f in fields(getattr(import_module(row.module), row.config))}
        assert {w[2:].replace("-", "_") for w in words if w.startswith("--")} <= known


def test_the_table_has_the_papers_figures_and_ours_where_there_are_any(tmp_path) -> None:
    text = recipe.draw(tmp_path)
    assert "| full | 80.5 / – |" in text and text.count(" / ") == 6 * 8 * 5 + 1
    assert "| topk+phi | 63.0 / – | 64.1 / – | 64.7 / – | 65.3 / – | 65.5 / – |" in text
    assert "| topk | – / – | 76.1 / – | 77.6 / – | 78.3 / – | 79.0 / – |" in text
    folder = tmp_path / "Qwen3-1.7B" / "16384" / "eval"
    folder.mkdir(parents=True)
    row = {"case": "ruler@16384", "metric": "score", "method": "topk", "budget": 0.01, "value": 81.25}
    (folder / "results.json").write_text(json.dumps([row, {**row, "method": "full", "budget": None, "value": 83.0}]))
    text = recipe.draw(tmp_path)
    assert "| topk | 82.4 / 81.2 | 82.9 / – |" in text and "| full | 82.5 / 83.0 |" in text
