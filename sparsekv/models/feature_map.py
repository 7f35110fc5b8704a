"""Positive feature maps, head by head in one batch: from a rotated query or key to `log φ`, one hidden layer and as
many ReZero blocks (completion paper §5) as the weights have, none or more."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sparsekv.kernels import FeatureMapWeights, KeyMap, add_centre, key_map, log_phi, log_phi_key


class FeatureMaps(NamedTuple):
    """The learned maps of some heads: φ_q of every query head, φ_k of every KV head, and for maps with a centred half
    the map from `k − k̄`. It makes the second half of φ_k's features; or, where both maps make all of them, their
    `log φ` are added: one layer whose units see either the key or what tells it from the others."""

    query: FeatureMapWeights
    key: FeatureMapWeights
    centred: FeatureMapWeights | None = None

    def log_phi_q(self, queries: Tensor, centre: Tensor | None = None, scale: float = 1.0) -> Tensor:
        """`[..., Hq, T, d]` with RoPE -> `[..., Hq, T, r]`. centre `[..., Hkv, d]`: the mean key, if half centred."""
        logs = log_phi(queries, self.query)
        return logs if self.centred is None or centre is None else add_centre(logs, queries, scale * centre)

    def log_phi_k(self, keys: Tensor, centre: Tensor | None = None) -> Tensor:
        """`[..., Hkv, N, d]` with RoPE -> `[..., Hkv, N, r]`. A centred map sees `k − k̄`, k̄ = centre `[..., Hkv, d]`:
        attention to the others hangs on what tells keys apart, and what they share is the query's to add, exactly, to
        the second half of the features (`add_centre`). Ours, not the paper's."""
        logs = log_phi_key(keys, self.key)
        if self.centred is None:
            return logs
        assert centre is not None, "maps with a centred half need the mean key of the request"
        centred = log_phi_key(keys - centre[..., None, :], self.centred)
        return logs + centred if self.shared else torch.cat([logs, centred], dim=-1)

    @property
    def shared(self) -> bool:
        """Return whether both maps of keys make all features."""
        return self.centred is not None and self.centred.b_out.shape[-1] == self.query.b_out.shape[-1]

    def of_keys(self, dtype: torch.dtype) -> KeyMap | FeatureMapWeights:
        """Return the map of keys as it is run, with products in `dtype`; as it is where it has blocks."""
        return key_map([m for m in (self.key, self.centred) if m is not None], self.query.b_out.shape[-1], dtype)

    def map(self, change: Callable[[Tensor], Tensor]) -> FeatureMaps:
        """Return the maps with every tensor changed."""
        return FeatureMaps(*(None if m is None else FeatureMapWeights(*(change(w) for w in m))  # type: ignore[arg-type]
                      for m in self))

    def named(self) -> dict[str, Tensor]:
        """Every tensor under the name it has in an artifact."""
        return {f"{part}_map.{k}": w for part, m in self._asdict().items() if m is not None
                for k, w in m._asdict().items()}

    @classmethod
    def from_named(cls, tensors: dict[str, Tensor]) -> FeatureMaps:
        """The maps whose tensors these are, among others."""
        return cls(*(FeatureMapWeights(*(tensors[f"{part}_map.{k}"] for k in FeatureMapWeights._fields))
                     for part in cls._fields if f"{part}_map.w_in" in tensors))

    def heads(self, query_heads: slice, kv_heads: slice) -> FeatureMaps:
        """Those of some query heads and KV heads."""
        parts = (query_heads, kv_heads, kv_heads)
        return FeatureMaps(*(None if m is None else FeatureMapWeights(*(w[part] for w in m))  # type: ignore[arg-type]
                      for m, part in zip(self, parts, strict=True)))


