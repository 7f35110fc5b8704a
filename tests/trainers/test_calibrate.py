"""Errors of many shifts at once against the steps one by one; gates that never raise a mean; the card's figures."""

from dataclasses import replace

import torch

from sparsekv.artifacts.phi import PhiLayer
from sparsekv.core.buckets import fit_buckets
from sparsekv.core.estimators import PhiEstimator
from sparsekv.core.index import RouterLayer
from sparsekv.core.offline import Window, mid_share, relative_error, requests
from sparsekv.core.step import sparse_step, two_parts
from sparsekv.models.feature_map import CentredMap, FeatureMap, FeatureMaps
from sparsekv.trainers.calibrate import CASES, choose_gates, reader, shifted_errors
from sparsekv.trainers.pool import Pool
from sparsekv.trainers.router import quality

HEADS_Q, HEADS_KV, DIM = 4, 2, 8


def pool(length: int = 200, documents: int = 1) -> Pool:
    torch.manual_seed(0)
    keys, values = torch.randn(2, documents, HEADS_KV, length, DIM)
    positions = torch.arange(10, length, 10).expand(documents, -1)
    queries = 2 * torch.randn(documents, HEADS_Q, positions.shape[1], DIM)
    return Pool(keys, values, queries, positions, torch.zeros_like(queries[..., 0]), scale=0.4, group=2, sink_size=2,
                window_size=6)


def test_requests_end_past_sink_and_window() -> None:
    window = replace(pool().window(0), window_size=120)
    made = list(requests(window, 4, span=40))
    assert len(made) == 4 and all(int(r.prefill.regions.mid_sizes) > 0 for r in made)
    assert len(list(requests(replace(window, window_size=500), 4))) == 1


def test_errors_of_shifts_are_those_of_the_steps() -> None:
    window: Window = pool().window(0)
    key = CentredMap(HEADS_KV, DIM, 6, 8)
    maps = FeatureMaps(FeatureMap(HEADS_Q, DIM, 6, 8).weights(), key.plain.weights(), key.centred.weights()).map(
        torch.Tensor.detach)
    shifts = torch.tensor([-2.0, 0.0, 0.5])
    for share in (None, 0.1):
        for request in requests(window, 2, span=40):
            def build(shift: float) -> PhiEstimator:
                estimator = PhiEstimator(PhiLayer(maps, torch.full((1, HEADS_Q), shift), capped=True))
                estimator.build(request.prefill)  # noqa: B023
                estimator.set_read_share(request.prefill, share or 0.0)  # noqa: B023
                return estimator

            selector, _ = request.build(reader(share), None)
            parts = two_parts(request.view, request.queries, selector, build(0.0))
            found = shifted_errors(parts, request.full, shifts).mean(1)
            for shift, row in zip(shifts.tolist(), found, strict=True):
                step = sparse_step(request.view, request.queries, selector, build(shift))
                error = relative_error(step.out[0].transpose(0, 1), request.full).mean(0)
                torch.testing.assert_close(row, error, rtol=1e-3, atol=1e-5)


def test_gates_never_raise_the_mean_of_a_case() -> None:
    generator = torch.Generator().manual_seed(0)
    none = {case: torch.rand(3, 5, generator=generator) for case in CASES}
    factor = {case: 0.4 + torch.rand(3, 5, generator=generator) for case in CASES}
    factor["topk@0.1"] = factor["topk@0.1"] + 0.3  # completion hurts most heads here
    tables = {f"{case} error": none[case] for case in CASES}
    tables |= {f"{case} + phi error": none[case] * factor[case] for case in CASES}
    helped = torch.stack(list(factor.values())).mean(0) < 1
    assert float((none["topk@0.1"] * (factor["topk@0.1"] - 1) * helped).mean()) > 0  # not enough to look at averages
    gate = choose_gates(tables)
    assert gate.shape == (3, 5) and 0 < int(gate.sum()) < 15
    for case in CASES:
        gated = torch.where(gate > 0, tables[f"{case} + phi error"], none[case])
        assert float(gated.mean()) <= float(none[case].mean())
    good = {name: t * (0.5 if "phi" in name else 1.0) for name, t in
            {f"{case}{w} error": none[case] for case in CASES for w in ("", " + phi")}.items()}
    assert bool((choose_gates(good) == 1).all())


def test_the_router_card_is_of_the_keys_read() -> None:
    """Key by key: buckets in the order of their density, the last one in part, shared by a group."""
    given, buckets, budget = pool(), 5, 0.05
    centroids = torch.nn.functional.normalize(torch.randn(HEADS_KV, buckets, DIM), dim=-1)
    card = quality(given, RouterLayer(centroids, None, "rot", "mean_key"))
    expected = []
    for request in requests(given.window(0), 8):
        share = mid_share(request)
        last = int(request.view.regions.mid_last[0])
        regions = request.prefill.regions
        used = regions.mid_mask(0, int(regions.mid_last[0])).expand(HEADS_KV, -1)
        fitted, _ = fit_buckets(given.keys[0, :, :used.shape[1]], centroids, used)  # as the request's prefill ends
        bucket = (given.keys[0] @ fitted.mT).argmax(-1)
        left = -(-int(regions.context[0]) * 5 // 100)
        for t in range(share.shape[0]):
            found = torch.zeros(HEADS_Q)
            for kv in range(HEADS_KV):
                members = [[i for i in range(2, last) if bucket[kv, i] == c] for c in range(buckets)]
                q = 0.4 * request.queries.rot[0, 2 * kv:2 * kv + 2, t]
                own = [given.keys[0, kv, m] for m in members]
                logits = torch.stack([q @ k.mean(0) + q.square().sum(-1) * (k - k.mean(0)).square().mean() / 2
                                      + torch.tensor(float(len(k))).log() for k in own])
                density = logits.softmax(0).sum(1) / torch.tensor([len(m) for m in members])
                order = [i for c in density.argsort(descending=True).tolist() for i in members[c]][:left]
                found[2 * kv:2 * kv + 2] = share[t, 2 * kv:2 * kv + 2][:, order].sum(-1)
            expected.append((found, 1 / share.shape[0]))
    total = sum(w for _, w in expected)
    want = sum(f * w for f, w in expected) / total
    torch.testing.assert_close(card[f"quality.mass_share@{budget}"], want, rtol=1e-4, atol=1e-5)
    oracle = card[f"quality.oracle_mass_share@{budget}"]
    assert float(oracle.mean()) >= float(want.mean())
