"""Command lines as processes."""

from collections.abc import Callable

import pytest
from forks import Fork, Forks


@pytest.fixture
def sparsekv(forks: Forks) -> Callable[..., Fork]:
    """Starts a command: `sparsekv("capture", "--model", ..., TMPDIR=...)`."""
    return lambda *words, **variables: forks.start("-m", "sparsekv.cli", *words, **variables)
