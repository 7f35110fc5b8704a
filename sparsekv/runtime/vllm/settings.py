"""The settings file of a served model, named by SPARSEKV_SETTINGS: where its artifacts lie, how to decode with them."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from sparsekv.artifacts.checks import brief, check_types, is_number, parse_object, reason
from sparsekv.artifacts.hub.named import REPOSITORY
from sparsekv.artifacts.phi import PhiArtifact, PhiLayer
from sparsekv.artifacts.router import RouterArtifact
from sparsekv.core.prefill import SparsePrompts
from sparsekv.core.regions import check_budget
from sparsekv.core.registry import NONE, served
from sparsekv.core.selectors.router import Router
from sparsekv.core.selectors.sketch import SketchRouter
from sparsekv.runtime.decoding import choose_selector, chosen_size, dense_by_number, for_layer, gated_maps
from sparsekv.runtime.hf.supported import load_artifacts
from sparsekv.runtime.settings import FORMAT as RECOMMENDED
from sparsekv.runtime.settings import LayerSetting, Settings
from sparsekv.util.errors import SparseKVError

VARIABLE = "SPARSEKV_SETTINGS"


class ServedShape(NamedTuple):
    """What a settings file must fit: the model's class, layers, heads and head dimension."""

    architecture: str
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Serving:
    """How a model is served. artifacts: what one training made, a folder with `router/`, `phi/` or both, or its name on
    the hub; router, phi: folders or names of these two; recommended: a file of `sparsekv eval recommend`, whose
    selector, completion, layers, budgets, gates, sink and window are taken; all relative to the settings file.
    selector: sketch (if the artifact has sketches) or router. completion: phi, where there are feature maps, or none.
    token_budget and candidates: the selector's. dense_below: the length from which a request decodes sparsely; without
    it where that was measured to be faster. requests: how many decode sparsely at once, each with an index; others are
    attended to fully; without it as many as the engine runs, within `memory_share` of the memory that vLLM may take.
    prefill: how prompts are read, dense, sparse, or an object with some fields of `SparsePrompts`."""

    artifacts: str | None = None
    router: str | None = None
    phi: str | None = None
    selector: str | None = None
    completion: str | None = None
    recommended: str | None = None
    token_budget: int | float | None = None
    candidates: float | None = None
    sink_size: int | None = None
    window_size: int | None = None
    decode_window: int = 1024
    dense_layers: list[int] | None = None
    dense_below: int | None = None
    requests: int | None = None
    memory_share: float = 0.1
    prefill: str | dict[str, Any] = "dense"

    @classmethod
    def load(cls, path: str | Path) -> Serving:
        """Of a settings file, or of what `sparsekv eval recommend` wrote. Raises SparseKVError in one sentence."""
        path = Path(path)
        where = f"the settings file {str(path)!r} ({VARIABLE})"
        try:
            raw = parse_object(path.read_bytes(), where)
        except OSError as error:
            raise SparseKVError(f"{where} could not be read ({reason(error)}); expected a JSON file with the router's "
                                "folder, or one of `sparsekv eval recommend`") from error
        if raw.get("format") == RECOMMENDED:
            raw = {"recommended": path.name}
        names = [f.name for f in fields(cls)]
        for name in raw:
            if name not in names:
                raise SparseKVError(f"{where} has an entry {name!r}; expected some of {', '.join(names)}")
        made = cls(**raw)
        check_types(made, where)
        made._check(where)
        beside = {name: str(path.parent / x) for name in ("artifacts", "router", "phi", "recommended")
                  if (x := getattr(made, name)) is not None
                  and (name == "recommended" or (path.parent / x).exists() or not REPOSITORY.fullmatch(x))}
        return replace(made, **beside)  # type: ignore[arg-type]

    def _check(self, where: str) -> None:
        if self.router is None and self.artifacts is None and self.recommended is None:
            raise SparseKVError(f"{where} names no router; expected an entry router with the folder of an artifact, or "
                                "recommended with a file of `sparsekv eval recommend`")
        if self.recommended is not None:
            for name in ("token_budget", "sink_size", "window_size", "dense_layers"):
                if getattr(self, name) is not None:
                    raise SparseKVError(f"{where} has recommended and {name}; expected one of them, since the "
                                        f"recommended file brings its own {name}")
        if self.selector not in (None, *served()):
            raise SparseKVError(f"{where} has selector {self.selector!r}; expected {' or '.join(served())}, which are "
                                "what is served")
        if self.completion not in (None, "phi", NONE):
            raise SparseKVError(f"{where} has completion {self.completion!r}; expected phi or {NONE}, which are "
                                "what is served")
        check_budget(self.token_budget)
        if self.candidates is not None and not 0 <= self.candidates <= 1:
            raise SparseKVError(f"{where} has candidates {self.candidates}; expected a share of the context between 0 "
                                "and 1")
        if not 0 < self.memory_share < 1:
            raise SparseKVError(f"{where} has memory_share {self.memory_share}; expected a share of the memory between "
                                "0 and 1, which indices and summaries may take")
        _reads(self.prefill, where)
        for name, least in (("sink_size", 0), ("window_size", 0), ("decode_window", 1), ("dense_below", 0),
                            ("requests", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise SparseKVError(f"{where} has {name} {value}; expected at least {least}")


@dataclass(frozen=True)
class ServedModel:
    """Settings with what they name, checked against a model. selector: as `attach` makes it of the same options;
    budgets: of the layers that decode sparsely; phi: what completes them, if anything does, with the gates of `layers`
    where a recommended file brought some."""

    serving: Serving
    router: RouterArtifact
    selector: Router
    budgets: dict[int, int | float | None]
    sink_size: int
    window_size: int
    phi: PhiArtifact | None = None
    layers: dict[int, LayerSetting] | None = None

    @cached_property
    def reads(self) -> SparsePrompts | None:
        """How prompts are read in the layers that decode sparsely, None: by full attention."""
        return _reads(self.serving.prefill, "prefill")

    def layer(self, layer_idx: int) -> Router | None:
        """The selector that a layer is served with, None: full attention."""
        if layer_idx not in self.budgets or self.router.layer(layer_idx) is None:
            return None
        made = for_layer(self.selector, self.router, layer_idx, self.budgets[layer_idx])
        assert isinstance(made, Router)
        return made

    def maps(self, layer_idx: int) -> PhiLayer | None:
        """The feature maps that complete a layer that decodes sparsely, None: nothing does."""
        return None if self.phi is None else gated_maps(self.phi, layer_idx, self.layers)


def _reads(prefill: str | dict[str, Any], where: str) -> SparsePrompts | None:
    """What an entry `prefill` says. Raises SparseKVError."""
    names = [f.name for f in fields(SparsePrompts)]
    if isinstance(prefill, str):
        if prefill not in ("dense", "sparse"):
            raise SparseKVError(f"{where} has prefill {prefill!r}; expected dense, sparse, or an object with some of "
                                f"{', '.join(names)}")
        return SparsePrompts() if prefill == "sparse" else None
    for name, value in prefill.items():
        if name not in names:
            raise SparseKVError(f"{where} has {name!r} in its prefill; expected some of {', '.join(names)}")
        if not is_number(value):
            raise SparseKVError(f"{where} has {name} {brief(value)} in its prefill; expected a number")
    try:
        return SparsePrompts(**prefill)
    except SparseKVError as error:
        raise SparseKVError(f"{where}: of prefill, {error}") from error


def settings_path() -> str | None:
    """Where the settings file lies, from the environment."""
    return os.environ.get(VARIABLE) or None


def served_model(serving: Serving, shape: ServedShape) -> ServedModel:
    """Load what the settings name. Raises SparseKVError in one sentence where they do not fit the model."""
    recommended = None if serving.recommended is None else Settings.load(serving.recommended)
    if recommended is not None:
        _check_recommended(recommended, serving, shape)
    router, phi = _artifacts(serving, recommended)
    what = f"the router {str(router.path or '')!r}"
    _check_shape(router.config.model, shape, what)
    if phi is not None:
        _check_shape(phi.config.model, shape, f"the feature maps {str(phi.path or '')!r}")
    name = serving.selector or (None if recommended is None else "router")
    if name == "sketch" and router.sketch is None:
        raise SparseKVError(f"{what} has no sketches, which selector sketch needs; train it with them, or serve with "
                            "selector router")
    budget = serving.token_budget
    if recommended is not None:
        budget = max((s.budget for s in recommended.layers.values()), default=0.0)
    selector = choose_selector(name, router, budget, {})
    assert isinstance(selector, Router)
    if isinstance(selector, SketchRouter):
        selector.candidates = serving.candidates
    if recommended is not None:
        budgets: dict[int, int | float | None] = {layer: s.budget for layer, s in recommended.layers.items()}
        missing = [layer for layer in budgets if router.layer(layer) is None]
        if missing:
            raise SparseKVError(f"the settings {serving.recommended!r} name layer {missing[0]}, which {what} does not "
                                "have; recommend again with this router")
        return ServedModel(serving, router, selector, budgets, recommended.sink_size, recommended.window_size, phi,
                           recommended.layers)
    dense = dense_by_number((0,) if serving.dense_layers is None else serving.dense_layers, shape.num_layers)
    budgets = {layer: serving.token_budget for layer in router.config.layers if layer not in dense}
    sink, window = (chosen_size(n, getattr(serving, n), (router, phi)) for n in ("sink_size", "window_size"))
    return ServedModel(serving, router, selector, budgets, sink, window, phi)


def _artifacts(serving: Serving, recommended: Settings | None) -> tuple[RouterArtifact, PhiArtifact | None]:
    """The router, and the feature maps if they complete."""
    router, phi, completion = serving.router, serving.phi, serving.completion
    if recommended is not None:
        completion = completion or recommended.completion
        if serving.artifacts is None:
            # what these settings name is a path, never a name on the hub
            router, phi = (x or (path and Path(path)) for x, path in (  # type: ignore[assignment]
                (router, recommended.router), (phi, recommended.phi)))
    if router is None and serving.artifacts is None:
        raise SparseKVError(f"the settings {serving.recommended!r} name no router; expected a file recommended with "
                            "--selector router, or an entry router beside it")
    found, maps = load_artifacts(serving.artifacts, router, None if completion == NONE else phi)
    if found is None:
        raise SparseKVError(f"the artifacts {serving.artifacts!r} hold no router; expected a folder with router/, or "
                            "an entry router beside it")
    if completion == "phi" and maps is None:
        raise SparseKVError("completion phi needs trained feature maps; expected artifacts with phi/, or an entry phi "
                            "with the folder of some")
    return found, None if completion == NONE else maps


def _check_recommended(found: Settings, serving: Serving, shape: ServedShape) -> None:
    _check_shape(found.model, shape, f"the settings file {serving.recommended!r}")
    if serving.completion == "phi" and found.completion != "phi":
        raise SparseKVError(f"the settings file {serving.recommended!r} completes with {found.completion} and has no "
                            "gates; recommend again from diagnostics with feature maps, or leave out completion")
    if found.selector != "router" and serving.router is None and serving.artifacts is None:
        raise SparseKVError(f"the settings file {serving.recommended!r} is for selector {found.selector}; expected "
                            "router; recommend again with --selector router")


def _check_shape(model: dict[str, Any], shape: ServedShape, what: str) -> None:
    differ = [name for name, value in shape._asdict().items() if model.get(name) != value]
    if differ:
        made = ", ".join(f"{name} {model.get(name)}" for name in differ)
        here = ", ".join(f"{name} {getattr(shape, name)}" for name in differ)
        raise SparseKVError(f"{what} was made for a model with {made}; this model has {here}: use the model it was "
                            "made for, or train again for this one")


