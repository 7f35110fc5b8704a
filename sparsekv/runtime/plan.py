"""From the arguments of `attach` to a plan: which selector and completion every layer gets, checked."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparsekv.core.estimators.phi import Completion, PhiCompletion
from sparsekv.core.regions import Regions
from sparsekv.core.selectors import SELECTORS, Selector
from sparsekv.errors import SparseKVError
from sparsekv.runtime.settings import LayerSetting

PLACEMENTS = ("gpu", "offload", "cpu")
COMPLETIONS = ("phi", "centroid", "moments", "sampling", "none")
SINK_SIZE, WINDOW_SIZE = 4, 16
# Keys and values of a layer under which full attention is faster than a step of the router at 2 %, by device [bytes]:
# where the measured times cross in docs/results/runtime.json (cpu-*) and docs/results/decode.json (32x8-*).
DENSE_BYTES = {"cpu": 32_000_000, "cuda": 90_000_000}


@dataclass(eq=False)
class Plan:
    """How an attachment decodes. Two plans are the same only if they are one object."""

    sink_size: int
    window_size: int
    decode_window: int
    prototype: Selector
    completion_kind: str
    router: Any
    phi: Any
    devices: dict[int, Any]
    placement: str = "gpu"
    dense_below: int | None = None
    layers: Mapping[int, LayerSetting] | None = None
    """Budget and gates by layer, from a settings file."""
    completion_tokens: float | None = None
    """What an untrained completion's summary may cost to fetch, in tokens."""
    fit_request: bool = True
    """Whether φ's mass is fitted to every request."""

    def is_short(self, key: Tensor) -> bool:
        """Whether a cache with these keys `[B, Hkv, N, d]` is decoded with full attention because that is faster."""
        if self.dense_below is not None:
            return key.shape[2] < self.dense_below
        return self.placement == "gpu" and 2 * key.nbytes < DENSE_BYTES.get(key.device.type, 0)

    def regions(self, starts: Tensor, length: int) -> Regions:
        return Regions.at_prefill_end(starts, length, self.sink_size, self.window_size)

    def selector(self, layer_idx: int) -> Selector:
        """A fresh selector for a layer, its artifact on the layer's device."""
        made = copy.copy(self.prototype)
        if getattr(made, "artifact", None) is not None:
            made.artifact = self._placed("router", made.artifact, layer_idx)  # type: ignore[attr-defined]
        if self.layers is not None:
            made.token_budget = self.layers[layer_idx].budget
        return made

    def completion(self, layer_idx: int) -> Completion | None:
        """A fresh completion for a layer; None where there is none."""
        if self.completion_kind == "phi":
            maps = self._placed("phi", self.phi, layer_idx).layer(layer_idx)
            if maps is not None and self.layers is not None:
                gate = self.layers[layer_idx].gate
                maps = None if gate is None else maps._replace(
                    offsets=maps.offsets + torch.tensor(gate, device=maps.offsets.device).log())
            return None if maps is None else PhiCompletion(maps, fit=self.fit_request)
        if self.completion_kind == "centroid":
            from sparsekv.core.estimators.centroid import CentroidCompletion

            return CentroidCompletion(tokens=self.completion_tokens)
        if self.completion_kind in ("moments", "sampling"):
            from sparsekv.runtime.moments import MomentsCompletion, SamplingCompletion

            kind = MomentsCompletion if self.completion_kind == "moments" else SamplingCompletion
            return kind(tokens=self.completion_tokens)
        return None

    def _placed(self, kind: str, artifact: Any, layer_idx: int) -> Any:
        device = "cpu" if self.placement == "cpu" else self.devices[layer_idx]
        held = self.__dict__.setdefault("_copies", {})
        if (kind, device) not in held:
            held[kind, device] = artifact.to(device) if hasattr(artifact, "to") else artifact
        return held[kind, device]


