"""What is trained: independent heads in one batch, and their schedule."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

WARMUP = 0.05
M = TypeVar("M", bound=nn.Module)


class Task(nn.Module):
    """Every parameter has the heads as its first dimension, and no head knows of another."""

    weight_decay = 0.0
    betas = (0.9, 0.999)
    muon = False
    """True if matrices take Muon's steps; vectors always take Adam's."""

    constant_rate = False
    """True if the learning rate neither warms up nor decays."""

    last_weights = False
    """True if a training ends with its last weights, and not with every head's best validated ones."""

    def draws(self, first: int, count: int) -> dict[str, Tensor]:
        """Random choices of the steps `first..first + count`, on the CPU, the step as first dimension. They depend on
        nothing but the seed and the step."""
        raise NotImplementedError

    def losses(self, draw: dict[str, Tensor]) -> dict[str, Tensor]:
        """One step's losses by name, a value a head; `loss` is the one that is minimised."""
        raise NotImplementedError

    def validate(self) -> Tensor:
        """Error of the present weights on held-out windows, one a group of heads that share weights (a KV head and its
        query heads); lower is better."""
        raise NotImplementedError


def cosine_factor(step: int, steps: int) -> float:
    """Learning rate as a share of its peak: linear warm-up over a share of the steps, then half a cosine to zero."""
    rise = max(1, int(steps * WARMUP))
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - rise) / max(1, steps - rise))))


def by_head(make: Callable[[int], M], seeds: list[int]) -> M:
    """`make(heads)` with the initial weights of every head drawn from its own seed, whichever others are beside it."""
    with torch.random.fork_rng(devices=[]):
        heads = make(len(seeds))
        with torch.no_grad():
            for row, seed in enumerate(seeds):
                torch.manual_seed(seed)
                for into, one in zip(heads.parameters(), make(1).parameters(), strict=True):
                    into[row] = one[0]
    return heads
