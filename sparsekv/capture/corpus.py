"""Text to token windows: texts that are shipped, local files, globs, Hugging Face datasets."""

from __future__ import annotations

import functools
import glob
import hashlib
import itertools
import json
import os
import random
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sparsekv.artifacts.checks import brief
from sparsekv.artifacts.hub.network import failed_request, in_time
from sparsekv.artifacts.hub.shipped import shipped
from sparsekv.artifacts.hub.spoken import around, as_text, chat_ids, names_special
from sparsekv.util.errors import SparseKVError, check_choice, first_line
from sparsekv.util.progress import progress

SPLITS = ("all", "train", "heldout")
FEW_DOCUMENTS = 10
HELDOUT_PERCENT = 20
SHUFFLED = 10_000
SYNTHETIC = "synthetic"  # the source of windows that no corpus holds
COLUMNS = ("text", "content", "document", "markdown")
SUFFIXES = (".txt", ".md", ".jsonl", ".parquet")
PIECE, EDGE, AT_ONCE = 1 << 15, 1 << 12, 1 << 20
"""Text is cut into pieces of so many characters, before a space among the last `EDGE` of them, and so many characters
of pieces are tokenized in one call, which tokenizers spread over the cores."""
MOST_MESSAGE = 1 << 20
"""Characters of a document that becomes one message of a chat."""
HELD, HELD_BYTES = 1 << 28, 1 << 24
"""Characters of documents that wait to be shuffled; text files above so many bytes are read in pieces."""
MOST_LINE, MOST_TEXT, MOST_ENTRIES = 1 << 26, 8_000_000_000, 1_000_000
"""Limits: characters of a line of .jsonl, bytes of a text file, entries of a folder."""


@dataclass(frozen=True)
class Document:
    """A piece of text and where it came from. file: where a text lies that is too long to hold; of it the characters
    from `first` up to `last`."""

    source: str
    text: str = ""
    file: Path | None = None
    first: int = 0
    last: int | None = None

    def pieces(self) -> Iterator[str]:
        """The text, `PIECE` characters at a time, cut before a space where there is one. Raises SparseKVError."""
        return _pieces([self.text] if self.file is None else self._read(self.file))

    def tokens(self, tokenizer: Any, end: str = "") -> Iterator[list[int]]:
        """Its token ids, piece by piece, without what the tokenizer puts before a text; white space at the end of the
        text is `end` instead, where that is any. Raises SparseKVError."""
        return (ids for _, ids, _ in tokenized([self], tokenizer, end))

    def speaks(self, tokenizer: Any) -> bool:
        """Whether its text names a special token."""
        return any(names_special(tokenizer, piece) for piece in self.pieces())

    def _read(self, file: Path) -> Iterator[str]:
        at, end = 0, self.last
        try:
            with file.open(encoding="utf-8-sig") as opened:
                while (end is None or at < end) and (block := opened.read(PIECE)):
                    yield block[max(0, self.first - at):None if end is None else max(0, end - at)]
                    at += len(block)
        except (OSError, ValueError) as error:
            raise _unreadable(file, error) from error

    @property
    def empty(self) -> bool:
        """Whether there is nothing but white space."""
        return not any(piece.strip() for piece in self.pieces())

    def cut(self, split: str) -> Document:
        """Its first 80 % of characters, or the rest."""
        length = len(self.text) if self.file is None else sum(map(len, self._read(self.file)))
        at, name = length * (100 - HELDOUT_PERCENT) // 100, f"{self.source}[{split}]"
        first, last = (0, at) if split == "train" else (at, length)
        if self.file is None:
            return Document(name, self.text[first:last])
        return replace(self, source=name, first=first, last=last)


def _pieces(blocks: Iterable[str]) -> Iterator[str]:
    held, at = "", 0
    for block in blocks:
        held, at = held[at:] + block, 0
        while len(held) - at > PIECE:
            cut = _cut(held, at + PIECE - EDGE, at + PIECE)
            yield held[at:cut]
            at = cut
    yield held[at:]


