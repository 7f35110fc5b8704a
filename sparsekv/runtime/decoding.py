"""From the arguments of `attach` to how a model decodes: which selector and estimator every layer gets, checked."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from sparsekv.artifacts.checks import brief
from sparsekv.artifacts.phi import PhiArtifact, PhiLayer
from sparsekv.artifacts.router import RouterArtifact
from sparsekv.core.estimators import ESTIMATORS, CentroidEstimator, Estimator, PhiEstimator
from sparsekv.core.prefill import SparsePrompts
from sparsekv.core.registry import ESTIMATOR_ROWS, NONE, default_selector
from sparsekv.core.selectors import SELECTORS, Selector
from sparsekv.core.selectors.base import ReadsPrompts
from sparsekv.runtime.crossing import Shape, Times, shortest, times_of
from sparsekv.runtime.hf.cache import SparseCache, SparseLayer
from sparsekv.runtime.numbers import check_selector, layer_numbers, whole
from sparsekv.runtime.settings import LayerSetting
from sparsekv.util.errors import SparseKVError, check_choice

PLACEMENTS = ("gpu", "offload", "cpu")
MOST_BUCKETS = 65536
SIZES = {"sink_size": 4, "window_size": 16}
"""Tokens of sink and local window where neither options nor artifacts say."""


@dataclass(eq=False)
class Decoding:
    """How an attachment decodes: a selector and an estimator to copy for every layer, and what they share. Two are the
    same only if they are one object."""

    selector: Selector
    estimator: Estimator | None
    router: RouterArtifact | None
    phi: PhiArtifact | None
    sink_size: int
    window_size: int
    decode_window: int
    placement: str
    dense_below: int | None
    dense_layers: frozenset[int]
    layers: Mapping[int, LayerSetting] | None
    """Budget and gates by layer, from a settings file."""
    prompts: SparsePrompts | None = None
    """How prompts are read sparsely; None: densely, but by a selector that reads them itself."""
    prompt_layers: frozenset[int] = frozenset()
    """Layers that may read prompts sparsely."""
    heads_q: int = 0
    first_sparse: int | None = None
    """Query heads, and the first layer that decodes sparsely."""
    placed: dict[Any, Any] = field(default_factory=dict)
    """Copies of what was trained, by device, and estimators to fork, by layer and device."""
    _times: dict[Shape, Times] = field(default_factory=dict)
    crossing: Times | None = None
    """The times that last said from which length a cache decodes sparsely."""

    def short_until(self, key: Tensor, length: int) -> int:
        """The length below which a cache with such keys `[B, Hkv, N, d]` decodes with full attention [tokens]; of a
        cache of a `length` that is too short to be timed, the length from which it is."""
        if self.dense_below is not None:
            return self.dense_below
        if self.placement != "gpu" or self.first_sparse is None:
            return 0
        timed = shortest(key.device, self.sink_size, self.window_size)
        if length < timed:
            return timed
        shape = Shape(key.shape[0], self.heads_q, key.shape[1], key.shape[3], key.dtype, key.device)
        if shape not in self._times:
            self._times[shape] = times_of(
                shape, self.selector_of(self.first_sparse, key.device),
                self.estimator_of(self.first_sparse, key.device), self.sink_size, self.window_size)
        self.crossing = self._times[shape]
        return self.crossing.crossing

    def why(self) -> str:
        """Why caches decode sparsely from the length that they do."""
        if self.first_sparse is None:
            return "no layer decodes sparsely"
        if self.dense_below is not None:
            return f"dense_below={self.dense_below} was given"
        if self.placement != "gpu":
            return "keys and values lie in CPU memory"
        if self.crossing is None:
            return "no cache was as long as the shortest that is timed"
        return self.crossing.describe(self.selector.name)

    def selector_of(self, layer_idx: int, device: Any) -> Selector:
        """A fresh selector for a layer, what it was trained with on the device."""
        budget = None if self.layers is None else self.layers[layer_idx].budget
        router = None if self.router is None else self._on("router", self.router, device)
        return for_layer(self.selector, router, layer_idx, budget)

    def reader_of(self, layer_idx: int, device: Any) -> ReadsPrompts | None:
        """Who reads the prompt of a layer; None: it is read densely."""
        if self.prompts is not None:
            return self.prompts if layer_idx in self.prompt_layers else None
        if layer_idx in self.dense_layers:
            return None
        return self.selector_of(layer_idx, device).reader(self.sink_size, self.window_size)

    def estimator_of(self, layer_idx: int, device: Any) -> Estimator | None:
        """A fresh estimator for a layer; None where there is none."""
        if self.phi is None:
            return None if self.estimator is None else self.estimator.fork()
        key = "estimator", layer_idx, device
        if key not in self.placed:
            maps = gated_maps(self.phi, layer_idx, self.layers)
            self.placed[key] = None if maps is None else PhiEstimator(maps.run_on(device))
        made: Estimator | None = self.placed[key]
        return None if made is None else made.fork()

    def spend(self, budget: int | float) -> None:
        """Another budget for the layers that begin from here on. Raises SparseKVError."""
        if self.layers is not None:
            raise SparseKVError("a settings file gives every layer its own budget; attach without one to change it")
        chosen = copy.copy(self.selector)
        chosen.token_budget = budget
        chosen.validate()
        self.selector, self._times, self.crossing = chosen, {}, None

    def _on(self, name: str, trained: Any, device: Any) -> Any:
        if (name, device) not in self.placed:
            self.placed[name, device] = trained.to(device)
        return self.placed[name, device]


def make_decoding(
    model: nn.Module, modules: dict[int, nn.Module], *, router: RouterArtifact | None, phi: PhiArtifact | None,
    selector: str | Selector | None, token_budget: int | float | None, completion: str | Estimator | None,
    sink_size: int | None, window_size: int | None, decode_window: int, dense_layers: Sequence[int], placement: str,
    dense_below: int | None, options: dict[str, Any], layers: Mapping[int, LayerSetting] | None = None,
    prefill: str | SparsePrompts = "dense",
) -> Decoding:
    """How to decode. Raises SparseKVError for what cannot work."""
    eligible = _eligible(model, modules)
    if layers is not None:
        token_budget = max((s.budget for s in layers.values()), default=0.0)
    chosen = choose_selector(selector, router, token_budget, options)
    for artifact in (router, phi):
        if artifact is not None:
            artifact.check(model)
    estimator, phi = _estimator(completion, phi)
    if isinstance(estimator, CentroidEstimator):
        whole("num_buckets of completion centroid", estimator.num_buckets, least=1, most=MOST_BUCKETS)
    sink = chosen_size("sink_size", sink_size, (router, phi))
    window = chosen_size("window_size", window_size, (router, phi))
    whole("decode_window", decode_window, least=1)
    if dense_below is not None:
        whole("dense_below", dense_below)
    layer_numbers(dense_layers)
    dense = set(range(len(modules))) - eligible | dense_by_number(dense_layers, max(modules) + 1)
    prompts = _prompts(prefill, chosen, sink, window)
    prompt_layers = frozenset(eligible - dense)
    trained = router if chosen.is_trained() else None
    dense |= {i for i in eligible if not chosen.serves(i) or (layers is not None and i not in layers)
              or (trained is not None and trained.layer(i) is None)}
    check_choice("placement", placement, PLACEMENTS)
    if placement == "offload" and chosen.scores_keys:
        raise SparseKVError(f"selector {chosen.name} scores keys at every step, which lie in CPU memory under "
                            "placement offload; use placement='cpu', or a selector with an index such as router")
    if getattr(chosen, "extrapolate", False) and (estimator is not None or phi is not None):
        raise SparseKVError("extrapolate gives keys contiguous positions, and a completion estimates keys at their "
                            "own; leave out the completion (completion='none')")
    config: Any = next(iter(modules.values())).config
    return Decoding(chosen, estimator, trained, phi, sink, window, decode_window, placement, dense_below,
                    frozenset(dense), layers, prompts, prompt_layers, config.num_attention_heads,
                    min(eligible - dense, default=None))


def _prompts(prefill: str | SparsePrompts, selector: Selector, sink: int, window: int) -> SparsePrompts | None:
    """How prompts are read. Raises SparseKVError."""
    if isinstance(prefill, str):
        check_choice("prefill", prefill, ("dense", "sparse"))
        prefill = SparsePrompts() if prefill == "sparse" else prefill
    elif not isinstance(prefill, SparsePrompts):
        raise SparseKVError(f"prefill is 'dense', 'sparse' or a SparsePrompts, found {brief(prefill)}")
    if isinstance(prefill, str):
        return None
    if selector.reader(sink, window) is not None:
        raise SparseKVError(f"selector {selector.name} reads prompts itself with prefill_chunk, and prefill='sparse' "
                            "reads them by blocks; leave one of them out")
    return prefill


def choose_selector(
    selector: str | Selector | None, router: RouterArtifact | None, token_budget: int | float | None,
    options: dict[str, Any],
) -> Selector:
    """The selector that is named, or the best that the router has been trained for, with its options. Raises
    SparseKVError for an unknown name and for options that it does not have or that it refuses."""
    if isinstance(selector, Selector):
        made = copy.copy(selector)
    else:
        if not isinstance(selector, str | None):
            raise SparseKVError(f"a selector is a name or a Selector, found {brief(selector)}")
        name = selector or _default(router, options)
        check_choice("selector", name, sorted(SELECTORS))
        made = SELECTORS[name]()
    names = made.option_names()
    for key, value in {**options, "token_budget": token_budget}.items():
        if value is None:
            continue
        if key not in names:
            raise SparseKVError(f"selector {made.name} has no option {key!r}; its options are {', '.join(names)}")
        setattr(made, key, value)
    if made.is_trained() and router is not None:
        made = for_layer(made, router, router.config.layers[0])
        if made.name == "sketch" and router.sketch is None:
            warnings.warn("this router was trained without sketches and decodes by buckets alone; train it again for "
                          "selector sketch", stacklevel=2)
    check_selector(made)
    return made


def for_layer(selector: Selector, router: RouterArtifact | None, layer_idx: int,
              budget: int | float | None = None) -> Selector:
    """A fresh selector of a layer, with what it is trained with there, and with a budget of its own if given."""
    made = copy.copy(selector)
    if router is not None and made.is_trained():
        made.layer = router.layer(layer_idx)  # type: ignore[attr-defined]
    if budget is not None:
        made.token_budget = budget
    return made


def gated_maps(
    phi: PhiArtifact, layer_idx: int, layers: Mapping[int, LayerSetting] | None,
) -> PhiLayer | None:
    """The maps of a layer, with the gates of a settings file if there is one; None where it is not completed."""
    gate = None if layers is None else layers[layer_idx].gate
    return None if layers is not None and gate is None else phi.layer(layer_idx, gate)


def _default(router: RouterArtifact | None, options: dict[str, Any]) -> str:
    """The selector where none is named: the best that the artifact has been trained for."""
    sketches = router is not None and router.sketch is not None and options.get("probes") is None
    return default_selector([*(["router"] if router is not None else []), *(["sketches"] if sketches else [])])


def _estimator(
    completion: str | Estimator | None, phi: PhiArtifact | None,
) -> tuple[Estimator | None, PhiArtifact | None]:
    """The estimator to copy, or the feature maps to make one of for every layer."""
    if isinstance(completion, Estimator):
        return completion, None
    if not isinstance(completion, str | None):
        raise SparseKVError(f"a completion is a name or an Estimator, found {brief(completion)}")
    completion = completion or (NONE if phi is None else "phi")
    check_choice("completion", completion, (*ESTIMATOR_ROWS, NONE))
    if completion == "phi" and phi is None:
        raise SparseKVError("completion phi needs trained feature maps: give phi=... or use completion='centroid'")
    if completion in (NONE, "phi"):
        return None, phi if completion == "phi" else None
    return ESTIMATORS[completion](), None


def dense_by_number(layers: Sequence[int], count: int) -> set[int]:
    """The layers of a model of `count` that are named, from the end if negative. Raises SparseKVError for another."""
    for layer in layers:
        if not -count <= layer < count:
            raise SparseKVError(f"dense_layers names layer {layer}; this model has layers 0 to {count - 1}")
    return {layer % count for layer in layers}


def chosen_size(
    name: str, given: int | None, artifacts: tuple[RouterArtifact | PhiArtifact | None, ...],
) -> int:
    """sink_size or window_size: the option if given, else the artifacts' own (they must agree), else the default."""
    if given is not None:
        whole(name, given)
        return given
    found = {getattr(a.config, name) for a in artifacts if a is not None}
    if len(found) > 1:
        raise SparseKVError(f"the router and the feature maps were trained with different {name} "
                            f"({' and '.join(map(str, sorted(found)))} tokens); say which with {name}=...")
    return found.pop() if found else SIZES[name]


def _eligible(model: Any, modules: dict[int, nn.Module]) -> set[int]:
    """Layers with full softmax attention over the whole cache; `sources.families.check_family` has seen some."""
    layers = SparseCache(model.config).layers
    return {i for i, m in modules.items() if i < len(layers) and isinstance(layers[i], SparseLayer)
            and getattr(m, "attn_logit_softcapping", None) is None}
