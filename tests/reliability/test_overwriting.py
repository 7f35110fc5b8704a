"""What is replaced is set aside until the new is whole; requests in an eval's folder are ours and stay."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_families import captured
from test_folders_and_statuses import content
from test_training import sharp

from sparsekv.capture import run as capture_run
from sparsekv.capture.store.store import CaptureStore
from sparsekv.evaluation import run as eval_run
from sparsekv.evaluation.run import EvalConfig, run_eval
from sparsekv.util.errors import SparseKVError


def broken(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_the_old_store_stays_until_the_new_one_is_whole(tmp_path, monkeypatch) -> None:
    model, output, old = sharp(), tmp_path / "s", tmp_path / ".s.old"
    captured(model, output, num_documents=2)
    first = content(output)
    for _ in range(2):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(capture_run, "complete_store", broken)
            captured(model, output, num_documents=2, seed=1, overwrite=True)
        assert content(old) == first and CaptureStore.open(old).verify() == []
    captured(model, output, num_documents=2, seed=1)  # goes on
    assert CaptureStore.open(output).config["seed"] == 1 and sorted(p.name for p in tmp_path.iterdir()) == ["s"]


def test_the_old_results_stay_until_the_new_ones_are_whole(saved_model: Path, tmp_path, monkeypatch) -> None:
    output, old = tmp_path / "e", tmp_path / ".e.old"
    options = {"model": str(saved_model), "output": output, "lengths": "128", "samples": 1, "device": "cpu",
               "methods": "streaming", "budgets": "0.1"}
    for name in ("requests.jsonl", "more.jsonl.gz"):
        run_eval(EvalConfig(**options, tasks="needle", save_requests=output / name))
    asked = {name: (output / name).read_bytes() for name in ("requests.jsonl", "more.jsonl.gz")}
    run_eval(EvalConfig(**options, requests=output / "requests.jsonl"))
    first = content(output)
    with pytest.raises(SparseKVError, match="already exists; add --overwrite"):
        run_eval(EvalConfig(**options, requests=output / "requests.jsonl"))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(eval_run, "_write_report", broken)
        run_eval(EvalConfig(**options, requests=output / "requests.jsonl", overwrite=True))
    assert content(old) == first and not (output / "report.html").exists()
    run_eval(EvalConfig(**options, requests=output / "requests.jsonl", resume=True))
    assert not old.exists() and (output / "report.html").is_file()
    assert {name: (output / name).read_bytes() for name in asked} == asked
    (output / "mine.jsonl").write_text('{"format": "mine"}\n')
    before = content(output)
    with pytest.raises(SparseKVError, match=r"results of sparsekv eval: mine\.jsonl; choose"):
        run_eval(EvalConfig(**options, requests=output / "requests.jsonl", overwrite=True))
    assert content(output) == before
