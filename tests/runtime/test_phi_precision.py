"""Feature maps whose products over the keys are in half precision, as on CUDA, against float32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from views import make_view

from sparsekv.artifacts.phi import PhiLayer
from sparsekv.core.estimators import PhiEstimator
from sparsekv.core.estimators import phi as estimators
from sparsekv.core.layer import LayerView
from sparsekv.core.regions import Regions
from sparsekv.kernels import for_request, key_features, log_phi_key, products
from sparsekv.kernels.features import LOG2_E, log_features
from sparsekv.models.feature_map import FeatureMap, FeatureMaps

LIMITS = {torch.bfloat16: (0.05, 0.005), torch.float16: (0.006, 0.001)}
"""Largest error of `log φ_k`, and relative error of z and S."""
HEADS, DIM, WIDTH, FEATURES = 2, 32, 64, 32


def drawn(length: int = 2500) -> torch.Tensor:
    """Keys `[2, HEADS, length, d]` as far from zero as models' are, of very different spread in every channel."""
    torch.manual_seed(0)
    return torch.randn(2, HEADS, length, DIM) * torch.logspace(-1, 0.7, DIM) + 6 * torch.randn(1, HEADS, 1, DIM)


def layer(keys: torch.Tensor, *, centred: bool) -> PhiLayer:
    """Maps of a trained one's reach: stems fitted to the keys."""
    sample, made = keys[0], []
    for heads, features, seen in ((2 * HEADS, FEATURES, None), (HEADS, FEATURES // (1 + centred), sample),
                                  (HEADS, FEATURES // 2, sample - sample.mean(1, keepdim=True))):
        one = FeatureMap(heads, DIM, features, WIDTH, blocks=seen is None)
        if seen is not None:
            one.whiten(seen)
        weights = one.weights()
        made.append(weights._replace(b_out=torch.randn(heads, features)))
    maps = FeatureMaps(*made) if centred else FeatureMaps(*made[:2])
    return PhiLayer(maps.map(torch.Tensor.detach), torch.zeros(1, 2 * HEADS), capped=True)


@pytest.mark.parametrize("dtype", list(LIMITS), ids=str)
@pytest.mark.parametrize("centred", [False, True])
def test_log_features_of_half_precision_are_close(centred: bool, dtype: torch.dtype) -> None:
    keys = drawn().to(dtype)
    trained, centre = layer(keys.float(), centred=centred), keys.float().mean(2)
    truth = log_phi_key(keys.float(), trained.maps.key)
    if trained.maps.centred is not None:
        truth = torch.cat([truth, log_phi_key(keys - centre[:, :, None], trained.maps.centred)], dim=-1)
    torch.testing.assert_close(trained.maps.log_phi_k(keys, centre), truth, rtol=1e-4, atol=1e-4)
    found = log_features(keys, for_request(trained.of_keys(dtype), centre)) / LOG2_E
    assert found.dtype == torch.float32
    error = (found - truth).abs()
    print(f"{dtype} log φ: largest {float(error.max()):.4f}, mean {float(error.mean()):.5f}, "
          f"span {float(truth.min()):.1f} to {float(truth.max()):.1f}")
    assert float(error.max()) < LIMITS[dtype][0]


@pytest.mark.parametrize("dtype", list(LIMITS), ids=str)
@pytest.mark.parametrize("centred", [False, True])
def test_sums_of_half_precision_are_close(centred: bool, dtype: torch.dtype, monkeypatch) -> None:
    keys = drawn(4700).to(dtype)  # more than a block of `core.moments`
    view, _, _ = make_view(batch=2, heads_kv=HEADS, length=keys.shape[2], dim=DIM, pads=(0, 31))
    view = replace(view, keys=keys, values=view.values.to(dtype))
    trained = layer(keys.float(), centred=centred)
    whole, half = PhiEstimator(trained), PhiEstimator(trained)
    exact = replace(view, keys=keys.float(), values=view.values.float())
    whole.build(exact)
    monkeypatch.setattr(estimators, "product_dtype", lambda x: x.dtype)
    half.build(view)
    assert half.key_map is not None and half.key_map.w_in.dtype == dtype
    mine, right = half.state, whole.state
    scale = torch.exp2(mine.m - right.m)
    for name, a, b in (("z", mine.z * scale, right.z), ("S", mine.s * scale[..., None], right.s)):
        error = float((a - b).norm() / b.norm())
        print(f"{dtype} {name}: {error:.5f}")
        assert error < LIMITS[dtype][1]
    # what was summed is what is made of the keys anew: taking all of it out again leaves nothing
    made = key_features(view.keys, half._maps())
    assert made.dtype == dtype
    counted, values = view.regions.mid_mask(0, made.shape[2]), view.values.double()
    kept = made.double().masked_fill(~counted[:, None, :, None], 0.0)
    for whole_sum, parts in ((mine.z, kept.sum(2)), (mine.s, kept.mT @ values)):
        assert float((whole_sum.double() - parts).norm() / parts.norm()) < 1e-5
    spread = (half.covariance - whole.covariance).norm() / whole.covariance.norm()
    assert float(spread) < 1e-3
    assert products(made, view.values).dtype == torch.float32


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU"))])
def test_trained_maps_stay_where_they_are(device: str) -> None:
    """Only what is run comes to the device, in the precision of the cache, once for all forks and before a step."""
    keys = drawn(700).to(device, torch.float16)
    trained = layer(keys.float().cpu(), centred=True)
    estimators_of = [PhiEstimator(one) for one in (trained.run_on(device), trained.to(device))]
    nowhere = torch.zeros(2, dtype=torch.long, device=device)
    for estimator in estimators_of:
        estimator.build(LayerView(keys, keys, regions=Regions(nowhere, nowhere + 650, 700, 3), scale=DIM**-0.5,
                                  num_query_heads=2 * HEADS))
    elsewhere, there = estimators_of
    assert all(w.device.type == "cpu" and w.dtype == torch.float32 for w in elsewhere.layer.query_map)
    made = [(*x.weights, *x.state[:3]) for x in (elsewhere, there) if x.weights is not None]
    for mine, theirs in zip(*made, strict=True):
        assert mine.device == theirs.device == keys.device and torch.equal(mine, theirs)
    assert elsewhere.weights is not None and all(w.dtype == torch.float16 for w in elsewhere.weights)
    assert elsewhere.fork()._query_maps(torch.float16)[0] is elsewhere.weights[0]
