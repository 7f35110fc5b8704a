"""The query model of a router: from a query to a distribution over buckets of keys (Saap §4)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sparsekv.kernels import QueryModel

MOMENTUM, EPS = 0.05, 1e-5
"""Of the batch norm."""


class BucketRouter(nn.Module):
    """`heads` independent models `W2 relu(BN(W1 q))`. Input `[heads, T, d]`, output logits `[heads, T, C]`.

    Batch norm runs over T, head by head; `fold` turns it into a scale and shift of the first layer.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, heads: int, dim: int, num_buckets: int, hidden: int):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(heads, dim, hidden) * dim**-0.5)
        self.gain = nn.Parameter(torch.ones(heads, hidden))
        self.bias = nn.Parameter(torch.zeros(heads, hidden))
        self.w2 = nn.Parameter(torch.randn(heads, hidden, num_buckets) * 0.5 * hidden**-0.5)
        self.b2 = nn.Parameter(torch.zeros(heads, num_buckets))
        self.register_buffer("running_mean", torch.zeros(heads, hidden))
        self.register_buffer("running_var", torch.ones(heads, hidden))

    def forward(self, queries: Tensor) -> Tensor:
        hidden = queries @ self.w1
        if self.training:
            mean, var = hidden.mean(1), hidden.var(1, unbiased=False)
            with torch.no_grad():
                self.running_mean.lerp_(mean, MOMENTUM)
                self.running_var.lerp_(var, MOMENTUM)
        else:
            mean, var = self.running_mean, self.running_var
        scale = self.gain * torch.rsqrt(var + EPS)
        hidden = hidden * scale[:, None] + (self.bias - mean * scale)[:, None]
        return hidden.relu() @ self.w2 + self.b2[:, None]

    @torch.no_grad()
    def fold(self) -> QueryModel:
        """Return the same function without batch norm, for inference."""
        scale = self.gain * torch.rsqrt(self.running_var + EPS)
        return QueryModel(self.w1 * scale[:, None], self.bias - self.running_mean * scale, self.w2.clone(),
                          self.b2.clone())
