"""Where text comes from: datasets in every form that works without a network, local files, chat templates, windows."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import tokenizers
import transformers
from test_families import Words, captured, tiny

from sparsekv.capture import corpus as corpora
from sparsekv.capture.corpus import SPLITS, Document, TokenWindow, make_windows, read_dataset, read_documents
from sparsekv.util.errors import SparseKVError

datasets = pytest.importorskip("datasets")

TEXTS = [f"document {i} " + "abc " * (10 + i) for i in range(12)]


@pytest.fixture
def offline(tmp_path, monkeypatch) -> None:
    import huggingface_hub.constants

    for place, name, value in (
            (datasets.config, "HF_DATASETS_OFFLINE", True), (datasets.config, "HF_HUB_OFFLINE", True),
            (datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache"),
            (huggingface_hub.constants, "HF_HUB_OFFLINE", True)):
        monkeypatch.setattr(place, name, value)


def written(form: str, folder: Path) -> Path:
    """A dataset of two splits (`arrow`: one) with the columns `body` and `number`."""
    folder.mkdir()
    whole = datasets.Dataset.from_dict({"body": TEXTS, "number": list(range(12))})
    if form == "arrow":
        whole.save_to_disk(folder / "d")
    elif form == "arrow-splits":
        datasets.DatasetDict({"train": whole, "test": whole.select([3])}).save_to_disk(folder / "d")
    else:
        (folder / "d").mkdir()
        for split, part in (("train", whole), ("test", whole.select([3]))):
            write = {"jsonl": part.to_json, "csv": part.to_csv, "parquet": part.to_parquet}[form]
            write(str(folder / "d" / f"{split}.{form}"))
    return folder / "d"


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("form", ["jsonl", "parquet", "csv", "arrow", "arrow-splits"])
def test_datasets_are_read_whole_and_streamed(form: str, streaming: bool, tmp_path, offline) -> None:
    folder = written(form, tmp_path / "a")

    def texts(column: str | None, split: str = "train", config: str | None = None) -> list[str]:
        options = {"split": split, "streaming": streaming, **({"name": config} if config else {})}
        return [d.text for d in read_dataset(str(folder), column, options)]

    assert texts("body") == TEXTS
    with pytest.raises(SparseKVError, match=r"has no text column 'page'; found \['body', 'number'\]\. Name it"):
        texts("page")
    with pytest.raises(SparseKVError, match=r"has no text column .*; found \['body', 'number'\]"):
        texts(None)
    with pytest.raises(SparseKVError, match="has no text column 'number'"):
        texts("number")
    if form != "arrow":
        assert texts("body", "test") == TEXTS[3:4]
        with pytest.raises(SparseKVError, match=r"'split': 'nope'.*; change --dataset-options \(.*train"):
            texts("body", "nope")
        with pytest.raises(SparseKVError, match=r"'name': 'x'.*; change --dataset-options \(.*default"):
            texts("body", config="x")


def test_a_dataset_is_captured_alike_streamed_or_not_and_wherever_it_lies(tmp_path, offline) -> None:
    """Folders whose files `datasets` alone reads; a command without a network; a seed."""
    first = written("csv", tmp_path / "a")
    shutil.copytree(first, tmp_path / "elsewhere" / "d")
    options = {"text_column": "body", "num_documents": 2, "queries_per_document": 8}
    model = tiny("llama")
    cases = enumerate(((first, False), (first, True), (tmp_path / "elsewhere" / "d", False)))
    stores = [captured(model, tmp_path / str(i), corpus=str(corpus), **options,
                       dataset_options=json.dumps({"streaming": streaming}))
              for i, (corpus, streaming) in cases]
    assert stores[0].documents == stores[1].documents == stores[2].documents
    assert stores[0].documents[0]["sources"][0].startswith("d/train:")
    for split in ("train", "heldout"):
        with pytest.raises(SparseKVError, match=r"cannot be loaded with \{'split': 'x'\}"):
            captured(model, tmp_path / "no", corpus=str(first), split=split, **options,
                     dataset_options='{"split": "x"}')
    assert not (tmp_path / "no").exists()


def test_what_is_no_dataset_is_one_sentence(tmp_path, offline) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "train.csv").write_text("text\n")
    for name in ("someone/nothing", str(tmp_path / "empty")):
        with pytest.raises(SparseKVError, match=r"no corpus .* nor a Hugging Face dataset that") as found:
            list(read_documents(name))
        assert "\n" not in str(found.value)
    for streaming, message in ((True, "the corpus is too short: it has 0 tokens"), (False, "no data")):
        with pytest.raises(SparseKVError, match=message):
            make_windows(read_documents(str(tmp_path / "d"), dataset_options={"streaming": streaming}), Words(),
                         length=100, count=1)


def test_a_stream_that_breaks_off_is_one_sentence(monkeypatch) -> None:
    def rows():
        yield {"text": "one"}
        raise ConnectionError("reset\nby peer")

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows())
    with pytest.raises(SparseKVError, match="'a/b' broke off after 1 documents: reset by peer"):
        list(read_documents("a/b"))


def test_the_same_windows_on_any_machine(tmp_path) -> None:
    """A seed decides, not the folder, the order of writing or the process: the digest was computed once."""
    for folder, order in (("a", range(30)), ("b/c", reversed(range(30)))):
        (tmp_path / folder).mkdir(parents=True)
        for i in order:
            (tmp_path / folder / f"{i:02d}.jsonl").write_text(
                "".join(json.dumps({"text": f"{i}.{j} " + "xyz" * (i + j)}) + "\n" for j in range(3)))

    def digest(corpus: Path, split: str = "all") -> str:
        windows = make_windows(read_documents(str(corpus), split=split), Words(), length=200, count=5, seed=3)
        return hashlib.sha256("".join(w.sha256 for w in windows).encode()).hexdigest()[:16]

    for corpus in ("a", "a/*.jsonl", "b/**/*.jsonl", "b"):
        assert digest(tmp_path / corpus) == "ee364b51fb7bd9b3"
    assert digest(tmp_path / "a", "train") == "3cbf2e11bd65f2ba"


def test_short_documents_without_packing_are_passed_over() -> None:
    documents = [Document("short", "x" * 50), Document("long", "y" * 130), Document("long2", "z" * 60)]

    def windows(pack: bool, count: int, length: int = 60) -> list:
        return make_windows(iter(documents), Words(), length=length, count=count, pack=pack)

    found = windows(False, 3)
    assert sorted(w.sources for w in found) == [("long",), ("long",), ("long2",)]
    assert all(len(set(w.tokens)) == 1 for w in found)
    assert {len(w.sources) for w in windows(True, 4)} == {1, 2}
    with pytest.raises(SparseKVError, match=r"it has 0 documents of 500 tokens or more \(the longest has 130\); "
                                            r"1 windows were asked for\. Use more text, or shorter or fewer"):
        windows(False, 1, length=500)
    with pytest.raises(SparseKVError, match="too short: it has 246 tokens, enough for 0 windows of 500"):
        windows(True, 1, length=500)


def test_chat_templates(tmp_path) -> None:
    """A window starts with the tokenizer's own first token once, though the template writes it too."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "?": 1, "user": 2, "a": 3, "b": 4}, "?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>")
    text = iter([Document("d", "a b a b b")])
    with pytest.raises(SparseKVError, match=r"chat template could not be applied .*leave out --chat-template"):
        make_windows(iter([Document("d", "a")]), tokenizer, length=7, count=1, chat_template=True)
    tokenizer.chat_template = "{{ bos_token }} {{ messages[0]['role'] }} {{ messages[0]['content'] }}"
    window = make_windows(text, tokenizer, length=7, count=1, chat_template=True)[0]
    assert window.tokens == [0, 2, 3, 4, 3, 4, 4]


