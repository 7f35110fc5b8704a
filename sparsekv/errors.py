"""The one exception a user meets: what was found, what was expected, what to do."""

from __future__ import annotations


class SparseKVError(Exception):
    """A problem with the user's input. The message is one clear sentence; the CLI prints it without a traceback."""
