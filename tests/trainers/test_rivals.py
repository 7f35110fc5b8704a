"""The rivals of a feature map that benchmarks measure, against their formulas written out key by key."""

import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks._rivals import RANK, IdentitySoftmax, Moments, RandomFeatures, Sampling, orthogonal_directions
from sparsekv.core.layer import Selection
from sparsekv.core.offline import Request, Window, mid_scores, requests

HEADS, GROUP, LENGTH, DIM, SCALE = 2, 2, 60, 20, 0.4


@pytest.fixture
def request_() -> Request:
    torch.manual_seed(0)
    keys, values = torch.randn(2, HEADS, LENGTH, DIM)
    window = Window(keys, values, torch.randn(HEADS * GROUP, 3, DIM), torch.tensor([50, 53, 59]), SCALE, 2, 3)
    return next(requests(window, 1, first=0.0))


def some_read(request: Request) -> tuple[Selection, list[list[int]]]:
    """Two mid tokens a query and KV head, and by query head and query what is left."""
    tokens = torch.stack([torch.randperm(44)[:2 * HEADS].reshape(HEADS, 2) + 3 for _ in range(3)])
    last = int(request.view.regions.mid_last[0])
    left = [[i for i in range(2, last) if i not in tokens[t, h // GROUP].tolist()]
            for h in range(HEADS * GROUP) for t in range(3)]
    return Selection(tokens=tokens), left


def test_moments_are_bucket_means_and_half_their_variance(request_) -> None:
    estimator = Moments(12.0)
    estimator.build(request_.view)
    selection, left = some_read(request_)
    out, lse = estimator.partial(request_.view, request_.queries, selection)
    bucket, scores = estimator.member.argmax(-1), mid_scores(request_)
    for h in range(HEADS * GROUP):
        kv, q = h // GROUP, request_.queries.rot[0, h]
        for t in range(3):
            mass, numerator = torch.zeros(()), torch.zeros(DIM)
            for c in range(estimator.member.shape[2]):
                members = [i for i in left[h * 3 + t] if bucket[kv, i - 2] == c]
                if members:
                    along = request_.view.keys[0, kv, members] @ estimator.basis[kv]
                    spread = (SCALE * q[t] @ estimator.basis[kv]).square() @ along.var(0, unbiased=False)
                    z = len(members) * (scores[t, h, members].mean() + 0.5 * spread).exp()
                    mass, numerator = mass + z, numerator + z * request_.view.values[0, kv, members].mean(0)
            torch.testing.assert_close(lse[t, h], mass.log(), rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(out[t, h], numerator / mass, rtol=1e-3, atol=1e-4)
    assert estimator.basis.shape == (HEADS, DIM, RANK)


@pytest.mark.parametrize("importance", [False, True])
def test_sampling_is_unbiased(request_, importance: bool) -> None:
    estimator = Sampling(40.0, importance=importance)
    estimator.build(request_.view)
    selection, left = some_read(request_)
    scores = mid_scores(request_)
    truth = torch.stack([scores[t, h, left[h * 3 + t]].logsumexp(0) for t in range(3) for h in range(HEADS * GROUP)])
    found = torch.stack([estimator.partial(request_.view, request_.queries, selection)[1].exp() for _ in range(1000)])
    torch.testing.assert_close(found.mean(0).flatten(), truth.exp(), rtol=0.1, atol=0.0)


def test_random_features_estimate_the_kernel() -> None:
    torch.manual_seed(1)
    queries, keys = torch.randn(2, 5, 6) * 0.4, torch.randn(2, 30, 6) * 0.5 + 1.0
    many = RandomFeatures(1.0, orthogonal_directions(60_000, 6))
    log_q, log_k = many.features(queries, keys, SCALE)
    found = (log_q[:, :, None] + log_k[:, None]).logsumexp(-1)
    torch.testing.assert_close(found, queries @ keys.mT * SCALE, rtol=0, atol=0.05)
    directions = orthogonal_directions(9, 6)
    torch.testing.assert_close(directions[0] @ directions[1], torch.zeros(()), atol=1e-5, rtol=0)


def test_identity_softmax_features(request_) -> None:
    estimator = IdentitySoftmax(1.0, torch.tensor([0.0, 1.0, 0.0, 0.0]))
    estimator.build(request_.view)
    none = Selection(tokens=torch.empty(3, HEADS, 0, dtype=torch.long))
    lse = estimator.partial(request_.view, request_.queries, none)[1]
    q, last = request_.queries.rot[0, 1, 2], int(request_.view.regions.mid_last[0])
    q = [*torch.softmax(q, 0), *torch.softmax(-q, 0)]
    mass = sum(sum(a * b for a, b in zip(q, [*torch.softmax(k, 0), *torch.softmax(-k, 0)], strict=True))
               for k in request_.view.keys[0, 0, 2:last])
    assert float(lse[2, 1]) == pytest.approx(math.log(mass) + 1.0, rel=1e-4)