def _cut(text: str, least: int, most: int) -> int:
    """Where no word and no run of white space is cut: at a space, since tokens may end with the end of a line."""
    for space in " \n":
        cut = text.rfind(space, least, most)
        while cut > least and text[cut - 1].isspace():
            cut = text.rfind(space, least, cut)
        if cut > least:
            return cut
    return most


def tokenized(
    documents: Iterable[Document], tokenizer: Any, end: str = "", chat_template: bool = False,
    special_tokens: bool = False,
) -> Iterator[tuple[Document, list[int], bool]]:
    """Documents' token ids, piece by piece, and whether a piece is its document's last; as `Document.tokens`, but that
    several documents' pieces are tokenized in one call. special_tokens: the text of special tokens, such as
    `<|im_end|>`, becomes these tokens, and stays text without it. Raises SparseKVError."""
    spoken = {} if chat_template else as_text(tokenizer, special_tokens)
    batch: list[tuple[Document, str, bool]] = []
    size = 0
    for document in documents:
        if chat_template and not special_tokens and document.speaks(tokenizer):
            yield document, _spoken_message(document, tokenizer, end), True
            continue
        pieces = _message(document, tokenizer) if chat_template else document.pieces()
        text: str | None = next(pieces)
        while text is not None:
            following = next(pieces, None)
            if following is None and end:
                text = text.rstrip() + end
            batch.append((document, text, following is None))
            size += len(text)
            if size >= AT_ONCE:
                yield from _encoded(batch, tokenizer, spoken)
                batch, size = [], 0
            text = following
    yield from _encoded(batch, tokenizer, spoken)


def _spoken_message(document: Document, tokenizer: Any, end: str) -> list[int]:
    """Token ids of the document as a user's message, in which special tokens are the template's alone."""
    parts = around(lambda text: _as_chat(text, tokenizer), _whole(document))
    if parts is None:
        raise SparseKVError(f"the document {document.source!r} has the text of special tokens, and the chat template "
                            "changes its text; leave it out, or give --special-tokens")
    return chat_ids(tokenizer, (parts[0], parts[1], parts[2].rstrip() + end if end else parts[2]))


def _message(document: Document, tokenizer: Any) -> Iterator[str]:
    """The document as a user's message."""
    yield _as_chat(_whole(document), tokenizer)


def _whole(document: Document) -> str:
    text = ""
    for piece in document.pieces():
        text += piece
        if len(text) > MOST_MESSAGE:
            raise SparseKVError(f"the document {document.source!r} has more than {MOST_MESSAGE:,} characters, too many "
                                "for one message; cut it, or leave out --chat-template")
    return text


def _encoded(
    batch: list[tuple[Document, str, bool]], tokenizer: Any, spoken: dict[str, Any],
) -> Iterator[tuple[Document, list[int], bool]]:
    if not batch:
        return
    try:
        found = tokenizer([text for _, text, _ in batch], add_special_tokens=False, **spoken)["input_ids"]
    except (TypeError, ValueError, OverflowError) as error:
        if len(batch) > 1:
            for one in batch:
                yield from _encoded([one], tokenizer, spoken)
            return
        raise SparseKVError(f"the model's tokenizer refuses the document {batch[0][0].source!r} ({first_line(error)})"
                            "; leave it out of the corpus") from error
    yield from ((document, list(ids), last) for (document, _, last), ids in zip(batch, found, strict=True))


@dataclass(frozen=True)
class TokenWindow:
    """`tokens`: ids of one context; `sources`: the documents it was cut from, in order."""

    tokens: list[int]
    sources: tuple[str, ...]

    @functools.cached_property
    def sha256(self) -> str:
        return hashlib.sha256(json.dumps(self.tokens).encode()).hexdigest()


