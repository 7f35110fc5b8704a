"""A settings file: per-layer budgets and per-head completion gates that `sparsekv eval recommend` writes and
`sparsekv.attach(model, settings=...)` obeys. Plain JSON, with a checksum that whoever edits it removes."""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from sparsekv.artifacts.checks import (
    brief,
    check_model_record,
    check_version,
    damaged,
    digest,
    from_record,
    parse_object,
)
from sparsekv.artifacts.fingerprint import check_fingerprint, model_fingerprint
from sparsekv.core.regions import Regions, tokens_of_budget
from sparsekv.util.config import MOST
from sparsekv.util.errors import SparseKVError
from sparsekv.util.records import write_json

FORMAT, FORMAT_VERSION = "sparsekv-settings", 1


@dataclass(frozen=True)
class LayerSetting:
    """budget: share of the context retrieved per query and KV head. gate: a factor in 0..1 on the completion's mass for
    every query head, None for no completion in this layer."""

    budget: float
    gate: list[float] | None = None


@dataclass(frozen=True)
class Settings:
    """How a model is to be decoded. layers: the sparse ones; every other layer keeps full attention. goal, measured:
    what was asked for and what the held-out text showed, for the reader. router, phi: folders of the artifacts,
    relative to the file's own folder when it was written beside them."""

    model: dict[str, Any]
    selector: str
    completion: str
    sink_size: int
    window_size: int
    layers: dict[int, LayerSetting]
    router: str | None = None
    phi: str | None = None
    goal: dict[str, Any] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)

    def selectivity(self, context_length: int, generated: int = 0) -> dict[int, float]:
        """Share of the context that a query of every sparse layer reads exactly, by layer: `⌈ρN⌉` retrieved tokens,
        sink and tail; `generated` tokens were decoded since the prefill of `context_length` and stay exact."""
        regions = Regions.at_prefill_end(torch.zeros(1, dtype=torch.long), context_length, self.sink_size,
                                         self.window_size)
        length = context_length + generated
        anchors = length - int(regions.mid_sizes)
        return {layer: (int(tokens_of_budget(s.budget, regions)) + anchors) / length
                for layer, s in self.layers.items()}

    def save(self, path: str | Path) -> Path:
        path = Path(path)
        raw = {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(self)}
        for kind in ("router", "phi"):
            if raw[kind] is not None:
                raw[kind] = Path(os.path.relpath(raw[kind], path.parent)).as_posix()
        write_json(path, {**raw, "sha256": digest(raw)})
        return path

    @classmethod
    def load(cls, path: str | Path) -> Settings:
        """Raises SparseKVError for a file that is missing, damaged, of another kind or of a newer version."""
        path = Path(path)
        where = f"the settings file {str(path)!r}"
        try:
            if not path.is_file():
                raise SparseKVError(f"no settings at {str(path)!r}; expected a file of `sparsekv eval recommend`")
            text = path.read_bytes()
        except OSError as error:
            raise SparseKVError(f"{where} could not be read ({error}); expected a file of `sparsekv eval recommend`"
                                ) from error
        raw = parse_object(text, where)
        if raw.get("format") != FORMAT:
            raise SparseKVError(f"{where} is no settings file; expected one of `sparsekv eval recommend`")
        check_version(raw.get("format_version"), FORMAT_VERSION, where)
        if "sha256" in raw and raw["sha256"] != digest({k: v for k, v in raw.items() if k != "sha256"}):
            raise SparseKVError(f"{where} is damaged or was edited: its checksum is another than when it was written; "
                                "remove its line sha256 if the change is meant")
        layers = raw.get("layers")
        if not isinstance(layers, dict) or not all(
                re.fullmatch("0|[1-9][0-9]{,5}", i) and isinstance(s, dict) for i, s in layers.items()):
            raise damaged(where, f"layers is {brief(layers)}, expected a setting by layer")
        raw["layers"] = {int(i): from_record(LayerSetting, s, f"layer {i} of {where}") for i, s in layers.items()}
        made = from_record(cls, raw, where)
        folders = {k: None if raw.get(k) is None else str(path.parent / raw[k]) for k in ("router", "phi")}
        made = replace(made, **folders)
        made.check(where)
        return made

    def check(self, where: str = "the settings object") -> None:
        """Refuse values that mean nothing. Raises SparseKVError."""
        check_model_record(self.model, where)
        heads, count = self.model["num_query_heads"], self.model["num_layers"]
        for name in ("sink_size", "window_size"):
            if not 0 <= getattr(self, name) <= MOST:
                raise damaged(where, f"{name} is {brief(getattr(self, name))}, expected 0 to {MOST}")
        for layer, s in self.layers.items():
            if not 0 <= layer < count:
                raise SparseKVError(f"{where} names layer {layer}; their model has layers 0 to {count - 1}")
            if not 0 <= s.budget <= 1:
                raise SparseKVError(f"{where} gives layer {layer} the budget {brief(s.budget)}; expected a share "
                                    "of the context between 0 and 1")
            if s.gate is not None and (len(s.gate) != heads or not all(0 <= g <= 1 for g in s.gate)):
                raise SparseKVError(f"{where} has a gate of {len(s.gate)} values in layer {layer}; "
                                    f"expected {heads} between 0 and 1, one a query head")
        if self.completion not in ("none", "phi"):
            raise SparseKVError(f"{where} names completion {self.completion!r}; expected none or phi")


def load_settings(settings: Any, model: Any, conflicts: list[str]) -> Settings:
    """The settings for this model, from a file or an object; `conflicts` names arguments that they replace.

    Raises SparseKVError for a bad file, another model's, and for conflicts.
    """
    if conflicts:
        raise SparseKVError(f"settings bring their own {', '.join(conflicts)}; give settings, or these, not both")
    made = Settings.load(settings) if isinstance(settings, str | Path) else settings
    if not isinstance(made, Settings):
        raise SparseKVError(f"settings are a file of `sparsekv eval recommend` or a Settings, found "
                            f"{type(made).__name__}")
    made.check()
    check_fingerprint(made.model, model_fingerprint(model), "the settings file")
    return made
