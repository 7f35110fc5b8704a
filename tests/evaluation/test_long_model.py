"""The example that trains a long-context model: its prompts hold their answers, only answers are learned."""

import importlib.util
import random
from pathlib import Path

import pytest
import torch
from tiny import make_model

from sparsekv.util.errors import SparseKVError

PATH = Path(__file__).parents[2] / "examples" / "train_long_model.py"
spec = importlib.util.spec_from_file_location("train_long_model", PATH)
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)
WORDS = [f"word{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(400)]


@pytest.mark.parametrize("task", dict.fromkeys(example.TASKS), ids=lambda task: task.__name__)
def test_a_prompt_holds_its_pieces_and_only_answers_are_learned(task, tokenizer) -> None:
    rng = random.Random(0)
    for length in (6000, 9000):
        made = task(rng, WORDS)
        tokens, labels = example.prompt(made, tokenizer, length, rng)
        assert 0.7 * length < len(tokens) <= length and len(labels) == len(tokens)
        text = tokenizer.decode(tokens)
        assert all(piece in text for piece in made.pieces)
        learned = [t for t, label in zip(tokens, labels, strict=True) if label != example.IGNORED]
        assert learned == [x for x in labels if x != example.IGNORED]
        answers = [answer for question, answer in made.asked if question in text]
        assert answers and tokenizer.decode(learned) == "".join(answers)
    if made.numbered:
        assert " 1. " in text and " 2. " in text and text.index(" 9. ") < text.index(" 10. ")


def test_a_step_learns_and_without_peft_one_is_told(tokenizer, monkeypatch) -> None:
    steps = example.Batches(tokenizer, WORDS, 3, 4096, 2048, 0)
    made = [steps[i] for i in range(len(steps))]
    assert [tokens.shape[0] for tokens, _ in made] == [2, 2, 2] and made[0][0].shape == made[0][1].shape
    assert all(torch.equal(a, b) for i, batch in enumerate(made) for a, b in zip(batch, steps[i], strict=True))
    model = make_model().train()
    tokens, labels = made[1][0] % model.config.vocab_size, made[1][1]
    labels = torch.where(labels == example.IGNORED, labels, labels % model.config.vocab_size)
    loss = example.answer_loss(model.model, model.lm_head, tokens, labels)
    whole = model(tokens).logits[:, :-1].float()
    want = torch.nn.functional.cross_entropy(whole.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=example.IGNORED,
                                             reduction="sum")
    torch.testing.assert_close(loss, want)
    loss.backward()
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(SparseKVError, match="needs peft"):
        example.adapted(model)
