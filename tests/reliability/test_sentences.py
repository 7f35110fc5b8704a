"""Bad input of every kind ends in one right sentence; strings of foreign files are written out wherever they are
shown."""

from __future__ import annotations

import copy
import json
import os
import pickle
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from test_families import captured
from test_training import sharp
from tiny import make_model, make_tokenizer, prompt, save_model
from tiny_artifacts import artifacts
from training_child import stopped, train

from sparsekv.artifacts.hub.modelcard import card_files
from sparsekv.artifacts.hub.models import load_model
from sparsekv.artifacts.router import RouterArtifact
from sparsekv.capture import document as documents
from sparsekv.capture.store.store import CaptureStore
from sparsekv.evaluation.cells import read_cells
from sparsekv.evaluation.requests import load_requests
from sparsekv.runtime.config import SparseConfig
from sparsekv.runtime.hf.attach import attach
from sparsekv.trainers.metrics import read_rows
from sparsekv.trainers.pipeline import MARKER, TrainConfig, run_train
from sparsekv.util.errors import SparseKVError, printable

ESCAPE = "\x1b]0;owned\x07\x1b[2J\u202e\x9b1m\r"
SCRIPT = "</code><script>alert(1)</script>`![x](http://x)|**\n# x\n```"


def refused(sentence: str):
    return pytest.raises(SparseKVError, match=sentence)


def clean(text: str) -> bool:
    return printable(text) == text


def hostile(folder: Path, what: str) -> RouterArtifact:
    """An artifact whose strings are all this, saved with a fitting checksum."""
    router, _ = artifacts(make_model())
    router.config.model.update(architecture=what, weights=what, dtype=what, rope={what: what})
    router.config.provenance.update(
        model=what, corpus=what, split=what, sparsekv=what, disjoint_by=what, hash=what, context_length=what,
        train_documents=[what], validation_documents=[what], options={"preset": what})
    router.config.quality.update({what: 0.5, "mass_share@0.05": what, "per_head": {what: [[0.1] * 4] * 3, "x": what}})
    router.save(folder)
    return router


def test_no_escape_of_an_artifact_reaches_the_terminal(cli, tmp_path) -> None:
    hostile(tmp_path / "r", ESCAPE)
    said = cli("inspect", "--heads", tmp_path / "r")
    assert said.status == 0 and clean(said.out) and "\\x1b]0;owned\\x07" in said.out, said
    with refused("was made for a model with") as error:
        RouterArtifact.load(tmp_path / "r").check(make_model())
    assert clean(str(error.value)) and "\\x1b" in str(error.value)
    (tmp_path / "x\x1b[2J").mkdir()
    status, _, shown = cli("inspect", tmp_path / "x\x1b[2J")
    assert status == 1 and clean(shown) and "x\\x1b[2J" in shown


@pytest.mark.parametrize("what", [SCRIPT, ESCAPE, "ann/model\n---\nbase_model: other"])
def test_a_card_is_words_whatever_a_file_says(what: str, tmp_path) -> None:
    router = hostile(tmp_path, what)
    page = card_files({"router": asdict(router.config)})["README.md"].decode()
    assert clean(page)
    lines, inside, outside = page.split("\n"), False, []
    for line in lines:
        inside ^= line.startswith("```")
        if not inside:
            outside.append(line)
    assert sum(line.startswith("```") for line in lines) == 4
    import re
    plain = re.sub(r"`[^`]*`", "", "\n".join(outside))
    assert "<script" not in plain and "![x]" not in plain and "\n# x" not in plain
    assert page.count("\n---\n") == 1 and "base_model: other" not in page.split("---")[1]


def test_quality_that_is_none_is_left_out(cli, tmp_path) -> None:
    for quality in ({"mass_share@x": 1.0}, {"per_head": []}, {"per_head": {"mass_share@0.05": [["a"]]}},
                    {"mass_share@0.05": 10**400, "per_head": {"mass_share@0.05": [[10**400] * 4] * 3}},
                    {"mass_share@0.05": float("1e308"), "per_head": {"mass_share@0.05": [[0.1] * 4] * 2}}):
        router, _ = artifacts(make_model())
        router.config.quality.update(quality)
        router.save(tmp_path / "r")
        status, _, shown = cli("inspect", "--heads", tmp_path / "r")
        assert status == 0 and not shown
        assert card_files({"router": asdict(router.config)})


