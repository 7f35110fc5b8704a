"""The router artifact: centroids of every (layer, KV head), and the query model that scores them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparsekv.artifacts.card import describe
from sparsekv.artifacts.fingerprint import check_fingerprint, model_fingerprint
from sparsekv.artifacts.format import load_artifact, save_artifact, take
from sparsekv.kernels import QueryModel

KIND = "router"
WEIGHT_DTYPES = ("float32", "bfloat16", "float8")
FLOAT8_MAX = 448.0


@dataclass(frozen=True)
class RouterArtifactConfig:
    """What the router is and where it came from; stored as `config.json`.

    key_space: `pre` (RoPE removed) or `rot`. scores: `mlp` (trained), `mean_key` (untrained, from the request's own
    bucket means) or `hybrid` (their sum). router_scope: one query model a `kv_head` or a `query_head`. weights_dtype:
    how the query model's matrices lie on disk.
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
    weights_dtype: str = "float32"
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
                tensors |= _packed(f"query_model.{name}", weight, self.config.weights_dtype)
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
            shapes = {"w1": (dim, hidden), "b1": (hidden,), "w2": (hidden, buckets), "b2": (buckets,)}
            weights = QueryModel(*(_unpacked(tensors, f"query_model.{name}", (layers, heads, *shapes[name]), where)
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


def _packed(name: str, weight: Tensor, dtype: str) -> dict[str, Tensor]:
    """A matrix in fewer bits; biases stay as they are. float8 has one scale a column."""
    if dtype == "float32" or name.split(".")[1].startswith("b"):
        return {name: weight}
    if dtype == "bfloat16":
        return {name: weight.to(torch.bfloat16)}
    scale = weight.float().abs().amax(-2, keepdim=True).clamp(min=1e-12) / FLOAT8_MAX
    return {name: (weight / scale).to(torch.float8_e4m3fn), f"{name}.scale": scale}


def _unpacked(tensors: dict[str, Tensor], name: str, shape: tuple[int, ...], where: str) -> Tensor:
    """float32, whatever the bits on disk: the runtime chooses its own."""
    weight = take(tensors, name, shape, where).float()
    scale = (*shape[:-2], 1, shape[-1])
    return weight * take(tensors, f"{name}.scale", scale, where) if f"{name}.scale" in tensors else weight
