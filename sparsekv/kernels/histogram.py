"""Scores as bins of a histogram: the best tokens are found by counting, without a sort.

A bin is an eighth of a doubling of a score, a share of a group's attention, from 2⁻²⁵ on: the float32's bits without
their last SHIFT, less FLOOR. Bin 0 is no candidate, bin 1 every smaller share. The threshold is the bin down to which
the budget reaches; of its own candidates the first are chosen.
"""

from __future__ import annotations

import torch
from torch import Tensor

BINS, FLOOR, SHIFT = 256, 816, 20
"""Bins, the bits of 2⁻²⁵ as a float32 without its last SHIFT, and those bits: eight bins to a doubling."""
LEAST = -60000.0
"""The least score that kernels write, a logarithm to the base 2 in half precision: smaller ones count as this."""
DONE, CHOSEN, THRESHOLD, TIES, TICKET, HEADER = 0, 1, 2, 3, 4, 5
"""Behind the bins of a histogram stand HEADER numbers: programs that have counted; tokens that are chosen; the bin that
is the threshold; how many of its candidates are chosen; the next block of `select_kernel` that is to be taken. Behind
them one number a block of `select_kernel`: what it chooses, and PUBLISHED."""
PUBLISHED = 1 << 30


def bins_of(scores: Tensor) -> Tensor:
    """The bins of scores, uint8: 0 where there is no candidate (a score below 0), else 1 to BINS - 1."""
    upper = (scores.float().clamp(min=0.0).view(torch.int32) >> SHIFT) - FLOOR
    return torch.where(scores < 0, 0, upper.clamp(0, BINS - 2) + 1).to(torch.uint8)


def best_tokens_reference(bins: Tensor, tokens: Tensor | None, budget: Tensor, widest: int) -> Tensor:
    """The `budget[q]` candidates of the highest bins `[Q, H, K]`, of one bin the first: `[Q, H, widest]` int32 in
    their order, padded with -1. tokens `[Q, H, K]`, or None where candidate i is token i."""
    count, heads, width = bins.shape
    out = torch.full((count, heads, widest + 1), -1, dtype=torch.int32, device=bins.device)
    if width == 0 or widest == 0:
        return out[..., :widest]
    wanted = budget[:, None].clamp(max=widest).minimum((bins > 0).sum(-1))
    highest = bins.topk(min(widest, width), dim=-1).values
    threshold = highest.gather(-1, (wanted[..., None] - 1).clamp(min=0))
    above, equal = bins > threshold, bins == threshold
    ties = wanted[..., None] - above.sum(-1, keepdim=True)
    chosen = (above | (equal & (equal.cumsum(-1) <= ties))) & (wanted > 0)[..., None]
    listed = torch.arange(width, dtype=torch.int32, device=bins.device).expand_as(bins) if tokens is None else (
        tokens.to(torch.int32))
    slot = torch.where(chosen, chosen.cumsum(-1) - 1, widest)
    return out.scatter_(-1, slot, torch.where(chosen, listed, -1))[..., :widest]
