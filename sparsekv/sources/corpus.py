"""Text to token windows: the embedded corpus, local files, globs, Hugging Face datasets."""

from __future__ import annotations

import glob
import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsekv.foundation.errors import SparseKVError, first_line

SPLITS = ("all", "train", "heldout")
FEW_DOCUMENTS = 10
HELDOUT_PERCENT = 20
SHUFFLED = 10_000
GENERATED = "generated"  # the source of a window that no corpus holds
COLUMNS = ("text", "content", "document", "markdown")


@dataclass(frozen=True)
class Document:
    """A piece of text and where it came from."""

    source: str
    text: str


@dataclass(frozen=True)
class Window:
    """`tokens`: ids of one context; `sources`: the documents it was cut from, in order."""

    tokens: list[int]
    sources: tuple[str, ...]

    @property
    def sha256(self) -> str:
        return hashlib.sha256(json.dumps(self.tokens).encode()).hexdigest()


def read_documents(
    corpus: str, *, split: str = "all", text_column: str | None = None, dataset_options: dict[str, Any] | None = None,
) -> Iterator[Document]:
    """The documents of `corpus`: `embedded`, a .txt, .md, .jsonl or .parquet file, a glob or folder of such files, a
    folder in another form that `datasets` reads, or the name of a Hugging Face dataset (the only form that uses the
    network). dataset_options: keywords of `datasets.load_dataset`; its split is `train` unless named.

    `split` keeps training and held-out text apart: by a hash of the document's name (20 % held out), or, where a local
    corpus has fewer than ten documents, by cutting each at 80 % of its characters. The two parts never overlap.
    """
    _check_split(split)
    if corpus == "embedded":
        documents: Iterator[Document] = iter(_embedded())
    elif files := _local_files(corpus):
        documents = (d for f in files for d in _read_file(f, text_column))
    else:
        documents = read_dataset(corpus, text_column, {"split": "train", **(dataset_options or {})})
        yield from (d for d in documents if split == "all" or _held_out(d) == (split == "heldout"))
        return
    listed = [d for d in documents if d.text.strip()]
    if not listed:
        raise _no_text(corpus)
    if split == "all":
        yield from listed
    elif len(listed) < FEW_DOCUMENTS:
        yield from (_cut(d, split) for d in listed)
    else:
        yield from (d for d in listed if _held_out(d) == (split == "heldout"))


def check_corpus(
    corpus: str, *, split: str = "all", text_column: str | None = None, dataset_options: dict[str, Any] | None = None,
) -> None:
    """Look for the corpus and read its first text, as `read_documents` would. Raises SparseKVError."""
    _check_split(split)
    if corpus == "embedded":
        return
    files = _local_files(corpus)
    documents: Iterator[Document] = (d for f in files for d in _read_file(f, text_column))
    if not files:
        documents = read_dataset(corpus, text_column, {"split": "train", **(dataset_options or {})})
    if not any(d.text.strip() for d in documents):
        raise _no_text(corpus)


def _check_split(split: str) -> None:
    if split not in SPLITS:
        raise SparseKVError(f"unknown split {split!r}: expected one of {', '.join(SPLITS)}")


def _no_text(corpus: str) -> SparseKVError:
    return SparseKVError(f"the corpus {corpus!r} holds no text; expected at least one non-empty document")


def make_windows(
    documents: Iterator[Document], tokenizer: Any, *, length: int, count: int, seed: int = 0, pack: bool = True,
    chat_template: bool = False, remedy: str = "shorter or fewer windows",
) -> list[Window]:
    """Cut documents into `count` windows of exactly `length` tokens. The same seed gives the same windows anywhere.

    pack: short documents are joined (a blank line between) until a window is full; without it a document shorter than
    a window is passed over. Every window starts with what the tokenizer puts before a text, once. Documents come in an
    order shuffled by `seed` (after the first 10,000 in their own). remedy: what else than
    more text helps the caller's user, for the message.
    Raises SparseKVError where the corpus has too little text.
    """
    prefix = list(tokenizer("")["input_ids"])
    body = length - len(prefix)
    if body < 1:
        raise SparseKVError(f"a window of {length} tokens is too short; expected at least {len(prefix) + 1}")
    windows: list[Window] = []
    tokens: list[int] = []
    owners: list[str] = []
    longest = 0
    for document in _shuffled(documents, seed):
        text = document.text
        if chat_template:
            text = _as_chat(text, tokenizer)
        ids = tokenizer(text if not pack else text.rstrip() + "\n\n", add_special_tokens=False)["input_ids"]
        if chat_template and prefix and ids[:len(prefix)] == prefix:
            ids = ids[len(prefix):]
        longest = max(longest, len(ids))
        if not pack:
            tokens, owners = [], []
        tokens.extend(ids)
        owners.append(document.source)
        while len(tokens) >= body:
            windows.append(Window(prefix + tokens[:body], tuple(owners)))
            tokens, owners = tokens[body:], owners[-1:]
            if len(windows) == count:
                return windows
        if not tokens:
            owners = []
    found = len(windows) * body + len(tokens) if pack else longest
    what = (f"has {found} tokens, enough for {len(windows)} windows of {length}" if pack else
            f"has {len(windows)} documents of {length} tokens or more (the longest has {longest})")
    raise SparseKVError(f"the corpus is too short: it {what}; {count} windows were asked for. Use more text, "
                        f"or {remedy}.")