def test_a_full_device_is_named(tmp_path) -> None:
    hostile(tmp_path / "r", "x")
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "sparsekv.cli", "inspect", str(tmp_path / "r")], stdout=full,
                              stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 1 and "could not write to standard output (No space left on device)" in done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


@pytest.mark.slow
def test_standard_input_that_is_none(saved_model, tmp_path) -> None:
    words = [sys.executable, "-m", "sparsekv.cli", "generate", "--model", str(saved_model), "--prompt", "-"]
    options: Any = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE, "cwd": Path(__file__).parents[2]}
    done = subprocess.run(words, input=b"caf\xe9 x", env={**os.environ, "PYTHONUTF8": "1"}, **options)
    assert done.returncode == 1 and b"standard input is not UTF-8 text (byte 3)" in done.stderr
    done = subprocess.run(["bash", "-c", f"{' '.join(words)} <&-"], **options)
    assert done.returncode == 1 and b"standard input is closed" in done.stderr, done.stderr


def test_a_template_and_a_tokenizer_that_raise(cli, tmp_path) -> None:
    folder = save_model(tmp_path / "m")
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no\x1b[2J') }}"
    tokenizer.save_pretrained(folder)
    status, _, shown = cli("generate", "--model", folder, "--prompt", "x", "--chat-template",
                         "--device", "cpu")
    assert status == 1 and "chat template could not be applied (no\\x1b[2J)" in shown


def test_weights_that_are_a_strangers_pickle_are_not_run(tmp_path) -> None:
    folder = save_model(tmp_path / "m")
    (folder / "model.safetensors").unlink()

    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "ran"),))

    for content in (pickle.dumps(Evil()), pickle.dumps({"a": Evil()}), b"", b"garbage", b"PK\x03\x04broken"):
        (folder / "pytorch_model.bin").write_bytes(content)
        with refused("could not load a model from"):
            load_model(str(folder), device="cpu")
    torch.save({"x": Evil()}, folder / "pytorch_model.bin")
    with refused("could not load a model from"):
        load_model(str(folder), device="cpu")
    assert not (tmp_path / "ran").exists()


CELLS = '{"format": "sparsekv-sweep", "format_version": 1, "origin": {}}\n'
DEEP = "[" * 50_000


@pytest.mark.parametrize("line", ["[1]", '"x"', "3", DEEP, "{"])
def test_lines_of_results_and_requests_that_are_others(line: str, tmp_path) -> None:
    (tmp_path / "cells.jsonl").write_text(CELLS + line + "\n" + '{"case": "a"}\n')
    with refused("line 2 of .*cells.jsonl' is damaged; remove it and resume"):
        read_cells(tmp_path / "cells.jsonl")
    for first in (line, '{"format": "sparsekv-requests", "format_version": 1}'):
        (tmp_path / "r.jsonl").write_text(first + "\n" + line + "\n")
        with refused("is damaged|is no file of requests"):
            load_requests(tmp_path / "r.jsonl")
    (tmp_path / "cells.jsonl").write_bytes(b"\xff\xfe")
    with refused("holds no cells"):
        read_cells(tmp_path / "cells.jsonl")


@pytest.mark.parametrize("content", [b"\xff\xfe", b"step,loss\n1,2\n", b"group,step\n0,1\n0\n", b"group,step\n0,x\n",
                                     b'group,step\n0,"1', b"group,step\n0,1,2\n"])
def test_a_bad_metrics_file_is_named(content: bytes, tmp_path) -> None:
    (tmp_path / "metrics.csv").write_bytes(content)
    with refused("metrics.csv' is damaged .*; delete it"):
        read_rows(tmp_path / "metrics.csv")


def test_settings_at_a_path_that_cannot_be() -> None:
    for name in ("a" * 5000, "a\0b"):
        with refused("settings"):
            SparseConfig.load(name)


def test_an_attached_model_is_not_copied_and_a_cache_not_used_twice() -> None:
    model, ids = make_model(), prompt(60)
    with attach(model, selector="topk", token_budget=8, dense_below=0) as attachment:
        for work in (copy.deepcopy, pickle.dumps):
            with refused("cannot be copied or pickled while it is attached"):
                work(model)
        cache = attachment.prefill(ids[:, :-1])
        first = model.generate(ids, past_key_values=cache.fork(), max_new_tokens=3, do_sample=False)
        assert torch.equal(model.generate(ids, past_key_values=cache, max_new_tokens=3, do_sample=False), first)
        for length in (60, 62):
            with refused(rf"the cache holds 62 tokens and the prompt has {length}; .*cache\.fork\(\)"):
                model.generate(prompt(length), past_key_values=cache, max_new_tokens=3, do_sample=False)
    copy.deepcopy(model)


