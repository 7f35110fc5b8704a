"""Every selector by name. A new one is a file here and a line below."""

from __future__ import annotations

from sparsekv.runtime.selectors.base import Selection, Selector
from sparsekv.runtime.selectors.dense import Dense
from sparsekv.runtime.selectors.router import Router
from sparsekv.runtime.selectors.streaming import Streaming
from sparsekv.runtime.selectors.topk import TopK

SELECTORS: dict[str, type[Selector]] = {
    cls.name: cls for cls in (Dense, Streaming, TopK, Router)
}

__all__ = ["SELECTORS", "Selection", "Selector"]
