"""PyramidKV: SnapKV with a budget that shrinks with depth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sparsekv.core.baselines.snapkv import SnapKV
from sparsekv.core.layer import LayerView
from sparsekv.util.config import option


@dataclass(eq=False)
class PyramidKV(SnapKV):
    """`k_l = k_max − l·(k_max − k_min)/(L − 1)` with `k_min = k/β`, `k_max = 2k − k_min` (Cai et al. 2024, §4.1): the
    mean over layers is the budget `k`."""

    name: ClassVar[str] = "pyramidkv"

    beta: float = option(20.0, help="Steepness of the pyramid: the last layer keeps the budget divided by this.", min=1)

    def layer_budget(self, view: LayerView, tokens: Tensor) -> Tensor:
        return (tokens.double() * self._part(view)).round().long()

    def read_share(self, view: LayerView) -> float | Tensor:
        share = super().read_share(view) * self._part(view)
        return share.clamp(max=1.0) if isinstance(share, Tensor) else min(share, 1.0)

    def _part(self, view: LayerView) -> float:
        """This layer's budget, in budgets: from 2 − 1/β in the first to 1/β in the last."""
        last = 1 / self.beta
        return 2 - last - view.layer_idx * 2 * (1 - last) / max(view.num_layers - 1, 1)
