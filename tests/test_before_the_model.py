"""A wrong path or option of any command is found before a model is loaded."""

import json
from pathlib import Path

import pytest

from sparsekv.cli import COMMANDS

CASES = {
    "generate": [
        ("no prompt file", "--prompt-file NOTHING"),
        ("no artifact at", "--prompt x --router NOTHING"),
        ("no artifact at", "--prompt x --phi NOTHING"),
        ("not an artifact", "--prompt x --router FOLDER"),
        ("unknown selector", "--prompt x --selector best"),
        ("has no option 'probes'", "--prompt x --selector streaming --probes 3"),
        ("whole number of tokens", "--prompt x --selector topk --token-budget 2.5"),
        ("unknown --placement", "--prompt x --placement disk"),
        ("prefill is 'half'", "--prompt x --prefill half"),
        ("unknown completion", "--prompt x --completion magic"),
        ("has no option 'candidates'", "--prompt x --selector topk --token-budget 9 --candidates 0.2"),
    ],
    "eval": [
        ("no artifact at", "--output NEW --router NOTHING"),
        ("no artifact at", "--output NEW --phi NOTHING"),
        ("no file at", "--output NEW --corpus NOTHING.txt"),
        ("unknown split", "--output NEW --split most"),
        ("no requests at", "--output NEW --requests NOTHING"),
        ("is a file", "--output FILE"),
        ("is a file", "--output FILE --resume"),
        ("something else", "--output FOLDER --overwrite"),
        ("could not write", "--output NEW --save-requests FILE/requests.jsonl"),
        ("unknown selector", "--output NEW --methods best"),
        ("must be a finite number", "--output NEW --methods lfps:alpha=much"),
        ("no option of selector", "--output NEW --methods topk:magic=3"),
        ("no method has it", "--output NEW --methods topk --candidates 0.2"),
        ("unknown --placement", "--output NEW --methods topk --placement disk"),
        ("scores keys at every step", "--output NEW --methods topk --placement offload"),
        ("--kv-memory must be a finite number from 0 on, or auto", "--output NEW --methods quest --kv-memory much"),
        ("scores keys at every step", "--output NEW --methods topk --kv-memory 4"),
        ("prefill is 'half'", "--output NEW --prefill half"),
        ("prefill is {'part': 1}", '--output NEW --prefill {"part":1}'),
        ("unknown completion", "--output NEW --methods topk --completion magic"),
        ("unknown tasks", "--output NEW --tasks chess"),
    ],
    "capture": [
        ("no file at", "--corpus NOTHING.txt --output NEW"),
        ("holds no text", "--corpus EMPTY --output NEW"),
        ("no text column", "--corpus LINES --output NEW --text-column body"),
        ("unknown split", "--corpus FILE --output NEW --split most"),
        ("no JSON object", "--corpus FILE --output NEW --dataset-options x"),
        ("names layer 99", "--corpus FILE --output NEW --layers 0,99"),
        ("is not empty", "--corpus FILE --output FOLDER"),
    ],
    "train-router": [("no capture store at", "--capture NOTHING --output NEW")],
    "train-phi": [("no capture store at", "--capture NOTHING --output NEW")],
    "eval diagnostics": [("no capture store at", "--capture NOTHING --output NEW")],
    "inspect": [("nothing at", "NOTHING")],
    "demo": [
        ("no file at", "--corpus NOTHING.txt --output NEW"),
        ("something else", "--output FOLDER --overwrite"),
        ("999999 buckets need at least as many keys", "--output NEW --num-buckets 999999"),
    ],
    "train": [("", "MODEL NOTHING.txt --output NEW")],
    "push": [("", "NOTHING someone/name")],
}
TAKE_NO_PATH = {"doctor"}
NAMES_A_MODEL = ("generate", "eval", "capture", "demo")


@pytest.fixture(scope="module")
def places(tmp_path_factory, saved_model) -> dict[str, str]:
    root = tmp_path_factory.mktemp("places")
    (root / "folder").mkdir()
    (root / "folder" / "thesis.txt").write_text("precious")
    (root / "text.txt").write_text("some words\n" * 100)
    (root / "empty.txt").write_text(" ")
    (root / "lines.jsonl").write_text(json.dumps({"text": "words"}) + "\n")
    return {"MODEL": str(saved_model), "FOLDER": str(root / "folder"), "FILE": str(root / "text.txt"),
            "EMPTY": str(root / "empty.txt"), "LINES": str(root / "lines.jsonl"), "NOTHING": str(root / "nothing")}


def test_every_command_has_a_case() -> None:
    assert set(COMMANDS) <= set(CASES) | TAKE_NO_PATH


READS_EVERY_TASK = "--output NEW --tasks chess"
"""lm-eval takes some ten seconds to read the names of all its tasks."""


@pytest.mark.parametrize(("command", "expected", "options"), [
    pytest.param(command, *case, id=f"{command}: {case[1]}",
                 marks=[pytest.mark.slow] if case[1] == READS_EVERY_TASK else [])
    for command, cases in CASES.items() if command in COMMANDS for case in cases])
def test_the_model_is_not_loaded(command, expected, options, places, tmp_path, cli, monkeypatch) -> None:
    import transformers

    places = {**places, "NEW": str(tmp_path / "new")}

    loaded = []
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda *a, **k: loaded.append(a))
    words = []
    for word in options.split():
        name = next((n for n in places if word.startswith(n)), None)
        words.append(word if name is None else word.replace(name, places[name], 1))
    if command in NAMES_A_MODEL:
        words += ["--model", places["MODEL"]]
    status, _, said = cli(*command.split(), *words)
    assert status == 1, said
    assert "unexpected" not in said
    assert expected in said
    assert not loaded
    assert not Path(places["NEW"]).exists()
