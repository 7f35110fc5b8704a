"""The settings file of a served model, named by SPARSEKV_SETTINGS: where its artifacts lie, how to decode with them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sparsekv.artifacts.phi import PhiArtifact, PhiLayer
from sparsekv.artifacts.router import RouterArtifact
from sparsekv.core.index import Untrained
from sparsekv.core.prefill import SparsePrompts
from sparsekv.core.registry import NONE, served
from sparsekv.core.selectors.router import Router
from sparsekv.runtime.config import SparseConfig
from sparsekv.runtime.decoding import choose_selector, dense_by_number, for_layer, load_artifacts
from sparsekv.util.config import option
from sparsekv.util.errors import SparseKVError

VARIABLE = "SPARSEKV_SETTINGS"
MEANS = "centroid"


class ServedShape(NamedTuple):
    """The shape that a settings file must fit: the model's class, layers, heads and head dimension."""

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

    @classmethod
    def load(cls, path: str | Path, where: str | None = None) -> Serving:
        return super().load(path, where or f"the settings file {str(path)!r} ({VARIABLE})")

    def check(self, where: str | None = None) -> None:
        """Check as `SparseConfig` does, and refuse what is not served. Raises SparseKVError."""
        super().check(where)
        if self.router is None and self.artifacts is None and self.token_budget is None:
            raise SparseKVError(f"{where} names no router; expected an entry artifacts, or router, with the folder of "
                                "one, or token_budget alone, which decodes by what is fitted to every request")
        known: dict[str, tuple[Any, ...]] = {
            "selector": (None, *served()), "completion": (None, "phi", MEANS, NONE), "probes": (None,),
            "placement": ("gpu",), "kv_memory": (None,), "options": ({},)}
        for name, values in known.items():
            if (value := getattr(self, name)) not in values:
                expected = " or ".join(str(x) for x in values if x) or "none"
                raise SparseKVError(f"{where} has {name} {value!r}; expected {expected}, which is what is served")


@dataclass(frozen=True)
class ServedModel:
    """Settings with what they name, checked against a model. router: None where nothing was trained; selector: as
    `attach` makes it of the same options; layers: those that decode sparsely; phi: the feature maps that complete them;
    by_means: bucket means of every request do."""

    serving: Serving
    router: RouterArtifact | None
    selector: Router
    layers: frozenset[int]
    sink_size: int
    window_size: int
    phi: PhiArtifact | None = None
    by_means: bool = False

    @cached_property
    def reads(self) -> SparsePrompts | None:
        """The reader of prompts in the layers that decode sparsely, None: by full attention."""
        return self.serving.prompts()

    def layer(self, layer_idx: int) -> Router | None:
        """The selector that a layer is served with, None: full attention."""
        if layer_idx not in self.layers:
            return None
        selector = for_layer(self.selector, self.router, layer_idx)
        assert isinstance(selector, Router)
        return selector

    def maps(self, layer_idx: int) -> PhiLayer | None:
        """The feature maps that complete a layer that decodes sparsely, None: nothing does."""
        return None if self.phi is None else self.phi.layer(layer_idx)


def settings_path() -> str | None:
    """Return the path of the settings file, from the environment."""
    return os.environ.get(VARIABLE) or None


def served_model(serving: Serving, shape: ServedShape) -> ServedModel:
    """Load what the settings name. Raises SparseKVError in one sentence where they do not fit the model."""
    completion, off = serving.completion, (MEANS, NONE)
    router, phi = load_artifacts(serving.artifacts, serving.router, None if completion in off else serving.phi)
    if router is None and serving.token_budget is None:
        raise SparseKVError(f"the artifacts {serving.artifacts!r} hold no router; expected a folder with router/, or "
                            "an entry router, or token_budget, beside it")
    if completion == MEANS and router is not None:
        raise SparseKVError("completion centroid is served where nothing was trained, and there is a router; leave out "
                            "the router and artifacts, or take completion phi or none")
    if completion == "phi" and phi is None:
        raise SparseKVError("completion phi needs trained feature maps; expected artifacts with phi/, or an entry phi "
                            "with the folder of some")
    phi = None if completion in off else phi
    if router is not None:
        what = f"the router {str(router.path or '')!r}"
        _check_shape(router.config.model, shape, what)
        if serving.selector == "sketch" and router.sketch is None:
            raise SparseKVError(f"{what} has no sketches, which selector sketch needs; train it with them, or serve "
                                "with selector router")
    if phi is not None:
        _check_shape(phi.config.model, shape, f"the feature maps {str(phi.path or '')!r}")
    selector = choose_selector(SparseConfig.of(serving), router)
    assert isinstance(selector, Router)
    if router is None:
        selector.layer = Untrained.of_shape(shape.num_kv_heads, shape.head_dim, torch.device("cpu"))
    able = range(shape.num_layers) if router is None else router.config.layers
    layers = frozenset(able) - dense_by_number(serving.dense_layers, shape.num_layers)
    means = router is None and phi is None and completion in (None, MEANS)
    return ServedModel(serving, router, selector, layers, *serving.sizes(router, phi), phi, means)


def _check_shape(model: dict[str, Any], shape: ServedShape, what: str) -> None:
    differ = [name for name, value in shape._asdict().items() if model.get(name) != value]
    if differ:
        theirs = ", ".join(f"{name} {model.get(name)}" for name in differ)
        here = ", ".join(f"{name} {getattr(shape, name)}" for name in differ)
        raise SparseKVError(f"{what} was made for a model with {theirs}; this model has {here}: use the model it was "
                            "made for, or train again for this one")


