"""From options to how a model decodes: its artifacts, and which selector and estimator every layer gets, checked."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from sparsekv.artifacts.hub.named import find_artifacts
from sparsekv.artifacts.phi import OUTSIDE, PhiArtifact
from sparsekv.artifacts.router import RouterArtifact
from sparsekv.core.estimators import ESTIMATORS, CentroidEstimator, Estimator, PhiEstimator
from sparsekv.core.prefill import SparsePrompts
from sparsekv.core.regions import TailRule
from sparsekv.core.registry import NONE, SELECTOR_ROWS, default_selector
from sparsekv.core.selectors import SELECTORS, Selector
from sparsekv.core.selectors.base import ReadsPrompts
from sparsekv.runtime.break_even import DenseRule, Shape, Times, dense_rule, shortest, times_of
from sparsekv.runtime.config import SparseConfig
from sparsekv.util.config import check_ranges, whole
from sparsekv.util.errors import SparseKVError, check_choice

MOST_BUCKETS = 32767
ARTIFACTS: dict[str, type[RouterArtifact] | type[PhiArtifact]] = {"router": RouterArtifact, "phi": PhiArtifact}


@dataclass(eq=False)
class Decoding:
    """The decoding of an attachment: a selector and an estimator to copy for every layer, and what they share. Two are
    the same only if they are one object."""

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
    kv_memory: float | str | None = None
    """What keys and values may take of the GPU's memory [GB], auto: what is free."""
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
    rule: DenseRule | None = None
    """The rule by which a cache was last decoded sparsely or not."""

    @property
    def tails(self) -> TailRule:
        """The rule by which the oldest tokens of a tail join the mid region."""
        return TailRule(self.window_size, self.decode_window)

    @property
    def by_cpu(self) -> bool:
        """True where the CPU attends to keys and values that lie in its memory; else the device does, which reads what
        is selected there."""
        return self.placement == "cpu" or self.selector.scores_keys

    def dense_threshold(self, key: Tensor, length: int, on_host: bool = False) -> int:
        """The length below which a cache with such keys `[B, Hkv, N, d]` decodes with full attention [tokens]; of a
        cache of a `length` that is too short to be timed, the length from which it is. on_host: the keys lie in CPU
        memory, which a device attends to."""
        times = None
        if self.first_sparse is None:
            return self.dense_below or 0
        if self.dense_below is None and not on_host:
            timed = shortest(key.device, self.sink_size, self.window_size)
            if length < timed:
                return timed
            shape = Shape(key.shape[0], self.heads_q, key.shape[1], key.shape[3], key.dtype, key.device)
            if shape not in self._times:
                self._times[shape] = times_of(
                    shape, self.selector_of(self.first_sparse, key.device),
                    self.estimator_of(self.first_sparse, key.device), self.sink_size, self.window_size)
            times = self._times[shape]
        self.rule = dense_rule(self.dense_below, on_host=on_host, times=times, name=self.selector.name)
        return self.rule.shortest

    @property
    def completion(self) -> str:
        """Name of the completion."""
        if self.estimator is None:
            return NONE if self.phi is None else "phi"
        kind = type(self.estimator)
        return next((name for name, known in ESTIMATORS.items() if known is kind), kind.__name__)

    def why(self) -> str:
        """Say why caches decode sparsely from the length that they do."""
        if self.first_sparse is None:
            return "no layer decodes sparsely"
        return "no cache was as long as the shortest that is timed" if self.rule is None else self.rule.why

    def selector_of(self, layer_idx: int, device: Any) -> Selector:
        """A fresh selector for a layer, what it was trained with on the device."""
        router = None if self.router is None else self._on("router", self.router, device)
        return for_layer(self.selector, router, layer_idx)

    def reader_of(self, layer_idx: int, device: Any) -> ReadsPrompts | None:
        """Return the reader of a layer's prompt; None: it is read densely."""
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
            maps = self.phi.layer(layer_idx)
            self.placed[key] = None if maps is None else PhiEstimator(maps.run_on(device))
        estimator: Estimator | None = self.placed[key]
        return None if estimator is None else estimator.fork()

    def spend(self, budget: int | float) -> None:
        """Another budget for the layers that begin from here on. Raises SparseKVError."""
        chosen = copy.copy(self.selector)
        chosen.token_budget = budget
        chosen.validate()
        self.selector, self._times, self.rule = chosen, {}, None

    def _on(self, name: str, trained: Any, device: Any) -> Any:
        if (name, device) not in self.placed:
            self.placed[name, device] = trained.to(device)
        return self.placed[name, device]


