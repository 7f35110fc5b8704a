"""Every estimator against the formula written out key by key."""

import math

import pytest
import torch

from sparsekv.core import offline
from sparsekv.models import estimators

F64 = torch.float64
HEADS, GROUP, QUERIES, LENGTH, DIM, BUCKETS, SCALE = 2, 2, 3, 40, 6, 5, 0.4


@pytest.fixture
def drawn():
    torch.manual_seed(0)
    queries = torch.randn(HEADS * GROUP, QUERIES, DIM, dtype=F64) * 2
    keys, values = torch.randn(2, HEADS, LENGTH, DIM, dtype=F64)
    positions = torch.tensor([[LENGTH - 1, 30, 22]])
    scene = offline.make_scene(queries, keys, values, positions, scale=SCALE, sink_size=2, window_size=3)
    bucket = torch.randint(BUCKETS, (HEADS, LENGTH))
    return scene, queries, keys, values, bucket


def unread_keys(scene, read, head: int, query: int) -> list[int]:
    mid = scene.mid[head % scene.mid.shape[0], query]
    return [i for i in range(LENGTH) if mid[i] and not (read is not None and read[head, query, i])]


@pytest.mark.parametrize("rank", [0, 2, DIM])
@pytest.mark.parametrize("fraction", [None, 0.2])
def test_bucket_means_are_counts_mean_keys_and_mean_values(drawn, rank: int, fraction: float | None) -> None:
    scene, queries, keys, values, bucket = drawn
    read = None if fraction is None else offline.top_k(scene, fraction)
    basis = estimators.principal_directions(keys, bucket, BUCKETS, rank)
    along = basis.repeat_interleave(GROUP, 0)
    projected = (queries @ along * SCALE, keys @ basis) if rank else None
    weights = estimators.bucket_means(scene, bucket, BUCKETS, read, projected=projected)
    out = offline.output(scene, read, weights)
    for head in range(HEADS * GROUP):
        kv = head // GROUP
        for t in range(QUERIES):
            exact = scene.anchors[0, t] if read is None else scene.anchors[0, t] | read[head, t]
            w = torch.where(exact, scene.scores[head, t].exp(), 0.0)
            mass, numerator = w.sum(), w @ values[kv]
            left = unread_keys(scene, read, head, t)
            for c in range(BUCKETS):
                members = [i for i in left if bucket[kv, i] == c]
                if members:
                    logit = queries[head, t] @ keys[kv, members].mean(0) * SCALE
                    for j in range(rank):
                        u = basis[kv, :, j]
                        logit = logit + 0.5 * (SCALE * queries[head, t] @ u)**2 * (keys[kv, members] @ u).var(
                            unbiased=False)
                    z = len(members) * logit.exp()
                    mass, numerator = mass + z, numerator + z * values[kv, members].mean(0)
            torch.testing.assert_close(out[head, t], numerator / mass)


def test_principal_directions_hold_the_largest_spread(drawn) -> None:
    _, _, keys, _, bucket = drawn
    basis = estimators.principal_directions(keys, bucket, BUCKETS, 2)
    torch.testing.assert_close(basis.mT @ basis, torch.eye(2, dtype=F64).expand(HEADS, 2, 2))
    for h in range(HEADS):
        centred = torch.cat([keys[h, bucket[h] == c] - keys[h, bucket[h] == c].mean(0) for c in range(BUCKETS)])
        largest = torch.linalg.svdvals(centred)[:2].square().sum()
        torch.testing.assert_close((centred @ basis[h]).square().sum(), largest)


