"""Muon for batches of matrices: momentum, then the nearest orthogonal matrix as the step (Jordan et al. 2024)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of the Newton-Schulz step that Jordan et al. fitted to bring singular values to 0.7 … 1.2 soon."""
STEPS = 3
"""Theirs are five; here three serve as well (docs/log/maps.md) and cost less."""
MOMENTUM = 0.95
RMS = 2 / 3
"""Root mean square of a step at rate 1. Adam's is about 0.2 after a while (Liu et al. 2025) and nearly 1 at first; with
this one the learning rate that suits Adam suits Muon."""


class Muon(torch.optim.Optimizer):
    """`torch.optim.Muon` for parameters `[heads, ..., m, n]`, matrices of heads, as one batched program that a CUDA
    graph can replay (torch's own takes single matrices). lr: float or a tensor, read anew at every step.

    All directions of a step are about equally long, those in which gradients are small too.
    """

    def __init__(self, params: Iterable[Tensor], lr: float | Tensor, *, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            rate = group["lr"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                if not self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
                mean = self.state[p]["momentum"]
                mean.lerp_(p.grad, 1 - MOMENTUM)
                step = orthogonal(p.grad.lerp(mean, MOMENTUM)).mul_(RMS * max(p.shape[-2:]) ** 0.5)
                p.mul_(1 - rate * group["weight_decay"]).sub_(step.mul_(rate))


def orthogonal(x: Tensor, steps: int = STEPS) -> Tensor:
    """`[..., m, n]` -> about `U Vᵀ` of its singular value decomposition; zero stays zero."""
    a, b, c = QUINTIC
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-12)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x