@pytest.mark.slow
def test_metrics_after_an_interruption_are_those_of_a_clean_run_as_text(store, tmp_path) -> None:
    options: dict[str, Any] = {"max_steps": 25, "layer_group": 2}
    train("phi", str(store), str(tmp_path / "one"), **options)
    with stopped("keep", lambda run, parts, _: parts[0].layer == run.store.layers[-1]):
        train("phi", str(store), str(tmp_path / "cut"), **options)
    train("phi", str(store), str(tmp_path / "cut"), resume=True, **options)

    def text(folder: Path) -> list[list[str]]:
        rows = [line.split(",") for line in (folder / "metrics.csv").read_text().splitlines()]
        time = rows[0].index("ms_per_step")
        return [row[:time] + row[time + 1:] for row in rows]

    assert text(tmp_path / "cut") == text(tmp_path / "one")


def test_a_document_json_that_changed_is_found(store, tmp_path) -> None:
    place = Path(shutil.copytree(store, tmp_path / "s"))
    file, other = (place / f"doc0000{i}" / "document.json" for i in (1, 2))
    good = file.read_text()
    for content, sentence in ((good.replace('"id": 1', '"id": 2'), r"contents changed \(checksum differs\)"),
                              (other.read_text(), "it is of another window"), ("{", "is damaged")):
        file.write_text(content)
        with refused(f"the capture store .* is damaged: doc00001/document.json: .*{sentence}"):
            CaptureStore.open(place).check()
    file.unlink()  # the manifest says all of it
    CaptureStore.open(place).check()


def test_a_store_that_is_removed_while_it_is_written(tmp_path, monkeypatch) -> None:
    finish = documents.DocumentCapture.finish

    def remove(document: Any) -> None:
        finish(document)
        shutil.rmtree(tmp_path / "s")

    with monkeypatch.context() as patch, refused("was removed while it was written, .*run the same command again"):
        patch.setattr(documents.DocumentCapture, "finish", remove)
        captured(sharp(), tmp_path / "s", num_documents=4)
    shutil.rmtree(tmp_path / "s", ignore_errors=True)  # as the sentence says: the next window may have been under way
    assert captured(sharp(), tmp_path / "s", num_documents=4).verify() == []


SMALL = {"num_documents": 3, "context_length": 192, "phi_steps": 2, "device": "cpu"}


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> Path:
    """A training that has its capture and nothing else."""
    from sparsekv.trainers import router

    folder = tmp_path_factory.mktemp("begun")
    save_model(folder / "model")
    (folder / "text.txt").write_text("some words of a text, not all of them the same. " * 100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(router, "train_router", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run_train(TrainConfig(str(folder / "model"), str(folder / "text.txt"), str(folder / "out"), **SMALL))
    return folder


@pytest.mark.parametrize(("change", "sentence"), [
    ("model", "the finished capture .* was made for a model with weights"),
    ("corpus", "the finished capture .* holds other text than the corpus"),
    ("plan", "is damaged or of another version of sparsekv; go on with that version"),
    ("types", "documents is 'x', expected int"), ("options", "is damaged|was started with")])
def test_a_training_goes_on_with_the_same_model_and_corpus_alone(change: str, sentence: str, begun, tmp_path) -> None:
    folder = Path(shutil.copytree(begun, tmp_path / "copy"))
    marker = json.loads((folder / "out" / MARKER).read_text())
    marker["options"] |= {"model": str(folder / "model"), "corpus": str(folder / "text.txt")}
    if change == "model":
        model = make_model().__class__(make_model().config)
        model.save_pretrained(folder / "model")
    if change == "corpus":
        (folder / "text.txt").write_text("other words of a text, not all of them the same. " * 100)
    if change == "plan":
        marker["plan"]["new"] = 1
    if change == "types":
        marker["plan"]["documents"] = "x"
    if change == "options":
        marker["options"] = [1]
    (folder / "out" / MARKER).write_text(json.dumps(marker))
    with refused(sentence):
        run_train(TrainConfig(str(folder / "model"), str(folder / "text.txt"), str(folder / "out"), **SMALL))
