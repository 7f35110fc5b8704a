"""The settings file of a served model, named by SPARSEKV_SETTINGS: where its artifacts lie, how to decode with them."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from sparsekv.artifacts.phi import PhiArtifact, PhiLayer
from sparsekv.artifacts.router import RouterArtifact
from sparsekv.core.prefill import SparsePrompts
from sparsekv.core.registry import NONE, served
from sparsekv.core.selectors.router import Router
from sparsekv.runtime.config import SparseConfig
from sparsekv.runtime.decoding import choose_selector, dense_by_number, for_layer, gated_maps
from sparsekv.runtime.hf.supported import load_artifacts
from sparsekv.runtime.settings import FORMAT as RECOMMENDED
from sparsekv.runtime.settings import LayerSetting, Settings
from sparsekv.util.config import option
from sparsekv.util.errors import SparseKVError

VARIABLE = "SPARSEKV_SETTINGS"


class ServedShape(NamedTuple):
    """What a settings file must fit: the model's class, layers, heads and head dimension."""

    architecture: str
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, kw_only=True)
class Serving(SparseConfig):
    """Options of a served model: those of `attach`, and what only an engine of many requests has. Paths are relative to
    the settings file."""

    requests: int | None = option(None, min=1, help=(
        "Requests that decode sparsely at once, each with an index; others are attended to fully. Without it as many "
        "as the engine runs, within memory_share."))
    memory_share: float = option(0.1, min=0.001, max=0.999, help=(
        "Share of vLLM's memory that indices and summaries may take."))
    recommended: str | None = option(None, help=(
        "A file of `sparsekv eval recommend`, whose selector, completion, layers, budgets, gates, sink and window are "
        "taken."))

    @classmethod
    def load(cls, path: str | Path, where: str | None = None) -> Serving:
        made = super().load(path, where or f"the settings file {str(path)!r} ({VARIABLE})")
        if made.recommended is None:
            return made
        return replace(made, recommended=str(Path(path).parent / made.recommended))

    @classmethod
    def _entries(cls, raw: dict[str, Any], path: Path) -> dict[str, Any]:
        return {"recommended": path.name} if raw.get("format") == RECOMMENDED else raw

    def check(self, where: str | None = None) -> None:
        """Check as `SparseConfig` does, and refuse what is not served. Raises SparseKVError."""
        super().check(where)
        if self.router is None and self.artifacts is None and self.recommended is None:
            raise SparseKVError(f"{where} names no router; expected an entry router with the folder of an artifact, or "
                                "recommended with a file of `sparsekv eval recommend`")
        if self.recommended is not None:
            for name in ("token_budget", "sink_size", "window_size", "dense_layers"):
                if getattr(self, name) is not None:
                    raise SparseKVError(f"{where} has recommended and {name}; expected one of them, since the "
                                        f"recommended file brings its own {name}")
        known: dict[str, tuple[Any, ...]] = {
            "selector": (None, *served()), "completion": (None, "phi", NONE), "probes": (None,),
            "placement": ("gpu",), "kv_memory": (None,), "options": ({},)}
        for name, values in known.items():
            if (value := getattr(self, name)) not in values:
                expected = " or ".join(str(x) for x in values if x) or "none"
                raise SparseKVError(f"{where} has {name} {value!r}; expected {expected}, which is what is served")


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
        return self.serving.prompts()

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
    selector = choose_selector(replace(SparseConfig.of(serving), selector=name, token_budget=budget), router)
    assert isinstance(selector, Router)
    if recommended is not None:
        budgets: dict[int, int | float | None] = {layer: s.budget for layer, s in recommended.layers.items()}
        missing = [layer for layer in budgets if router.layer(layer) is None]
        if missing:
            raise SparseKVError(f"the settings {serving.recommended!r} name layer {missing[0]}, which {what} does not "
                                "have; recommend again with this router")
        return ServedModel(serving, router, selector, budgets, recommended.sink_size, recommended.window_size, phi,
                           recommended.layers)
    dense = dense_by_number(serving.dense_layers, shape.num_layers)
    budgets = {layer: serving.token_budget for layer in router.config.layers if layer not in dense}
    return ServedModel(serving, router, selector, budgets, *serving.sizes(router, phi), phi)


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


