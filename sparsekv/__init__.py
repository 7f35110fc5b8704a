"""sparsekv: decode long contexts reading a few percent of the KV cache."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparsekv.runtime.config import SparseConfig
    from sparsekv.runtime.hf.attach import Attachment, attach

__version__ = "0.1.0"
__all__ = ["Attachment", "SparseConfig", "__version__", "attach"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'sparsekv' has no attribute {name!r}")
    return getattr(importlib.import_module("sparsekv.runtime.hf.attach"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
