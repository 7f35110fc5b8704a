"""What a step of a layer reads, in bytes: the rows of keys and values, and all that chooses and completes them."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsekv.core.estimators import Estimator
from sparsekv.core.layer import LayerView, Queries, Selection
from sparsekv.core.selectors.base import Selector


def read_shares(
    view: LayerView, queries: Queries, selection: Selection, selector: Selector, estimator: Estimator | None,
) -> Tensor:
    """What a step reads, over what is in sight, `[2, B, T]` float64: tokens, mean over lists, and bytes, every query
    taken as a step of its own: the selected rows (for every list that has them) and the anchors, the selector's
    `cost_bytes` and the estimator's. Waits for no device."""
    context = queries.lengths - queries.per_query(view.regions.starts)
    anchors = context - queries.per_query(view.regions.mid_sizes)
    counts = selection.counts()
    mean = counts.mean(-1, dtype=torch.float64)
    more = selector.cost_bytes(view) + (0.0 if estimator is None else estimator.cost_bytes(view))
    if isinstance(more, Tensor):
        more = queries.per_query(more)
    # lists of query heads of one group are read one by one
    rows = mean * max(1.0, counts.shape[1] / view.num_kv_heads) + more / token_bytes(view)
    return ((torch.stack([mean, rows]) + anchors) / context).unflatten(-1, (-1, queries.count))


def token_bytes(view: LayerView) -> int:
    """Bytes of one token's key and value in all heads of a layer."""
    return view.num_kv_heads * (view.keys.shape[-1] * view.keys.element_size()
                                + view.values.shape[-1] * view.values.element_size())
