"""What a training loses and wins on text: measured as one would by hand, and what is recommended of it."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from test_evaluator import TEXT
from tiny import make_model
from tiny_artifacts import artifacts

from sparsekv.artifacts.hub.text_quality import FILE, GOAL, Setting, TextQuality, read_quality
from sparsekv.evaluation.text_quality import BUDGETS, card_methods, measure_text
from sparsekv.runtime.hf.attach import RunOptions, attach
from sparsekv.util.errors import SparseKVError

LENGTH = 1100


@pytest.fixture
def folder(tmp_path) -> Path:
    router, phi = artifacts(make_model(), space="rot", scores="mean_key")
    router.save(tmp_path / "router")
    phi.save(tmp_path / "phi")
    return tmp_path


@pytest.fixture
def windows(tokenizer) -> list[list[int]]:
    text = tokenizer(TEXT * 40)["input_ids"]
    return [text[:LENGTH], text[70:LENGTH + 70]]


def measured(folder: Path, windows: list[list[int]], tokenizer) -> TextQuality:
    return measure_text(make_model(), tokenizer, windows, folder, corpus="text.txt", unseen=True)


def test_it_is_what_the_attached_model_computes(folder, windows, tokenizer) -> None:
    found = measured(folder, windows, tokenizer)
    assert (found.context_length, found.windows, found.tokens) == (LENGTH, 2, 256)
    assert [(s.completion, s.token_budget) for s in found.settings] == [
        (c, b) for c in ("none", "phi") for b in BUDGETS]
    model, loss = make_model(), torch.nn.functional.cross_entropy

    def continued(**options) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        losses, tokens, logs = [], [], []
        for window in windows:
            ids = torch.tensor(window)[None]
            with attach(model, **options, dense_below=0, run=RunOptions(sparse_chunks=True)) as a, torch.no_grad():
                logits = model(ids[:, -257:-1], past_key_values=a.prefill(ids[:, :-257])).logits[0]
            losses.append(loss(logits, ids[0, -256:], reduction="none"))
            tokens.append(logits.argmax(-1))
            logs.append(logits.double().log_softmax(-1))
        return torch.cat(losses), torch.cat(tokens), torch.cat(logs)

    whole, theirs, full = continued(selector="dense")
    assert found.perplexity == pytest.approx(float(whole.mean().exp()), rel=1e-4)
    for s in found.settings:
        mine, tokens, logs = continued(artifacts=folder, token_budget=s.token_budget, completion=s.completion)
        more = mine - whole
        assert s.loss == pytest.approx(math.expm1(float(more.mean())), abs=2e-4)
        assert s.margin == pytest.approx(1.96 * float(more.std()) / 512 ** 0.5 * (1 + s.loss), rel=2e-3)
        assert s.same_tokens == pytest.approx(float((tokens == theirs).double().mean()))
        assert 0 < s.bytes_read < 1.5
        assert s.kl == pytest.approx(float((full.exp() * (full - logs)).sum(-1).mean()), rel=1e-2, abs=1e-6)
    assert "KL [nats a token]" in found.table() and all(f"{s.kl:.2g}" in found.table() for s in found.settings)
    assert any(s.same_tokens < 1 for s in found.settings)


def test_what_an_interrupted_run_has_measured_is_kept(folder, windows, tokenizer) -> None:
    whole = measured(folder, windows, tokenizer)
    cells = folder / f"cells-{LENGTH}.jsonl"
    lines = cells.read_text().splitlines(keepends=True)
    cells.write_text("".join(lines[:5]))
    found = []
    again = measure_text(make_model(), tokenizer, windows, folder, corpus="text.txt", unseen=True, advance=found.append)
    assert cells.read_text().splitlines(keepends=True)[:5] == lines[:5]
    assert [s.loss for s in again.settings] == [s.loss for s in whole.settings]
    assert sum(found, 0) <= 2 * len(card_methods())


def test_where_the_memory_is_short_windows_are(folder, windows, tokenizer, capsys) -> None:
    """The model has room for 700 tokens at once."""
    def check(module, args, kwargs):
        if kwargs["input_ids"].shape[1] > 700:
            raise torch.OutOfMemoryError("out of memory")

    model = make_model()
    hook = model.model.register_forward_pre_hook(check, with_kwargs=True)
    try:
        found = measured(folder, windows, tokenizer)
        assert found.context_length == LENGTH // 2 and "measured on 550" in capsys.readouterr().err
        with pytest.raises(SparseKVError, match="holds no window of 1000 tokens"):
            measured(folder, [w[:1000] for w in windows], tokenizer)
    finally:
        hook.remove()


def card(*losses: float, phi: tuple[float, ...] = (), margin: float = 0.001) -> TextQuality:
    settings = [Setting("sketch", c, b, x, margin, 0.9, 0.04) for c, line in (("none", losses), ("phi", phi))
                for b, x in zip(BUDGETS, line, strict=False)]
    return TextQuality("text.txt", True, 2048, 4, 256, 9.0, {}, settings)


@pytest.mark.parametrize(("losses", "phi", "arguments", "why"), [
    ((0.02, 0.004, 0.001), (0.01, 0.004, 0.001), "token_budget=0.02", "smallest budget measured"),
    ((0.004, 0.001, 0.001), (0.03, 0.02, 0.001), 'token_budget=0.01, completion="none"', "(sketch)"),
    ((0.02, 0.01, 0.006), (0.03, 0.02, 0.012), 'token_budget=0.05, completion="none"',
     "the largest budget measured; none stays within 0.5 % of full attention's perplexity, this one has +0.6 %"),
    ((-0.03, 0.02, 0.02), (-0.03, 0.02, 0.004), "token_budget=0.05", "smallest budget measured")],
    ids=["completed", "alone", "none is", "by chance"])
def test_the_smallest_budget_that_keeps_the_goal(losses, phi, arguments, why) -> None:
    found = card(*losses, phi=phi)
    assert found.recommended.arguments == arguments and why in found.advice()
    assert "wider" not in found.advice() and "wider" in card(*losses, phi=phi, margin=2 * GOAL).advice()


def test_of_a_budget_the_setting_that_agrees_most_is_recommended() -> None:
    found = card(0.02, 0.02, 0.001, phi=(0.02, 0.02, 0.006))
    assert found.recommended.completion == "none"
    agree = [dataclasses.replace(s, same_tokens=0.95 if s.completion == "phi" else 0.9) for s in found.settings]
    found = dataclasses.replace(found, settings=agree)
    assert (found.recommended.completion, found.recommended.token_budget) == ("phi", 0.05)


def test_a_file_and_what_is_none(folder) -> None:
    made = dataclasses.replace(card(0.1, 0.2, 0.3), artifacts={
        kind: json.loads((folder / kind / "config.json").read_text())["sha256"] for kind in ("router", "phi")})
    assert read_quality(folder) is None
    made.save(folder)
    assert read_quality(folder) == made and made.figure().png.startswith(b"\x89PNG")
    assert json.loads((folder / FILE).read_text())["recommended"]["token_budget"] == 0.05
    artifacts(make_model(), space="pre", scores="mean_key")[0].save(folder / "router")
    assert read_quality(folder) is None  # of another router
    record = dataclasses.asdict(made) | {"settings": [{"selector": "sketch"}]}
    for text in ("[]", "{", json.dumps(record), json.dumps(record | {"settings": []}), json.dumps(
            dataclasses.asdict(made) | {"perplexity": "9"})):
        (folder / FILE).write_text(text)
        with pytest.raises(SparseKVError, match="is damaged"):
            read_quality(folder)
