"""Where decoding begins: the views of a cache's layers over what was prefilled, and selectors and estimators built over
them, of all layers at once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsekv.core.layer import LayerView
from sparsekv.core.regions import Regions
from sparsekv.core.step import LayerState, build_layers, restore
from sparsekv.runtime.counters import Counters
from sparsekv.runtime.decoding import Decoding
from sparsekv.runtime.hf.cache import HostLayer, SparseCache, SparseLayer
from sparsekv.runtime.hf.offload import HostView, Near, Room


class AttentionSpec(NamedTuple):
    """A model's call of the attention of a layer: number of query heads, where queries lie, scale, kind of rotary
    table, learned sinks `[Hq]` or None."""

    heads: int
    device: torch.device
    scale: float
    kind: Any
    sinks: Tensor | None


def decodes_sparsely(decoding: Decoding, index: int, layer: SparseLayer, length: int) -> bool:
    """Decide dense or sparse for a layer in a cache of `length` tokens."""
    return index not in decoding.dense_layers and length >= decoding.dense_threshold(
        layer.keys, length, isinstance(layer, HostLayer))


def to_begin(
    decoding: Decoding, cache: SparseCache, called: dict[int, AttentionSpec], past: int, first: int | None = None,
) -> list[int]:
    """The layers of which decoding can begin after `past` tokens and has not. first: the layer that is asked for; those
    that the CPU attends to begin one by one."""
    layers: list[Any] = cache.layers
    if first is not None and isinstance(layers[first], HostLayer) and decoding.by_cpu:
        return [first]
    return [i for i in sorted(called) if i < len(layers)
            and isinstance(layers[i], SparseLayer) and layers[i].keys is not None and past <= layers[i].keys.shape[2]
            and (layers[i].state is None or layers[i].state.owner is not decoding)
            and decodes_sparsely(decoding, i, layers[i], past + 1)]


def begin(
    decoding: Decoding, cache: SparseCache, which: Sequence[int], called: dict[int, AttentionSpec], starts: Tensor,
    past: int, counters: Counters,
) -> None:
    """States of these layers over the first `past` tokens of the cache; starts `[B]`: the first real token of every
    row."""
    layers: list[Any] = cache.layers
    on_host = [isinstance(layers[i], HostLayer) and not decoding.by_cpu for i in which]
    layer_devices = [called[i].device if away else layers[i].keys.device
                     for i, away in zip(which, on_host, strict=True)]
    devices = [*layer_devices, *(called[i].device for i in which)]
    began = _now(devices)
    built = cache.built if cache.built is not None and cache.built.serves(which, starts.tolist(), on_host) else None
    past = past if built is None else built.past
    regions = {device: Regions.at_prefill_end(starts.to(device), past, decoding.sink_size, decoding.window_size)
               for device in dict.fromkeys(layer_devices)}
    room = _room(decoding, layers, called[which[0]].device) if any(on_host) else Room()
    views: list[LayerView | HostView] = []
    for i, device, away in zip(which, layer_devices, on_host, strict=True):
        how, layer = called[i], layers[i]
        rows, _, _, dim = layer.keys.shape
        recent = layer.keys.new_empty(rows, how.heads, 0, dim) if layer.recent is None else layer.recent
        given: dict[str, Any] = {
            "regions": regions[device], "scale": how.scale, "num_query_heads": how.heads, "layer_idx": i,
            "num_layers": len(layers), "rope": cache.rope.get(how.kind), "recent_queries": recent.to(device),
            "recent_end": layer.recent_end, "sinks": None if how.sinks is None else how.sinks.detach().to(device)}
        if away:
            row = layer.both.shape[3] * layer.both.element_size()
            views.append(HostView(layer.both[:, :, :past], decoding.tails.longest, near=Near(room),
                                  counts=counters.fetches(i, row, device), **given))
        else:
            views.append(LayerView(layer.keys[:, :, :past], layer.values[:, :, :past], **given))
    selectors = [decoding.selector_of(*one) for one in zip(which, layer_devices, strict=True)]
    estimators = [decoding.estimator_of(*one) for one in zip(which, layer_devices, strict=True)]
    with contextlib.ExitStack() as stack:
        for view in views:
            if isinstance(view, HostView):
                stack.enter_context(view.on_device())
        if built is None:
            build_layers(views, selectors, estimators)
        else:
            for i, view, selector, estimator in zip(which, views, selectors, estimators, strict=True):
                restore(view, selector, estimator, built.layers[i])
    for i, view, selector, estimator in zip(which, views, selectors, estimators, strict=True):
        layers[i].state = LayerState(view, selector, estimator, decoding.tails, decoding)
    counters.index_seconds += _now(devices) - began


def _room(decoding: Decoding, layers: Sequence[Any], device: torch.device) -> Room:
    """The room on the device for rows that were read lately, of each layer in CPU memory."""
    host = [layer for layer in layers if isinstance(layer, HostLayer)]
    here = sum(store.data.numel() * store.data.element_size() for layer in layers
               if isinstance(layer, SparseLayer) and not isinstance(layer, HostLayer) for store in layer.stores
               if store.data is not None)
    return Room.of(decoding.kv_memory, here, device, len(host))


def _now(devices: Sequence[torch.device]) -> float:
    """The time, when these devices have done all they were given [s]."""
    for device in dict.fromkeys(devices):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return time.perf_counter()
