"""The quality card: which heads are named, and how a query model is packed."""

import pytest
import torch

from sparsekv.artifacts.card import describe, heads_best_dense
from sparsekv.artifacts.router import WEIGHT_DTYPES, _packed, _unpacked
from sparsekv.errors import SparseKVError


def test_heads_best_left_dense() -> None:
    shares = {"per_head": {"mass_share@0.05": [[0.9, 0.4], [0.6, 0.7]]}, "mass_share@0.05": 0.65}
    assert heads_best_dense("router", [3, 7], shares) == {3: [1]}
    errors = {"per_head": {"sink_tail + phi error": [[0.1, 0.2], [0.6, 0.51]]}}
    assert heads_best_dense("phi", [3, 7], errors) == {7: [0, 1]}
    assert heads_best_dense("phi", [3], {}) == {}
    assert describe(shares) == ["  mass_share@0.05: 0.650"]


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES)
def test_packed_weights(dtype: str) -> None:
    torch.manual_seed(0)
    weight = torch.randn(2, 3, 8, 5) * torch.logspace(-4, 2, 5)
    packed = _packed("query_model.w2", weight, dtype)
    size = sum(t.numel() * t.element_size() for t in packed.values() if t.shape == weight.shape) / weight.numel()
    assert size == {"float32": 4, "bfloat16": 2, "float8": 1}[dtype]
    back = _unpacked(packed, "query_model.w2", (2, 3, 8, 5), "x")
    relative = (back - weight).norm(dim=-2) / weight.norm(dim=-2)
    assert float(relative.max()) < {"float32": 1e-9, "bfloat16": 4e-3, "float8": 5e-2}[dtype]
    bias = torch.randn(2, 3, 5)
    assert torch.equal(_packed("query_model.b2", bias, dtype)["query_model.b2"], bias)
    with pytest.raises(SparseKVError, match="has shape"):
        _unpacked(packed, "query_model.w2", (2, 3, 8, 6), "x")