def make_decoding(
    model: nn.Module, modules: dict[int, nn.Module], eligible: set[int], config: SparseConfig, *,
    router: RouterArtifact | None, phi: PhiArtifact | None,
) -> Decoding:
    """Build the decoding of a model. modules: its attention, by layer; eligible: the layers that may decode sparsely;
    router, phi: loaded, in place of the config's. Raises SparseKVError for what cannot work."""
    chosen = choose_selector(config, router)
    for artifact in (router, phi):
        if artifact is not None:
            artifact.check(model)
    usual = "phi" if phi is not None else "centroid" if router is None and untrained(chosen) else NONE
    estimator, phi = _estimator(config.completion or usual, phi)
    if phi is not None and phi.config.key_blocks:
        warnings.warn(f"the maps of keys of these feature maps have ReZero blocks: {OUTSIDE}", stacklevel=2)
    if isinstance(estimator, CentroidEstimator):
        whole("num_buckets of completion centroid", estimator.num_buckets, least=1, most=MOST_BUCKETS)
    sink, window = config.sizes(router, phi)
    dense = set(range(len(modules))) - eligible | dense_by_number(config.dense_layers, max(modules) + 1)
    prompts, prompt_layers = config.prompts(), frozenset(eligible - dense)
    trained = router if chosen.is_trained() else None
    dense |= {i for i in eligible if not chosen.serves(i) or (trained is not None and trained.layer(i) is None)}
    if getattr(chosen, "extrapolate", False) and (estimator is not None or phi is not None):
        raise SparseKVError("extrapolate gives keys contiguous positions, and a completion estimates keys at their "
                            "own; leave out the completion (completion='none')")
    shape: Any = next(iter(modules.values())).config
    return Decoding(chosen, estimator, trained, phi, sink, window, config.decode_window, config.placement,
                    config.dense_below, frozenset(dense), config.kv_memory, prompts, prompt_layers,
                    shape.num_attention_heads, min(eligible - dense, default=None))


def choose_selector(config: SparseConfig, router: RouterArtifact | None) -> Selector:
    """Check a config as far as that needs no model, and make its selector: the one that is named, or the best that the
    router has been trained for. Raises SparseKVError."""
    config.check()
    given = config.selector_options()
    if isinstance(config.selector, Selector):
        selector = copy.copy(config.selector)
    else:
        name = config.selector or _default(router, given)
        check_choice("selector", name, sorted(SELECTORS))
        selector = SELECTORS[name]()
    names = selector.option_names()
    for key, value in given.items():
        if key not in names:
            raise SparseKVError(f"selector {selector.name} has no option {key!r}; its options are {', '.join(names)}")
        setattr(selector, key, value)
    if selector.is_trained() and router is not None:
        selector = for_layer(selector, router, router.config.layers[0])
        if selector.name == "sketch" and router.sketch is None:
            warnings.warn("this router was trained without sketches and decodes by buckets alone; train it again for "
                          "selector sketch", stacklevel=2)
    check_ranges(selector, lambda option: f"{option} of selector {selector.name}", least=0)
    selector.validate()
    if (config.placement == "offload" or config.kv_memory is not None) and selector.scores_keys:
        raise SparseKVError(f"selector {selector.name} scores keys at every step, which lie in CPU memory under "
                            "placement offload or beyond kv_memory; use placement='cpu', or a selector with an index "
                            "such as router")
    if config.placement == "cpu" and config.kv_memory is not None:
        raise SparseKVError("kv_memory says how much may lie on the GPU, and placement='cpu' keeps all keys and values "
                            "in CPU memory; give one of them")
    if config.prompts() is not None and selector.reader(0, 0) is not None:
        raise SparseKVError(f"selector {selector.name} reads prompts itself with prefill_chunk, and prefill='sparse' "
                            "reads them by blocks; leave one of them out")
    return selector


