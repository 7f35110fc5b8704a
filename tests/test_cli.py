"""The command line as a user meets it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sparsekv.cli import COMMANDS, app, shown_options
from sparsekv.util.errors import SparseKVError

runner = CliRunner()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_explained(command: str) -> None:
    result = runner.invoke(app, [command, "--help"], env={"COLUMNS": "300", "TERMINAL_WIDTH": "300"})
    assert result.exit_code == 0
    import importlib
    config = getattr(importlib.import_module(COMMANDS[command].module), COMMANDS[command].config)
    for field in shown_options(config):
        assert field.metadata.get("help"), field.name
        assert field.name in result.output or "--" + field.name.replace("_", "-") in result.output


def fail(cli, *words: str) -> str:
    status, _, shown = cli(*words)
    assert status == 1 and "Traceback" not in shown and "error:" in shown
    return shown


def test_errors_are_one_sentence(cli, tmp_path) -> None:
    nothing = str(tmp_path / "nothing")
    cases = {
        "no model at": ["generate", "--model", nothing, "--prompt", "x"],
        "is not installed: run `pip install": ["generate", "--model", "package:no_such_pkg", "--prompt", "x"],
        "exactly one of --prompt": ["generate", "--model", "m"],
        "no capture store at": ["train-phi", "--capture", nothing, "--output", str(tmp_path / "o")],
        "expected the folder of a capture store or an artifact": ["inspect", nothing],
        "needs a router artifact": ["eval", "--model", "m", "--output", nothing, "--methods", "router"],
        "fractions such as": ["eval", "--model", "m", "--output", nothing, "--budgets", "lots"],
        "unknown split": ["capture", "--model", "m", "--corpus", "embedded", "--output", nothing, "--split", "x"],
    }
    for message, arguments in cases.items():
        assert message in fail(cli, *arguments)


def test_debug_shows_the_traceback(cli) -> None:
    with pytest.raises(SparseKVError):
        cli("inspect", "/nonexistent", "--debug")


def test_the_version(cli) -> None:
    from sparsekv import __version__

    assert cli("--version") == (0, f"sparsekv {__version__}\n", "")


@pytest.mark.parametrize(("words", "found"), [("sparsekv gen", ["generate"]), ("sparsekv eval --acc", ["--accounting"]),
                                              ("sparsekv eval diagnostics --sh", ["--shoot-out"])])
def test_the_shell_completes_commands_and_options(words, found) -> None:
    env = {**os.environ, "_SPARSEKV_COMPLETE": "complete_bash", "COMP_WORDS": words,
           "COMP_CWORD": str(len(words.split()) - 1)}
    code = "import sys; sys.argv = ['sparsekv']; from sparsekv.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          cwd=Path(__file__).parent.parent, env=env)
    assert done.stdout.split() == found and not done.stderr


def test_what_generate_takes_by_name_is_inspected_by_name(cli) -> None:
    said = cli("inspect", "smollm2-135m")
    assert not said.status and "576 units" not in said.err
    for words in ("heads best left dense", "recommended: token_budget"):
        assert words in said.out


@pytest.mark.parametrize("words", [
    "generate --prompt x --model {}", "generate --prompt x --model package:m --artifacts {}", "inspect {}",
    "capture --model m --output o --corpus {}"])
def test_a_path_that_is_misspelt_is_asked_of_nobody(words, cli, tmp_path, monkeypatch) -> None:
    import socket

    def ask(*_: object) -> None:
        raise AssertionError("the network was asked")

    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket, "getaddrinfo", ask)
    said = fail(cli, *words.format("models/lama").split())
    assert "'models/lama'" in said and "unexpected" not in said


@pytest.mark.parametrize(("command", "module", "extra"), [
    ("train", "lightning", "train"), ("demo", "lightning", "train"), ("eval", "matplotlib", "eval")])
def test_a_missing_extra_is_said_before_anything_is_done(command, module, extra, cli, monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    words = {"train": ["m", "c"], "demo": [], "eval": ["--model", "m"]}[command]
    said = fail(cli, command, *words, "--output", tmp_path / "new")
    assert f"this needs the package {module}, which is not installed: run `pip install 'sparsekv[{extra}]'`" in said
    assert not (tmp_path / "new").exists()


def test_a_bar_gives_way_to_standard_output() -> None:
    """On a terminal: the display goes before text comes, and comes back with the next bar."""
    code = ("import sys, time; from sparsekv.cli import StandardOutput; from sparsekv.util.progress import progress\n"
            "sys.stdout = StandardOutput(sys.stdout)\n"
            "with progress('sparsekv x'):\n"
            "    with progress('load', 2, 'models') as advance: advance(2)\n"
            "    print('the answer', end=' '); sys.stdout.flush(); time.sleep(0.3); print('is short')\n"
            "    with progress('rest', 3, 'rows') as advance: advance(3)\n")
    import pty

    shown = bytearray()

    def read(handle: int) -> bytes:
        data = os.read(handle, 4096)
        shown.extend(data)
        return data

    assert not pty.spawn([sys.executable, "-c", code], read)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode()).replace("\r", "\n")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    assert "the answer is short" in lines
    assert lines[-1].startswith("rest") and "100%" in lines[-1]


def test_demo_never_deletes_what_it_did_not_make(cli, tmp_path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    assert "already exists" in fail(cli, "demo", "--output", str(tmp_path))
    assert "something else" in fail(cli, "demo", "--output", str(tmp_path), "--overwrite")
    assert (tmp_path / "thesis.txt").read_text() == "precious"


def test_import_is_light() -> None:
    heavy = "('torch', 'triton', 'faiss', 'lightning', 'datasets', 'transformers')"
    code = f"import sys, sparsekv, sparsekv.cli; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          cwd=Path(__file__).parent.parent, env=dict(os.environ))
    assert done.stdout.strip() == "[]"


def test_faiss_missing_says_what_to_install(monkeypatch) -> None:
    from sparsekv.core.baselines.faiss import import_faiss

    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(SparseKVError, match=r"sparsekv\[cpu\].*sparsekv\[gpu\].*exclude each other"):
        import_faiss()
