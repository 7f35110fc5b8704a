"""The trained networks against what they stand for."""

import torch

from sparsekv.kernels.routing import router_logits
from sparsekv.models.feature_map import FeatureMap, log_kernel
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
