"""Where decoding begins: the views of a cache's layers over what was prefilled, and selectors and estimators built over
them, of all layers at once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsekv.core.layer import LayerView
from sparsekv.core.regions import Regions
from sparsekv.core.step import LayerState, build_layers
from sparsekv.runtime.counters import Counters
from sparsekv.runtime.decoding import Decoding
from sparsekv.runtime.hf.cache import HostLayer, SparseCache, SparseLayer
from sparsekv.runtime.hf.offload import HostView


class AttentionSpec(NamedTuple):
    """How a model calls the attention of a layer: number of query heads, where queries lie, scale, kind of rotary
    table, learned sinks `[Hq]` or None."""

    heads: int
    device: torch.device
    scale: float
    kind: Any
    sinks: Tensor | None


def decodes_sparsely(decoding: Decoding, index: int, keys: Any, length: int) -> bool:
    """Whether a layer with such keys does, in a cache of `length` tokens: the one rule of dense or sparse."""
    return index not in decoding.dense_layers and length >= decoding.short_until(keys, length)


def to_begin(
    decoding: Decoding, cache: SparseCache, called: dict[int, AttentionSpec], past: int, first: int | None = None,
) -> list[int]:
    """The layers of which decoding can begin after `past` tokens and has not. first: the layer that is asked for; those
    whose keys lie in CPU memory begin one by one, as they are."""
    layers: list[Any] = cache.layers
    if first is not None and isinstance(layers[first], HostLayer):
        return [first]
    return [i for i in sorted(called) if i < len(layers)
            and type(layers[i]) is SparseLayer and layers[i].keys is not None and past <= layers[i].keys.shape[2]
            and (layers[i].state is None or layers[i].state.owner is not decoding)
            and decodes_sparsely(decoding, i, layers[i].keys, past + 1)]


def begin(
    decoding: Decoding, cache: SparseCache, which: Sequence[int], called: dict[int, AttentionSpec], starts: Tensor,
    past: int, counters: Counters,
) -> None:
    """States of these layers over the first `past` tokens of the cache; starts `[B]`: the first real token of every
    row."""
    layers: list[Any] = cache.layers
    on_host = isinstance(layers[which[0]], HostLayer) and decoding.placement == "offload"
    places = [called[i].device if on_host else layers[i].keys.device for i in which]
    began = _now(places)
    regions = {device: Regions.at_prefill_end(starts.to(device), past, decoding.sink_size, decoding.window_size)
               for device in dict.fromkeys(places)}
    kind = HostView if on_host else LayerView
    stored = [tuple(x.to(device) for x in (layers[i].keys, layers[i].values))
              for i, device in zip(which, places, strict=True)]
    views = []
    for i, device, (keys, values) in zip(which, places, stored, strict=True):
        how, recent = called[i], layers[i].recent
        recent = keys.new_empty(keys.shape[0], how.heads, 0, keys.shape[3]) if recent is None else recent.to(device)
        views.append(kind(keys[:, :, :past], values[:, :, :past], regions[device], how.scale, how.heads, i, len(layers),
                          cache.rope.get(how.kind), recent, layers[i].recent_end,
                          sinks=None if how.sinks is None else how.sinks.detach().to(device)))
    selectors = [decoding.selector_of(*one) for one in zip(which, places, strict=True)]
    estimators = [decoding.estimator_of(*one) for one in zip(which, places, strict=True)]
    build_layers(views, selectors, estimators)
    for i, view, whole, selector, estimator in zip(which, views, stored, selectors, estimators, strict=True):
        layers[i].state = LayerState(view, selector, estimator, window_size=decoding.window_size,
                                     decode_window=decoding.decode_window, owner=decoding)
        if isinstance(view, HostView):
            view.keep_anchors(*whole)
    counters.index_seconds += _now(places) - began


def _now(devices: Sequence[torch.device]) -> float:
    """The time, when these devices have done all they were given [s]."""
    for device in dict.fromkeys(devices):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return time.perf_counter()
