"""sparsekv: decode long contexts reading a few percent of the KV cache."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["SparseConfig", "__version__", "attach"]


def __getattr__(name: str) -> Any:
    if name == "attach":
        from sparsekv.runtime.hf.attach import attach

        return attach
    if name == "SparseConfig":
        from sparsekv.runtime.config import SparseConfig

        return SparseConfig
    raise AttributeError(f"module 'sparsekv' has no attribute {name!r}")
