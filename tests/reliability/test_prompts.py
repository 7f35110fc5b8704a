"""Token ids, padding, chunks, seeds and ends of an answer that are none: one sentence each, before anything runs."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny import VOCAB, attach, make_model, make_tokenizer, prompt

from sparsekv.artifacts.hub.rotary import beyond_positions
from sparsekv.runtime.hf.attach import Attachment
from sparsekv.runtime.hf.generate import GenerateConfig, generate
from sparsekv.util.errors import SparseKVError

IDS = prompt(40, 2)
MASK = torch.ones_like(IDS)
MASK[0, :5] = 0


@pytest.fixture(scope="module")
def attachment() -> Iterator[Attachment]:
    with attach(make_model(), selector="topk", token_budget=8) as made:
        yield made


def refused(sentence: str) -> Any:
    return pytest.raises(SparseKVError, match=sentence)


WRONG_IDS = [
    (IDS.float(), r"whole numbers \(torch.long\), found torch.float32; give the tokenizer's ids"),
    (IDS.short(), "found torch.int16"), (IDS.bool(), "found torch.bool"), (IDS.to(torch.complex64), "torch.complex64"),
    (IDS + VOCAB, f"go from {int(IDS.min()) + VOCAB} to .* the model has tokens 0 to {VOCAB - 1}; use the model's own"),
    (IDS - 200, "go from -1"), (IDS[:, :0], r"the prompt is empty: input_ids are \[2, 0\]; give at least one token")]
OTHER_SHAPES = [(IDS[0], r"rows and tokens, found \[40\]"), (IDS[None], r"found \[1, 2, 40\]"),
                (IDS.tolist(), "found list"), (None, "found NoneType")]
WRONG_MASKS = [
    (MASK[:, :30], r"attention_mask is \[2, 30\], expected \[2, 40\]: one number for every token of every row"),
    (MASK[:1], r"is \[1, 40\], expected \[2, 40\]"), (MASK[0], r"rows and tokens, found \[40\]"),
    (MASK.tolist(), "found list"), ((1 - MASK.float()) * -1e9, "other numbers than 0 and 1; give 1 for a token"),
    (MASK * 2, "other numbers than 0 and 1"), (MASK * float("nan"), "other numbers than 0 and 1")]


@pytest.mark.parametrize(("ids", "sentence"), [*WRONG_IDS, *OTHER_SHAPES])
def test_ids_that_are_none(attachment: Attachment, ids: Any, sentence: str) -> None:
    for read in (attachment.generate, attachment.prefill):
        with refused(sentence):
            read(ids)
    if isinstance(ids, torch.Tensor) and ids.dim() == 2:
        with refused(sentence):
            attachment.model.generate(ids, max_new_tokens=2)
    elif ids is not None:
        with refused("a step takes a tensor of rows and tokens"):
            attachment.step(ids, attachment.cache())


@pytest.mark.parametrize(("mask", "sentence"), WRONG_MASKS)
def test_masks_that_are_none(attachment: Attachment, mask: Any, sentence: str) -> None:
    for read in (attachment.generate, attachment.prefill, attachment.model.generate):
        with refused(sentence):
            read(IDS, attention_mask=mask)


@pytest.mark.parametrize("mask", [MASK.flip(1), MASK * 0, MASK * torch.tensor([[0], [1]])])
def test_masks_that_are_not_of_a_left_padded_batch(attachment: Attachment, mask: torch.Tensor) -> None:
    with refused("needs left padding, found padding after or between real tokens; set tokenizer.padding_side = 'left'"):
        attachment.generate(IDS, mask)


def test_masks_of_ones_and_zeros_are_taken_in_any_arithmetic(attachment: Attachment) -> None:
    first, *others = [attachment.generate(IDS.to(kind), MASK.to(other), max_new_tokens=3) for kind, other in (
        (torch.long, torch.long), (torch.int32, torch.bool), (torch.long, torch.float32))]
    assert all(torch.equal(first, x) for x in others)


@pytest.mark.parametrize("size", [0, -1, 1.5, "8", True])
def test_chunks_that_are_none(attachment: Attachment, size: Any) -> None:
    with refused("chunk_size must be a whole number of tokens from 1 on, found .*; leave it out for"):
        attachment.prefill(IDS, chunk_size=size)


def test_a_chunk_longer_than_any_prompt_is_the_prompt(attachment: Attachment) -> None:
    assert attachment.prefill(IDS, chunk_size=10**30).get_seq_length() == 40


@pytest.mark.parametrize(("given", "sentence"), [
    ({"seed": -1}, "seed must be a whole number from 0 to 18446744073709551615, found -1"), ({"seed": 2**64}, "seed"),
    ({"seed": "x"}, "seed .* found 'x'"), ({"seed": 1.5}, "seed"), ({"seed": True}, "seed"),
    ({"eos_token_id": "x"}, "eos_token_id must be a token's number or a list of some, found 'x'; give \\[\\] for"),
    ({"eos_token_id": 1.5}, "eos_token_id"), ({"eos_token_id": [1, "a"]}, "eos_token_id"),
    ({"eos_token_id": 10**30}, "eos_token_id"), ({"eos_token_id": torch.tensor([0.5])}, "eos_token_id"),
    ({"pad_token_id": VOCAB}, f"pad_token_id is {VOCAB}, and the model has tokens 0 to {VOCAB - 1}; give one of them"),
    ({"pad_token_id": "x"}, "pad_token_id"), ({"streamer": 3}, "a streamer has `put` and `end`, .* found int"),
    ({"cache": 3}, "a int has no sparse index"), ({"max_new_tokens": 2.5}, "max_new_tokens must be a whole number")])
def test_arguments_of_an_answer_that_are_none(attachment: Attachment, given: dict[str, Any], sentence: str) -> None:
    with refused(sentence):
        attachment.generate(IDS, **given)


def test_ends_that_are_taken(attachment: Attachment) -> None:
    free = attachment.generate(IDS[:1], max_new_tokens=6)
    end = int(free[0, 42])
    for eos in (end, [end], (end,), torch.tensor([end]), torch.tensor(end)):
        assert attachment.generate(IDS[:1], max_new_tokens=6, eos_token_id=eos).shape[1] <= 43
    for eos in ([], -1, VOCAB):
        assert torch.equal(attachment.generate(IDS[:1], max_new_tokens=6, eos_token_id=eos), free)


def test_a_cache_of_other_rows_is_refused(attachment: Attachment) -> None:
    cache = attachment.prefill(IDS[:1])
    for read in (attachment.generate, attachment.prefill):
        with refused("the cache holds 1 rows and input_ids have 2; give every row of the cache its next tokens"):
            read(IDS[:, :1], cache=cache)
    with refused(r"is \[1, 1\], expected \[1, 41\]: .* those in the cache included"):
        attachment.generate(IDS[:1, :1], MASK[:1, -1:], cache=cache)


def test_a_seed_of_the_command_line_that_is_none(cli, saved_model) -> None:
    for seed in ("-1", "x", "1.5", str(2**32)):
        status, _, shown = cli("generate", "--model", saved_model, "--prompt", "hi", "--seed", seed)
        assert status == 2 and "--seed" in shown and "Traceback" not in shown
    with refused("seed must be a whole number from 0 to .*, found -1"):
        generate(GenerateConfig(model=str(saved_model), prompt="hi", seed=-1, device="cpu"))


@pytest.mark.parametrize("words", [
    ("generate", "--prompt", "many words " * 25, "--max-new-tokens", 4),
    ("eval", "--output", "eval", "--tasks", "perplexity", "--lengths", "300", "--samples", 1, "--methods", "streaming",
     "--budgets", "0.1", "--corpus", "corpus.txt")])
def test_a_text_beyond_the_models_positions_is_said_in_one_line(cli, tmp_path, monkeypatch, words: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.txt").write_text("many words " * 200)
    make_tokenizer().save_pretrained(tmp_path / "model")
    for positions in (256, 512):
        make_model(max_position_embeddings=positions).save_pretrained(tmp_path / "model")
        status, _, said = cli(words[0], "--model", "model", "--device", "cpu", *words[1:],
                              *(["--overwrite"] if positions == 512 and words[0] == "eval" else []))
        assert status == 0, said
        found = re.findall(r"prompt and answer have up to (\d+) tokens and the model was made for (\d+)", said)
        assert len(found) == (positions == 256) and all(int(n) > int(most) == 256 for n, most in found)


def test_a_rotation_that_grows_with_the_text_has_no_last_position() -> None:
    config = copy.deepcopy(make_model(max_position_embeddings=64).config)
    assert beyond_positions(config, 64) is None and beyond_positions(config, 65) is not None
    config.rope_parameters = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    assert beyond_positions(config, 65) is None
