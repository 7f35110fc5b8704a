"""Completion: an estimate of what was not read, as one more partial attention (completion paper §4)."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparsekv.kernels import (
    MeanKey,
    PhiCache,
    PhiStore,
    blend_mass,
    mean_mass,
    phi_cache,
    phi_extend,
    phi_features,
    phi_partial,
    phi_remainder,
)
from sparsekv.kernels.reference import FeatureMapWeights
from sparsekv.models.estimators import phi_tokens
from sparsekv.runtime.regions import Regions
from sparsekv.runtime.request_fit import LASTS, Fit, request_fit
from sparsekv.runtime.rows import gather_rows
from sparsekv.runtime.selectors.base import LayerView, Queries, Selection, fold, one_launch

BLOCK = 4096


class Completion:
    """Estimates `Σ exp(s_i)` and `Σ exp(s_i) v_i` over the mid tokens outside a selection, whatever made it.

    Like a selector's, its state is replaced and never changed in place; `row_state` names the tensors by row.
    """

    row_state: ClassVar[tuple[str, ...]] = ()

    def build(self, view: LayerView) -> None:
        """Summarise the mid region."""
        raise NotImplementedError

    def extend(self, view: LayerView, old: Regions) -> None:
        """The mid region grew from `old` to `view.regions`."""
        self.build(view)

    def reads(self, view: LayerView, share: float) -> None:
        """The steps that follow read this share of the context beside sink and tail."""

    def partial(self, view: LayerView, queries: Queries, selection: Selection) -> tuple[Tensor, Tensor]:
        """`(out [B·T, Hq, d], lse [B·T, Hq])` over the remainder; lse = -inf where it estimates nothing."""
        raise NotImplementedError

    def cost_tokens(self, view: LayerView) -> float:
        """What the summary costs to fetch, per KV head, in tokens of `2d` elements (METHODS, budget accounting)."""
        raise NotImplementedError

    def fork(self) -> Any:
        return copy.copy(self)

    def take_rows(self, index: Tensor) -> None:
        """Keep the chosen rows of the batch, in that order."""
        for name in self.row_state:
            value = getattr(self, name)
            if isinstance(value, tuple):
                rows: list[Any] = [None if x is None else x[index] for x in value]
                setattr(self, name, type(value)(*rows))
            elif value is not None:
                setattr(self, name, value[index])


class PhiCompletion(Completion):
    """The stable cache of feature sums, minus the selection (completion paper §4.4, appendix C).

    `layer` has `log_phi_q(q_rot [B, Hq, T, d])`, `log_phi_k(k_rot [B, Hkv, N, d])` and an `offset [Hq]`, as
    `PhiArtifact.layer` gives.
    Maps with a centred half (`layer.centred`) also want the request's mean key: that of the mid region when the cache
    was built, `centre [B, Hkv, d]` float32. Where the mid region has doubled since, the cache is built anew. With
    `layer.blend` the mass is blended with that of the mean score, by the mean key of all of the mid region times the
    softmax scale, `mean_key [B, Hkv, d]`.
    With `fit` shift and blend of a request's first tokens are fitted to it (`request_fit`).
    """

    row_state = ("cache", "features", "store", "centre", "centre_of", "fitted", "mean_key", "size")

    def __init__(self, layer: Any, fit: bool = False):
        self.layer = self.calibrated = layer
        self.fit, self.fitted_until = fit, 0
        self.fitted: Fit | None = None
        self.cache: PhiCache | None = None
        self.features: Tensor | None = None
        self.store: PhiStore | None = None
        self.maps: FeatureMapWeights | None = None
        self.centre: Tensor | None = None
        self.centre_of: Tensor | None = None
        self.mean_key: Tensor | None = None
        self.size: Tensor | None = None

    def build(self, view: LayerView) -> None:
        self.cache, self.features, self.store = self._kept(view), None, None
        centred = getattr(self.layer, "centred", False) and self.cache is None
        blended = getattr(self.layer, "blend", None) is not None
        if centred or blended:
            mean = _mean_key(view)
            if centred:
                self.centre, self.centre_of = mean, view.regions.mid_sizes
            if blended:
                self.mean_key, self.size = view.scale * mean.to(view.device), view.regions.mid_sizes.float()
        if self.cache is None:
            self._add(view, view.regions.mid_first, view.regions.mid_last)

    def reads(self, view: LayerView, share: float) -> None:
        if hasattr(self.calibrated, "at"):
            self.layer = self.calibrated.at(share)
        self.fitted = None
        if self.fit and view.length - view.recent_end < LASTS:
            self.fitted = request_fit(view, self.layer, share, self.centre)
            self.fitted_until = view.recent_end + LASTS

    def _mass(self, view: LayerView, queries: int = 1) -> tuple[Tensor, Tensor | None]:
        """Offset and blend of the last `queries` tokens' mass: as fitted to the request while that lasts, then as
        calibrated. `[Hq]`, or `[B·T, Hq]`."""
        offset, blend = self.layer.offset, getattr(self.layer, "blend", None)
        if self.fitted is None or view.length - queries >= self.fitted_until:
            return offset, blend
        if queries == 1:
            return self.fitted
        ends = torch.arange(view.length - queries + 1, view.length + 1, device=offset.device)
        lasts = (ends <= self.fitted_until).repeat(self.fitted.shift.shape[0])[:, None]
        offset = torch.where(lasts, fold(self.fitted.shift, queries), offset)
        return offset, None if blend is None else torch.where(lasts, fold(self.fitted.blend, queries), blend)

    def _log_k(self, keys: Tensor, queries: int = 1) -> Tensor:
        """`log φ_k` of keys `[B · queries, Hkv, n, d]`."""
        return self.layer.log_phi_k(keys, *(() if self.centre is None else (fold(self.centre, queries),)))

    def _kept(self, view: LayerView) -> PhiCache | None:
        """The cache saved with a prefix, if it is of these maps and this mid region."""
        saved = view.saved or {}
        if "phi.m" not in saved:
            return None
        mid = torch.stack([view.regions.mid_first, view.regions.mid_last])
        if ("phi.centre" in saved) != getattr(self.layer, "centred", False):
            return None
        if "phi.centre" in saved:
            self.centre, self.centre_of = saved["phi.centre"], saved["phi.centre_of"]
        mark = self._log_k(view.keys[:, :, :1])
        if not torch.equal(saved["phi.mid"], mid) or saved["phi.mark"].shape != mark.shape or not torch.allclose(
                saved["phi.mark"], mark):
            return None
        return PhiCache(saved["phi.m"], saved["phi.z"], saved["phi.s"])

    def saved(self, regions: Regions, first_key: Tensor) -> dict[str, Tensor]:
        """What a saved prefix keeps, by name: read back by `build` where maps and mid region are the same. first_key
        `[B, Hkv, 1, d]`: by its features maps are told apart."""
        assert self.cache is not None
        found = {**self.cache._asdict(), "mid": torch.stack([regions.mid_first, regions.mid_last]),
                 "mark": self._log_k(first_key)}
        if self.centre is not None and self.centre_of is not None:
            found |= {"centre": self.centre, "centre_of": self.centre_of}
        return found

    def extend(self, view: LayerView, old: Regions) -> None:
        if self.centre_of is not None and bool((view.regions.mid_sizes > 2 * self.centre_of).any()):
            self.build(view)
            return
        self.features = None
        joined = torch.maximum(old.mid_last, view.regions.mid_first), view.regions.mid_last
        if self.mean_key is not None:
            sizes = view.regions.mid_sizes
            new = view.scale * _key_sum(view, *joined).to(view.device)
            more = (sizes - old.mid_sizes)[:, None, None]
            self.mean_key = self.mean_key + (new - more * self.mean_key) / sizes.clamp(min=1)[:, None, None]
            self.size = sizes.float()
        self._add(view, *joined)
        if self.store is not None:
            self.store = self._stored(view, self.store, *joined)

    def fused(self, view: LayerView, queries: Queries) -> tuple[FeatureMapWeights, Tensor, PhiStore] | None:
        """Maps, offset and store for the attention kernel, which then completes by itself: one query a row, keys on a
        CUDA device. The features of the mid keys are kept from here on, `2r` bytes a key in half precision."""
        width = self.cache.m.shape[-1] if self.cache is not None else 0
        if not one_launch(view, queries):
            return None
        if width < 16 or width & (width - 1) or not hasattr(self.layer, "query_map"):
            return None
        if self.store is None:
            self.store = self._stored(view, None, view.regions.mid_first, view.regions.mid_last)
        if self.maps is None:
            self.maps = FeatureMapWeights(*(w.to(queries.rot.dtype).contiguous() for w in self.layer.query_map))
        offset, blend = self._mass(view)
        return self.maps, offset, self.store._replace(mean=self._mean(blend))

    def _mean(self, blend: Tensor | None, queries: int = 1) -> MeanKey | None:
        """What the mass is blended with, for each of `queries` rows of every row of the batch."""
        if self.mean_key is None or self.size is None or blend is None:
            return None
        size = fold(self.size, queries)
        return MeanKey(fold(self.mean_key, queries), size, blend.expand(len(size), -1))

    def _stored(self, view: LayerView, held: PhiStore | None, first: Tensor, last: Tensor) -> PhiStore:
        """Features of the tokens `first[b] <= i < last[b]` after those held, with the sums of what was rounded."""
        assert self.cache is not None
        m = self.cache.m if held is None else held.m
        low = 0 if held is None else int(first.min())
        parts = [] if held is None or held.features is None else [held.features[:, :, :low]]
        z, s = (torch.zeros_like(x) for x in self.cache[1:]) if held is None else (held.z, held.s)
        for a in range(low, int(last.max()), BLOCK):
            b = min(a + BLOCK, int(last.max()))
            positions = torch.arange(a, b, device=m.device)
            inside = (positions >= first[:, None]) & (positions < last[:, None])
            new = phi_features(self._log_k(view.keys[:, :, a:b]), m) * inside[:, None, :, None]
            new = new.to(view.keys.dtype)
            if held is not None and held.features is not None:
                # rows whose mid region ends later than the others' already hold some of these
                there = held.features[:, :, a:b]
                parts.append(new + torch.nn.functional.pad(there, (0, 0, 0, b - a - there.shape[2])))
            else:
                parts.append(new)
            z = z + new.float().sum(2)
            s = s + (new.mT @ view.values[:, :, a:b].to(new.dtype)).float()
        centre = None if self.centre is None else view.scale * self.centre
        return PhiStore(m, z, s, torch.cat(parts, dim=2), centre=centre)

    def _add(self, view: LayerView, first: Tensor, last: Tensor) -> None:
        """Sum the tokens `first[b] <= i < last[b]` into the cache, a block at a time."""
        low, high = int(first.min()), int(last.max())
        for a in list(range(low, high, BLOCK)) or [low]:
            b = max(a, min(a + BLOCK, high))
            logs = self._log_k(view.keys[:, :, a:b])
            positions = torch.arange(a, b, device=logs.device)
            inside = (positions >= first[:, None]) & (positions < last[:, None])
            logs = logs.masked_fill(~inside[:, None, :, None], float("-inf"))
            values = view.values[:, :, a:b]
            self.cache = phi_cache(logs, values) if self.cache is None else phi_extend(self.cache, logs, values)

    def partial(self, view: LayerView, queries: Queries, selection: Selection) -> tuple[Tensor, Tensor]:
        assert self.cache is not None
        log_q = self.layer.log_phi_q(queries.rot, *(() if self.centre is None else (self.centre, view.scale)))
        offset, blend = self._mass(view, queries.count)
        log_q = queries.folded(log_q) + offset[..., None]
        mean = self._mean(blend, queries.count)

        def blended(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
            if mean is None:
                return out, lse
            return out, blend_mass(lse, mean_mass(queries.folded(queries.rot), mean) + offset, mean.blend)

        tokens = selection.as_tokens()
        cache = PhiCache(*(fold(x, queries.count) for x in self.cache))
        if tokens.shape[-1] == 0:
            return blended(*phi_partial(log_q, cache))
        lists = tokens.shape[1] // view.num_kv_heads
        logs, values = self._read(view, selection, lists)
        if lists > 1:
            cache = PhiCache(*(x.repeat_interleave(lists, dim=1) for x in cache))
        rest = phi_remainder(cache, logs, values, tokens >= 0)
        return blended(*phi_partial(log_q, rest, full_z=cache.z))

    def _read(self, view: LayerView, selection: Selection, lists: int) -> tuple[Tensor, Tensor]:
        """`log φ_k` and values of the selected tokens, `[Q, H, K, r]` and `[Q, H, K, d]`.

        Where a chunk of queries reads more tokens than there are, the features of all of them are computed once.
        """
        tokens = selection.as_tokens()
        rows, heads, width = tokens.shape
        if selection.rows is not None:
            keys, values = selection.rows
            return (self._log_k(keys, rows // view.keys.shape[0]).reshape(rows, heads, width, -1),
                    values.reshape(rows, heads, width, -1))
        index = tokens.clamp(min=0).reshape(rows, view.num_kv_heads, lists * width)
        values = gather_rows(view.values, index)
        mid = int(view.regions.mid_last.max())
        if index.shape[-1] * (rows // view.keys.shape[0]) >= mid:
            if self.features is None:
                self.features = torch.cat([self._log_k(view.keys[:, :, a:min(a + BLOCK, mid)])
                                           for a in range(0, mid, BLOCK)], dim=2)
            logs = gather_rows(self.features, index)
        else:
            logs = self._log_k(gather_rows(view.keys, index), rows // view.keys.shape[0])
        return logs.reshape(rows, heads, width, -1), values.reshape(rows, heads, width, -1)

    def cost_tokens(self, view: LayerView) -> float:
        features, dim = self.cache.m.shape[-1], view.keys.shape[-1]  # type: ignore[union-attr]
        mean = 0.0 if self.mean_key is None else 0.5
        return phi_tokens(features, dim) + mean


def _mean_key(view: LayerView) -> Tensor:
    """Mean of the mid region's keys, `[B, Hkv, d]` float32; zero where there are none."""
    total = _key_sum(view, view.regions.mid_first, view.regions.mid_last)
    return total / view.regions.mid_sizes.clamp(min=1)[:, None, None].to(total.device)


def _key_sum(view: LayerView, first: Tensor, last: Tensor) -> Tensor:
    """Sum of the keys `first[b] <= i < last[b]`, `[B, Hkv, d]` float32."""
    total = torch.zeros((*view.keys.shape[:2], view.keys.shape[-1]), dtype=torch.float32, device=view.keys.device)
    low, high = int(first.min()), int(last.max())
    for a in range(low, high, BLOCK):
        keys = view.keys[:, :, a:min(a + BLOCK, high)]
        place = torch.arange(a, a + keys.shape[2], device=first.device)
        inside = (place >= first[:, None]) & (place < last[:, None])
        total += torch.where(inside[:, None, :, None].to(keys.device), keys, 0).sum(2, dtype=torch.float32)
    return total
