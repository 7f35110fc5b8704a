"""What a step of a layer reads, in bytes: the rows of keys and values, and all that chooses and completes them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparsekv.core.estimators import Estimator
from sparsekv.core.layer import CacheLayer, Queries, Selection
from sparsekv.core.selectors.base import Selector


def read_shares(view: CacheLayer, queries: Queries, selections: Sequence[Selection], more: Tensor) -> Tensor:
    """Compute what a step reads of every layer, over what is in sight. Waits for no device.

    Args:
        view, queries: of any of the layers, which differ in their selection alone; every query is a step of its own.
        selections: of every layer.
        more: `[layers, B]`, `extra_tokens` of every layer.

    Returns:
        `[2, layers, Q]` float64: tokens, mean over lists, and bytes: the selected rows (for every list that has them),
        the anchors and `more`.
    """
    starts, mid = queries.per_query(view.regions.starts), queries.per_query(view.regions.mid_sizes)
    context = queries.lengths - starts
    by_layer: list[Tensor] = [context] * len(selections)
    alike: dict[Any, list[int]] = defaultdict(list)
    for i, selection in enumerate(selections):
        alike[None if selection.tokens is None else selection.tokens.shape].append(i)
    for shape, members in alike.items():
        counts = (torch.stack([selections[i].counts() for i in members]) if shape is None else
                  (torch.stack([selections[i].as_tokens() for i in members]) >= 0).sum(-1))
        extra = torch.stack([queries.per_query(more[i]) for i in members])
        mean = counts.mean(-1, dtype=torch.float64)
        # lists of query heads of one group are read one by one
        rows = mean * max(1.0, counts.shape[-1] / view.num_kv_heads) + extra
        shares = (torch.stack([mean, rows]) + (context - mid)) / context
        for i, share in zip(members, shares.unbind(1), strict=True):
            by_layer[i] = share
    return torch.stack(by_layer, 1)


def extra_tokens(view: CacheLayer, selector: Selector, estimator: Estimator | None) -> Tensor:
    """Compute what a step reads to choose and to complete, `[B]` float64 [tokens of the layer]."""
    more = torch.zeros_like(view.regions.starts, dtype=torch.float64) + selector.cost_bytes(view)
    return (more if estimator is None else more + estimator.cost_bytes(view)) / token_bytes(view)


def token_bytes(view: CacheLayer) -> int:
    """Bytes of one token's key and value in all heads of a layer."""
    return view.num_kv_heads * 2 * view.head_dim * view.dtype.itemsize
