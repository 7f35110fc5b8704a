"""What a method reads, in tokens: one token is K and V of one KV head, `2d` numbers (completion paper, appendix D)."""

from __future__ import annotations

import torch

from sparsekv.core.regions import Regions
from sparsekv.core.selectors.base import tokens_of_budget
from sparsekv.errors import SparseKVError
from sparsekv.models.estimators import phi_tokens


def cache_tokens(num_features: int, head_dim: int) -> float:
    """The completion cache `(m, z, S)` of one layer and KV head: `r(d + 2)` numbers, in tokens."""
    return phi_tokens(num_features, head_dim)


def retrieved_tokens(
    budget: float, context_length: int, anchors: int, *, num_features: int = 0, head_dim: int = 1,
    generated_tokens: int = 1, completion_tokens: float = 0.0,
) -> int | None:
    """Mid tokens a budget leaves to retrieve; None where it cannot even pay for what is always read.

    budget: fraction of the context; anchors: sink and tail tokens; num_features 0 is selection alone, otherwise the
    completion cache is paid for too, spread over `generated_tokens` (1 is the worst case). completion_tokens: the same
    for a summary whose size is known in tokens.
    """
    regions = Regions(torch.zeros(1, dtype=torch.long), torch.tensor([context_length - anchors]), context_length, 0)
    cache = (completion_tokens + (cache_tokens(num_features, head_dim) if num_features else 0.0)) / generated_tokens
    try:
        return int(tokens_of_budget(float(budget), regions, accounting="worst_case", completion_tokens=cache))
    except SparseKVError:
        return None
