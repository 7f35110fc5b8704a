"""How an attachment runs a model's passes: a step of one token by a plan of all layers, captured or run as it is;
prompts, chunks and what cannot be planned one layer after another, as the model's forward comes to it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparsekv.core.cost import extra_tokens
from sparsekv.core.layer import LayerView, Queries
from sparsekv.core.regions import Regions
from sparsekv.core.selectors.base import ReadsPrompts
from sparsekv.core.step import LayerState
from sparsekv.kernels import dense_attention
from sparsekv.runtime.break_even import Shape, shortest
from sparsekv.runtime.counters import Counters
from sparsekv.runtime.decoding import Decoding
from sparsekv.runtime.fused import Fused
from sparsekv.runtime.hf.begin import AttentionSpec, begin, decodes_sparsely, to_begin
from sparsekv.runtime.hf.cache import HostLayer, SparseCache, SparseLayer
from sparsekv.runtime.hf.graph import raised_by_user, take_step
from sparsekv.runtime.hf.model_pass import why_not_planned
from sparsekv.runtime.hf.offload import HostView, read
from sparsekv.runtime.hf.plan import Plan, RunOptions
from sparsekv.runtime.hf.sliding import SlidingLayer
from sparsekv.runtime.hf.turns import PADDED, is_left
from sparsekv.runtime.warm import ROWS, Warming, full_token
from sparsekv.util.errors import SparseKVError, first_line

QUERY_BLOCK = 64


class Runner:
    """The runner of an attachment: its plans, and its attention where nothing is planned."""

    def __init__(self, decoding: Decoding, run: RunOptions, layers: int):
        self.decoding, self.run, self.counters = decoding, run, Counters(layers)
        self.prefilling = False
        """Whether what runs is a prompt, however many tokens it has."""
        self.called: dict[int, AttentionSpec] = {}
        """How the model calls the attention of every layer that it has called."""
        self.warming = Warming()
        self._loaded: set[int] = set()
        """Layers whose maps are on their device, or on the way."""
        self.fused: Fused | None = None
        """What runs by kernels in the passes of its model."""
        self.whole = 0
        """Tokens of the prompt that is read piece by piece, with what the cache held before; 0 for one in one piece."""
        self._mask: tuple[Any, Tensor] | None = None

    def forget(self) -> None:
        """Let go of what belongs to the last pass."""
        self.warming.wait()
        self._mask, self.prefilling, self.whole = None, False, 0

    def attention(self, module: Any, cache: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
                  scale: float, window: int | None, softcap: float | None, sinks: Tensor | None,
                  own: Callable[..., Any] | None = None) -> Tensor:
        """Dense or sparse, of the last tokens of a layer: query `[B, Hq, T, d]`, key, value `[B, Hkv, N, d]` -> as
        query. sinks `[Hq]`: learned sinks of the layer. own: the model's own attention, of a prompt with spans that see
        both ways."""
        index = module.layer_idx
        layers = cache.layers if isinstance(cache, SparseCache) else ()
        layer = layers[index] if index < len(layers) else None
        count, past = query.shape[2], key.shape[2] - query.shape[2]
        if mask is not None and mask.dim() != 2 and own is None:
            raise SparseKVError(f"sparsekv reads 2-D attention masks (batch, tokens), found {mask.dim()} dimensions")

        def held() -> tuple[Tensor, Tensor]:
            """Keys and values where the queries are."""
            if isinstance(layer, HostLayer) and key.device != query.device and not cache.moves:
                return cache.ahead.read(cache.layers, index, query.device)
            return read(key, query.device), read(value, query.device)

        def dense() -> Tensor:
            k, v = held()
            if own is not None:
                return own(query, k, v)[0].transpose(1, 2)
            return dense_attention(query, k, v, scale=scale, key_mask=mask, window=window, softcap=softcap,
                                   sinks=sinks)

        if not isinstance(layer, SparseLayer) or layer.keys.shape[2] != key.shape[2]:
            return dense()
        if softcap is None:
            self.called[index] = AttentionSpec(query.shape[1], query.device, scale, getattr(module, "layer_type", None),
                                               sinks)
        if not past or self.prefilling or own is not None or (count > 1 and not self.run.sparse_chunks):
            layer.remember_queries(query, key.shape[2], cache.moves)
            if query.is_cuda and self.fused is not None:
                loads = self.fused.loads(query.shape[0])
                if loads:
                    shape = Shape(query.shape[0], query.shape[1], key.shape[1], key.shape[3], key.dtype, query.device)
                    loads[shape] = functools.partial(full_token, shape)
                self.warming.load(loads, query.device)
            if query.is_cuda and index not in self.decoding.dense_layers and self.decoding.placement != "cpu":
                self._warm(index, query, key)
            reader = None if softcap is not None or own is not None else self.decoding.reader_of(index, query.device)
            if reader is not None and max(self.whole, key.shape[2]) >= reader.shortest:
                return self._prefill_sparsely(reader, module, cache, query, *held(), mask, scale, sinks)
            return dense()
        self.warming.wait()
        if softcap is not None or not decodes_sparsely(self.decoding, index, layer, key.shape[2]):
            self.counters.took([], [index], count, query.shape[0])
            return dense()
        with torch.no_grad():
            if layer.state is None or layer.state.owner is not self.decoding:
                self._begin(cache, mask, past, index)
            assert layer.state is not None
            out = self._decode(layer, layer.state, query, past)
            if self.run.compares:
                self.counters.compare(index, out, dense())
        return WithoutGradient.apply(query, out) if query.requires_grad else out

    def _prefill_sparsely(self, reader: ReadsPrompts, module: Any, cache: SparseCache, query: Tensor, key: Tensor,
                          value: Tensor, mask: Tensor | None, scale: float, sinks: Tensor | None) -> Tensor:
        """A prompt, or a part of one."""
        self.counters.sparse_prompts += 1
        device = query.device
        regions = Regions.at_prefill_end(self._starts(mask, query.shape[0], device), key.shape[2], 0, 0)
        view = LayerView(
            key, value, regions=regions, scale=scale, num_query_heads=query.shape[1],
            layer_idx=module.layer_idx, num_layers=len(cache.layers),
            rope=cache.rope.get(getattr(module, "layer_type", None)), sinks=sinks)
        with torch.no_grad():
            out = reader.read(view, query, after=max(0, self.whole - key.shape[2]))
        return WithoutGradient.apply(query, out) if query.requires_grad else out

    def _warm(self, index: int, query: Tensor, key: Tensor) -> None:
        """Load maps and kernels beside a prompt that is long enough to be decoded sparsely."""
        decoding, device = self.decoding, query.device
        least = shortest(device, decoding.sink_size, decoding.window_size) if decoding.dense_below is None else (
            decoding.dense_below)
        if key.shape[2] < least:
            return
        if index not in self._loaded:
            self._loaded.add(index)
            estimator = decoding.estimator_of(index, device)
            if estimator is not None:
                self.warming.copy(functools.partial(estimator.load, key.dtype, device), device)
        if index == decoding.first_sparse:
            shape = Shape(min(ROWS, key.shape[0]), query.shape[1], key.shape[1], key.shape[3], key.dtype, device)
            self.warming.start(shape, decoding.selector_of(decoding.first_sparse, device),
                               decoding.estimator_of(decoding.first_sparse, device), decoding.sink_size,
                               decoding.window_size, key.shape[2])

    @torch.no_grad()
    def prompt_ended(self, cache: SparseCache, mask: Tensor | None) -> None:
        """Begin decoding after the last pass of a prompt, so that no token waits for it later."""
        first: Any = cache.first
        if first is not None and first.keys is not None and first.get_seq_length() == cache.prompt:
            self._begin(cache, mask if mask is None or mask.dim() == 2 else None, cache.prompt)

    @torch.no_grad()
    def begin(self, cache: SparseCache, past: int) -> None:
        """Decoding begins after `past` tokens of a cache without padding, of all layers of which it can."""
        self._begin(cache, None, past)

    def _begin(self, cache: SparseCache, mask: Tensor | None, past: int, index: int | None = None) -> None:
        """Decoding begins after `past` tokens, of all layers of which it can. index: the layer that asks."""
        self.warming.wait()
        which = to_begin(self.decoding, cache, self.called, past, index)
        if which:
            rows, device = cache.rows, self.called[which[0]].device
            begin(self.decoding, cache, which, self.called, self._starts(mask, rows, device), past, self.counters)

    def _decode(self, layer: SparseLayer, state: LayerState, query: Tensor, past: int) -> Tensor:
        """Steps of the last tokens of a cache, `[B, Hq, T, d]`, some queries at a time."""
        view, parts = state.view, []
        q = query.to(view.device)
        for first in range(0, q.shape[2], QUERY_BLOCK):
            block = q[:, :, first:first + QUERY_BLOCK]
            end = past + first + block.shape[2]
            advance(state, layer, past + first, end)
            queries = Queries.last(block, end, view.rope)
            step = state.step(queries)
            more = extra_tokens(view, state.selector, state.estimator)
            self.counters.read(view, queries, [step.selection], more[None], view.layer_idx)
            self.counters.took([view.layer_idx], [], block.shape[2], len(q))
            parts.append(step.out.to(query.device))
        self.counters.statistics[view.layer_idx] = state.selector.statistics()
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def step(
        self, attached: Any, cache: SparseCache, token: Tensor, mask: Tensor | None, positions: Tensor | None,
    ) -> Tensor | None:
        """Logits `[B, 1, V]` after one more token of every row by a plan of all layers, overwritten by the next step;
        None where there is none. What a user raises in it, a signal handler say, comes out as it was raised; where the
        model cannot be planned at all its layers decode one by one."""
        if positions is None and attached.layers.counts_positions:
            self.counters.not_replayed = "the model counts positions by itself, an image's in three dimensions (M-RoPE)"
            return None
        plan = self.plan(cache, attached, mask)
        if plan is None:
            return None
        try:
            return take_step(plan, token, positions)
        except Exception as error:  # whatever the model raises on its first plan
            if plan.taken or isinstance(error, torch.OutOfMemoryError) or raised_by_user(error):
                raise
            cache.plan, attached.layers.failed = None, f"its step failed: {first_line(error)}"
            warnings.warn(f"{type(attached.model).__name__} decodes layer by layer, {attached.layers.failed}",
                          stacklevel=2)
            return None

    def plan(self, cache: SparseCache, attached: Any, mask: Tensor | None) -> Plan | None:
        """The plan of the next step of one token, made anew where the last no longer serves; None where the step is
        taken layer by layer: before decoding has begun, and where a plan is not possible, as the report says."""
        first: Any = cache.first
        if first.keys is None or self.prefilling:
            return None
        reason = self._why_not(cache, attached)
        if reason is not None:
            self.counters.not_replayed = reason
            return None
        self.warming.wait()
        held, length = cache.plan, first.get_seq_length()
        ours = held is not None and held.owner is self
        if ours and held.fits(cache):
            return held
        cache.plan = None
        if length >= first.room or not set(cache.rope) <= set(attached.ropes):
            return None  # no room; or an attachment before this one read the prompt: a pass shows how the model rotates
        states = self._states(cache, mask, length)
        if states is None:
            return None
        for state in states:
            if state is not None and not (state.replayable and (
                    not isinstance(state.view, HostView) or state.view.lists(state.selector))):
                self.counters.not_replayed = f"{state.selector.name} or its completion decides on the host"
                return None
        for layer, state in zip(cache.layers, states, strict=True):
            if isinstance(layer, SlidingLayer) and layer.room <= length:
                layer.make_room()
            if state is not None:
                advance(state, layer, length, length + 1)
        starts = next((s.view.regions.starts for s in states if s is not None), None)
        if starts is None:
            starts = self._starts(mask, first.keys.shape[0], first.device)
        on_host = any(isinstance(layer, HostLayer) for layer in cache.layers)
        until = None if all(s is not None or i in self.decoding.dense_layers for i, s in enumerate(states)) else (
            self.decoding.dense_threshold(first.keys, length + 1, on_host))
        ropes = {key: (table, how) for key, table in cache.rope.items()
                 if table.length == length and (how := attached.ropes.get(key)) is not None}
        steady = (ours and held.data[0] is first.data and held.length == length) or cache.settled
        plan = Plan(attached.layers, cache, states, starts, self.counters, ropes, until=until, owner=self,
                    steady=steady)
        if plan.fits(cache):
            cache.plan = plan
        return cache.plan

    def _why_not(self, cache: SparseCache, attached: Any) -> str | None:
        """Say why no step of this cache can be planned now; None where nothing speaks against it."""
        if not self.run.replays:
            return "RunOptions(replays=False)"
        if self.run.compares:
            return "RunOptions(compares=True)"
        if torch.is_grad_enabled():
            return "gradients are on"
        return why_not_planned(cache, attached.layers, attached.model, attached.hooks, self.decoding.by_cpu)

    def _states(self, cache: SparseCache, mask: Tensor | None, length: int) -> list[LayerState | None] | None:
        """Return what every layer decodes with, None: full attention. None for all where decoding has not begun, and
        this attachment has not seen how the model calls its attention."""
        states: list[LayerState | None] = []
        layers: list[Any] = cache.layers
        self._begin(cache, mask, length)
        for index, layer in enumerate(layers):
            if not decodes_sparsely(self.decoding, index, layer, length + 1):
                states.append(None)
                continue
            state = layer.state
            if state is None or state.owner is not self.decoding:
                return None
            states.append(state)
        return states

    def _starts(self, mask: Tensor | None, batch: int, device: Any) -> Tensor:
        """First real token of every row, from the 2-D mask of a left-padded batch; checked once a mask."""
        if mask is None:
            return torch.zeros(batch, dtype=torch.long, device=device)
        if self._mask is None or self._mask[0] is not mask:
            if not is_left(mask):
                raise SparseKVError(PADDED)
            self._mask = (mask, (~mask.bool()).sum(-1).to(device))
        return self._mask[1]


def advance(state: LayerState, layer: Any, past: int, length: int) -> None:
    """Bring a state to the first `length` tokens of its layer, of which `past` may join the mid region; where that
    grows, over keys and values on the device."""
    view: Any = state.view
    if isinstance(view, HostView):
        view.both = layer.both[:, :, :length]
        with view.on_device():
            state.advance(past, length)
        view.settle()
    else:
        view.keys, view.values = layer.keys[:, :, :length], layer.values[:, :, :length]
        state.advance(past, length)


class WithoutGradient(torch.autograd.Function):
    """The output of a sparse step or prompt, through which no gradient goes."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, out: Tensor) -> Tensor:
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise SparseKVError("a sparse step has no gradient, nor has a prompt read sparsely; train with full attention "
                            "(selector='dense' and prefill='dense', or without attach)")
