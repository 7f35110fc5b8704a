"""The router artifact: centroids of every (layer, KV head), and the query model that scores them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from sparsekv.artifacts.fingerprint import check_fingerprint, model_fingerprint
from sparsekv.artifacts.format import load_artifact, save_artifact, take
from sparsekv.kernels.reference import RouterWeights

KIND = "router"


@dataclass(frozen=True)
class RouterArtifactConfig:
    """What the router is and where it came from; stored as `config.json`.

    key_space: `pre` (RoPE removed) or `rot`. scores: `mlp` (trained), `mean_key` (untrained, from the request's own
    bucket means) or `hybrid` (their sum). router_scope: one query model a `kv_head` or a `query_head`.
    """

    model: dict[str, Any]
    layers: list[int]
    num_buckets: int
    key_space: str
    scores: str
    router_scope: str
    sink_size: int
    window_size: int
    provenance: dict[str, Any] = field(default_factory=dict)
    quality: dict[str, Any] = field(default_factory=dict)
    kind: str = KIND


class RouterLayer(NamedTuple):
    """One layer: centroids `[Hkv, C, d]` unit length; weights None for `mean_key` scores."""

    centroids: Tensor
    weights: RouterWeights | None
    key_space: str
    scores: str


class RouterArtifact:
    """centroids `[L, Hkv, C, d]`; weights with leading dimensions `[L, H]`, or None."""

    def __init__(self, config: RouterArtifactConfig, centroids: Tensor, weights: RouterWeights | None,
                 path: Path | None = None):
        self.config, self.centroids, self.weights, self.path = config, centroids, weights, path
        self._row = {layer: row for row, layer in enumerate(config.layers)}

    def layer(self, layer_idx: int) -> RouterLayer | None:
        """The router of a model layer, or None where it has none (the layer stays dense)."""
        row = self._row.get(layer_idx)
        if row is None:
            return None
        weights = None if self.weights is None else RouterWeights(*(w[row] for w in self.weights))
        return RouterLayer(self.centroids[row], weights, self.config.key_space, self.config.scores)

    def save(self, path: str | Path) -> None:
        tensors = {"centroids": self.centroids}
        if self.weights is not None:
            tensors |= {f"query_model.{k}": w for k, w in self.weights._asdict().items()}
        save_artifact(path, asdict(self.config), tensors)

    @classmethod
    def load(cls, path: str | Path) -> RouterArtifact:
        """Raises SparseKVError for a missing, damaged, newer or foreign artifact."""
        raw, tensors = load_artifact(path, KIND)
        names = {f.name for f in fields(RouterArtifactConfig)}
        config = RouterArtifactConfig(**{k: v for k, v in raw.items() if k in names})
        where, layers, buckets = str(path), len(config.layers), config.num_buckets
        heads = config.model["num_kv_heads" if config.router_scope == "kv_head" else "num_query_heads"]
        dim = config.model["head_dim"]
        centroids = take(tensors, "centroids", (layers, config.model["num_kv_heads"], buckets, dim), where)
        weights = None
        if config.scores != "mean_key":
            hidden = take(tensors, "query_model.b1", (layers, heads, None), where).shape[-1]
            weights = RouterWeights(
                take(tensors, "query_model.w1", (layers, heads, dim, hidden), where), tensors["query_model.b1"],
                take(tensors, "query_model.w2", (layers, heads, hidden, buckets), where),
                take(tensors, "query_model.b2", (layers, heads, buckets), where))
        return cls(config, centroids, weights, Path(path))

    def check(self, model: nn.Module) -> None:
        """Refuse a model other than the one trained on (rotary parameters may differ: contexts get extended)."""
        check_fingerprint(self.config.model, model_fingerprint(model), f"the router {str(self.path or '')!r}",
                          ignore=("rope",))

    def to(self, device: Any) -> RouterArtifact:
        weights = None if self.weights is None else RouterWeights(*(w.to(device) for w in self.weights))
        return RouterArtifact(self.config, self.centroids.to(device), weights, self.path)

    def summary(self) -> str:
        c, q = self.config, self.config.quality
        lines = [f"router {self.path or ''}: {len(c.layers)} layers, {c.num_buckets} buckets over "
                 f"{'RoPE-free' if c.key_space == 'pre' else 'rotated'} keys, scores {c.scores}"]
        lines += [f"  {name}: {value:.3f}" for name, value in q.items() if isinstance(value, float)]
        return "\n".join(lines)
