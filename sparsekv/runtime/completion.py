"""Completion: an estimate of the attention that was not read, as one more partial attention to merge.

The stable cache over the mid region is built once; every step subtracts what was retrieved (completion paper §4.3, §4.4).
Completion takes a list of tokens and does not know which selector chose them.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from sparsekv.artifacts.phi import PhiLayer
from sparsekv.kernels import PhiCache, phi_cache, phi_partial, phi_remainder
from sparsekv.runtime.selectors.base import LayerView, fold

CHUNK = 16_384


class Completion(Protocol):
    """Estimates the mid region less the retrieved tokens."""

    def partial(self, view: LayerView, q_rot: Tensor, retrieved: Tensor) -> tuple[Tensor, Tensor]:
        """q_rot `[B, Hq, T, d]`, retrieved `[B·T, H, K]` -> `(out [B·T, Hq, d], lse [B·T, Hq])`."""
        ...


class PhiCompletion:
    """Learned positive feature maps. Features of the mid keys are kept, so that subtraction only gathers."""

    def __init__(self, maps: PhiLayer, view: LayerView):
        self.maps = maps
        keys = view.keys
        parts = [maps.log_phi_k(keys[:, :, a:a + CHUNK]) for a in range(0, keys.shape[2], CHUNK)]
        self.log_phi_k = torch.cat(parts, dim=2)
        self.cache = phi_cache(self.log_phi_k, view.values, view.regions.mid_mask()[:, None])

    def partial(self, view: LayerView, q_rot: Tensor, retrieved: Tensor) -> tuple[Tensor, Tensor]:
        queries = q_rot.shape[2]
        log_q = self.maps.log_phi_q(q_rot).transpose(1, 2).flatten(0, 1)
        cache = PhiCache(*(fold(x, queries) for x in self.cache))
        if retrieved.shape[1] != view.num_kv_heads:
            return self._per_query_head(view, log_q, cache, retrieved, queries)
        rest = phi_remainder(cache, *self._gather(view, retrieved, queries), retrieved >= 0)
        return phi_partial(log_q, rest, full_z=cache.z)

    def _gather(self, view: LayerView, tokens: Tensor, queries: int) -> tuple[Tensor, Tensor]:
        """Features and values of the retrieved tokens `[Q, Hkv, K]`."""
        row = torch.arange(tokens.shape[0], device=tokens.device)[:, None, None] // queries
        head = torch.arange(tokens.shape[1], device=tokens.device)[None, :, None]
        place = tokens.clamp(min=0).long()
        return self.log_phi_k[row, head, place], view.values[row, head, place]

    def _per_query_head(
        self, view: LayerView, log_q: Tensor, cache: PhiCache, retrieved: Tensor, queries: int,
    ) -> tuple[Tensor, Tensor]:
        """Every query head subtracts a list of its own."""
        outs, lses = [], []
        for g in range(view.group):
            part = retrieved[:, g::view.group]
            rest = phi_remainder(cache, *self._gather(view, part, queries), part >= 0)
            out, lse = phi_partial(log_q[:, g::view.group], rest, full_z=cache.z)
            outs.append(out)
            lses.append(lse)
        return torch.stack(outs, 2).flatten(1, 2), torch.stack(lses, 2).flatten(1, 2)


class CentroidCompletion:
    """The rival without training: `Z_c ≈ n_c · exp(q·mean k_c · scale)`, numerator `Z_c · mean v_c`, over equal runs of
    tokens; a run's retrieved tokens are subtracted from its mean and count."""

    def __init__(self, view: LayerView, run: int = 32):
        self.run = run
        length = view.length
        self.group_of = torch.arange(length, device=view.keys.device) // run
        self.num_groups = (length + run - 1) // run
        mask = view.regions.mid_mask()[:, None, :, None].to(torch.float32)
        self.counts = self._sum(mask.expand(-1, view.num_kv_heads, -1, -1))[..., 0]
        self.keys, self.values = (self._sum(x.float() * mask) for x in (view.keys, view.values))

    def _sum(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], self.num_groups, x.shape[3])
        index = self.group_of[None, None, :, None].expand(x.shape)
        return torch.zeros(shape, device=x.device).scatter_add_(2, index, x)

    def partial(self, view: LayerView, q_rot: Tensor, retrieved: Tensor) -> tuple[Tensor, Tensor]:
        queries = q_rot.shape[2]
        if retrieved.shape[1] != view.num_kv_heads:
            raise NotImplementedError("centroid completion takes selections shared by the group")
        q = q_rot.transpose(1, 2).flatten(0, 1).float()
        valid = (retrieved >= 0).float()
        place = retrieved.clamp(min=0).long()
        row = torch.arange(place.shape[0], device=place.device)[:, None, None] // queries
        head = torch.arange(place.shape[1], device=place.device)[None, :, None]
        groups = self.group_of[place]
        counts = fold(self.counts, queries).clone().scatter_add_(2, groups, -valid)
        sums = []
        for total, source in ((self.keys, view.keys), (self.values, view.values)):
            taken = source[row, head, place].float() * valid[..., None]
            sums.append(fold(total, queries).clone().scatter_add_(2, groups[..., None].expand_as(taken), -taken))
        means = [s / counts.clamp(min=1)[..., None] for s in sums]
        grouped = q.reshape(q.shape[0], view.num_kv_heads, view.group, -1)
        logits = (grouped @ means[0].mT) * view.scale + torch.where(counts > 0.5, counts, 0.0).log()[:, :, None]
        lse = logits.logsumexp(-1)
        weights = torch.exp(logits - torch.where(torch.isinf(lse), 0.0, lse)[..., None])
        return (weights @ means[1]).flatten(1, 2), lse.flatten(1, 2)