def for_layer(selector: Selector, router: RouterArtifact | None, layer_idx: int) -> Selector:
    """Copy a selector for a layer, with what it is trained with there."""
    own = copy.copy(selector)
    if router is not None and own.is_trained():
        own.layer = router.layer(layer_idx)  # type: ignore[attr-defined]
    return own


def untrained(selector: Selector) -> bool:
    """Return whether a selector decodes by what is fitted to the request where nothing was trained for it."""
    row = SELECTOR_ROWS.get(selector.name)
    return row is not None and row.untrained


def _default(router: RouterArtifact | None, options: dict[str, Any]) -> str:
    """The selector where none is named: the best that the artifact has been trained for, and with a budget alone the
    best that needs none."""
    if router is None and options.get("probes") is not None:
        return "router"  # whose sentence says that it needs a trained one
    if router is None and options.get("token_budget") is not None:
        return next(row.name for row in SELECTOR_ROWS.values() if row.untrained)
    sketches = router is not None and router.sketch is not None and options.get("probes") is None
    return default_selector([*(["router"] if router is not None else []), *(["sketches"] if sketches else [])])


def _estimator(
    completion: str | Estimator, phi: PhiArtifact | None,
) -> tuple[Estimator | None, PhiArtifact | None]:
    """The estimator to copy, or the feature maps to make one of for every layer."""
    if isinstance(completion, Estimator):
        return completion, None
    if completion == "phi" and phi is None:
        raise SparseKVError("completion phi needs trained feature maps: give phi=... or use completion='centroid'")
    if completion in (NONE, "phi"):
        return None, phi if completion == "phi" else None
    return ESTIMATORS[completion](), None


def dense_by_number(layers: Sequence[int] | None, count: int) -> set[int]:
    """The layers of a model of `count` that are named, from the end if negative; layer 0 where none are given. Raises
    SparseKVError for another."""
    layers = (0,) if layers is None else layers
    for layer in layers:
        if not -count <= layer < count:
            raise SparseKVError(f"dense_layers names layer {layer}; this model has layers 0 to {count - 1}")
    return {layer % count for layer in layers}


def load_artifacts(artifacts: Any, router: Any, phi: Any) -> tuple[Any, Any]:
    """Router and feature maps, each None where there is none. artifacts: folder or name of a training, or of one of
    them, for what is not given by itself. Raises SparseKVError."""
    paths: dict[str, Path] = {}
    if artifacts is not None:
        if not isinstance(artifacts, str | Path):
            raise SparseKVError(f"artifacts is a {type(artifacts).__name__}; expected a folder or a name on the hub, "
                                "as user/name")
        given = {"router": router, "phi": phi}
        paths = find_artifacts(artifacts)
        if not any(kind in ARTIFACTS and given[kind] is None for kind in paths):
            raise SparseKVError(f"{str(artifacts)!r} holds {', '.join(paths)}; expected what is not given by router "
                                "and phi")
    return (as_artifact(paths.get("router") if router is None else router, "router"),
            as_artifact(paths.get("phi") if phi is None else phi, "phi"))


def as_artifact(artifact: Any, kind: str) -> Any:
    """An artifact from its folder or by its name on the hub, or the object itself; None for None. Raises SparseKVError
    for anything else."""
    wanted = ARTIFACTS[kind]
    if artifact is None or isinstance(artifact, wanted):
        return artifact
    if isinstance(artifact, str | Path):
        return wanted.load(artifact)
    raise SparseKVError(f"{kind} is a {type(artifact).__name__}; expected a {wanted.__name__} or the folder of one, "
                        "or its name on the hub, as user/name")
