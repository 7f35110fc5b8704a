"""The router artifact: centroids of every (layer, KV head), and the query model that scores them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from sparsekv.artifacts.card import describe
from sparsekv.artifacts.checks import brief, check_scope, damaged, from_record
from sparsekv.artifacts.fingerprint import check_fingerprint, model_fingerprint
from sparsekv.artifacts.format import load_artifact, save_artifact, take
from sparsekv.errors import SparseKVError
from sparsekv.kernels import QueryModel

KIND = "router"


@dataclass(frozen=True)
class RouterArtifactConfig:
    """What the router is and where it came from; stored as `config.json`.

    key_space: `pre` (RoPE removed) or `rot`. scores: `mean_key` (untrained, from the request's own bucket means) or
    `mlp` (trained, one query model a KV head).
    """

    model: dict[str, Any]
    layers: list[int]
    num_buckets: int
    key_space: str
    scores: str
    sink_size: int
    window_size: int
    provenance: dict[str, Any] = field(default_factory=dict)
    quality: dict[str, Any] = field(default_factory=dict)
    kind: str = KIND


class RouterLayer(NamedTuple):
    """One layer: centroids `[Hkv, C, d]` unit length; weights None for `mean_key` scores."""

    centroids: Tensor
    weights: QueryModel | None
    key_space: str
    scores: str


class RouterArtifact:
    """centroids `[L, Hkv, C, d]`; weights with leading dimensions `[L, H]`, or None."""

    def __init__(self, config: RouterArtifactConfig, centroids: Tensor, weights: QueryModel | None,
                 path: Path | None = None):
        self.config, self.centroids, self.weights, self.path = config, centroids, weights, path
        self._row = {layer: row for row, layer in enumerate(config.layers)}

    def layer(self, layer_idx: int) -> RouterLayer | None:
        """The router of a model layer, or None where it has none (the layer stays dense)."""
        row = self._row.get(layer_idx)
        if row is None:
            return None
        weights = None if self.weights is None else QueryModel(*(w[row] for w in self.weights))
        return RouterLayer(self.centroids[row], weights, self.config.key_space, self.config.scores)

    def save(self, path: str | Path) -> None:
        tensors = {"centroids": self.centroids}
        if self.weights is not None:
            for name, weight in self.weights._asdict().items():
                tensors[f"query_model.{name}"] = weight
        save_artifact(path, asdict(self.config), tensors)

    @classmethod
    def load(cls, path: str | Path) -> RouterArtifact:
        """Raises SparseKVError for a missing, damaged, newer or foreign artifact, and for one of a kind that is no
        longer made."""
        raw, tensors = load_artifact(path, KIND)
        where = f"the artifact {str(path)!r}"
        if raw.get("scores") == "hybrid" or raw.get("router_scope", "kv_head") != "kv_head":
            kind = "hybrid scores" if raw.get("scores") == "hybrid" else "one query model a query head"
            raise SparseKVError(f"the router {str(path)!r} has {kind}, which sparsekv no longer reads: expected scores "
                                "mean_key, or mlp with one query model a KV head; train it again")
        config = from_record(RouterArtifactConfig, raw, where)
        check_scope(config, where, num_buckets=1)
        if config.key_space not in ("pre", "rot") or config.scores not in ("mean_key", "mlp"):
            raise damaged(where, f"it has keys {brief(config.key_space)} and scores {brief(config.scores)}, expected "
                                 "pre or rot, and mean_key or mlp")
        layers, buckets = len(config.layers), config.num_buckets
        heads, dim = config.model["num_kv_heads"], config.model["head_dim"]
        centroids = take(tensors, "centroids", (layers, heads, buckets, dim), where)
        weights = None
        if config.scores == "mlp":
            hidden = take(tensors, "query_model.b1", (layers, heads, None), where).shape[-1]
            shapes = {"w1": (dim, hidden), "b1": (hidden,), "w2": (hidden, buckets), "b2": (buckets,)}
            weights = QueryModel(*(_float32(tensors, f"query_model.{name}", (layers, heads, *shapes[name]), where)
                                   for name in QueryModel._fields))
        return cls(config, centroids, weights, Path(path))

    def check(self, model: nn.Module) -> None:
        """Refuse a model other than the one trained on (rotary parameters may differ: contexts get extended)."""
        check_fingerprint(self.config.model, model_fingerprint(model), f"the router {str(self.path or '')!r}",
                          ignore=("rope",))

    def to(self, device: Any) -> RouterArtifact:
        weights = None if self.weights is None else QueryModel(*(w.to(device) for w in self.weights))
        return RouterArtifact(self.config, self.centroids.to(device), weights, self.path)

    def summary(self) -> str:
        c = self.config
        lines = [f"router {self.path or ''}: {len(c.layers)} layers, {c.num_buckets} buckets over "
                 f"{'RoPE-free' if c.key_space == 'pre' else 'rotated'} keys, scores {c.scores}", *describe(c.quality)]
        return "\n".join(lines)


def _float32(tensors: dict[str, Tensor], name: str, shape: tuple[int, ...], where: str) -> Tensor:
    """Artifacts made before may hold a matrix in bfloat16, or in float8 with one scale a column."""
    weight = take(tensors, name, shape, where).float()
    scale = (*shape[:-2], 1, shape[-1])
    return weight * take(tensors, f"{name}.scale", scale, where) if f"{name}.scale" in tensors else weight
