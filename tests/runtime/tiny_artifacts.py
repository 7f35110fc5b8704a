"""Random router and feature-map artifacts for a tiny model."""

from __future__ import annotations

import torch

from sparsekv.artifacts.fingerprint import model_fingerprint
from sparsekv.artifacts.phi import PhiArtifact, PhiArtifactConfig
from sparsekv.artifacts.router import RouterArtifact, RouterArtifactConfig
from sparsekv.kernels import QueryModel, Sketch
from sparsekv.models.feature_map import FeatureMap, FeatureMaps


def artifacts(model, *, buckets: int = 8, space: str = "pre", scores: str = "mlp", features: int = 12,
              centred: bool = True, capped: bool = True, sketched: bool = True, key_blocks: int = 0):
    torch.manual_seed(1)
    mark = model_fingerprint(model)
    layers, heads_q, heads_kv, dim = mark["num_layers"], mark["num_query_heads"], mark["num_kv_heads"], mark["head_dim"]
    common = {"model": mark, "layers": list(range(layers)), "sink_size": 4, "window_size": 16}
    centroids = torch.nn.functional.normalize(torch.randn(layers, heads_kv, buckets, dim), dim=-1)
    weights = None
    if scores == "mlp":
        weights = QueryModel(torch.randn(layers, heads_kv, dim, 20), torch.randn(layers, heads_kv, 20),
                             torch.randn(layers, heads_kv, 20, buckets), torch.randn(layers, heads_kv, buckets))
    sizes = [(heads_q, features)] + ([(heads_kv, features // 2)] * 2 if centred else [(heads_kv, features)])
    made = [FeatureMap(layers * h, dim, r, 24, blocks=key_blocks if i else 1, of_keys=i > 0)
            for i, (h, r) in enumerate(sizes)]
    if key_blocks:
        torch.nn.init.ones_(made[1].alpha)
    maps = FeatureMaps(*(m.weights() for m in made)).map(lambda w: w.detach().unflatten(0, (layers, -1)))
    maps_config = PhiArtifactConfig(num_features=features, width=24, key_width=24, key_blocks=key_blocks,
                                    centred=centred, capped=capped, **common)
    phi = PhiArtifact(maps_config, maps, torch.zeros(layers, 1, heads_q), torch.ones(layers, heads_q))
    width, wide = (dim // 3, 1) if sketched else (0, 0)
    shapes = (dim, 2 * width - wide), (2 * width - wide,), (dim, 2 * width - wide)
    sketch = Sketch(*(torch.randn(layers, heads_kv, *shape) for shape in shapes)) if sketched else None
    config = RouterArtifactConfig(num_buckets=buckets, key_space=space, scores=scores, sketch_bytes=width,
                                  sketch_wide=wide, **common)
    return RouterArtifact(config, centroids, weights, sketch=sketch), phi
