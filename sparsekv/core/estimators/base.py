"""What an estimator is: a stand-in for the mid tokens that a step does not read, as one more partial attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsekv.core.layer import Queries, RowState, Selection
from sparsekv.core.regions import Regions
from sparsekv.kernels import CompletionQuery


class Estimator(RowState):
    """Estimates `Σ exp(s_i)` and `Σ exp(s_i) v_i` over the mid tokens outside a selection, whatever made it."""

    in_kernel: bool = False
    """Whether the attention kernel can take the selection out of the estimate and add what is left, given `query`;
    otherwise `partial` is called after it. Known once it is built."""

    def extend(self, view: Any, old: Regions) -> None:
        """The mid region grew from `old` to `view.regions`; the default builds again."""
        self.build(view)

    def set_read_share(self, view: Any, share: float | Tensor) -> None:
        """Set the share of the context that later steps read beside the anchors: a float, or `[B]` per row."""

    def load(self, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """Put what was trained on the device, for layers with keys of this precision; once for all forks."""
        return []

    @property
    def key_sizes(self) -> tuple[int, int] | None:
        """Units and features of the map of keys that the kernel takes in; None where it takes no map."""
        return None

    def query(self, view: Any, queries: Queries) -> CompletionQuery:
        """The queries' side of the estimate."""
        raise NotImplementedError

    def partial(self, view: Any, queries: Queries, selection: Selection) -> tuple[Tensor, Tensor]:
        """`(out [Q, Hq, d], lse [Q, Hq])` over what was not selected, lse its log mass; -inf where it estimates
        nothing."""
        raise NotImplementedError

    def cost_tokens(self, view: Any) -> float:
        """Return what a step fetches of the summary, per KV head [tokens of `2d` elements] (completion paper, appendix
        D)."""
        raise NotImplementedError

    def cost_bytes(self, view: Any) -> Tensor | float:
        """Bytes that a step of a layer reads for it, of one row, in the precision of the keys. Waits for no device."""
        return self.cost_tokens(view) * 2 * view.head_dim * view.dtype.itemsize * view.num_kv_heads
