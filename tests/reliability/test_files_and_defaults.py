"""What others read of ours, and what they set for their process: modes, escapes, names, defaults, forks."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from test_state import SPARSE, options
from tiny import make_model, prompt
from tiny_artifacts import artifacts
from ways import answer, fresh_model, fresh_prompt

from sparsekv.evaluation.report import write_report
from sparsekv.runtime.hf.attach import attach
from sparsekv.util.disk import only_writer
from sparsekv.util.errors import SparseKVError, as_markdown


def test_an_artifacts_files_have_the_mode_that_the_umask_leaves(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        artifacts(make_model())[0].save(tmp_path)
    finally:
        os.umask(before)
    assert {f.name: oct(f.stat().st_mode & 0o777) for f in tmp_path.iterdir()} == {
        "config.json": "0o644", "model.safetensors": "0o644"}


def test_names_of_others_are_written_out_on_pages(tmp_path: Path) -> None:
    name = "model\x1b[31m<script>alert(1)</script>"
    page = write_report(tmp_path / "report.html", name, name, [], [], []).read_text()
    assert "\x1b" not in page and "<script>" not in page
    assert as_markdown(f"| {name} |\n") == "| model\\x1b[31m&lt;script>alert(1)&lt;/script> |\n"


def test_a_name_that_is_too_long_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(SparseKVError, match="name has 249 bytes"), only_writer(tmp_path / ("a" * 249)):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in ("topk", "magicpig", "lfps", "sketch")
                                               else pytest.mark.slow) for n in SPARSE])
def test_a_process_default_of_dtype_or_device_changes_nothing(name: str) -> None:
    given, ids = options(name, "none"), prompt(120)

    def found() -> torch.Tensor:
        torch.manual_seed(0)
        with attach(make_model(), **given) as attachment:
            return attachment.generate(ids, max_new_tokens=3)

    right = found()
    try:
        torch.set_default_dtype(torch.bfloat16)
        half = found()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(half, right)
    with torch.device("meta"):
        assert torch.equal(found(), right)


def test_a_child_of_fork_does_not_wait_for_a_thread_that_is_gone() -> None:
    model, ids = fresh_model(), fresh_prompt()
    begun, end = threading.Event(), threading.Event()

    def hold() -> None:
        with attach(model, selector="streaming", dense_below=0) as attachment:
            from sparsekv.runtime.hf.attached import model_of
            with model_of(attachment).lock:
                begun.set()
                end.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    begun.wait()
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)
            answer(model, ids)
            os._exit(0)
        finally:
            os._exit(1)
    status: Any = None
    ends = time.monotonic() + 60
    while time.monotonic() < ends and status is None:
        done, found = os.waitpid(child, os.WNOHANG)
        status = found if done else None
        time.sleep(0.05)
    end.set()
    thread.join()
    if status is None:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert status == 0


@pytest.mark.parametrize("how", [{"prompt_lookup_num_tokens": 3}, {"assistant": True}])
def test_an_assistant_with_a_filled_cache_answers_as_without(how: dict[str, Any]) -> None:
    model, ids = make_model(), prompt(121)
    given = {"assistant_model": model} if "assistant" in how else how
    given = {"assistant_model": fresh_model()} if "assistant" in how else given
    right = answer(model, ids)
    with attach(model, selector="topk", token_budget=4096, dense_below=0) as attachment, pytest.warns(UserWarning):
        cache = attachment.prefill(ids[:, :-1])
        assert torch.equal(answer(model, ids, past_key_values=cache, **given), right)


def test_embeddings_go_on_from_a_cache() -> None:
    model, ids = make_model(), prompt(121)
    embeds = model.get_input_embeddings()(ids)
    right = answer(model, None, inputs_embeds=embeds)
    with attach(model, selector="topk", token_budget=4096, dense_below=0) as attachment:
        found = answer(model, None, inputs_embeds=embeds, past_key_values=attachment.prefill(ids[:, :-1]))
        with pytest.raises(SparseKVError, match="the cache holds 120 tokens and the prompt has 1"):
            answer(model, None, inputs_embeds=embeds[:, -1:], past_key_values=attachment.prefill(ids[:, :-1]))
    assert torch.equal(found, right)
