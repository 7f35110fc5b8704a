"""The command line as a user meets it."""

import os
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
