"""Completion: an estimate of what was not read, as one more partial attention (completion paper §4)."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparsekv.core.regions import Regions
from sparsekv.core.rows import gather_rows
from sparsekv.core.selectors.base import LayerView, Queries, Selection, fold, one_launch
from sparsekv.kernels import (
    PhiCache,
    PhiStore,
    ScoreMoments,
    moments_cap,
    phi_cache,
    phi_extend,
    phi_features,
    phi_partial,
    phi_remainder,
)
from sparsekv.kernels.reference import FeatureMapWeights, factored, read_bound
from sparsekv.models.estimators import phi_tokens
from sparsekv.runtime.request_fit import LASTS, request_fit

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
    `layer.capped` the mass is capped (`mass_cap`), by mean and covariance of the mid region's keys; the whole
    `covariance [B, Hkv, d, d]` is kept for when it grows.
    With `fit` the shift of a request's first tokens is fitted to it (`request_fit`).
    """

    row_state = ("cache", "features", "store", "centre", "centre_of", "fitted", "moments", "covariance")

    def __init__(self, layer: Any, fit: bool = False):
        self.layer = self.calibrated = layer
        self.fit, self.fitted_until = fit, 0
        self.fitted: Tensor | None = None
        self.cache: PhiCache | None = None
        self.features: Tensor | None = None
        self.store: PhiStore | None = None
        self.maps: FeatureMapWeights | None = None
        self.centre: Tensor | None = None
        self.centre_of: Tensor | None = None
        self.share = 0.0
        self.moments: ScoreMoments | None = None
        self.covariance: Tensor | None = None

    def build(self, view: LayerView) -> None:
        self.cache, self.features, self.store = self._kept(view), None, None
        centred = getattr(self.layer, "centred", False) and self.cache is None
        limited = getattr(self.layer, "capped", False)
        mid = view.regions.mid_first, view.regions.mid_last
        if centred or limited:
            mean = key_mean(view, *mid)
            if centred:
                self.centre, self.centre_of = mean, view.regions.mid_sizes
            if limited:
                self._describe(view, view.scale * mean, view.scale**2 * key_covariance(view, *mid, mean))
        if self.cache is None:
            self._add(view, *mid)

    def reads(self, view: LayerView, share: float) -> None:
        if hasattr(self.calibrated, "at"):
            self.layer = self.calibrated.at(share)
        self.share = share
        if self.moments is not None:
            self.moments = self.moments._replace(bound=self._bound(view))
        self.fitted = None
        if self.fit and view.length - view.recent_end < LASTS:
            self.fitted = request_fit(view, self.layer, share, self.centre)
            self.fitted_until = view.recent_end + LASTS

    def _offset(self, view: LayerView, queries: int = 1) -> Tensor:
        """Offset of the last `queries` tokens' mass: as fitted to the request while that lasts, then as calibrated.
        `[Hq]`, or `[B·T, Hq]`."""
        offset: Tensor = self.layer.offset
        if self.fitted is None or view.length - queries >= self.fitted_until:
            return offset
        if queries == 1:
            return self.fitted
        ends = torch.arange(view.length - queries + 1, view.length + 1, device=offset.device)
        lasts = (ends <= self.fitted_until).repeat(self.fitted.shape[0])[:, None]
        return torch.where(lasts, fold(self.fitted, queries), offset)

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
        if self.moments is not None and self.covariance is not None:
            mean = key_mean(view, *joined)
            part = (1 - old.mid_sizes / view.regions.mid_sizes.clamp(min=1))[:, None, None]
            away = view.scale * mean - self.moments.key
            between = (part * (1 - part))[..., None] * away[..., None] * away[..., None, :]
            within = view.scale**2 * key_covariance(view, *joined, mean) - self.covariance
            self._describe(view, self.moments.key + part * away, self.covariance + part[..., None] * within + between)
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
        return self.maps, self._offset(view), self.store._replace(moments=self.moments)

    def _describe(self, view: LayerView, mean: Tensor, covariance: Tensor) -> None:
        """The moments of the mid region as it is now."""
        self.covariance = covariance
        self.moments = ScoreMoments(mean, *factored(covariance), view.regions.mid_sizes.float(), self._bound(view))

    def _bound(self, view: LayerView) -> Tensor:
        """Where the keys that are read begin among those of the mid region."""
        return read_bound(self.share * view.regions.context / view.regions.mid_sizes.clamp(min=1))

    def _stored(self, view: LayerView, held: PhiStore | None, first: Tensor, last: Tensor) -> PhiStore:
        """Features of the tokens `first[b] <= i < last[b]` after those held, with the sums of what was rounded."""
        assert self.cache is not None
        m = self.cache.m if held is None else held.m
        parts = [] if held is None or held.features is None else [held.features[:, :, :int(first.min())]]
        z, s = (torch.zeros_like(x) for x in self.cache[1:]) if held is None else (held.z, held.s)
        for block, inside in _blocks(first, last, 0 if held is None else None):
            new = (phi_features(self._log_k(view.keys[:, :, block]), m) * inside).to(view.keys.dtype)
            if held is not None and held.features is not None:
                # rows whose mid region ends later than the others' already hold some of these
                there = held.features[:, :, block]
                parts.append(new + torch.nn.functional.pad(there, (0, 0, 0, new.shape[2] - there.shape[2])))
            else:
                parts.append(new)
            z = z + new.float().sum(2)
            s = s + new.float().mT @ view.values[:, :, block].float()
        centre = None if self.centre is None else view.scale * self.centre
        return PhiStore(m, z, s, torch.cat(parts, dim=2), centre=centre)

    def _add(self, view: LayerView, first: Tensor, last: Tensor) -> None:
        """Sum the tokens `first[b] <= i < last[b]` into the cache, a block at a time."""
        for block, inside in _blocks(first, last):
            logs = self._log_k(view.keys[:, :, block]).masked_fill(~inside, float("-inf"))
            values = view.values[:, :, block]
            self.cache = phi_cache(logs, values) if self.cache is None else phi_extend(self.cache, logs, values)

    def partial(self, view: LayerView, queries: Queries, selection: Selection) -> tuple[Tensor, Tensor]:
        assert self.cache is not None
        log_q = self.layer.log_phi_q(queries.rot, *(() if self.centre is None else (self.centre, view.scale)))
        offset = self._offset(view, queries.count)
        log_q = queries.folded(log_q) + offset[..., None]

        def capped(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
            if self.moments is None:
                return out, lse
            moments = ScoreMoments(*(fold(x, queries.count) for x in self.moments))
            return out, torch.minimum(lse, moments_cap(queries.folded(queries.rot), moments, offset))

        tokens = selection.as_tokens()
        cache = PhiCache(*(fold(x, queries.count) for x in self.cache))
        if tokens.shape[-1] == 0:
            return capped(*phi_partial(log_q, cache))
        lists = tokens.shape[1] // view.num_kv_heads
        logs, values = self._read(view, selection, lists)
        if lists > 1:
            cache = PhiCache(*(x.repeat_interleave(lists, dim=1) for x in cache))
        rest = phi_remainder(cache, logs, values, tokens >= 0)
        return capped(*phi_partial(log_q, rest, full_z=cache.z))

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
        return phi_tokens(features, dim, moments=self.moments is not None)


def key_mean(view: LayerView, first: Tensor, last: Tensor) -> Tensor:
    """Mean `[B, Hkv, d]`, float32, of the keys `first[b] <= i < last[b]`; zero where there are none."""
    total = torch.zeros(*view.keys.shape[:2], view.keys.shape[-1], device=view.device)
    for block, inside in _blocks(first, last):
        total += torch.where(inside, view.keys[:, :, block], 0).sum(2, dtype=torch.float32)
    return total / (last - first).clamp(min=1)[:, None, None]


def key_covariance(view: LayerView, first: Tensor, last: Tensor, mean: Tensor) -> Tensor:
    """Covariance `[B, Hkv, d, d]`, float32, of the same keys around their `mean`, from which they are taken before they
    are multiplied: keys lie far from zero."""
    total = torch.zeros(*mean.shape, mean.shape[-1], device=mean.device)
    for block, inside in _blocks(first, last):
        away = torch.where(inside, view.keys[:, :, block] - mean[:, :, None], 0.0)
        total += away.mT @ away
    return total / (last - first).clamp(min=1)[:, None, None, None]


def _blocks(first: Tensor, last: Tensor, low: int | None = None) -> Iterator[tuple[slice, Tensor]]:
    """Tokens from `low`, or the first of any row, to the last of any, a block at a time and at least one, if empty:
    where they are, and `[B, 1, n, 1]` whether `first[b] <= i < last[b]`."""
    low, high = int(first.min()) if low is None else low, int(last.max())
    for a in range(low, high, BLOCK) or [low]:
        b = max(a, min(a + BLOCK, high))
        places = torch.arange(a, b, device=first.device)
        inside = (places >= first[:, None]) & (places < last[:, None])
        yield slice(a, b), inside[:, None, :, None]
