"""The trained networks against what they stand for."""

import pytest
import torch

from sparsekv.kernels import for_request
from sparsekv.kernels.features import LOG2_E, log_features
from sparsekv.kernels.routing import router_logits
from sparsekv.models.feature_map import CentredMap, FeatureMap, FeatureMaps, log_kernel
from sparsekv.models.router import BucketRouter


def test_folding_batch_norm_changes_nothing() -> None:
    torch.manual_seed(0)
    router = BucketRouter(3, 8, 10, 24)
    assert router.fold().w1.shape == (3, 8, 24)
    x = torch.randn(3, 50, 8) * 4 + 1
    for _ in range(20):
        router(x)
    router.eval()
    logits = router_logits(x.transpose(0, 1), router.fold()).transpose(0, 1)
    torch.testing.assert_close(logits, router(x), rtol=1e-4, atol=1e-4)


def test_log_kernel_is_the_log_of_the_inner_product() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 5, 6, dtype=torch.float64) * 10, torch.randn(2, 7, 6, dtype=torch.float64) * 10
    torch.testing.assert_close(log_kernel(q, k), torch.logsumexp(q[:, :, None] + k[:, None], -1))
    closed = log_kernel(torch.full_like(q, float("-inf")), k)
    assert torch.isneginf(closed).all()


def test_whitening_does_not_change_with_the_data_scale() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 400, 8)
    one, other = (FeatureMap(2, 8, 4, 16) for _ in range(2))
    other.load_state_dict(one.state_dict())
    one.whiten(x)
    other.whiten(x * 37 + 5)
    torch.testing.assert_close(one(x), other(x * 37 + 5), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("blocks", "of_keys"), [(0, True), (1, True), (0, False), (1, False), (3, False)])
def test_a_map_has_as_many_blocks_as_its_weights(blocks: int, of_keys: bool) -> None:
    """Against the layers written out, head by head; those of keys without a block are of ReLUs."""
    torch.manual_seed(0)
    made = FeatureMap(2, 6, 5, 7, blocks, of_keys=of_keys).double()
    for p in made.parameters():
        torch.nn.init.normal_(p)
    x, weights = torch.randn(2, 9, 6, dtype=torch.float64), made.weights()
    assert weights.w_a.shape == weights.w_b.shape == (2, 7 * blocks, 7) and weights.alpha.shape == (2, blocks)

    def gelu(y):
        return torch.nn.functional.gelu(y, approximate="tanh")

    for head in range(2):
        h = (torch.relu if of_keys and not blocks else gelu)(x[head] @ made.w_in[head] + made.b_in[head])
        for n in range(blocks):
            inner = gelu(h @ made.w_a[head, n] + made.b_a[head, 7 * n:7 * n + 7])
            h = h + made.alpha[head, n] * inner @ made.w_b[head, n]
        torch.testing.assert_close(made(x)[head], h @ made.w_out[head] + made.b_out[head])


@pytest.mark.parametrize("shared", [False, True])
def test_keys_have_the_features_that_were_trained(shared: bool) -> None:
    """The map of keys as it is run, and the maps from their names, against the module."""
    torch.manual_seed(0)
    keys, centre = torch.randn(2, 40, 6) + 3, torch.randn(2, 1, 6)
    query, key = FeatureMap(4, 6, 9, 12, 2), CentredMap(2, 6, 9, 7, shared=shared)
    for p in key.parameters():
        torch.nn.init.normal_(p)
    maps = FeatureMaps(query.weights(), key.plain.weights(), key.centred.weights()).map(torch.Tensor.detach)
    maps = FeatureMaps.from_named(maps.named())
    found = key(keys, centre).detach()
    assert found.shape == (2, 40, 9) and maps.shared == shared
    torch.testing.assert_close(maps.log_phi_k(keys, centre[:, 0]), found, rtol=1e-4, atol=1e-4)
    one = maps.heads(slice(2, 4), slice(1, 2))
    run = for_request(one.of_keys(torch.float32), centre[None, 1:, 0])
    torch.testing.assert_close(log_features(keys[None, 1:], run)[0], LOG2_E * found[1:], rtol=1e-4, atol=1e-4)
