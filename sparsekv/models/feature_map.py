"""Positive feature maps, head by head in one batch: a ReZero MLP from a rotated query or key to `log φ`
(completion paper §5)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sparsekv.kernels.reference import FeatureMapWeights, log_phi

__all__ = ["FeatureMap", "FeatureMapWeights", "log_kernel", "log_phi"]


def log_kernel(log_phi_q: Tensor, log_phi_k: Tensor) -> Tensor:
    """Surrogate logits `ŝ = log Σ_j φ_qj φ_kj`: `[..., T, r]` and `[..., N, r]` -> `[..., T, N]`."""
    top_q, top_k = log_phi_q.amax(-1, keepdim=True), log_phi_k.amax(-1, keepdim=True)
    # a head whose gate is closed has -inf everywhere and must stay there, not become NaN
    shift = torch.where(torch.isneginf(top_q), 0.0, top_q)
    product = torch.exp(log_phi_q - shift) @ torch.exp(log_phi_k - top_k).mT
    return product.clamp(min=1e-30).log() + top_q + top_k.mT


class FeatureMap(nn.Module):
    """`heads` independent maps `R^d -> R_{>0}^r`. Input `[heads, T, d]`, output `log φ [heads, T, r]`."""

    def __init__(self, heads: int, dim: int, features: int, width: int):
        super().__init__()

        def matrix(rows: int, columns: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(heads, rows, columns) * rows**-0.5)

        self.w_in, self.w_a, self.w_b = matrix(dim, width), matrix(width, width), matrix(width, width)
        self.w_out = matrix(width, features)
        self.b_in, self.b_a = nn.Parameter(torch.zeros(heads, width)), nn.Parameter(torch.zeros(heads, width))
        self.b_out = nn.Parameter(torch.zeros(heads, features))
        self.alpha = nn.Parameter(torch.zeros(heads, 1))

    @torch.no_grad()
    def whiten(self, sample: Tensor) -> None:
        """Fold the mean and spread of `sample [heads, T, d]` into the stem, so that training starts in range."""
        mean, spread = sample.mean(1, keepdim=True), sample.std(1, keepdim=True).clamp(min=1e-3)
        self.w_in.div_(spread.mT)
        self.b_in.sub_((mean @ self.w_in)[:, 0])

    def weights(self) -> FeatureMapWeights:
        return FeatureMapWeights(self.w_in, self.b_in, self.w_a, self.b_a, self.w_b, self.alpha, self.w_out, self.b_out)

    def forward(self, x: Tensor) -> Tensor:
        return log_phi(x, self.weights())
