"""A pass of the model's own forward, one token of every row, in which the attention of every layer is a plan's.

transformers' code runs from embedding to logits. For the time of the pass the configuration names an attention function
that wants no mask; where the layers are compiled, so do they have other forwards, numbers and hooks.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from sparsekv.foundation.errors import SparseKVError
from sparsekv.runtime.cache import SparseCache, SparseLayer
from sparsekv.runtime.process import NOW, known
from sparsekv.runtime.sliding import SlidingLayer

PLANNED = "sparsekv_step"
"""The attention function's name in a pass: transformers makes no mask for one without a mask function."""
COMPILER: Any = {"coordinate_descent_tuning": True}
"""Products with one row become reductions that are tuned: 4.9 for 5.6 ms a token of an 8B model at 8k on an H200."""


@torch.library.custom_op("sparsekv::decode_layer", mutates_args=())
def decode_layer(query: Tensor, key: Tensor, value: Tensor, scale: float, sinks: Tensor | None) -> Tensor:
    """The next layer of the plan that runs, as compiled layers call it: query `[B, Hq, 1, d]`, key, value
    `[B, Hkv, 1, d]` -> `[B, 1, Hq, d]`. sinks `[Hq]`: the layer's learned sinks."""
    if NOW.plan is None:
        raise SparseKVError("a layer of this model is wrapped by torch.compile; attach to a model that is not compiled")
    return NOW.plan.layer(query, key, value, scale, sinks)


@decode_layer.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, scale: float, sinks: Tensor | None) -> Tensor:
    return query.new_empty(query.shape[0], 1, query.shape[1], query.shape[3])


class Passing:
    """Stands for the cache in a pass: new keys and values go on to the attention function."""

    is_compileable = False

    def __init__(self, length: int):
        self.length = length

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return keys, values

    def get_seq_length(self, *args: Any) -> int:
        return self.length


class Layers:
    """A model's forward and decoder layers, as they were when it was attached to; all layers of a kind compile to one
    program."""

    def __init__(self, model: nn.Module, modules: dict[int, Any]):
        self.known = known(model)
        self.forward: Any = model.forward
        self.modules = [modules[i] for i in sorted(modules)]
        names = {m: name for name, m in model.named_modules()}
        self.decoders: list[Any] = [model.get_submodule(names[m].rpartition(".")[0]) for m in self.modules]
        self.everything = list(model.modules())
        capped = any(getattr(m, "attn_logit_softcapping", None) is not None for m in self.modules)
        self.failed: str | None = "the model caps its attention's scores" if capped else None
        """Why no step is planned."""
        self.not_captured: str | None = None
        """Why planned steps are not captured."""
        self.first_of_kind: dict[Any, Any] = {}
        """The first decoder layer of every kind of attention -> the kind."""
        for module, decoder in zip(self.modules, self.decoders, strict=True):
            kind = getattr(module, "layer_type", None)
            if kind not in self.first_of_kind.values():
                self.first_of_kind[decoder] = kind
        self._numbers = [m.layer_idx for m in self.modules]
        self._hooks = [m._forward_pre_hooks for m in self.modules]
        self._configs = list({id(m.config): m.config for m in self.modules}.values())
        self._before: list[str] | None = None
        """The names of the configurations' attention functions before the pass that runs."""
        self._compiled = False

    def left(self, compile_after: int | None) -> int | None:
        """Steps until the layers are compiled; None once they were, and where they never are."""
        if compile_after is None or self.known.compiled is not None:
            return None
        return max(0, compile_after - self.known.steps)

    def compile(self) -> None:
        """Nothing is traced before it runs."""
        self.known.compiled = {kind: torch.compile(kind.forward, fullgraph=True, dynamic=False, options=COMPILER)
                               for kind in {type(d) for d in self.decoders}}

    def run(self, plan: Any) -> Tensor:
        """Logits `[B, 1, V]` of the plan's token. An interrupt at any moment leaves the model as it was."""
        try:
            try:
                NOW.plan, self._before = plan, [c._attn_implementation for c in self._configs]
                for config in self._configs:
                    config._attn_implementation = PLANNED
                if self.known.compiled:
                    self._put_compiled(self.known.compiled)
                return self.forward(
                    input_ids=plan.ids, position_ids=plan.positions, attention_mask=None,
                    past_key_values=Passing(plan.length), use_cache=True, return_dict=True).logits
            finally:
                self.restore()
        except BaseException:
            self.restore()  # which may have been what was interrupted
            raise

    def _put_compiled(self, compiled: dict[type, Any]) -> None:
        """Compiled layers in place of the model's, alike in all that a compiled program looks at: numbers and hooks of
        their own would compile every layer anew."""
        self._compiled = True
        for module in self.modules:
            module.layer_idx, module._forward_pre_hooks = 0, OrderedDict()
        for decoder in self.decoders:
            if type(decoder) in compiled:
                decoder.__dict__["forward"] = functools.partial(compiled[type(decoder)], decoder)

    def restore(self) -> None:
        """The layers as they were; any number of times."""
        NOW.plan = None
        if self._before is not None:
            for config, name in zip(self._configs, self._before, strict=True):
                config._attn_implementation = name
            self._before = None
        if self._compiled:
            for module, number, own in zip(self.modules, self._numbers, self._hooks, strict=True):
                module.layer_idx, module._forward_pre_hooks = number, own
            for decoder in self.decoders:
                decoder.__dict__.pop("forward", None)
            self._compiled = False


def why_not_planned(cache: SparseCache, layers: Layers, model: nn.Module, ours: frozenset[int]) -> str | None:
    """Why no step of this cache can be planned; None where nothing speaks against it. ours: sparsekv's hooks by id."""
    layers_of_cache: list[Any] = cache.layers
    if layers.failed is not None:
        return layers.failed
    for layer in layers_of_cache:
        if type(layer) not in (SparseLayer, SlidingLayer):
            return ("keys and values lie in CPU memory" if isinstance(layer, SparseLayer)
                    else f"the cache has a {type(layer).__name__}")
    if len({layer.keys.device for layer in layers_of_cache}) > 1:
        return "the model is spread over devices"
    for module in layers.everything:
        if module._forward_hooks or not ours.issuperset(module._forward_pre_hooks) or (
                "forward" in module.__dict__ and module is not model):
            return f"a hook on {type(module).__name__} reads its values"
    return None