def read_documents(
    corpus: str, *, split: str = "all", text_column: str | None = None, dataset_options: dict[str, Any] | None = None,
) -> Iterator[Document]:
    """The documents of `corpus`: `embedded`, `embedded-prose` or `embedded+embedded-prose` (`artifacts/hub/shipped`),
    a .txt, .md, .jsonl or .parquet file, a glob or folder of such files, a folder in another form that `datasets`
    reads, or the name of a Hugging Face dataset (the only form that uses the network). dataset_options: keywords of
    `datasets.load_dataset`; its split is `train` unless named.

    `split` keeps training and held-out text apart: by a hash of the document's name (20 % held out), or, where a local
    corpus has fewer than ten documents, by cutting each at 80 % of its characters. The two parts never overlap.
    """
    check_choice("split", split, SPLITS)
    documents, is_local = _documents(corpus, text_column, dataset_options)
    if not is_local:
        yield from (d for d in documents if split == "all" or _held_out(d) == (split == "heldout"))
        return
    documents = (d for d in documents if not d.empty)
    first = list(itertools.islice(documents, FEW_DOCUMENTS))
    if not first:
        raise _no_text(corpus)
    documents = itertools.chain(first, documents)
    if split == "all":
        yield from documents
    elif len(first) < FEW_DOCUMENTS:
        yield from (d.cut(split) for d in documents)
    else:
        yield from (d for d in documents if _held_out(d) == (split == "heldout"))


def check_corpus(
    corpus: str, *, split: str = "all", text_column: str | None = None, dataset_options: dict[str, Any] | None = None,
) -> None:
    """Look for the corpus and read its first text, as `read_documents` would. Raises SparseKVError."""
    check_choice("split", split, SPLITS)
    documents, _ = _documents(corpus, text_column, dataset_options)
    with progress(f"looking for text in {corpus!r}"):
        if all(d.empty for d in documents):
            raise _no_text(corpus)


def _documents(
    corpus: str, text_column: str | None, dataset_options: dict[str, Any] | None,
) -> tuple[Iterator[Document], bool]:
    """All of a corpus, and whether it lies on this machine, in files of known form."""
    if (texts := shipped(corpus)) is not None:
        return (Document(name, text) for name, text in texts), True
    if files := _local_files(corpus):
        return (d for f in files for d in _read_file(f, text_column)), True
    return read_dataset(corpus, text_column, {"split": "train", **(dataset_options or {})}), False


def _no_text(corpus: str) -> SparseKVError:
    return SparseKVError(f"the corpus {corpus!r} holds no text; expected at least one non-empty document")


def make_windows(
    documents: Iterator[Document], tokenizer: Any, *, length: int, count: int, seed: int = 0, pack: bool = True,
    chat_template: bool = False, remedy: str = "shorter or fewer windows", least: int | None = None,
    special_tokens: bool = False,
) -> list[TokenWindow]:
    """Cut documents into `count` windows of exactly `length` tokens. The same seed gives the same windows anywhere.

    pack: short documents are joined (a blank line between) until a window is full; without it a document shorter than
    a window is passed over. Every window starts with what the tokenizer puts before a text, once. Documents come in an
    order shuffled by `seed` (after the first 10,000, or 2²⁸ characters, in their own). remedy: what else than more
    text helps the caller's user, for the message. least: so many windows are enough where the corpus holds no more.
    special_tokens: as `tokenized`.
    Raises SparseKVError where it has too little text.
    """
    prefix = list(tokenizer("")["input_ids"])
    body = length - len(prefix)
    if body < 1:
        raise SparseKVError(f"a window of {length} tokens is too short; expected at least {len(prefix) + 1}")
    windows: list[TokenWindow] = []
    tokens: list[int] = []
    owners: list[str] = []
    longest = 0
    with progress("cutting the corpus into windows") as say:
        found, begins = 0, True
        shuffled = _shuffled(documents, seed)
        for document, ids, ends in tokenized(shuffled, tokenizer, "\n\n" if pack else "", chat_template,
                                              special_tokens):
            if begins:
                found = 0
                if not pack:
                    tokens, owners = [], []
                owners.append(document.source)
            if chat_template and prefix and ids[:len(prefix)] == prefix:
                ids = ids[len(prefix):]
            found += len(ids)
            tokens.extend(ids)
            used = 0
            while len(tokens) - used >= body:
                windows.append(TokenWindow(prefix + tokens[used:used + body], tuple(owners)))
                used, owners = used + body, owners[-1:]
                if len(windows) == count:
                    return windows
            tokens = tokens[used:]
            say(0, f"{len(windows)} of {count}")
            longest = max(longest, found)
            if ends and not tokens:
                owners = []
            begins = ends
    if least is not None and len(windows) >= least:
        return windows
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
    head, held = [], 0
    for document in documents:
        head.append(document)
        held += len(document.text)
        if len(head) == SHUFFLED or held >= HELD:
            break
    head.sort(key=lambda d: random.Random(f"{seed}:{d.source}").random())
    yield from head
    yield from documents


