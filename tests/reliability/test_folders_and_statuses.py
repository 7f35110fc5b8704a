"""Folders that are not ours stay as they are; no exit status says more than was done; no model folder runs code."""

import dataclasses
import importlib
import json
import signal
import time
from pathlib import Path

import pytest
import torch
from test_families import captured
from test_training import sharp
from tiny import make_model, prompt
from training_child import stopped, train

from sparsekv.artifacts.hub.models import load_config, load_model
from sparsekv.artifacts.phi import PhiArtifact
from sparsekv.cli import COMMANDS
from sparsekv.runtime.hf.attach import attach
from sparsekv.util.errors import SparseKVError


def content(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


MODEL = {"config.json": '{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}',
         "model.safetensors": "weights", "tokenizer.json": "{}"}
FOREIGN = {
    "a model": MODEL,
    "a browser extension": {"manifest.json": '{"manifest_version": 3, "name": "x"}', "background.js": ""},
    "a report": {"report.html": "<p>mine</p>", "results.json": "[]", "table.md": "mine"},
    "metrics": {"metrics.csv": "step,loss\n", "training.json": "{}"},
    "nothing known": {"thesis/chapter.txt": "precious"},
    "a lookalike": {"demo.json": "{}", "diagnostics.json": "{}", "cells-notes.jsonl": "mine\n", "config.json": "[1]"},
}
"""Folders that somebody else made, some with the names that our own files have."""


def command_line(command: str, store: Path, output: Path) -> list[object]:
    more: dict[str, list[object]] = {
        "capture": ["--model", "m", "--corpus", "embedded"], "train-router": ["--capture", store, "--num-buckets", 4],
        "train-phi": ["--capture", store], "eval": ["--model", "m"], "eval diagnostics": ["--capture", store],
        "demo": []}
    return [*command.split(), *more[command], "--output", output]


@pytest.mark.parametrize("foreign", FOREIGN)
@pytest.mark.parametrize("command", ["capture", "train-router", "train-phi", "eval", "eval diagnostics", "demo"])
def test_overwrite_leaves_foreign_folders_alone(
    cli, store, tmp_path, command: str, foreign: str,
) -> None:
    for name, text in FOREIGN[foreign].items():
        file = tmp_path / "out" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    before = content(tmp_path)
    words = command_line(command, store, tmp_path / "out")
    for extra in ([], ["--overwrite"], *([["--resume"]] if command == "eval" and foreign == "a report" else [])):
        status, _, shown = cli(*words, *extra)
        assert status == 1 and "unexpected" not in shown, shown
        assert not extra or "holds something else than" in shown, shown
        assert content(tmp_path) == before
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "out")
    status, _, shown = cli(*command_line(command, store, link), "--overwrite")
    assert status == 1 and "holds something else than" in shown
    link.unlink()
    assert content(tmp_path) == before


def test_one_strange_file_among_ours_is_named(cli, store, tmp_path) -> None:
    own = captured(sharp(), tmp_path / "s").path
    (own / "doc00000" / "notes.txt").write_text("precious")
    status, _, shown = cli(*command_line("capture", store, own), "--overwrite")
    assert status == 1 and "a capture store: doc00000/notes.txt; choose another --output" in shown
    cells = tmp_path / "e" / "cells.jsonl"
    cells.parent.mkdir()
    cells.write_text('{"format": "sparsekv-sweep", "format_version": 1}\n')
    (tmp_path / "e" / "cells-notes.jsonl").write_text("precious\n")
    before = content(tmp_path)
    status, _, shown = cli(*command_line("eval", store, tmp_path / "e"), "--overwrite")
    assert status == 1 and "results of sparsekv eval: cells-notes.jsonl; choose another" in shown
    assert content(tmp_path) == before