def log_kernel(log_phi_q: Tensor, log_phi_k: Tensor) -> Tensor:
    """Surrogate logits `ŝ = log Σ_j φ_qj φ_kj`: `[..., T, r]` and `[..., N, r]` -> `[..., T, N]`."""
    top_q, top_k = log_phi_q.amax(-1, keepdim=True), log_phi_k.amax(-1, keepdim=True)
    # a head whose gate is closed has -inf everywhere and must stay there, not become NaN
    shift = torch.where(torch.isneginf(top_q), 0.0, top_q)
    product = torch.exp(log_phi_q - shift) @ torch.exp(log_phi_k - top_k).mT
    return product.clamp(min=1e-30).log() + top_q + top_k.mT


class FeatureMap(nn.Module):
    """`heads` independent maps `R^d -> R_{>0}^r` of one hidden layer and `blocks` ReZero blocks, of GELUs; of keys
    without a block the layer is of ReLUs. Input `[heads, T, d]`, output `log φ [heads, T, r]`."""

    def __init__(self, heads: int, dim: int, features: int, width: int, blocks: int = 0, *, of_keys: bool = False):
        super().__init__()

        def matrix(*size: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(heads, *size) * size[-2]**-0.5)

        self.w_in = matrix(dim, width)
        if blocks:  # a parameter without numbers has no norm
            self.w_a, self.w_b = matrix(blocks, width, width), matrix(blocks, width, width)
            self.b_a = nn.Parameter(torch.zeros(heads, blocks * width))
            self.alpha = nn.Parameter(torch.zeros(heads, blocks))
        self.blocks, self.of_keys = blocks, of_keys
        self.w_out = matrix(width, features)
        self.b_in = nn.Parameter(torch.zeros(heads, width))
        self.b_out = nn.Parameter(torch.zeros(heads, features))

    @torch.no_grad()
    def whiten(self, sample: Tensor) -> None:
        """Fold the mean and spread of `sample [heads, T, d]` into the stem, so that training starts in range."""
        mean, spread = sample.mean(1, keepdim=True), sample.std(1, keepdim=True).clamp(min=1e-3)
        self.w_in.div_(spread.mT)
        self.b_in.sub_((mean @ self.w_in)[:, 0])

    def weights(self) -> FeatureMapWeights:
        if not self.blocks:
            heads, _, width = self.w_in.shape
            rows, numbers = self.w_in.new_empty(heads, 0, width), self.w_in.new_empty(heads, 0)
            return FeatureMapWeights(self.w_in, self.b_in, rows, numbers, rows, numbers, self.w_out, self.b_out)
        return FeatureMapWeights(self.w_in, self.b_in, self.w_a.flatten(1, 2), self.b_a, self.w_b.flatten(1, 2),
                                 self.alpha, self.w_out, self.b_out)

    def forward(self, x: Tensor) -> Tensor:
        return (log_phi_key if self.of_keys else log_phi)(x, self.weights())


class CentredMap(nn.Module):
    """φ_k of `heads` heads with a centred half: of `width` units that see `k` and as many that see `k − k̄` each make
    half of the features, or, `shared`, all make all of them."""

    def __init__(self, heads: int, dim: int, features: int, width: int, *, shared: bool = False):
        super().__init__()
        half = features // 2
        made = (features, features) if shared else (features - half, half)
        self.plain, self.centred = (FeatureMap(heads, dim, n, width, of_keys=True) for n in made)
        self.shared = shared

    @torch.no_grad()
    def whiten(self, sample: Tensor) -> None:
        """Whiten as `FeatureMap.whiten` does, the centred half with the mean of the sample taken off."""
        self.plain.whiten(sample)
        self.centred.whiten(sample - sample.mean(1, keepdim=True))

    def forward(self, x: Tensor, centre: Tensor) -> Tensor:
        """x `[heads, ..., d]`, centre of the same number of dimensions."""
        shape = (x.shape[0], -1, x.shape[-1])
        plain, centred = self.plain(x.reshape(shape)), self.centred((x - centre).reshape(shape))
        logs = plain + centred if self.shared else torch.cat([plain, centred], -1)
        return logs.reshape(*x.shape[:-1], -1)
