"""A decode step of the whole model, planned once for some hundred tokens: what `generate` runs at one token.

The step is the model's own transformers code, from embedding to logits; attention calls back into `Replay.layer`, which
appends the new token to storage of fixed capacity and takes the runtime's own step. What was read is counted once for
all layers. On a CUDA device the layers are compiled and the step is a graph that is captured once and replayed, lengths
counted on the device; on a CPU it is run. Where the mid region grows or the storage is full, the next is planned anew.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import time
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from sparsekv.core.cost import extra_tokens, shares_of_layers
from sparsekv.core.layer import LayerView, Queries, Selection
from sparsekv.core.rope import LayerRope
from sparsekv.core.step import LayerState, sparse_step
from sparsekv.foundation.errors import first_line
from sparsekv.kernels import append_token, decode_attention, dense_attention
from sparsekv.runtime.cache import GrowingRope, SparseCache, SparseLayer
from sparsekv.runtime.counters import Counters

NAME = "sparsekv_step"
COMPILE_AFTER = 256
"""Replayed steps of a model after which its layers are compiled: ten seconds that a short answer would not earn."""
COMPILER: Any = {"coordinate_descent_tuning": True}
"""Products with one row become reductions that are tuned: 4.9 for 5.6 ms a token of an 8B model at 8k on an H200."""
_CURRENT = threading.local()


@torch.library.custom_op("sparsekv::decode_layer", mutates_args=())
def decode_layer(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """One layer of the step that runs now: query `[B, Hq, 1, d]`, key, value `[B, Hkv, 1, d]` -> `[B, 1, Hq, d]`."""
    return _CURRENT.step.layer(query, key, value, scale)


@decode_layer.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    return query.new_empty(query.shape[0], 1, query.shape[1], query.shape[3])


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in a pass of `Replay`."""
    layer = decode_layer if torch.compiler.is_compiling() else _CURRENT.step.layer
    return layer(query, key, value, query.shape[-1] ** -0.5 if scaling is None else scaling), None


class Passing:
    """Stands for the cache in a pass: new keys and values go on to the attention function."""

    is_compileable = False

    def __init__(self, length: int):
        self.length = length

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return keys, values

    def get_seq_length(self, *args: Any) -> int:
        return self.length


@dataclass
class Earned:
    """What outlives an attachment: how much a model has decoded, and its layers' forward once that is compiled."""

    steps: int = 0
    compiled: dict[type, Any] | None = None


_EARNED: weakref.WeakKeyDictionary[nn.Module, Earned] = weakref.WeakKeyDictionary()


class Layers:
    """The decoder layers of a model, and their forward compiled: one program for all layers that are alike."""

    def __init__(self, model: nn.Module, modules: dict[int, Any]):
        self.earned = _EARNED.setdefault(model, Earned())
        self.modules = [modules[i] for i in sorted(modules)]
        names = {m: name for name, m in model.named_modules()}
        self.decoders: list[Any] = [model.get_submodule(names[m].rpartition(".")[0]) for m in self.modules]
        self.everything = list(model.modules())
        self.failed: str | None = None
        """Why a step could not be taken or captured."""
        self.first_of_kind: dict[Any, tuple[Any]] = {}
        seen = set()
        for module, decoder in zip(self.modules, self.decoders, strict=True):
            kind = getattr(module, "layer_type", None)
            if kind not in seen:
                seen.add(kind)
                self.first_of_kind[decoder] = (kind,)

    @property
    def left(self) -> int | None:
        """Steps until the layers are compiled; None once they were."""
        return None if self.earned.compiled is not None else max(0, COMPILE_AFTER - self.earned.steps)

    def compile(self) -> None:
        """Once they have earned it; nothing is traced before it runs."""
        if self.left == 0:
            self.earned.compiled = {kind: torch.compile(kind.forward, fullgraph=True, dynamic=False, options=COMPILER)
                             for kind in {type(d) for d in self.decoders}}

    @contextlib.contextmanager
    def entered(self, before_layer: Any) -> Iterator[None]:
        """While a pass runs: compiled layers, our attention, no hooks but `before_layer`; then all as it was."""
        configs = list({id(m.config): m.config for m in self.modules}.values())
        names, numbers = [c._attn_implementation for c in configs], [m.layer_idx for m in self.modules]
        hooks = [m._forward_pre_hooks for m in self.modules]
        handles = [] if before_layer is None else [
            d.register_forward_pre_hook(before_layer, with_kwargs=True) for d in self.first_of_kind]
        AttentionInterface.register(NAME, _attention)
        try:
            for config in configs:
                config._attn_implementation = NAME
            for module in self.modules:
                # a number of its own would compile every layer anew
                module.layer_idx, module._forward_pre_hooks = 0, OrderedDict()
            for decoder in self.decoders:
                compiled = (self.earned.compiled or {}).get(type(decoder))
                if compiled is not None:
                    decoder.__dict__["forward"] = functools.partial(compiled, decoder)
            yield
        finally:
            for config, name in zip(configs, names, strict=True):
                config._attn_implementation = name
            for module, number, own in zip(self.modules, numbers, hooks, strict=True):
                module.layer_idx, module._forward_pre_hooks = number, own
            for decoder in self.decoders:
                decoder.__dict__.pop("forward", None)
            for handle in handles:
                handle.remove()


