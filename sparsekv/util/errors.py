"""The exceptions a user meets: what was found, what was expected, what to do."""

from __future__ import annotations

import re
from collections.abc import Iterable

_HIDDEN = re.compile(
    r"(?<=://)[^/@\s'\"]+(?=@)|(?-i:\bhf_[A-Za-z0-9]{8,})|(?<=[?&])((?:\w|-)*(?:token|secret|key|sig|signature|credential|"
    r"password|auth)(?:\w|-)*=)[^&\s'\"]+", re.IGNORECASE)
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """A text that may have come from a file or a server of somebody else's, as a terminal may show it: control and
    direction characters and lone surrogates are written out (`\\x1b`), but for tab and line feed; user names, passwords
    and tokens in URLs, and tokens of the Hugging Face hub, are dots."""
    shown = _HIDDEN.sub(lambda found: f"{found[1] or ''}…", text)
    return _UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode(), shown)


def as_markdown(text: str) -> str:
    """A page of Markdown whose names may be somebody else's: `printable`, and without HTML."""
    return printable(text).replace("<", "&lt;")


class SparseKVError(Exception):
    """A problem with the user's input. The message is one clear sentence, made `printable`; the CLI prints it without a
    traceback."""

    def __init__(self, message: str):
        super().__init__(printable(message))


class Interrupted(SparseKVError):
    """Work that a signal stopped, at a place from which it can go on; the CLI exits with 128 + `signal`."""

    def __init__(self, message: str, signal: int):
        super().__init__(message)
        self.signal = signal


def check_choice(name: str, value: object, allowed: Iterable[str]) -> None:
    """Raises SparseKVError for a word that is not one of the allowed."""
    if value not in (allowed := tuple(allowed)):
        raise SparseKVError(f"unknown {name} {value!r}: expected one of {', '.join(allowed)}")


def first_line(error: BaseException) -> str:
    """Return what an exception says, its first line; its name where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def brief(value: object) -> str:
    """A value in a sentence."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
