"""Corpora that are pipes, devices, endless lines, holes or half characters: one sentence, or windows, in time and in
bounded memory."""

from __future__ import annotations

import itertools
import json
import os
import resource
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from test_families import Words

from sparsekv.capture import corpus as corpora
from sparsekv.capture.corpus import Document, check_corpus, make_windows, read_documents
from sparsekv.util.errors import SparseKVError
from sparsekv.util.progress import progress


class Bytes:
    """A tokenizer of bytes, as fast as can be."""

    def __call__(self, text: str | list[str], **_: object) -> dict[str, Any]:
        if isinstance(text, list):
            return {"input_ids": [list(x.encode("utf-8", "strict")) for x in text]}
        return {"input_ids": list(text.encode("utf-8", "strict"))}


def read(corpus: Any, count: int = 2, split: str = "all", **options: Any) -> list[Any]:
    check_corpus(str(corpus), split=split, **options)
    return make_windows(read_documents(str(corpus), split=split, **options), Bytes(), length=100, count=count)


def refused(corpus: Any, sentence: str, **options: Any) -> None:
    began = time.monotonic()
    with pytest.raises(SparseKVError, match=sentence) as error:
        read(corpus, **options)
    assert "\n" not in str(error.value) and time.monotonic() - began < 30


def test_a_pipe_a_device_and_a_dead_link_are_no_corpora(tmp_path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    os.mkfifo(folder / "pipe.txt")
    (folder / "zero.txt").symlink_to("/dev/zero")
    (folder / "dead.md").symlink_to(tmp_path / "none")
    (folder / "round").symlink_to(folder)
    for corpus in (folder, folder / "*.txt", folder / "pipe.txt", "/dev/zero", "/dev/stdin"):
        refused(corpus, "is no regular file but a pipe, a device or a dead link")
    (folder / "a.txt").write_text("word " * 200)
    (tmp_path / "far.txt").write_text("other " * 200)
    (folder / "b.txt").symlink_to(tmp_path / "far.txt")
    assert {w.sources for w in read(folder, 20)} >= {("a.txt",), ("b.txt",)}


@pytest.mark.parametrize("name", ["", " ", "\n"])
def test_no_name_is_no_corpus(name: str) -> None:
    refused(name, "the corpus has no name")


def test_names_that_no_file_can_have() -> None:
    for name in ("a" * 5000, "a\0b.txt", "/" + "x/" * 3000):
        refused(name, "no corpus can be at|no file at")


def test_holes_and_endless_lines_are_refused_with_their_limit(tmp_path) -> None:
    for name, sentence in (("hole.txt", r"has 50.0 GB; a text file may have up to 8 GB"),
                           ("hole.jsonl", r"line 1 .* has more than 67,108,864 characters")):
        with (tmp_path / name).open("wb") as file:
            file.truncate(50_000_000_000)
        refused(tmp_path / name, sentence)


LONG = {"one word": "x" * 3_500_000, "words": "some words of text " * 200_000, "lines": "line\n" * 700_000,
        "spaces": "a" + " " * 3_000_000 + "b" * 500_000}


@pytest.mark.parametrize("kind", LONG)
@pytest.mark.parametrize("held", [True, False])
def test_a_long_text_is_read_in_pieces_that_make_it_up(kind: str, held: bool, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(corpora, "HELD_BYTES", 1 << 30 if held else 1000)
    text, file = LONG[kind], tmp_path / "long.txt"
    file.write_text(text)
    document = next(iter(read_documents(str(file))))
    pieces = list(document.pieces())
    assert "".join(pieces) == text and len(pieces) > 2 and all(len(p) <= corpora.PIECE for p in pieces)
    if kind in ("words", "lines"):
        assert all(p[0] in " \n" and not before[-1].isspace() for before, p in itertools.pairwise(pieces))
    parts = ["".join(next(iter(read_documents(str(file), split=s))).pieces()) for s in ("train", "heldout")]
    assert "".join(parts) == text and len(parts[0]) == len(text) * 8 // 10
    windows = make_windows(iter([document]), Bytes(), length=1000, count=3000)
    assert b"".join(bytes(w.tokens) for w in windows).decode() == text[:3_000_000]


def test_memory_is_bounded_whatever_the_size(tmp_path) -> None:
    file, line = tmp_path / "long.txt", "some words of a long text " * 40_000
    with file.open("w") as out:
        for _ in range(300):  # 312 MB
            out.write(line)
    child = os.fork()
    if child == 0:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        read(file, 100)
        read(file, 100, split="heldout")
        more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        os._exit(0 if more < 150_000 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_what_goes_on_says_so(capsys) -> None:
    with progress("counting", every=0.02) as say:
        time.sleep(0.05)
        say(0, "half")
        time.sleep(0.05)
    said = capsys.readouterr().err
    assert "counting: 0 s\n" in said and "counting: half, 0 s\n" in said
    assert not [t for t in threading.enumerate() if "_tell" in t.name]


def test_rows_without_text_are_named(tmp_path) -> None:
    import pyarrow
    import pyarrow.parquet

    file = tmp_path / "a.parquet"
    for column, sentence in (([None], "has a row without text: its column 'text' holds None"),
                             ([float("nan")], "has a row without text: its column 'text' holds nan"),
                             ([3], "has no text column 'text'; it holds 3 there")):
        pyarrow.parquet.write_table(pyarrow.table({"text": column}), file)
        refused(file, sentence)
    pyarrow.parquet.write_table(pyarrow.table({"text": ["word " * 99] * 200, "other": list(range(200))}), file)
    assert len(read(file, 400)) == 400


@pytest.mark.parametrize(("line", "sentence"), [
    ("[" * 100_000, "could not read .* as .jsonl"), ('{"text": "\\ud800 half"}', r"half a character .*U\+D800"),
    ('{"text": NaN}', "has a row without text"), ("[1]", "has no text column"), ('"\\u001b[2J"', "has no text column"),
    ('{"text": "a"', "could not read .* as .jsonl")])
def test_lines_that_are_no_documents(line: str, sentence: str, tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n' + line + "\n")
    refused(tmp_path / "a.jsonl", sentence)


def test_short_documents_are_cut_as_whole_texts_are(tmp_path) -> None:
    """A document that is tokenized whole has the same windows, whether it is read from a file or given."""
    texts = ["abc " * (10 + i) for i in range(30)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    plain = make_windows(iter([Document(f"a.jsonl:{i}", t) for i, t in enumerate(texts)]), Words(), length=50, count=30)
    assert plain == make_windows(read_documents(str(Path(tmp_path) / "a.jsonl")), Words(), length=50, count=30)
