"""The feature-map artifact: `φ_q` of every query head, `φ_k` of every KV head, calibration and gates."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from sparsekv.artifacts.card import describe
from sparsekv.artifacts.fingerprint import check_fingerprint, model_fingerprint
from sparsekv.artifacts.format import load_artifact, save_artifact, take
from sparsekv.models.feature_map import FeatureMapWeights, log_phi

KIND = "phi"


@dataclass(frozen=True)
class PhiArtifactConfig:
    """What the maps are and where they came from; stored as `config.json`."""

    model: dict[str, Any]
    layers: list[int]
    num_features: int
    width: int
    sink_size: int
    window_size: int
    provenance: dict[str, Any] = field(default_factory=dict)
    quality: dict[str, Any] = field(default_factory=dict)
    kind: str = KIND


class PhiLayer(NamedTuple):
    """The maps of one layer; offset `[Hq]` is added to `log φ_q`: calibration shift and logarithm of the gate."""

    query_map: FeatureMapWeights
    key_map: FeatureMapWeights
    offset: Tensor

    def log_phi_q(self, q_rot: Tensor) -> Tensor:
        """`[B, Hq, T, d]` with RoPE -> `[B, Hq, T, r]`; a head whose gate is 0 gives -inf."""
        return log_phi(q_rot, self.query_map) + self.offset[:, None, None]

    def log_phi_k(self, k_rot: Tensor) -> Tensor:
        """`[B, Hkv, N, d]` with RoPE -> `[B, Hkv, N, r]`."""
        return log_phi(k_rot, self.key_map)


class PhiArtifact:
    """query_map and key_map with leading dimensions `[L, Hq]` and `[L, Hkv]`; shift, gate `[L, Hq]`: the completion's
    mass is multiplied by `gate · exp(shift)`."""

    def __init__(self, config: PhiArtifactConfig, query_map: FeatureMapWeights, key_map: FeatureMapWeights,
                 shift: Tensor, gate: Tensor, path: Path | None = None):
        self.config, self.query_map, self.key_map = config, query_map, key_map
        self.shift, self.gate, self.path = shift, gate, path
        self._row = {layer: row for row, layer in enumerate(config.layers)}

    def layer(self, layer_idx: int) -> PhiLayer | None:
        """The maps of a model layer, or None where it has none (no completion there)."""
        row = self._row.get(layer_idx)
        if row is None:
            return None
        query_map, key_map = (FeatureMapWeights(*(w[row] for w in m)) for m in (self.query_map, self.key_map))
        return PhiLayer(query_map, key_map, self.shift[row] + self.gate[row].log())

    def save(self, path: str | Path) -> None:
        tensors = {f"{part}.{k}": w for part, m in (("query_map", self.query_map), ("key_map", self.key_map))
                   for k, w in m._asdict().items()}
        save_artifact(path, asdict(self.config), {**tensors, "shift": self.shift, "gate": self.gate})

    @classmethod
    def load(cls, path: str | Path) -> PhiArtifact:
        """Raises SparseKVError for a missing, damaged, newer or foreign artifact."""
        raw, tensors = load_artifact(path, KIND)
        names = {f.name for f in fields(PhiArtifactConfig)}
        config = PhiArtifactConfig(**{k: v for k, v in raw.items() if k in names})
        layers, where = len(config.layers), str(path)
        maps = []
        for part, heads in (("query_map", config.model["num_query_heads"]), ("key_map", config.model["num_kv_heads"])):
            d, w, r = config.model["head_dim"], config.width, config.num_features
            shapes = {"w_in": (d, w), "b_in": (w,), "w_a": (w, w), "b_a": (w,), "w_b": (w, w), "alpha": (1,),
                      "w_out": (w, r), "b_out": (r,)}
            maps.append(FeatureMapWeights(**{
                k: take(tensors, f"{part}.{k}", (layers, heads, *shape), where) for k, shape in shapes.items()}))
        heads = config.model["num_query_heads"]
        shift, gate = (take(tensors, name, (layers, heads), where) for name in ("shift", "gate"))
        return cls(config, maps[0], maps[1], shift, gate, Path(path))

    def check(self, model: nn.Module) -> None:
        """Refuse a model other than the one trained on (rotary parameters may differ: contexts get extended)."""
        check_fingerprint(self.config.model, model_fingerprint(model), f"the feature maps {str(self.path or '')!r}",
                          ignore=("rope",))

    def to(self, device: Any) -> PhiArtifact:
        query_map, key_map = (FeatureMapWeights(*(w.to(device) for w in m)) for m in (self.query_map, self.key_map))
        return PhiArtifact(self.config, query_map, key_map, self.shift.to(device), self.gate.to(device), self.path)

    def summary(self) -> str:
        c = self.config
        lines = [f"feature maps {self.path or ''}: {len(c.layers)} layers, r = {c.num_features}, width {c.width}; "
                 f"completion on for {int((self.gate > 0).sum())} of {self.gate.numel()} heads", *describe(c.quality)]
        return "\n".join(lines)