def test_the_old_artifact_stays_until_the_new_one_is_whole(store, tmp_path, monkeypatch, capsys) -> None:
    output, old = tmp_path / "phi", tmp_path / ".phi.old"
    train("phi", str(store), str(output), max_steps=4)
    first = content(output)
    with pytest.raises(SparseKVError, match=r"holds something else than a router artifact: README.md, config.json"):
        train("router", str(store), str(output), max_steps=4, overwrite=True)
    for _ in range(2):  # the second replaces what the first left unfinished
        with stopped("keep"):
            train("phi", str(store), str(output), max_steps=5, overwrite=True)
        assert content(old) == first and PhiArtifact.load(old) and not (output / "config.json").exists()
    resumed = train("phi", str(store), str(output), max_steps=5, resume=True)  # from its last step's checkpoint
    again = train("phi", str(store), str(tmp_path / "b"), max_steps=5)
    for one, other in zip(resumed.maps, again.maps, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert not old.exists() and PhiArtifact.load(output).config.provenance["options"]["max_steps"] == 5
    link = tmp_path / "link"
    link.symlink_to(output)
    train("phi", str(store), str(link), max_steps=6, overwrite=True)
    assert link.is_symlink() and PhiArtifact.load(output).config.provenance["options"]["max_steps"] == 6
    assert f"is a link to '{output}'" in capsys.readouterr().err
    monkeypatch.chdir(output)
    with pytest.raises(SparseKVError, match="is the current folder"):
        train("phi", str(store), ".", max_steps=6, overwrite=True)


def test_damaged_parts_of_an_interrupted_training_are_named(store, tmp_path) -> None:
    with stopped("finish"):
        train("phi", str(store), str(tmp_path / "phi"), max_steps=4)
    part = next((tmp_path / "phi" / "parts").iterdir())
    part.write_bytes(part.read_bytes()[:-8])
    with pytest.raises(SparseKVError, match=rf"{part.name}' is damaged .*; delete it"):
        train("phi", str(store), str(tmp_path / "phi"), max_steps=4, resume=True)
    (tmp_path / "phi" / "training.json").write_text("")
    with pytest.raises(SparseKVError, match=r"training.json' is damaged; delete that folder"):
        train("phi", str(store), str(tmp_path / "phi"), max_steps=4, resume=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_signal_gives_its_status_and_a_sentence(cli, monkeypatch, command: str, number: int) -> None:
    row = COMMANDS[command]
    module = importlib.import_module(row.module)
    words: list[str] = []
    for field in dataclasses.fields(getattr(module, row.config)):
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            words += ["x"] if field.metadata["typer"].get("argument") else [f"--{field.name.replace('_', '-')}", "x"]
    monkeypatch.setattr(module, row.run, lambda config: signal.raise_signal(number))
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    status, _, shown = cli(*command.split(), *words)
    assert status == 128 + number and f"interrupted: {row.interrupted}" in shown
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_training_stopped_by_a_signal_says_so_and_goes_on(sparsekv, store, tmp_path, number: int) -> None:
    words = ["train-phi", "--capture", store, "--output", tmp_path / "phi", "--width", 16, "--batch-size", 8,
             "--keys-per-step", 32, "--device", "cpu", "--max-steps", 200]
    process = sparsekv(*words)
    while process.poll() is None and not (tmp_path / "phi" / "metrics.csv").is_file():
        time.sleep(0.05)
    process.send_signal(number)
    _, shown = process.communicate()
    assert process.returncode == 128 + number, shown
    assert "the same command with --resume goes on from there" in " ".join(shown.split())
    assert "Traceback" not in shown and not (tmp_path / "phi" / "config.json").exists()
    checkpoint = next((tmp_path / "phi" / "checkpoints").iterdir())
    good = checkpoint.read_bytes()
    for bad in (b"", good[:len(good) // 2], b"{}"):
        checkpoint.write_bytes(bad)
        with pytest.raises(SparseKVError, match=r"checkpoint .* cannot be read; delete it"):
            train("phi", str(store), str(tmp_path / "phi"), max_steps=200, resume=True)
    checkpoint.write_bytes(good)
    again = sparsekv(*words, "--resume")
    _, shown = again.communicate()
    assert again.returncode == 0 and PhiArtifact.load(tmp_path / "phi"), shown


def test_no_code_from_a_model_folder(tmp_path, monkeypatch) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "config.json").write_text(json.dumps({
        "model_type": "evil", "architectures": ["Evil"],
        "auto_map": {n: f"evil.{n}" for n in ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")}}))
    (tmp_path / "evil.py").write_text(f"open({str(ran)!r}, 'w')\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    for load in (load_model, load_config):
        with pytest.raises(SparseKVError, match="code of its own, which sparsekv never runs"):
            load(str(tmp_path))
    assert not ran.exists()


@pytest.mark.parametrize("length", [1, 2, 5, 20, 21, 22])
@pytest.mark.parametrize("batch", [1, 3])
def test_lfps_on_short_prompts(length: int, batch: int) -> None:
    model = make_model()
    asked = {"input_ids": prompt(length, batch), "max_new_tokens": 6, "do_sample": False,
             "attention_mask": torch.ones(batch, length, dtype=torch.long)}
    dense = model.generate(**asked)
    with attach(model, selector="lfps", token_budget=8, dense_below=0):
        assert torch.equal(model.generate(**asked), dense)


@pytest.mark.parametrize(("words", "status", "message"), [
    (["--prompt-file", "latin.txt"], 1, "is not UTF-8 text (byte 3)"),
    (["--prompt", "x", "--token-budget", "inf"], 1, "must be a finite number from 0 on, found inf"),
    (["--prompt", "x", "--temperature", "inf"], 1, "must be a finite number from 0 on, found inf"),
    (["--prompt", "x", "--seed", str(2**70)], 2, "less than or equal to 4294967295"),
])
def test_bad_input_of_generate_is_one_sentence(
    cli, tmp_path, monkeypatch, words: list[str], status: int, message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    found, _, shown = cli("generate", "--model", "/nonexistent", *words)
    assert found == status and message in shown and "Traceback" not in shown
