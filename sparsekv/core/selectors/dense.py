"""Full attention through the same door."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sparsekv.core.selectors.base import Selector, Spends


@dataclass(eq=False)
class Dense(Selector):
    """Reads everything: no layer decodes sparsely, and nothing is selected."""

    name: ClassVar[str] = "dense"
    spends: ClassVar[Spends] = Spends.NOTHING

    def serves(self, layer_idx: int) -> bool:
        return False
