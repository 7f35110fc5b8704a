"""What a step of a layer reads, in bytes: the rows of keys and values, and all that chooses and completes them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparsekv.core.estimators import Estimator
from sparsekv.core.layer import LayerView, Queries, Selection
from sparsekv.core.regions import Regions
from sparsekv.core.selectors.base import Selector


def read_shares(
    view: LayerView, queries: Queries, selection: Selection, selector: Selector, estimator: Estimator | None,
) -> Tensor:
    """What a step reads, over what is in sight, `[2, B, T]` float64: tokens, mean over lists, and bytes, every query
    taken as a step of its own: the selected rows (for every list that has them) and the anchors, the selector's
    `cost_bytes` and the estimator's. Waits for no device."""
    context = queries.lengths - queries.per_query(view.regions.starts)
    more = extra_tokens(view, selector, estimator)
    more = queries.per_query(more) if isinstance(more, Tensor) else more
    shares = _shares(selection.counts(), view.num_kv_heads, more, context, queries.per_query(view.regions.mid_sizes))
    return shares.unflatten(-1, (-1, queries.count))


def shares_of_layers(
    selections: Sequence[Selection], regions: Regions, lengths: Tensor, heads_kv: int, more: Tensor,
) -> Tensor:
    """`read_shares` of a step of every layer, summed over rows, `[2, layers]` float64: one selection a layer, one query
    a row, the same regions in all; lengths `[B]`, more `[layers, B]`: `extra_tokens`. A few launches for all layers."""
    found: list[Tensor] = [more] * len(selections)
    alike: dict[Any, list[int]] = defaultdict(list)
    for i, selection in enumerate(selections):
        alike[None if selection.tokens is None else selection.tokens.shape].append(i)
    for shape, members in alike.items():
        counts = (torch.stack([selections[i].counts() for i in members]) if shape is None else
                  (torch.stack([selections[i].as_tokens() for i in members]) >= 0).sum(-1))
        shares = _shares(counts, heads_kv, torch.stack([more[i] for i in members]), lengths - regions.starts,
                         regions.mid_sizes)
        for i, share in zip(members, shares.sum(-1).unbind(1), strict=True):
            found[i] = share
    return torch.stack(found, 1)


def _shares(counts: Tensor, heads_kv: int, more: Tensor | float, context: Tensor, mid: Tensor) -> Tensor:
    """`[2, ..., Q]` from the tokens of every list, counts `[..., Q, H]`, and what else is read, more `[..., Q]`, of
    contexts `[Q]` with mid regions `[Q]`, all in tokens."""
    mean = counts.mean(-1, dtype=torch.float64)
    # lists of query heads of one group are read one by one
    rows = mean * max(1.0, counts.shape[-1] / heads_kv) + more
    return (torch.stack([mean, rows]) + (context - mid)) / context


def extra_tokens(view: LayerView, selector: Selector, estimator: Estimator | None) -> Tensor | float:
    """What a step reads to choose and to complete, of one row, in tokens of the layer."""
    more = selector.cost_bytes(view) + (0.0 if estimator is None else estimator.cost_bytes(view))
    return (more.double() if isinstance(more, Tensor) else more) / token_bytes(view)


def token_bytes(view: LayerView) -> int:
    """Bytes of one token's key and value in all heads of a layer."""
    return view.num_kv_heads * (view.keys.shape[-1] * view.keys.element_size()
                                + view.values.shape[-1] * view.values.element_size())
