"""A pass of the model's own forward, one token of every row, in which the attention of every layer is a plan's.

transformers' code runs from embedding to logits. For the time of the pass the configuration names an attention function
that wants no mask, and norms and rotations are one launch each (`runtime/fused.py`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from sparsekv.runtime.fused import Fused
from sparsekv.runtime.hf.cache import HostLayer, SparseCache, SparseLayer
from sparsekv.runtime.hf.sliding import SlidingLayer
from sparsekv.runtime.process import NOW

PLANNED = "sparsekv_step"
"""The attention function's name in a pass: transformers makes no mask for one without a mask function."""
RECORDING = "transformers.utils.output_capturing"
"""The module whose forward hooks stay on a model that was once asked for hidden states, and do nothing in a pass."""


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
    """A model's forward and decoder layers, as they were when it was attached to."""

    def __init__(self, model: nn.Module, modules: dict[int, Any]):
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
        self.fused = Fused(model, self.modules[0])
        self._configs = list({id(m.config): m.config for m in self.modules}.values())
        self._by_images = [m for m in self.everything if hasattr(m, "rope_deltas")]
        self._before: list[str] | None = None
        """The names of the configurations' attention functions before the pass that runs."""

    @property
    def counts_positions(self) -> bool:
        """True where the next token's position is not the length of the cache, after an image (M-RoPE)."""
        return any(m.rope_deltas is not None for m in self._by_images)

    def run(self, plan: Any) -> Tensor:
        """Logits `[B, 1, V]` of the plan's token. An interrupt at any moment leaves the model unchanged."""
        try:
            try:
                NOW.plan, self._before = plan, [c._attn_implementation for c in self._configs]
                for config in self._configs:
                    config._attn_implementation = PLANNED
                self.fused.put()
                return self.forward(
                    input_ids=plan.ids, position_ids=plan.positions, attention_mask=None,
                    past_key_values=Passing(plan.length), use_cache=True, return_dict=True).logits
            finally:
                self.restore()
        except BaseException:
            self.restore()  # which may have been what was interrupted
            raise

    def restore(self) -> None:
        """The layers as they were; any number of times."""
        NOW.plan = None
        if self._before is not None:
            for config, name in zip(self._configs, self._before, strict=True):
                config._attn_implementation = name
            self._before = None
        self.fused.restore()


def why_not_planned(
    cache: SparseCache, layers: Layers, model: nn.Module, ours: frozenset[int], by_cpu: bool = False,
) -> str | None:
    """Say why no step of this cache can be planned; None where nothing speaks against it. ours: sparsekv's hooks by id.
    by_cpu: the CPU attends to what lies in its memory."""
    layers_of_cache: list[Any] = cache.layers
    if layers.failed is not None:
        return layers.failed
    for layer in layers_of_cache:
        if type(layer) not in (SparseLayer, SlidingLayer, HostLayer):
            return f"the cache has a {type(layer).__name__}"
        if isinstance(layer, HostLayer) and by_cpu:
            return "keys and values lie in CPU memory, where sparse layers attend to them"
    if len({layer.device for layer in layers_of_cache}) > 1:
        return "the model is spread over devices"
    for module in layers.everything:
        reads = any(getattr(hook, "__module__", "") != RECORDING for hook in module._forward_hooks.values())
        if reads or not ours.issuperset(module._forward_pre_hooks) or (
                "forward" in module.__dict__ and module is not model):
            return f"a hook on {type(module).__name__} reads its values"
    return None