def _held_out(document: Document) -> bool:
    return int(hashlib.sha256(document.source.encode()).hexdigest(), 16) % 100 < HELDOUT_PERCENT


def _local_files(corpus: str) -> list[Path]:
    """The files that a corpus names; empty where it may be a dataset. Raises SparseKVError."""
    if not corpus.strip():
        raise SparseKVError("the corpus has no name; expected embedded, embedded-prose, a file, a folder, a glob, "
                            "or the name of a Hugging Face dataset")
    path = Path(corpus)
    try:
        if path.is_dir():
            with progress(f"looking for texts in {corpus!r}"):
                return _regular(sorted(_below(path)), corpus)
        if path.exists():
            return _regular([path], corpus)
        with progress(f"looking for texts at {corpus!r}"):
            found = sorted(map(Path, itertools.islice(glob.iglob(corpus, recursive=True), MOST_ENTRIES)))
    except (OSError, ValueError) as error:
        raise SparseKVError(f"no corpus can be at {brief(corpus)} ({first_line(error)})") from error
    found = _regular([f for f in found if not f.is_dir()], corpus)
    if not found and (path.suffix in SUFFIXES or "*" in corpus or (path.name != corpus and path.parent.is_dir())):
        raise SparseKVError(f"no file at {corpus!r}: expected a .txt, .md, .jsonl or .parquet file, a glob, "
                            "'embedded', 'embedded-prose', or the name of a Hugging Face dataset")
    return found


def _below(folder: Path) -> Iterator[Path]:
    """Texts anywhere below a folder; folders that are links are not entered."""
    count = 0
    for where, _, files in os.walk(folder):
        count += len(files) + 1
        if count > MOST_ENTRIES:
            raise SparseKVError(f"the folder {str(folder)!r} holds more than {MOST_ENTRIES:,} files and folders; give "
                                "one with texts alone")
        yield from (Path(where) / f for f in files if Path(f).suffix in SUFFIXES)


def _regular(files: list[Path], corpus: str) -> list[Path]:
    """Those that are files, or links to files: pipes and devices may never end. Raises SparseKVError where none is."""
    doubles = {f for f in files if f.name.startswith("._")}
    if doubles and len(doubles) < len(files):
        print(f"{len(doubles)} of {len(files)} in {corpus!r} are passed over: their names begin with ._, as those of "
              "AppleDouble files, which hold no text", file=sys.stderr)
        files = [f for f in files if f not in doubles]
    kept = [f for f in files if f.is_file()]
    if files and not kept:
        raise SparseKVError(f"{corpus!r} is no regular file but a pipe, a device or a dead link; give a file")
    if len(kept) < len(files):
        print(f"{len(files) - len(kept)} of {len(files)} in {corpus!r} are passed over: they are pipes, devices or "
              "dead links", file=sys.stderr)
    return kept


