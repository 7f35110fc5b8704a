"""A decode step of all layers, planned once for some hundred tokens: what `generate` runs at one token.

Attention appends the new token to storage of fixed capacity and takes the layer's step over all that the plan may fill;
what was read is counted once for all layers, lengths on the device. `graph.py` captures a plan, elsewhere it is run.
Where the mid region grows or the storage is full, the next is planned anew.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsekv.core.cost import extra_tokens
from sparsekv.core.layer import Queries, Selection
from sparsekv.core.rope import LayerRope
from sparsekv.core.step import LayerState, sparse_step
from sparsekv.kernels import add_sinks, append_token, decode_attention, dense_attention
from sparsekv.runtime.counters import Counters
from sparsekv.runtime.hf.cache import SparseCache
from sparsekv.runtime.hf.model_pass import Layers
from sparsekv.runtime.hf.offload import HostView
from sparsekv.runtime.hf.sliding import SlidingLayer
from sparsekv.runtime.hf.storage import GrowingRope


@dataclass(frozen=True)
class RunOptions:
    """The way that steps are run; none of it changes what a step of one token reads.

    replays: steps of one token are planned for all layers, on a CUDA device as a graph that is replayed.
    sparse_chunks: chunks of several tokens after the prefill are decoded sparsely too, each query on its own.
    compares: full attention runs beside every sparse step, and the report has the relative error.
    """

    replays: bool = True
    sparse_chunks: bool = False
    compares: bool = False


class Plan:
    """The decode step of one cache, for one batch and one set of regions.

    `states[i]`: the state of layer i, or None where it decodes with full attention; `starts [B]`: the first real token
    of every row. `until`: the length at which full attention is no longer the faster one. ropes: the cache's rotary
    tables and how the model's become them, by kind of layer. `owner`: the attachment it is of. `steady`: nothing was
    moved since the step before it, so that it is worth capturing.
    """

    def __init__(
        self, layers: Layers, cache: SparseCache, states: list[LayerState | None], starts: Tensor, counters: Counters,
        ropes: dict[Any, tuple[GrowingRope, LayerRope]], *, until: int | None, owner: Any,
        steady: bool,
    ):
        self.layers, self.states, self.counters, self.ropes = layers, states, counters, ropes
        self.owner, self.steady = owner, steady
        self.taken = 0
        self.stores: list[Any] = list(cache.layers)
        first: Any = cache.first
        self.parts: list[Any] = [first, *[layer for layer in self.stores if isinstance(layer, SlidingLayer)][:1]]
        """A layer of either kind, with full attention and with a window, whose storage stands for that of all."""
        self.starts, self.device = starts, first.device
        self.length = first.get_seq_length()
        self.capacity = min([layer.room for layer in self.stores] + [r.room for r, _ in ropes.values()])
        ends = [self.capacity, *(s.room for s in states if s is not None),
                *(s.view.near.room for s in states if s is not None and isinstance(s.view, HostView))]
        if until is not None:
            ends.append(until - 1)
        self.end = min(ends)
        rows, device = first.keys.shape[0], self.device
        with torch.inference_mode(False):  # steps inside and outside of inference mode write them
            self.ids = torch.zeros(rows, 1, dtype=torch.long, device=device)
            self.positions = torch.zeros(rows, 1, dtype=torch.long, device=device)
            self.lengths = torch.full((rows,), self.length, dtype=torch.long, device=device)
        self.sparse = [i for i, s in enumerate(states) if s is not None]
        self.windows = [(x.sliding_window, x.offset) if isinstance(x, SlidingLayer) else None for x in self.stores]
        """Of every layer with a window: its tokens, and the position of the token in slot 0 of its storage."""
        self.seen: dict[tuple[int, int] | None, tuple[Tensor, Tensor]] = {}
        """Of every such window, and of full attention: the slots from and to which a step sees the storage, `[B]`."""
        self.dense = [i for i, s in enumerate(states) if s is None and self.windows[i] is None]
        self.where = torch.tensor(self.sparse, dtype=torch.long, device=device)
        self.ends: dict[int, Tensor] = {}
        """By a shift from tokens to slots of `Near`, `lengths` in slots."""
        self.views = [None if s is None else self._whole(s) for s in states]
        self.near = [view.near for view in self.views if isinstance(view, HostView)]
        """Of layers in CPU memory what lies on the device."""
        self.parts += self.near
        self.data = [part.data for part in self.parts]
        self.real = (torch.arange(self.capacity, device=device) >= starts[:, None]) if (
            device.type != "cuda" and bool(starts.any())) else None
        """Tokens of the storage that are no padding, where full attention needs to know."""
        self.more = torch.stack([extra_tokens(s.view, s.selector, s.estimator) for s in states if s is not None]
                                or [self.lengths])
        self.logits: Tensor | None = None
        self.graph: Any = None
        self._read: list[tuple[Queries, Selection]] = []
        self._next = 0

    def fits(self, cache: SparseCache) -> bool:
        """Return whether nothing happened to the cache since the last step, and this one still serves."""
        return (cache.first is self.parts[0] and cache.first.get_seq_length() == self.length < self.end
                and all(x.room > 0 and x.data is data for x, data in zip(self.parts, self.data, strict=True)))

    def begin(self, ids: Tensor, positions: Tensor | None) -> None:
        """Set the next step: ids, positions `[B, 1]`, None: the next of the cache; where a model has several
        `[n, B, 1]` (M-RoPE) those of a token of text are alike, and the last are taken."""
        self.ids.copy_(ids)
        if positions is not None and positions.dim() == 3:
            positions = positions[-1]
        if positions is None:
            self.positions.fill_(self.length)
        else:
            self.positions.copy_(positions.expand_as(self.positions))

    def run(self, captured: bool = False) -> Tensor:
        """The step, launch by launch: its logits `[B, 1, V]`. captured: nothing is run, a graph is made of it, which
        counts the lengths on the device."""
        # 1. where the token goes, counted on the device
        if not captured:
            self.lengths.fill_(self.length)
        self.lengths.add_(1)
        for window in dict.fromkeys(self.windows):
            self.seen[window] = self._slots(window)
        self.ends.clear()
        self.ends.update({shift: self.lengths + shift for shift in {near.shift for near in self.near}})
        # 2. the model's own forward, whose attention asks `layer` for one layer after another
        self._next, self._read = 0, []
        logits = self.layers.run(self)
        # 3. what was read, of all layers at once
        if self._read:
            view: Any = self.views[self.sparse[0]]
            self.counters.read(view, self._read[0][0], [s for _, s in self._read], self.more, self.where)
        return logits

    def finish(self) -> Tensor:
        """The step's logits; the token is one of the cache from here on."""
        self.length += 1
        for layer in self.stores:
            layer.grown_to(self.length)
        for rope, _ in self.ropes.values():
            rope.grown_to(self.length)
        self.taken, self.steady = self.taken + 1, True
        self.counters.replayed_steps += 1
        self.counters.took(self.sparse, self.dense, 1, len(self.ids))
        assert self.logits is not None
        return self.logits

    def layer(self, query: Tensor, key: Tensor, value: Tensor, scale: float, sinks: Tensor | None) -> Tensor:
        """Attention of the next layer: query `[B, Hq, 1, d]`, key, value `[B, Hkv, 1, d]` -> `[B, 1, Hq, d]`. sinks
        `[Hq]`: its learned sinks, which a sparse layer's view has."""
        index, self._next = self._next, self._next + 1
        state, view = self.states[index], self.views[index]
        keys, values = self.stores[index].whole
        window = self.windows[index]
        append_token(key, value, keys, values, self.seen[window][1])
        if isinstance(view, HostView):
            assert view.near.data is not None
            keys, values = view.near.data.chunk(2, dim=-1)
            append_token(key, value, keys, values, self.ends[view.near.shift])
        if state is None or view is None:
            return self._dense(query, keys, values, scale, sinks, window).contiguous()
        queries = Queries(query, self.lengths, view.rope)
        step = sparse_step(view, queries, state.selector, state.estimator)
        self._read.append((queries, step.selection))
        return step.out.transpose(1, 2).contiguous()

    def write_tables(self, kind: Any, tables: tuple[Tensor, Tensor]) -> None:
        """The model's rotary tables of the new token, into their place; of the first layer of a kind."""
        if kind in self.ropes:
            rope, how = self.ropes[kind]
            rope.write(how.table(tables[0]), how.table(tables[1]), self.lengths)

    def _slots(self, window: tuple[int, int] | None) -> tuple[Tensor, Tensor]:
        """Count from and to which slot a step sees the storage of a layer, `[B]` each, counted on the device."""
        if window is None:
            return self.starts, self.lengths
        tokens, offset = window
        return torch.maximum(self.starts, self.lengths - tokens).clamp(min=offset) - offset, self.lengths - offset

    def _dense(self, query: Tensor, keys: Tensor, values: Tensor, scale: float, sinks: Tensor | None,
               window: tuple[int, int] | None) -> Tensor:
        """Attention over all of the storage of a layer, or its window, `[B, 1, Hq, d]`."""
        if query.is_cuda:
            out, lse = decode_attention(query[:, :, 0], keys, values, *self.seen[window], scale=scale)
            return (out if sinks is None else add_sinks(out, lse, sinks)[0])[:, None]
        tokens, offset = window or (self.length + 1, 0)
        span = slice(max(offset, self.length + 1 - tokens), self.length + 1)
        slots = slice(span.start - offset, span.stop - offset)
        return dense_attention(query, keys[:, :, slots], values[:, :, slots], scale=scale,
                               key_mask=None if self.real is None else self.real[:, span],
                               sinks=sinks).transpose(1, 2)

    def _whole(self, state: LayerState) -> Any:
        """The layer's view over what this plan may fill of its storage: regions end it, not its length."""
        view: Any = copy.copy(state.view)
        if isinstance(view, HostView):
            view.both, view.ends = self.stores[view.layer_idx].data[:, :, :self.end], self.ends
        else:
            view.keys, view.values = (x[:, :, :self.end] for x in self.stores[view.layer_idx].whole)
        view.regions = view.regions.grown(self.end)
        if any(view.rope is table for table, _ in self.ropes.values()):
            view.rope = view.rope.whole()
        return view
