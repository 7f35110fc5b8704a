"""Positive feature maps, head by head in one batch: a ReZero MLP from a rotated query or key to `log φ`
(completion paper §5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sparsekv.kernels import FeatureMapWeights, KeyMap, add_centre, key_map, log_phi, log_phi_keys


class Maps(NamedTuple):
    """The learned maps of some heads: φ_q of every query head, φ_k of every KV head, and for maps with a centred half
    the map that makes the second half of φ_k's features from `k − k̄`."""

    query: FeatureMapWeights
    key: FeatureMapWeights
    centred: FeatureMapWeights | None = None

    def log_phi_q(self, queries: Tensor, centre: Tensor | None = None, scale: float = 1.0) -> Tensor:
        """`[..., Hq, T, d]` with RoPE -> `[..., Hq, T, r]`. centre `[..., Hkv, d]`: the mean key, if half centred."""
        logs = log_phi(queries, self.query)
        return logs if self.centred is None or centre is None else add_centre(logs, queries, scale * centre)

    def log_phi_k(self, keys: Tensor, centre: Tensor | None = None) -> Tensor:
        """`[..., Hkv, N, d]` with RoPE -> `[..., Hkv, N, r]`. With a centred map the second half of the features is
        that map's of `k − k̄`, k̄ = centre `[..., Hkv, d]`: attention to the others hangs on what tells keys apart, and
        what they share is the query's to add, exactly (`add_centre`). Ours, not the paper's."""
        assert self.centred is None or centre is not None, "maps with a centred half need the mean key of the request"
        return log_phi_keys(keys, self.of_keys(self.key.w_in.dtype), centre)

    def of_keys(self, dtype: torch.dtype) -> tuple[KeyMap, ...]:
        """Those of keys as `log_phi_keys` takes them, with products in `dtype`."""
        return tuple(key_map(m, dtype) for m in (self.key, self.centred) if m is not None)

    def map(self, change: Callable[[Tensor], Tensor]) -> Maps:
        """With every tensor changed."""
        return Maps(*(None if m is None else FeatureMapWeights(*(change(w) for w in m))  # type: ignore[arg-type]
                      for m in self))

    def named(self) -> dict[str, Tensor]:
        """Every tensor under the name it has in an artifact."""
        return {f"{part}_map.{k}": w for part, m in self._asdict().items() if m is not None
                for k, w in m._asdict().items()}

    @classmethod
    def from_named(cls, tensors: dict[str, Tensor]) -> Maps:
        """The maps whose tensors these are, among others."""
        return cls(*(FeatureMapWeights(*(tensors[f"{part}_map.{k}"] for k in FeatureMapWeights._fields))
                     for part in cls._fields if f"{part}_map.w_in" in tensors))

    def heads(self, query_heads: slice, kv_heads: slice) -> Maps:
        """Those of some query heads and KV heads."""
        parts = (query_heads, kv_heads, kv_heads)
        return Maps(*(None if m is None else FeatureMapWeights(*(w[part] for w in m))  # type: ignore[arg-type]
                      for m, part in zip(self, parts, strict=True)))


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


class CentredMap(nn.Module):
    """φ_k of `heads` heads with a centred half: `features` of which the second half sees `k − k̄`."""

    def __init__(self, heads: int, dim: int, features: int, width: int):
        super().__init__()
        half = features // 2
        self.plain, self.centred = (FeatureMap(heads, dim, n, width) for n in (features - half, half))

    @torch.no_grad()
    def whiten(self, sample: Tensor) -> None:
        """As `FeatureMap.whiten`, the centred half with the mean of the sample taken off."""
        self.plain.whiten(sample)
        self.centred.whiten(sample - sample.mean(1, keepdim=True))

    def forward(self, x: Tensor, centre: Tensor) -> Tensor:
        """x `[heads, ..., d]`, centre of the same number of dimensions."""
        shape = (x.shape[0], -1, x.shape[-1])
        logs = [self.plain(x.reshape(shape)), self.centred((x - centre).reshape(shape))]
        return torch.cat(logs, -1).reshape(*x.shape[:-1], -1)