class Replay:
    """The decode step of one cache, for one batch and one set of regions.

    `states[i]`: the state of layer i, or None where it decodes with full attention. `until`: the length at which full
    attention is no longer the faster one. ropes: the cache's rotary tables and how the model's become them, by kind of
    layer.
    """

    def __init__(
        self, forward: Any, layers: Layers, cache: SparseCache, states: list[LayerState | None], starts: Tensor,
        counters: Counters, ropes: dict[Any, tuple[GrowingRope, LayerRope]], until: int | None,
        owner: object, compiles: bool,
    ):
        self.owner, self.compiles = owner, compiles
        """The attachment that made it; whether layers may be compiled."""
        self.forward, self.layers, self.states, self.counters = forward, layers, states, counters
        self.stores: list[Any] = list(cache.layers)
        first = self.stores[0]
        self.data, self.length = first.whole[0], first.get_seq_length()
        self.ropes, self.starts, self.device = ropes, starts, first.keys.device
        self.capacity = min([layer.room for layer in self.stores] + [r.room for r, _ in ropes.values()])
        ends = [self.capacity, *(s.room for s in states if s is not None)]
        if until is not None:
            ends.append(until - 1)
        if compiles and layers.left:
            ends.append(self.length + layers.left)
        self.end = min(ends)
        rows, device = first.keys.shape[0], self.device
        with torch.inference_mode(False):  # steps inside and outside of inference mode write them
            self.ids = torch.zeros(rows, 1, dtype=torch.long, device=device)
            self.positions = torch.zeros(rows, 1, dtype=torch.long, device=device)
            self.lengths = torch.full((rows,), self.length, dtype=torch.long, device=device)
        self.sparse = [i for i, s in enumerate(states) if s is not None]
        self.dense = [i for i, s in enumerate(states) if s is None]
        self.where = torch.tensor(self.sparse, dtype=torch.long, device=device)
        self.views = [None if s is None else self._whole(s) for s in states]
        self.real = (torch.arange(self.capacity, device=device) >= starts[:, None]) if (
            device.type != "cuda" and bool(starts.any())) else None
        """Tokens of the storage that are no padding, where full attention needs to be told."""
        self.heads_kv = first.keys.shape[1]
        self.more = torch.stack([self._more(s, rows) for s in states if s is not None] or [self.lengths])
        self.logits: Tensor | None = None
        self.graph: Any = None
        self._selections: list[Selection] = []
        self._next = 0

    def fits(self, cache: SparseCache) -> bool:
        """Whether nothing happened to the cache since the last step, and this one still serves."""
        first: Any = cache.layers[0]
        return (first.room > 0 and first.whole[0] is self.data
                and first.get_seq_length() == self.length < self.end)

    def step(self, ids: Tensor, positions: Tensor | None) -> Tensor:
        """One token of every row: ids, positions `[B, 1]`, None: the next of the cache. Returns logits `[B, 1, V]`,
        overwritten by the next step."""
        self.ids.copy_(ids)
        if positions is None:
            self.positions.fill_(self.length)
        else:
            self.positions.copy_(positions.expand_as(self.positions))
        if self.graph is None:
            self.logits = self._first()
        else:
            self.graph.replay()
        self.length += 1
        for layer in self.stores:
            layer.grown_to(self.length)
        for rope, _ in self.ropes.values():
            rope.grown_to(self.length)
        self.layers.earned.steps += 1
        self.counters.replayed(len(self.ids), self.sparse, self.dense)
        assert self.logits is not None
        return self.logits

    def _first(self) -> Tensor:
        """The step as it is, and its capture for those that follow."""
        if self.device.type != "cuda":
            return self._pass()
        began = time.perf_counter()
        if self.compiles:
            self.layers.compile()
        here, stream = torch.cuda.current_stream(self.device), torch.cuda.Stream(self.device)
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            answer = self._tried()
            graph, logits = self._captured()
            logits.copy_(answer)
        here.wait_stream(stream)
        self.graph = graph
        self.counters.captured(time.perf_counter() - began)
        return logits

    def _captured(self) -> tuple[Any, Tensor]:
        """A pass as a graph, and where its logits will be."""
        graph, collecting = torch.cuda.CUDAGraph(), gc.isenabled()
        gc.disable()  # what is freed inside a capture must be its own
        try:
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                return graph, self._pass()
            finally:
                graph.capture_end()
        finally:
            if collecting:
                gc.enable()

    def _tried(self) -> Tensor:
        """A pass; with the layers as they are where they do not compile."""
        if not self.layers.earned.compiled:
            return self._pass()
        try:
            return self._pass()
        except Exception as error:  # whatever the compiler raises
            self.layers.earned.compiled = {}
            answer = self._pass()
            warnings.warn(f"the model's layers could not be compiled and decode slower: {first_line(error)}",
                          stacklevel=2)
            return answer

    def _pass(self) -> Tensor:
        """The model's own step, its attention ours."""
        if self.graph is None and not capturing(self.device):
            self.lengths.fill_(self.length)
        self.lengths.add_(1)
        self._next, self._selections = 0, []
        _CURRENT.step = self
        try:
            with self.layers.entered(self._write_tables if self.ropes else None):
                out = self.forward(input_ids=self.ids, position_ids=self.positions, attention_mask=None,
                                   past_key_values=Passing(self.length), use_cache=True, return_dict=True)
        finally:
            _CURRENT.step = None
        if self.sparse:
            regions = self.views[self.sparse[0]].regions  # type: ignore[union-attr]
            shares = shares_of_layers(self._selections, regions, self.lengths, self.heads_kv, self.more)
            self.counters.shares(self.device).index_add_(1, self.where, shares)
        return out.logits

    def layer(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """The next layer's attention."""
        index, self._next = self._next, self._next + 1
        state, view = self.states[index], self.views[index]
        keys, values = self.stores[index].whole
        append_token(key, value, keys, values, self.lengths)
        if state is None or view is None:
            return self._dense(query, keys, values, scale).contiguous()
        step = sparse_step(view, Queries(query, self.lengths, view.rope), state.selector, state.estimator)
        self._selections.append(step.selection)
        return step.out.transpose(1, 2).contiguous()

    def _dense(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Full attention over the storage of a layer, `[B, 1, Hq, d]`."""
        if query.is_cuda:
            return decode_attention(query[:, :, 0], keys, values, self.starts, self.lengths, scale=scale)[0][:, None]
        seen = self.length + 1
        return dense_attention(query, keys[:, :, :seen], values[:, :, :seen], scale=scale,
                               key_mask=None if self.real is None else self.real[:, :seen]).transpose(1, 2)

    def _whole(self, state: LayerState) -> LayerView:
        """The layer's view over what this plan may fill of its storage: regions end it, not its length."""
        view = state.view.fork()
        view.keys, view.values = (x[:, :, :self.end] for x in self.stores[view.layer_idx].whole)
        view.regions = view.regions.grown(self.end)
        if any(view.rope is table for table, _ in self.ropes.values()):
            view.rope = view.rope.whole()  # type: ignore[union-attr]
        return view

    def _more(self, state: LayerState, rows: int) -> Tensor:
        """What chooses and completes, in tokens of the layer, `[B]` float64."""
        cost = extra_tokens(state.view, state.selector, state.estimator)
        return torch.as_tensor(cost, dtype=torch.float64, device=self.device).expand(rows).clone()

    def _write_tables(self, decoder: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Before the first layer of a kind: the rotary tables of the new token, into their place."""
        tables = kwargs.get("position_embeddings")
        kind = self.layers.first_of_kind.get(decoder)
        if tables is not None and kind is not None and kind[0] in self.ropes:
            rope, how = self.ropes[kind[0]]
            rope.write(how.table(tables[0]), how.table(tables[1]), self.lengths)


def capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def why_not(cache: SparseCache, layers: Layers, model: nn.Module, ours: frozenset[int]) -> str | None:
    """Why no step of this cache can be replayed; None where nothing speaks against it. ours: sparsekv's hooks by id."""
    layers_of_cache: list[Any] = cache.layers
    if layers.failed is not None:
        return layers.failed
    for layer in layers_of_cache:
        if type(layer) is not SparseLayer:
            return ("keys and values lie in CPU memory" if isinstance(layer, SparseLayer)
                    else "the model has sliding-window layers")
    if len({layer.keys.device for layer in layers_of_cache}) > 1:
        return "the model is spread over devices"
    for module in layers.everything:
        if module._forward_hooks or not ours.issuperset(module._forward_pre_hooks) or (
                "forward" in module.__dict__ and module is not model):
            return f"a hook on {type(module).__name__} reads its values"
    return None