@pytest.mark.parametrize("importance", [False, True])
def test_sampling_is_unbiased_and_counts_what_was_drawn(drawn, importance: bool) -> None:
    scene, *_ = drawn
    read = offline.top_k(scene, 0.1)
    proposal = estimators.mixture(scene, scene.scores * 0.5) if importance else None
    generator = torch.Generator().manual_seed(1)
    unread = scene.mid & ~read
    truth = torch.where(unread, scene.scores.exp(), 0.0)
    total, rounds = torch.zeros_like(truth), 400
    for _ in range(rounds):
        weights = estimators.sampled(scene, 30, read, proposal=proposal, generator=generator)
        assert not torch.isfinite(weights[~unread.expand_as(weights)]).any()
        total += weights.exp()
    torch.testing.assert_close(total.sum(-1) / rounds, truth.sum(-1), rtol=0.05, atol=0.0)
    # one draw: each key weighs w / (count p) for every time it came, and the times add up to the count
    p = torch.ones_like(truth) if proposal is None else proposal.exp()
    p = torch.where(unread, p, 0.0)
    times = torch.where(unread, weights.exp() * 30 * (p / p.sum(-1, keepdim=True)) / scene.scores.exp(), 0.0)
    torch.testing.assert_close(times, times.round(), rtol=0, atol=1e-9)
    torch.testing.assert_close(times.sum(-1), torch.full_like(times[..., 0], 30.0))


def test_a_query_with_nothing_unread_gets_no_sample(drawn) -> None:
    scene, *_ = drawn
    weights = estimators.sampled(scene, 4, scene.mid.expand_as(scene.scores))
    assert torch.isneginf(weights).all()


def test_positive_random_features_estimate_the_kernel(drawn) -> None:
    scene, queries, keys, _, _ = drawn
    directions = estimators.orthogonal_directions(9, DIM, torch.Generator().manual_seed(2)).double()
    assert directions.shape == (9, DIM)
    torch.testing.assert_close(directions[0] @ directions[1], torch.zeros((), dtype=F64), atol=1e-5, rtol=0)
    log_q, log_k = estimators.favor(queries, keys, directions, scale=SCALE)
    logits = estimators.feature_logits(scene, log_q, log_k)
    head, t, i = 3, 1, 17
    centre = keys[1].mean(0)
    b = ((keys[1] - centre).square().mean() / queries[2:].square().mean()) ** 0.25
    x, y = queries[head, t] * b * SCALE**0.5, (keys[1, i] - centre) / b * SCALE**0.5
    features = [math.exp(w @ x - x @ x / 2) * math.exp(w @ y - y @ y / 2) / 9 for w in directions]
    want = queries[head, t] @ centre * SCALE + math.log(sum(features))
    torch.testing.assert_close(logits[head, t, i], want)
    many = estimators.orthogonal_directions(60_000, DIM, torch.Generator().manual_seed(3)).double()
    logits = estimators.feature_logits(scene, *estimators.favor(queries * 0.2, keys * 0.3, many, scale=SCALE))
    torch.testing.assert_close(logits, offline.grouped(queries * 0.2, keys * 0.3) * SCALE, rtol=0, atol=0.05)


def test_identity_softmax_features(drawn) -> None:
    scene, queries, keys, _, _ = drawn
    logits = estimators.feature_logits(scene, *estimators.identity_softmax(queries, keys))
    q, k = ([*torch.softmax(x, 0), *torch.softmax(-x, 0)] for x in (queries[2, 0], keys[1, 7]))
    torch.testing.assert_close(logits[2, 0, 7], math.log(sum(a * b for a, b in zip(q, k, strict=True))) * torch.ones(
        (), dtype=F64))


def test_mass_shift_makes_the_mass_right_on_average(drawn) -> None:
    scene, *_ = drawn
    wrong = scene.scores + torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=F64)[:, None, None]
    torch.testing.assert_close(estimators.mass_shift(scene, wrong), torch.tensor([-0.5, 1.0, -2.0, 0.0], dtype=F64))


def test_equal_bytes() -> None:
    assert estimators.phi_tokens(64, 64) == pytest.approx(33.0)  # the completion paper's example: 439 = 492 - 20 - 33
    assert estimators.equal_buckets(33.0, 64) == 32
    assert estimators.equal_buckets(33.0, 64, 16) == 29
