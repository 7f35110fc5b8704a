"""Every selector by name. A new one is a file here and a row in `core/registry.py`."""

from __future__ import annotations

from collections.abc import Mapping

from sparsekv.core.registry import SELECTOR_ROWS, Classes
from sparsekv.core.selectors.base import Selector

SELECTORS: Mapping[str, type[Selector]] = Classes(SELECTOR_ROWS)

__all__ = ["SELECTORS", "Selector"]
