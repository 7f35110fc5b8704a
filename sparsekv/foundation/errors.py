"""The exceptions a user meets: what was found, what was expected, what to do."""

from __future__ import annotations


class SparseKVError(Exception):
    """A problem with the user's input. The message is one clear sentence; the CLI prints it without a traceback."""


class Interrupted(SparseKVError):
    """Work that a signal stopped, at a place from which it can go on; the CLI exits with 128 + `signal`."""

    def __init__(self, message: str, signal: int):
        super().__init__(message)
        self.signal = signal


def first_line(error: BaseException) -> str:
    """What an exception says, its first line; its name where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