def _read_file(path: Path, column: str | None) -> Iterator[Document]:
    try:
        if path.suffix == ".jsonl":
            yield from _read_lines(path, column)
        elif path.suffix == ".parquet":
            yield from _read_parquet(path, column)
        elif (size := path.stat().st_size) > MOST_TEXT:
            raise SparseKVError(f"{str(path)!r} has {size / 1e9:.1f} GB; a text file may have up to "
                                f"{MOST_TEXT / 1e9:.0f} GB: cut it into several")
        elif size > HELD_BYTES:
            yield Document(path.name, file=path)
        else:
            yield Document(path.name, path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> SparseKVError:
    return SparseKVError(f"could not read {str(path)!r} as {path.suffix or 'text'}: {first_line(error)}")


def _read_lines(path: Path, column: str | None) -> Iterator[Document]:
    with path.open(encoding="utf-8-sig") as lines:
        for number in itertools.count():
            line = lines.readline(MOST_LINE + 1)
            if not line:
                return
            if len(line) > MOST_LINE:
                raise SparseKVError(f"line {number + 1} of {str(path)!r} has more than {MOST_LINE:,} characters; give "
                                    "every document a line of its own, or a .txt file")
            if line.strip():
                try:
                    record = json.loads(line)
                except ValueError as error:
                    raise SparseKVError(f"could not read {str(path)!r} as .jsonl: its line {number + 1} is no JSON "
                                        f"({brief(line.strip())}); give one object a line") from error
                yield Document(f"{path.name}:{number}", _text(record, column, str(path)))


def _read_parquet(path: Path, column: str | None) -> Iterator[Document]:
    """A few rows at a time, of the text's column alone."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        wanted = _column(dict.fromkeys(file.schema_arrow.names, ""), column, str(path))
        numbers = itertools.count()
        for batch in file.iter_batches(batch_size=64, columns=[wanted]):
            for record in batch.to_pylist():
                yield Document(f"{path.name}:{next(numbers)}", _text(record, wanted, str(path)))


def _column(record: Any, column: str | None, where: str) -> str:
    """The column that holds the text. Raises SparseKVError."""
    names = [column] if column else [c for c in COLUMNS if isinstance(record, dict) and c in record]
    if not names or not isinstance(record, dict) or names[0] not in record:
        have = sorted(record) if isinstance(record, dict) else type(record).__name__
        raise SparseKVError(f"{where} has no text column {column or ' or '.join(COLUMNS)!r}; found {have}. "
                            "Name it with --text-column.")
    return names[0]


def _text(record: Any, column: str | None, where: str) -> str:
    name = _column(record, column, where)
    text = record[name]
    if text is None or text != text:
        raise SparseKVError(f"{where} has a row without text: its column {name!r} holds {text}; leave such rows out")
    if not isinstance(text, str):
        raise SparseKVError(f"{where} has no text column {name!r}; it holds {brief(text)} there. Name it with "
                            "--text-column.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise SparseKVError(f"{where} has half a character (a lone surrogate, U+{ord(text[error.start]):X}) in its "
                            f"column {name!r}; write it again in UTF-8") from error
    return text


def read_dataset(name: str, column: str | None, options: dict[str, Any]) -> Iterator[Document]:
    """The documents of a Hugging Face dataset, or of a folder that `datasets` reads; options: of `load_dataset`, split
    among them. Raises SparseKVError for whatever goes wrong."""
    import datasets

    number, label = -1, Path(name).name if Path(name).is_dir() else name  # where a folder lies decides nothing
    try:
        with in_time():
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
        failed = None if Path(name).exists() else failed_request(error, f"load the dataset {name!r}", datasets.config.
                                                                 HF_ENDPOINT)
        if failed is not None and number < 0 and "cannot be reached" not in str(failed):
            raise failed from error
        if number >= 0:
            message = f"the dataset {name!r} broke off after {number + 1} documents: {reason}"
        elif isinstance(error, TypeError | ValueError) and any(
                word in reason.lower() for word in ("split", "config", "argument")):
            message = f"the dataset {name!r} cannot be loaded with {options}; change --dataset-options ({reason})"
        else:
            message = (f"no corpus {name!r}: it is neither 'embedded', a file or glob, nor a Hugging Face dataset "
                       f"that could be opened ({reason})")
        raise SparseKVError(message) from error
