"""Windows of the corpus's words: the same again for the same seed, before the corpus's own, and no source of any."""

import pytest
from test_families import Words, captured, tiny

from sparsekv.capture.corpus import TokenWindow
from sparsekv.capture.run import CaptureConfig, run_capture
from sparsekv.capture.synthetic import synthetic_windows
from sparsekv.trainers.pool import split_documents
from sparsekv.util.errors import SparseKVError


class Vocabulary(Words):
    """Its texts begin with token 1."""

    def __call__(self, text: str, add_special_tokens: bool = True, **_: object) -> dict:
        ids = super().__call__(text)["input_ids"]
        return {"input_ids": [1, *ids] if add_special_tokens else ids}

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(ord("!") + i - 3) for i in ids if i > 2 or not skip_special_tokens)


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
    with pytest.raises(SparseKVError, match="leaves none of the 2 windows"):
        captured(tiny("llama"), tmp_path / "none", num_documents=2, synthetic_documents=2)


def test_synthetic_windows_do_not_count_where_the_rest_is_judged(tmp_path) -> None:
    store = captured(tiny("llama"), tmp_path / "store", num_documents=6)
    for document in store.documents[:2]:
        document["sources"] = ["synthetic"]
    for document in store.documents[2:]:
        document["sources"] = ["one file"]
    assert split_documents(store, 1) == ([0, 1, 2, 3, 4], [5])
    store.documents[5]["sources"] = store.documents[2]["sources"] = ["another"]
    assert split_documents(store, 1) == ([0, 1, 3, 4], [5])
