"""Feature maps of the sizes that `sparsekv train` makes, with random weights: a step takes the time of trained ones."""

from __future__ import annotations

from typing import Any

import torch

from sparsekv.artifacts.phi import PhiLayer
from sparsekv.models.feature_map import CentredMap, FeatureMap, FeatureMaps
from sparsekv.trainers.options import DEFAULT
from sparsekv.trainers.phi import RECIPES


def random_phi(heads_q: int, heads: int, dim: int, device: Any) -> PhiLayer:
    """Those of one layer."""
    recipe = RECIPES[DEFAULT]
    features = recipe.features or dim
    query = FeatureMap(heads_q, dim, features, recipe.width, recipe.query_blocks)
    keys = CentredMap(heads, dim, features, recipe.key_width, shared=recipe.shared)
    maps = FeatureMaps(*(m.weights() for m in (query, keys.plain, keys.centred)))
    return PhiLayer(maps.map(lambda w: w.detach().to(device)), torch.zeros(1, heads_q, device=device),
                    capped=recipe.calibrate)
