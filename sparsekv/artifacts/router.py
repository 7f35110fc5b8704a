"""The router artifact: centroids of every (layer, KV head), the query model that scores them, and the sketch that tells
their keys apart."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from sparsekv.artifacts.card import describe
from sparsekv.artifacts.checks import brief, check_scope, damaged, from_record
from sparsekv.artifacts.fingerprint import check_fingerprint, model_fingerprint
from sparsekv.artifacts.format import load_artifact, save_artifact, take
from sparsekv.artifacts.hub.named import find_artifact
from sparsekv.artifacts.hub.push import OnHub
from sparsekv.core.index import RouterLayer
from sparsekv.core.sketch import check_sketch
from sparsekv.kernels import QueryModel, Sketch
from sparsekv.util.errors import SparseKVError

KIND = "router"


@dataclass(frozen=True)
class RouterArtifactConfig:
    """What the router is and where it came from; stored as `config.json`.

    key_space: `pre` (RoPE removed) or `rot`. scores: `mean_key` (untrained, from the request's own bucket means) or
    `mlp` (trained, one query model a KV head). sketch_bytes: bytes of a key's code, and sketch_wide: how many of its
    channels have 8 bits; 0 bytes where there is no sketch.
    """

    model: dict[str, Any]
    layers: list[int]
    num_buckets: int
    key_space: str
    scores: str
    sink_size: int
    window_size: int
    sketch_bytes: int = 0
    sketch_wide: int = 0
    provenance: dict[str, Any] = field(default_factory=dict)
    quality: dict[str, Any] = field(default_factory=dict)
    kind: str = KIND


class RouterArtifact(OnHub):
    """centroids `[L, Hkv, C, d]`; weights and sketch with leading dimensions `[L, H]`, or None."""

    def __init__(self, config: RouterArtifactConfig, centroids: Tensor, weights: QueryModel | None,
                 path: Path | None = None, *, sketch: Sketch | None = None):
        self.config, self.centroids, self.weights, self.path = config, centroids, weights, path
        self.sketch = sketch
        self._row = {layer: row for row, layer in enumerate(config.layers)}

    def layer(self, layer_idx: int) -> RouterLayer | None:
        """The router of a model layer, or None where it has none (the layer stays dense)."""
        row = self._row.get(layer_idx)
        if row is None:
            return None
        weights = None if self.weights is None else QueryModel(*(w[row] for w in self.weights))
        sketch = None if self.sketch is None else Sketch(*(x[row] for x in self.sketch))
        return RouterLayer(self.centroids[row], weights, self.config.key_space, self.config.scores, sketch,
                           self.config.sketch_bytes)

    def save(self, path: str | Path, *, eight_bits: bool = False) -> None:
        """eight_bits: matrices rounded to 8 bits, a quarter of the size."""
        tensors = {"centroids": self.centroids}
        if self.weights is not None:
            for name, weight in self.weights._asdict().items():
                tensors[f"query_model.{name}"] = weight
        if self.sketch is not None:
            tensors |= {f"sketch.{name}": x for name, x in self.sketch._asdict().items()}
        save_artifact(path, asdict(self.config), tensors, eight_bits=eight_bits)

    @classmethod
    def load(cls, path: str | Path, revision: str | None = None) -> RouterArtifact:
        """From a folder, or by its name on the hub (`artifacts/hub/named.py`). Raises SparseKVError for a missing,
        damaged, newer or foreign artifact, and for one of a kind that this version does not read."""
        path = find_artifact(path, KIND, revision)
        raw, tensors = load_artifact(path, KIND)
        where = f"the artifact {str(path)!r}"
        if raw.get("scores") == "hybrid" or raw.get("router_scope", "kv_head") != "kv_head":
            kind = "hybrid scores" if raw.get("scores") == "hybrid" else "one query model a query head"
            raise SparseKVError(f"the router {str(path)!r} has {kind}, which this version does not read: expected "
                                "scores mean_key, or mlp with one query model a KV head; train it again")
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
        return cls(config, centroids, weights, Path(path), sketch=_sketch(config, tensors, (layers, heads, dim), where))

    def check(self, model: nn.Module) -> None:
        """Refuse a model other than the one trained on, or one that attends otherwise."""
        check_fingerprint(self.config.model, model_fingerprint(model), f"the router {str(self.path or '')!r}")

    def to(self, device: Any) -> RouterArtifact:
        weights = None if self.weights is None else QueryModel(*(w.to(device) for w in self.weights))
        sketch = None if self.sketch is None else Sketch(*(x.to(device) for x in self.sketch))
        return RouterArtifact(self.config, self.centroids.to(device), weights, self.path, sketch=sketch)

    @property
    def learned(self) -> str:
        """Say in a phrase which parts of the router were learned, and how."""
        found = ["centroids of the buckets by k-means"]
        if self.sketch is not None:
            found.append("the sketches' basis in closed form")
        if self.weights is None:
            return f"{', '.join(found)}; nothing by gradient, buckets are scored by the means of a request's own keys"
        return f"{', '.join(found)}; a query model of {self.weights.b1.shape[-1]} hidden units by gradient (Saap)"

    def summary(self) -> str:
        c = self.config
        sketch = f"sketches of {c.sketch_bytes} bytes a key" if c.sketch_bytes else "no sketches"
        lines = [f"router {self.path or ''}: {len(c.layers)} layers, {c.num_buckets} buckets over "
                 f"{'RoPE-free' if c.key_space == 'pre' else 'rotated'} keys, scores {c.scores}, {sketch}",
                 f"learned: {self.learned}", *describe(c.quality)]
        return "\n".join(lines)


def _sketch(
    config: RouterArtifactConfig, tensors: dict[str, Tensor], sizes: tuple[int, int, int], where: str,
) -> Sketch | None:
    """sizes: layers, KV heads, head dimension."""
    if not config.sketch_bytes:
        return None
    layers, heads, dim = sizes
    try:
        check_sketch(config.sketch_bytes, config.sketch_wide, dim)
    except SparseKVError as error:
        raise damaged(where, str(error)) from error
    rank = 2 * config.sketch_bytes - config.sketch_wide
    shapes = {"keys": (dim, rank), "centre": (rank,), "queries": (dim, rank)}
    return Sketch(*(take(tensors, f"sketch.{name}", (layers, heads, *shapes[name]), where) for name in Sketch._fields))


def _float32(tensors: dict[str, Tensor], name: str, shape: tuple[int, ...], where: str) -> Tensor:
    """Artifacts of earlier versions may hold a matrix in bfloat16."""
    if f"{name}.scale" in tensors:
        raise SparseKVError(f"{where} has a query model in float8, which this version does not read: expected one in "
                            "float32 or bfloat16; train it again")
    return take(tensors, name, shape, where).float()
