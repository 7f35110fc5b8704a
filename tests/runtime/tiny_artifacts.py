"""Random router and feature-map artifacts for a tiny model."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from sparsekv.artifacts.fingerprint import model_fingerprint
from sparsekv.artifacts.phi import PhiArtifact, PhiArtifactConfig
from sparsekv.artifacts.router import RouterArtifact, RouterArtifactConfig
from sparsekv.kernels import QueryModel
from sparsekv.models.feature_map import FeatureMap, Maps

SCOPE: dict[str, Any] = {"router_scope": "kv_head"} if "router_scope" in {
    f.name for f in fields(RouterArtifactConfig)} else {}


def artifacts(model, *, buckets: int = 8, space: str = "pre", scores: str = "mlp", features: int = 12,
              centred: bool = True, capped: bool = True):
    torch.manual_seed(1)
    mark = model_fingerprint(model)
    layers, heads_q, heads_kv, dim = mark["num_layers"], mark["num_query_heads"], mark["num_kv_heads"], mark["head_dim"]
    common = {"model": mark, "layers": list(range(layers)), "sink_size": 4, "window_size": 16}
    centroids = torch.nn.functional.normalize(torch.randn(layers, heads_kv, buckets, dim), dim=-1)
    weights = None
    if scores == "mlp":
        weights = QueryModel(torch.randn(layers, heads_kv, dim, 20), torch.randn(layers, heads_kv, 20),
                             torch.randn(layers, heads_kv, 20, buckets), torch.randn(layers, heads_kv, buckets))
    router = RouterArtifact(RouterArtifactConfig(num_buckets=buckets, key_space=space, scores=scores, **SCOPE,
                                                 **common), centroids, weights)
    sizes = [(heads_q, features)] + ([(heads_kv, features // 2)] * 2 if centred else [(heads_kv, features)])
    maps = Maps(*(FeatureMap(layers * h, dim, r, 24).weights() for h, r in sizes))
    maps = maps.map(lambda w: w.detach().reshape(layers, -1, *w.shape[1:]))
    config = PhiArtifactConfig(num_features=features, width=24, centred=centred, capped=capped, **common)
    phi = PhiArtifact(config, maps, torch.zeros(layers, 1, heads_q), torch.ones(layers, heads_q))
    return router, phi
