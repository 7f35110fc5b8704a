"""Corpora and prompts are read as they stand: names of special tokens, signatures, other systems' side files."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from tiny import make_model, make_tokenizer

from sparsekv.capture.corpus import make_windows, read_documents, tokenized
from sparsekv.runtime.hf.generate import GenerateConfig, generate
from sparsekv.util.errors import SparseKVError

TEMPLATE = "{% for m in messages %}<end>{{ m['role'] }}: {{ m['content'].strip() }}<end>{% endfor %}"


def tokenizer():
    made = make_tokenizer()
    made.chat_template = TEMPLATE
    return made


def ids_of(text: str, folder: Path, **how: bool) -> list[int]:
    (folder / "a.txt").write_text(text)
    return list(itertools.chain(*(ids for _, ids, _ in tokenized(read_documents(str(folder)), tokenizer(), **how))))


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("asked", [False, True])
def test_the_text_of_a_special_token_is_one_only_where_asked(chat: bool, asked: bool, tmp_path: Path) -> None:
    end = tokenizer().eos_token_id
    found = ids_of("before <end> after", tmp_path, chat_template=chat, special_tokens=asked)
    assert found.count(end) == asked + 2 * chat
    plain = ids_of("before after", tmp_path, chat_template=chat)
    assert plain.count(end) == 2 * chat


def test_windows_are_the_same_texts_characters(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("<end>" * 40)
    made = make_windows(read_documents(str(tmp_path)), make_tokenizer(), length=50, count=2)
    assert all(make_tokenizer().eos_token_id not in window.tokens for window in made)


@pytest.mark.parametrize("asked", [False, True])
def test_the_prompt_of_generate_is_text(asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    file = tmp_path / "prompt.txt"
    file.write_text("\N{BOM}words <end> words")
    monkeypatch.setattr("sparsekv.artifacts.hub.models.load_model", lambda *_, **__: (make_model(), tokenizer()))
    monkeypatch.setattr("sparsekv.runtime.hf.attach.Attachment.generate",
                        lambda self, ids, **_: seen.append(ids) or ids)
    for chat in (False, True):
        with pytest.raises(TypeError):  # nothing was decoded, so there is no share to print
            generate(GenerateConfig(model="tiny", prompt_file=file, chat_template=chat, special_tokens=asked))
    end = tokenizer().eos_token_id
    assert [int((ids == end).sum()) for ids in seen] == [asked, 2 + asked]
    assert "\N{BOM}" not in tokenizer().decode(seen[0][0])


def test_signatures_and_side_files_are_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone")
    (tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps({"text": "two"}).encode())
    (tmp_path / "._a.txt").write_bytes(b"\x00\x05\x16\x07")
    (tmp_path / "._b.jsonl").write_bytes(b"\x00\x05\x16\x07")
    assert [d.text for d in read_documents(str(tmp_path))] == ["one", "two"]
    assert capsys.readouterr().err.count("AppleDouble") == 1


def test_a_broken_line_is_named_by_its_number(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": "two"\n')
    with pytest.raises(SparseKVError, match=r"as .jsonl: its line 3 is no JSON"):
        list(read_documents(str(tmp_path)))