def test_texts_that_are_shipped_are_held_out_alike_alone_and_together() -> None:
    prose, both = ({split: {d.source: d for d in read_documents(corpus, split=split)} for split in SPLITS}
                   for corpus in ("embedded-prose", "embedded+embedded-prose"))
    assert len(prose["all"]) == 19 and all(len(d.text) > 8000 for d in prose["all"].values())
    for split in SPLITS:
        assert {n for n in both[split] if n.startswith("addresses/")} == set(prose[split])
    assert not set(both["train"]) & set(both["heldout"]) and len(prose["heldout"]) == 4
    assert any(n.startswith("pydoc_data.topics/") for n in both["heldout"])


def test_fewer_windows_are_enough_where_that_is_said() -> None:
    documents = [Document("a", "word " * 100)]
    assert len(make_windows(iter(documents), Words(), length=200, count=9, least=1)) == 2
    assert not make_windows(iter(()), Words(), length=200, count=9, least=0)
    with pytest.raises(SparseKVError, match="too short"):
        make_windows(iter(documents), Words(), length=200, count=9, least=3)


def test_pieces_of_many_documents_are_tokenized_in_one_call(monkeypatch) -> None:
    """The windows are those of one text a call; a text that the tokenizer refuses is named, whatever came with it."""
    calls = []

    class Counting(Words):
        def __call__(self, text: str | list[str], **_: object) -> dict:
            calls.append(text)
            if any("refused" in x for x in ([text] if isinstance(text, str) else text)):
                raise TypeError("no such text")
            return Words()(text)

    texts = [f"document {i} of many. " * (1 + i % 7) for i in range(40)]
    documents = [Document(str(i), text) for i, text in enumerate(texts)]

    def windows() -> list[TokenWindow]:
        return make_windows(iter(documents), Counting(), length=100, count=25)

    together = windows()
    assert len(calls) == 2  # that of the prefix, and all
    for name, value in (("AT_ONCE", 1), ("PIECE", 50), ("EDGE", 20)):
        monkeypatch.setattr(corpora, name, value)
    assert windows() == together and len(calls) > 50
    monkeypatch.setattr(corpora, "AT_ONCE", 1000)
    documents[3] = Document("bad", "a refused text")
    with pytest.raises(SparseKVError, match=r"refuses the document 'bad' .no such text"):
        list(corpora.tokenized(documents, Counting()))