def _as_chat(text: str, tokenizer: Any) -> str:
    """The text as a user's message, in the words of the model's template."""
    try:
        return str(tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False))
    except Exception as error:  # templates raise whatever they like
        raise SparseKVError(f"the model's chat template could not be applied ({first_line(error)}); leave out "
                            "--chat-template") from error


def _shuffled(documents: Iterator[Document], seed: int) -> Iterator[Document]:
    """The first `SHUFFLED` documents by a key that depends on the seed and the name only, the others in order."""
    head = []
    for document in documents:
        head.append(document)
        if len(head) == SHUFFLED:
            break
    head.sort(key=lambda d: random.Random(f"{seed}:{d.source}").random())
    yield from head
    yield from documents


def _held_out(document: Document) -> bool:
    return int(hashlib.sha256(document.source.encode()).hexdigest(), 16) % 100 < HELDOUT_PERCENT


def _cut(document: Document, split: str) -> Document:
    at = len(document.text) * (100 - HELDOUT_PERCENT) // 100
    text = document.text[:at] if split == "train" else document.text[at:]
    return Document(f"{document.source}[{split}]", text)


def _embedded() -> list[Document]:
    """The language reference that Python carries for its `help()`: about 113k tokens of technical English."""
    from pydoc_data import topics

    return [Document(f"pydoc_data.topics/{name}", text) for name, text in sorted(topics.topics.items())]


def _local_files(corpus: str) -> list[Path]:
    path = Path(corpus)
    if path.is_file():
        return [path]
    if path.is_dir():
        return sorted(f for f in path.rglob("*") if f.suffix in (".txt", ".md", ".jsonl", ".parquet"))
    found = sorted(Path(f) for f in glob.glob(corpus, recursive=True) if Path(f).is_file())
    if not found and (path.suffix in (".txt", ".md", ".jsonl", ".parquet") or "*" in corpus or path.is_absolute()):
        raise SparseKVError(f"no file at {corpus!r}: expected a .txt, .md, .jsonl or .parquet file, a glob, "
                            "'embedded', or the name of a Hugging Face dataset")
    return found


def _read_file(path: Path, column: str | None) -> Iterator[Document]:
    try:
        if path.suffix == ".jsonl":
            with path.open(encoding="utf-8") as lines:
                for number, line in enumerate(lines):
                    if line.strip():
                        yield Document(f"{path.name}:{number}", _text(json.loads(line), column, str(path)))
        elif path.suffix == ".parquet":
            import pyarrow.parquet

            table = pyarrow.parquet.read_table(path)
            for number, record in enumerate(table.to_pylist()):
                yield Document(f"{path.name}:{number}", _text(record, column, str(path)))
        else:
            yield Document(path.name, path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, OSError, ValueError) as error:
        raise SparseKVError(f"could not read {str(path)!r} as {path.suffix or 'text'}: {error}") from error


def _text(record: Any, column: str | None, where: str) -> str:
    names = [column] if column else [c for c in COLUMNS if isinstance(record, dict) and c in record]
    if not names or not isinstance(record, dict) or not isinstance(record.get(names[0]), str):
        have = sorted(record) if isinstance(record, dict) else type(record).__name__
        raise SparseKVError(f"{where} has no text column {column or ' or '.join(COLUMNS)!r}; found {have}. "
                            "Name it with --text-column.")
    return record[names[0]]


def read_dataset(name: str, column: str | None, options: dict[str, Any]) -> Iterator[Document]:
    """The documents of a Hugging Face dataset, or of a folder that `datasets` reads; options: of `load_dataset`, split
    among them. Raises SparseKVError for whatever goes wrong."""
    import datasets

    number, label = -1, Path(name).name if Path(name).is_dir() else name  # where a folder lies decides nothing
    try:
        if (Path(name) / "state.json").is_file():
            records = datasets.load_from_disk(name)  # what Dataset.save_to_disk wrote: it has no splits
        else:
            records = datasets.load_dataset(name, **options)
        for number, record in enumerate(records):
            yield Document(f"{label}/{options['split']}:{number}", _text(dict(record), column, name))
    except SparseKVError:
        raise
    except Exception as error:  # datasets, the hub and the readers of formats raise whatever they like
        reason = " ".join(str(error).split()) or type(error).__name__
        if number >= 0:
            message = f"the dataset {name!r} broke off after {number + 1} documents: {reason}"
        elif isinstance(error, TypeError | ValueError) and any(
                word in reason.lower() for word in ("split", "config", "argument")):
            message = f"the dataset {name!r} cannot be loaded with {options}; change --dataset-options ({reason})"
        else:
            message = (f"no corpus {name!r}: it is neither 'embedded', a file or glob, nor a Hugging Face dataset "
                       f"that could be opened ({reason})")
        raise SparseKVError(message) from error