def make_plan(
    model: nn.Module, modules: dict[int, nn.Module], *, router: Any, phi: Any, selector: str | Selector | None,
    probes: int | None, token_budget: int | float | None, completion: str | None, sink_size: int | None,
    window_size: int | None, decode_window: int, dense_layers: Sequence[int], placement: str, dense_below: int | None,
    options: dict[str, Any], layers: Mapping[int, LayerSetting] | None = None, completion_tokens: float | None = None,
    fit_request: bool = True,
) -> tuple[Plan, set[int]]:
    """The plan, and the layers that decode with full attention. Raises SparseKVError for what cannot work."""
    eligible = _eligible(model, modules)
    if layers is not None:
        token_budget = max((s.budget for s in layers.values()), default=0.0)
    prototype = _selector(selector, router, probes, token_budget, options)
    for artifact in (router, phi):
        if artifact is not None and hasattr(artifact, "check"):
            artifact.check(model)
    if completion is None:
        completion = "none" if phi is None else "phi"
    if completion not in COMPLETIONS:
        raise SparseKVError(f"unknown completion {completion!r}: expected one of {', '.join(COMPLETIONS)}")
    if completion == "phi" and phi is None:
        raise SparseKVError("completion phi needs trained feature maps: give phi=... or use completion='centroid'")
    if completion_tokens is not None and (completion in ("phi", "none") or completion_tokens <= 0):
        raise SparseKVError(f"completion_tokens sizes an untrained completion and is above 0; found "
                            f"{completion_tokens} with completion {completion}")
    sink_size = _size("sink_size", sink_size, (router, phi), SINK_SIZE)
    window_size = _size("window_size", window_size, (router, phi), WINDOW_SIZE)
    if decode_window < 1:
        raise SparseKVError(f"decode_window must be at least 1 token, found {decode_window}")
    if dense_below is not None and dense_below < 0:
        raise SparseKVError(f"dense_below must not be negative, found {dense_below}")
    dense = set(range(len(modules))) - eligible
    if layers is not None:
        dense |= eligible - set(layers)
    count = max(modules) + 1
    for layer in dense_layers:
        if not -count <= layer < count:
            raise SparseKVError(f"dense_layers names layer {layer}; this model has layers 0 to {count - 1}")
        dense.add(layer % count)
    if prototype.name == "dense":
        dense |= eligible
    if prototype.name == "router" and getattr(prototype, "partition", "") == "offline":
        held = getattr(prototype, "artifact", None)
        dense |= {i for i in eligible if held is None or held.layer(i) is None}
    if placement not in PLACEMENTS:
        raise SparseKVError(f"unknown placement {placement!r}: expected one of {', '.join(PLACEMENTS)}")
    if placement == "offload" and prototype.scores_keys:
        raise SparseKVError(f"selector {prototype.name} scores keys at every step, which lie in CPU memory under "
                            "placement offload; use placement='cpu', or a selector with an index such as router")
    devices = {i: next(m.parameters()).device for i, m in modules.items()}
    return Plan(sink_size, window_size, decode_window, prototype, completion, router, phi, devices,
                placement, dense_below, layers, completion_tokens, fit_request), dense


def _selector(
    selector: str | Selector | None, router: Any, probes: int | None, token_budget: int | float | None,
    options: dict[str, Any],
) -> Selector:
    if isinstance(selector, Selector):
        given = {k: v for k, v in {**options, "probes": probes, "token_budget": token_budget}.items() if v is not None}
        made = copy.copy(selector)
    else:
        name = selector or ("dense" if router is None else "router")
        if name not in SELECTORS:
            raise SparseKVError(f"unknown selector {name!r}: expected one of {', '.join(sorted(SELECTORS))}")
        made = SELECTORS[name]()
        given = dict(options)
        if token_budget is not None:
            given["token_budget"] = token_budget
        if probes is not None:
            given["probes"] = probes
    names = made.option_names()
    for key, value in given.items():
        if key not in names:
            raise SparseKVError(f"selector {made.name} has no option {key!r}; its options are {', '.join(names)}")
        setattr(made, key, value)
    if made.name == "router" and router is not None:
        made.artifact = router  # type: ignore[attr-defined]
    made.validate()
    return made


def _size(name: str, given: int | None, artifacts: tuple[Any, ...], default: int) -> int:
    """The option if given, else the artifacts' own (they must agree), else the default."""
    if given is not None:
        if given < 0:
            raise SparseKVError(f"{name} must not be negative, found {given}")
        return given
    found = {getattr(a.config, name) for a in artifacts if hasattr(getattr(a, "config", None), name)}
    if len(found) > 1:
        raise SparseKVError(f"the router and the feature maps were trained with different {name} "
                            f"({' and '.join(map(str, sorted(found)))} tokens); say which with {name}=...")
    return found.pop() if found else default


def _eligible(model: Any, modules: dict[int, nn.Module]) -> set[int]:
    """Layers with full softmax attention over the whole cache. Raises SparseKVError if there is none."""
    from sparsekv.runtime.cache import SparseCache, SparseLayer

    layers = SparseCache(model.config).layers
    good = {i for i, m in modules.items() if i < len(layers) and isinstance(layers[i], SparseLayer)
            and getattr(m, "attn_logit_softcapping", None) is None}
    if not good:
        raise SparseKVError(f"{type(model).__name__} has no layer with full softmax attention; sparsekv supports "
                            "decoders such as Llama, Qwen, Mistral, Phi-3, Gemma 3 and GLM-4")
    return good
