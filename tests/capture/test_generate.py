"""Windows that the model writes itself: its own distribution, no special tokens, the same again for the same seed."""

import pytest
import torch
from test_families import SIZES, Words, captured, tiny

from sparsekv.capture.corpus import TokenWindow
from sparsekv.capture.generate import generated_windows
from sparsekv.capture.run import CaptureConfig, run_capture
from sparsekv.capture.synthetic import synthetic_windows
from sparsekv.runtime.hf.attach import writing
from sparsekv.trainers.pool import split_documents
from sparsekv.util.errors import SparseKVError

VOCABULARY = SIZES["vocab_size"]


class Vocabulary(Words):
    """Its texts begin with token 1."""

    all_special_ids = (0, 1, 2)

    def __call__(self, text: str, add_special_tokens: bool = True, **_: object) -> dict:
        ids = super().__call__(text)["input_ids"]
        return {"input_ids": [1, *ids] if add_special_tokens else ids}

    def __len__(self) -> int:
        return VOCABULARY

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(ord("!") + i - 3) for i in ids if i > 2 or not skip_special_tokens)


def test_rows_are_what_the_model_says() -> None:
    model = tiny("llama")
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1e4)  # sampling becomes the most likely token
    windows = generated_windows(model, Vocabulary(), writing, length=33, count=2, seed=1, rows=3, row_length=16)
    assert [len(w.tokens) for w in windows] == [33, 33] and windows[0].sources == ("generated",)
    assert all(w.tokens[0] == 1 and min(w.tokens[1:]) > 2 for w in windows)
    rows = torch.tensor([w.tokens[1:] for w in windows]).reshape(4, 16)
    with torch.no_grad():
        logits = model(input_ids=torch.cat([torch.ones(4, 1, dtype=torch.long), rows], 1)).logits
    likely = logits[:, 1:-1].argmax(-1)
    ended = likely <= 2  # another text begins, anywhere in the vocabulary
    assert (~ended).sum() > 30 and torch.equal(rows[:, 1:][~ended], likely[~ended])


def test_the_same_seed_writes_the_same() -> None:
    model = tiny("qwen3")
    first, again, other = (generated_windows(model, Vocabulary(), writing, length=40, count=3, seed=s)
                           for s in (1, 1, 2))
    assert first == again and first != other and len({w.sha256 for w in first}) == 3
    tokens = [t for w in first for t in w.tokens[1:]]
    assert min(tokens) > 2 and max(tokens) < VOCABULARY and len(set(tokens)) > 20


def test_generated_windows_stand_before_those_of_the_corpus(tmp_path) -> None:
    model, options = tiny("llama"), {"model": "tiny", "corpus": "embedded", "context_length": 120}
    plain = run_capture(CaptureConfig(**options, num_documents=4, output=str(tmp_path / "plain")),
                        model=model, tokenizer=Vocabulary())
    with pytest.raises(SparseKVError, match="nothing makes the model write"):
        run_capture(CaptureConfig(**options, num_documents=6, generated_documents=2, output=str(tmp_path / "no")),
                    model=model, tokenizer=Vocabulary())
    store = run_capture(CaptureConfig(**options, num_documents=6, generated_documents=2,
                                      output=str(tmp_path / "mixed")), model=model, tokenizer=Vocabulary(),
                        generator=writing)
    assert [d["sources"] for d in store.documents[:2]] == [["generated"]] * 2
    assert [d["sha256"] for d in store.documents[2:]] == [d["sha256"] for d in plain.documents]
    # they share no source with the validation windows, and do not count where the rest is judged
    for document in store.documents[2:]:
        document["sources"] = ["one file"]
    assert split_documents(store, 1) == ([0, 1, 2, 3, 4], [5])
    store.documents[5]["sources"] = ["another"]
    store.documents[2]["sources"] = ["another"]
    assert split_documents(store, 1) == ([0, 1, 3, 4], [5])
    with pytest.raises(SparseKVError, match="leave none of the 2 windows"):
        captured(model, tmp_path / "none", num_documents=2, generated_documents=2)


def test_synthetic_windows_are_of_the_corpus_words_and_stand_before_it(tmp_path) -> None:
    tokenizer, body = Vocabulary(), "abc fgh. "
    corpus = [TokenWindow(tokenizer(body * 300)["input_ids"][:2000], ("x",))]
    made, again, other = (synthetic_windows(tokenizer, corpus, length=2500, count=3, seed=s) for s in (1, 1, 2))
    assert made == again and made != other and len({w.sha256 for w in made}) == 3
    for window in made:
        assert len(window.tokens) == 2500 and window.tokens[0] == 1 and window.sources == ("synthetic",)
    text = tokenizer.decode(made[0].tokens, skip_special_tokens=True)
    assert tokenizer.decode(tokenizer("abc")["input_ids"][1:]) in text
    options = {"model": "tiny", "corpus": "embedded", "context_length": 120, "num_documents": 5}
    store = run_capture(CaptureConfig(**options, synthetic_documents=2, output=str(tmp_path / "mixed")),
                        model=tiny("llama"), tokenizer=tokenizer)
    assert [d["sources"] == ["synthetic"] for d in store.documents] == [True, True, False, False, False]
