"""Every selector against a slow literal transcription of its paper's formulas, on random tensors."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from views import built, extended, full_attention, make_view

from sparsekv.core.baselines.faiss import _resources, gpu_resources
from sparsekv.core.baselines.lfps import GAMMA
from sparsekv.core.baselines.magicpig import sampling_probability
from sparsekv.core.buckets import ALONE, RESTARTS, moved, restart_empty
from sparsekv.core.regions import Regions, tokens_of_budget
from sparsekv.core.selectors import SELECTORS
from sparsekv.core.step import sparse_step
from sparsekv.kernels import QueryModel
from sparsekv.util.errors import SparseKVError

CASES = [{}, {"batch": 3, "pads": (0, 5, 60)}, {"new": 3}]


def mid(view, b: int) -> list[int]:
    return list(range(int(view.regions.mid_first[b]), int(view.regions.mid_last[b])))


def scores(view, queries, b: int, h: int, t: int) -> dict[int, float]:
    """`q·k·scale` of every mid token for one query head."""
    q = queries.rot[b, h, t]
    return {i: float(q @ view.keys[b, h // view.group, i] * view.scale) for i in mid(view, b)}


def softmax(values: dict[int, float]) -> dict[int, float]:
    top = max(values.values(), default=0.0)
    total = sum(math.exp(v - top) for v in values.values())
    return {i: math.exp(v - top) / total for i, v in values.items()}


def best(values: dict[int, float], k: int) -> set[int]:
    return set(sorted(values, key=lambda i: -values[i])[:k])


def chosen(selection, row: int, head: int) -> set[int]:
    found = [int(i) for i in selection.as_tokens()[row, head] if i >= 0]
    assert len(found) == len(set(found)), "a token twice"
    return set(found)


def run(name: str, case: dict, **options):
    before, queries, step = make_view(**case)
    selector = built(SELECTORS[name](**options), before)
    return selector, step, queries, selector.select(step, queries)


def each(view, queries):
    return [(b * queries.count + t, b, t) for b in range(view.keys.shape[0]) for t in range(queries.count)]


def group_of(view, h: int) -> range:
    return range(h * view.group, (h + 1) * view.group)


def added(parts: list[dict[int, float]]) -> dict[int, float]:
    return {i: sum(p[i] for p in parts) for i in parts[0]}


@pytest.mark.parametrize("case", CASES)
def test_streaming(case):
    _, step, queries, nothing = run("streaming", case)
    assert all(not chosen(nothing, row, 0) for row, _, _ in each(step, queries))


@pytest.mark.parametrize("case", CASES)
def test_random_draws_without_replacement_inside_the_mid_region(case):
    selector, step, queries, first = run("random", case, token_budget=12)
    second = selector.select(step, queries)
    for row, b, _ in each(step, queries):
        drawn = chosen(first, row, 0)
        assert len(drawn) == min(12, len(mid(step, b))) and drawn <= set(mid(step, b))
    assert not torch.equal(first.as_tokens(), second.as_tokens())


@pytest.mark.parametrize("case", CASES)
def test_topk(case):
    _, step, queries, shared = run("topk", case, token_budget=9)
    _, _, _, own = run("topk", case, token_budget=9, per_query_head=True)
    for row, b, t in each(step, queries):
        for h in range(step.num_query_heads):
            assert chosen(own, row, h) == best(scores(step, queries, b, h, t), 9)
        for h in range(step.num_kv_heads):
            parts = [scores(step, queries, b, g, t) for g in group_of(step, h)]
            assert chosen(shared, row, h) == best(added([softmax(p) for p in parts]), 9)


@pytest.mark.parametrize(("name", "options", "message"), [
    ("topk", {}, "topk needs a token budget"), ("topk", {"token_budget": 3, "accounting": "none"}, "accounting 'none'"),
    ("token_select", {"token_budget": 3, "vote": "loud"}, "vote 'loud'"), ("router", {}, "needs a trained router")])
def test_options_are_checked_wherever_a_selector_is_built(name, options, message):
    before, _, _ = make_view()
    with pytest.raises(SparseKVError, match=message):
        built(SELECTORS[name](**options), before)


@pytest.mark.parametrize("case", CASES)
def test_faiss_flat_is_exact(case):
    _, step, queries, own = run("faiss", case, token_budget=8, per_query_head=True)
    _, _, _, shared = run("faiss", case, token_budget=8)
    for row, b, t in each(step, queries):
        for h in range(step.num_query_heads):
            assert chosen(own, row, h) == best(scores(step, queries, b, h, t), 8)
        for h in range(step.num_kv_heads):
            union: dict[int, float] = {}
            for g in group_of(step, h):
                part = scores(step, queries, b, g, t)
                for i in best(part, 8):
                    union[i] = max(union.get(i, -math.inf), part[i])
            assert chosen(shared, row, h) == best(union, 8)


@pytest.mark.parametrize("factory", ["ivf", "hnsw", "IVF4,Flat", "HNSW8"])
def test_faiss_approximate_indexes_grow(factory):
    before, queries, step = make_view(length=300, new=40)
    selector = built(SELECTORS["faiss"](token_budget=20, factory=factory, nprobe=4, per_query_head=True), before)
    fork = extended(selector.fork(), step, 325)
    assert selector.indexes[0][0].ntotal == 287 and fork.indexes[0][0].ntotal == 322
    found = fork.select(step, queries)
    recalls = [len(chosen(found, t, h) & best(scores(step, queries, 0, h, t), 20)) / 20
               for t in range(40) for h in range(4)]
    assert max(chosen(found, 0, 0)) < 325 and 0.3 < sum(recalls) / len(recalls) <= 1
    with pytest.raises(SparseKVError, match="Faiss refused"):
        run("faiss", {}, token_budget=3, factory="NoSuchIndex")


def test_faiss_stays_in_cpu_memory_where_a_gpu_index_cannot_serve(monkeypatch):
    """Keys in CPU memory, a package without GPU support, lists longer than a GPU index gives."""
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    assert gpu_resources(cpu, 20) is None
    monkeypatch.setitem(sys.modules, "faiss", SimpleNamespace(contrib=None))
    monkeypatch.setitem(sys.modules, "faiss.contrib", SimpleNamespace(torch_utils=None))
    monkeypatch.setitem(sys.modules, "faiss.contrib.torch_utils", SimpleNamespace())
    assert gpu_resources(cuda, 20) is None
    sys.modules["faiss"].StandardGpuResources = object
    assert gpu_resources(cuda, 2049) is None and gpu_resources(cuda, 2048) is gpu_resources(cuda, 20) is not None
    _resources.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("factory", ["flat", "ivf"])
def test_faiss_on_a_gpu_finds_what_it_finds_in_cpu_memory(factory):
    if not hasattr(pytest.importorskip("faiss"), "StandardGpuResources"):
        pytest.skip("faiss without GPU support")
    found = []
    for device in ("cuda", "cpu"):
        before, queries, step = make_view(length=6000, new=8)
        regions = Regions.at_prefill_end(torch.zeros(1, dtype=torch.long, device=device), 6000, 3, 10)
        before, step = (replace(view, keys=view.keys.to(device), values=view.values.to(device),
                                regions=regions.grown(view.length)) for view in (before, step))
        selector = built(SELECTORS["faiss"](token_budget=60, factory=factory, nprobe=10_000), before)
        assert (selector.indexes[0][0].resources is not None) == (device == "cuda")
        grown = extended(selector.fork(), step, 6004)
        asked = replace(queries, rot=queries.rot.to(device), lengths=queries.lengths.to(device))
        found.append(grown.select(step, asked).as_tokens().cpu().sort().values)
    assert torch.equal(*found)


@pytest.mark.parametrize("factory, least", [("ivf", 0.7), ("hnsw", 0.97)])
def test_faiss_searches_as_far_as_the_budget_asks(factory, least):
    before, queries, step = make_view(length=6000, new=8)
    selector = built(SELECTORS["faiss"](token_budget=60, factory=factory, per_query_head=True), before)
    every = selector.cost_bytes(before)
    found = selector.select(step, queries)
    assert (found.as_tokens() >= 0).all() and 0 < selector.cost_bytes(before) < every
    recalls = [len(chosen(found, t, h) & best(scores(step, queries, 0, h, t), 60)) / 60
               for t in range(8) for h in range(4)]
    assert sum(recalls) / len(recalls) > least
    index, q = selector.indexes[0][0], queries.rot[0, 0]
    products, ids = index.search(q, 5)
    keys = before.keys[0, 0, selector.first[0]:]
    torch.testing.assert_close(products, (q @ keys.mT).gather(1, ids), rtol=1e-3, atol=1e-3)


class Trained:
    """A router of random weights in the shape of an artifact."""

    def __init__(self, scores: str, space: str, heads: int = 2, models: int = 2, buckets: int = 6, dim: int = 8):
        g = torch.Generator().manual_seed(3)
        self.centroids = torch.nn.functional.normalize(torch.randn(1, heads, buckets, dim, generator=g), dim=-1)
        self.weights = QueryModel(*(torch.randn(models, *s, generator=g) for s in (
            (dim, 5), (5,), (5, buckets), (buckets,))))
        self.scores, self.key_space = scores, space

    def layer(self, _):
        return type("Layer", (), {"centroids": self.centroids[0], "weights": self.weights, "scores": self.scores,
                                  "key_space": self.key_space})()


def literal_router(trained, step, queries, b, h, t) -> tuple[dict[int, list[float]], dict[int, set[int]]]:
    """Every query head's probability of every bucket, and the buckets' tokens."""
    keys = step.keys_pre(0, step.length) if trained.key_space == "pre" else step.keys
    members: dict[int, set[int]] = {c: set() for c in range(6)}
    for i in mid(step, b):
        members[int((trained.centroids[0, h] @ keys[b, h, i]).argmax())].add(i)
    every = step.keys[b, h, mid(step, b)].mean(0)
    probabilities = {}
    for g in group_of(step, h):
        logits = torch.zeros(6)
        if trained.scores == "mlp":
            q = (queries.pre if trained.key_space == "pre" else queries.rot)[b, g, t]
            w = QueryModel(*(x[h] for x in trained.weights))
            logits = (q @ w.w1 + w.b1).relu() @ w.w2 + w.b2
        for c, tokens in members.items():
            if not tokens:
                logits[c] = -math.inf
            elif trained.scores == "mean_key":
                mean, q = step.keys[b, h, sorted(tokens)].mean(0), queries.rot[b, g, t] * step.scale
                apart = (step.keys[b, h, sorted(tokens)] - mean).square().mean()
                one = (mean - every).abs().max() / 127  # the step of its 8 bits
                whole = ((mean - every) / one).round() * one
                logits[c] = math.log(len(tokens)) + q @ whole + q.square().sum() * apart / 2
        probabilities[g] = logits.softmax(-1).tolist()
    return probabilities, members


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("space", ["pre", "rot"])
@pytest.mark.parametrize("how", ["mlp", "mean_key"])
def test_router(case, how, space):
    trained = Trained(how, space)
    fixed = {"layer": trained.layer(0), "adapt": False}
    _, step, queries, probed = run("router", case, probes=2, **fixed)
    _, _, _, budgeted = run("router", case, token_budget=20, **fixed)
    for row, b, t in each(step, queries):
        for h in range(step.num_kv_heads):
            p, members = literal_router(trained, step, queries, b, h, t)
            filled = [c for c in members if members[c]]
            joint = {c: sum(p[g][c] for g in p) for c in filled}
            assert chosen(probed, row, h) == set().union(*(members[c] for c in best(joint, 2)))
            listed: list[int] = []
            for c in sorted(filled, key=lambda c: -joint[c] / len(members[c])):
                listed += sorted(members[c])
            assert chosen(budgeted, row, h) == set(listed[:20])


@pytest.mark.parametrize("how", ["mlp", "mean_key"])
def test_router_grows_as_if_built_at_once(how):
    before, queries, step = make_view(batch=2, pads=(0, 30), new=40)
    selector = built(SELECTORS["router"](token_budget=15, layer=Trained(how, "pre").layer(0), adapt=False), before)
    once = selector.fork()
    extended(selector, step, 120)
    built(once, step)
    for grown, made in zip(selector.buckets, once.buckets, strict=True):
        if made is not None:
            torch.testing.assert_close(grown, made)
    assert int(selector.buckets.counts.sum(-1)[0, 0]) == len(mid(step, 0))
    assert len(chosen(selector.select(step, queries), 0, 0)) == 15


def test_router_restarts_the_buckets_a_request_leaves_empty():
    g = torch.Generator().manual_seed(5)
    trained = Trained("mean_key", "rot", buckets=24)
    trained.centroids[:, :, 6:] = -trained.centroids[:, :, :1]  # 18 times the same: one of them gets keys at most
    pads = (0, 30)
    before, _, step = make_view(batch=2, pads=pads, new=40)
    fixed, selector = (built(SELECTORS["router"](token_budget=15, layer=trained.layer(0), adapt=adapt), before)
                       for adapt in (False, True))
    assert int((fixed.buckets.counts > 0).sum(-1).max()) <= 7 and int((selector.buckets.counts > 0).sum(-1).min()) > 15
    for b in range(2):
        keys = before.keys[b][:, sorted(mid(before, b))]
        for h in range(keys.shape[0]):
            # the literal first round: means, distances, the i-th empty bucket at the i-th worst key
            nearest = (keys[h] @ trained.centroids[0, h].mT).argmax(-1).tolist()
            means = {c: keys[h][[i for i, x in enumerate(nearest) if x == c]].mean(0) for c in set(nearest)}
            apart = [float((k - means[c]).norm()) for k, c in zip(keys[h], nearest, strict=True)]
            worst = sorted(range(len(apart)), key=lambda i: -apart[i])
            want = trained.centroids[0, h].clone()
            for i, c in enumerate(c for c in range(24) if c not in means):
                want[c] = keys[h][worst[i]] / keys[h][worst[i]].norm()
            once, _ = restart_empty(keys[h][None], trained.centroids[0, h][None], 1)
            torch.testing.assert_close(once[0], want)
            # an iteration: every bucket moves to the direction of its keys' sum
            nearest = (keys[h] @ want.mT).argmax(-1)
            sums = torch.stack([keys[h][nearest == c].sum(0) for c in range(24)])
            left = sums.norm(dim=-1) > 0
            then = moved(keys[h][None], trained.centroids[0, h][None])[0]
            torch.testing.assert_close(then[left], torch.nn.functional.normalize(sums, dim=-1)[left])
        # every row is fitted alone: iterations, then restarts while a bucket is empty
        alone = trained.centroids[0]
        for _ in range(ALONE.iterations):
            alone = moved(keys, alone)
        alone, bucket = restart_empty(keys, alone, RESTARTS)
        torch.testing.assert_close(selector.buckets.centroids[b], alone)
        assert torch.equal(bucket_of(selector.buckets, b)[:, sorted(mid(before, b))], bucket)
    # what is decoded joins its own buckets, and none is lost
    extended(selector, step, 120)
    for b in range(2):
        tokens = sorted(mid(step, b))
        order = selector.buckets.order[b, 0]
        assert sorted(order[order >= 0].tolist()) == tokens
        torch.testing.assert_close(*_nearest(step.keys[b][:, tokens], selector.buckets.centroids[b],
                                             bucket_of(selector.buckets, b)[:, tokens]))
    keys = torch.randn(2, 5, 8, generator=g)
    full = torch.nn.functional.normalize(keys, dim=-1)
    torch.testing.assert_close(restart_empty(keys, full, 3)[0], full)  # no empty bucket: nothing changes
    assert [x.shape for x in restart_empty(keys[:, :0], full, 3)] == [full.shape, (2, 0)]
    more = torch.randn(2, 30, 8, generator=g)
    start = torch.nn.functional.normalize(torch.randn(2, 6, 8, generator=g), dim=-1)
    start = torch.cat([start, start[:, :1].expand(-1, 4, -1)], 1)
    seen = (torch.arange(30) < 20).expand(2, -1)
    part, bucket = restart_empty(more, start, 3, seen)
    torch.testing.assert_close(part, restart_empty(more[:, :20], start, 3)[0])
    torch.testing.assert_close(*_nearest(more, part, bucket))
    assert not torch.equal(part, restart_empty(more, start, 3)[0])
    none = torch.zeros(2, 30, dtype=torch.bool)
    torch.testing.assert_close(restart_empty(more, start, 3, none)[0], start)  # no key that counts
    many, _ = restart_empty(keys, torch.cat([full, -full, -full], 1), 3)  # more buckets than keys
    torch.testing.assert_close((keys @ many.mT).amax(-1), keys.norm(dim=-1))


def bucket_of(buckets, b: int) -> torch.Tensor:
    """The bucket of every token of a row that is in the index, `[Hkv, N]` int32."""
    order, offsets = buckets.order[b].long(), buckets.offsets[b]
    found = torch.full((order.shape[0], int(order.max()) + 1), -1, dtype=torch.int32)
    for h, row in enumerate(order):
        for c in range(offsets.shape[1] - 1):
            found[h, row[offsets[h, c]:offsets[h, c + 1]]] = c
    return found


def _nearest(keys, centroids, bucket):
    """Products of the keys with their buckets' centroids, and the largest there are (two may be the same)."""
    products = keys @ centroids.mT
    return products.gather(-1, bucket[..., None].long())[..., 0], products.amax(-1)


def test_buckets_that_a_query_model_scores_do_not_restart():
    trained = Trained("mlp", "rot")
    selector, _, _, _ = run("router", CASES[0], layer=trained.layer(0))
    torch.testing.assert_close(selector.buckets.centroids[0], trained.centroids[0])


@pytest.mark.parametrize("how", ["soft", "hard", "topk"])
@pytest.mark.parametrize("case", CASES)
def test_token_select_votes(case, how):
    _, step, queries, got = run("token_select", case, token_budget=7, vote=how, theta=2.0, scaled=True)
    _, _, _, printed = run("token_select", case, token_budget=7, vote=how, theta=2.0)
    # the mean query of a chunk selects for all of it
    mean = replace(queries, rot=queries.rot.mean(2, keepdim=True))
    for row, b, _ in each(step, queries):
        heads = [scores(step, mean, b, h, 0) for h in range(step.num_query_heads)]
        if how == "soft":
            total = added([softmax(s) for s in heads])
            unscaled = added([softmax({i: x / step.scale for i, x in s.items()}) for s in heads])
            assert chosen(printed, row, 0) == best(unscaled, 7)
        elif how == "topk":
            total = added(heads)
        else:
            total = added([{i: float(i in best(s, 7)) for i in s} for s in heads])
        want = best(total, 7)
        found = chosen(got, row, 0)
        assert found == want or (how == "hard" and sum(total[i] for i in found) == sum(total[i] for i in want))


def test_token_select_cache_follows_the_cosine():
    before, queries, step = make_view()
    selector = built(SELECTORS["token_select"](token_budget=5, theta=0.9), before)
    first = selector.select(step, queries)
    queries.rot *= 3.0
    assert torch.equal(selector.select(step, queries).as_tokens(), first.as_tokens())
    assert selector.statistics() == {"cache_hit_rate": 0.5}
    queries.rot *= -1.0
    assert not torch.equal(selector.select(step, queries).as_tokens(), first.as_tokens())


def test_contiguous_positions_are_the_keys_moved_together():
    before, queries, step = make_view(heads_q=2, heads_kv=1)
    selector = built(SELECTORS["token_select"](token_budget=6, extrapolate=True), before)
    done = sparse_step(step, queries, selector, None)
    read = sorted({0, 1, 2, *chosen(done.selection, 0, 0), *range(80, 91)})
    pre, zero = step.keys_pre(0, step.length)[0, 0, read], torch.zeros(1, dtype=torch.long)
    keys = step.rope.turn(pre, zero, torch.arange(len(read)))
    for h in range(2):
        q = step.rope.turn(queries.pre[0, h], zero, torch.tensor([len(read) - 1]))[0]
        want = (keys @ q * step.scale).softmax(0) @ step.values[0, 0, read]
        torch.testing.assert_close(done.out[0, h, 0], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("k", [9, 32, 39])
def test_quest(case, k):
    _, step, queries, got = run("quest", case, token_budget=k)
    for row, b, t in each(step, queries):
        begin = int(step.regions.starts[b])
        for h in range(step.num_kv_heads):
            pages: dict[int, list[int]] = {}
            for i in mid(step, b):
                pages.setdefault((i - begin) // 16, []).append(i)
            bounds = {}
            for page, tokens in pages.items():
                low, high = step.keys[b, h, tokens].amin(0), step.keys[b, h, tokens].amax(0)
                bounds[page] = max(float(torch.maximum(queries.rot[b, g, t] * low, queries.rot[b, g, t] * high).sum())
                                   for g in group_of(step, h))
            order = [i for page in sorted(bounds, key=lambda p: -bounds[p]) for i in pages[page]]
            assert chosen(got, row, h) == set(order[:k])


@pytest.mark.parametrize("case", CASES)
def test_snapkv_and_pyramidkv(case):
    _, step, queries, got = run("snapkv", case, token_budget=11, observation_window=8, kernel_size=5)
    view = make_view(**case)[0]
    for row, b, _ in each(step, queries):
        for h in range(step.num_kv_heads):
            votes = [0.0] * view.length
            for g in group_of(step, h):
                for u in range(8):
                    t = view.length - 8 + u
                    seen = {i: float(view.recent_queries[b, g, -8 + u] @ view.keys[b, h, i] * view.scale)
                            for i in range(int(view.regions.starts[b]), t + 1)}
                    for i, p in softmax(seen).items():
                        if i in mid(view, b):
                            votes[i] += p
            pooled = {i: max(votes[max(0, i - 2):i + 3]) for i in mid(view, b)}
            found = chosen(got, row, h)
            assert len(found) == min(11, len(pooled))
            worst = sorted(pooled.values(), reverse=True)[:len(found)]
            np.testing.assert_allclose(sorted((pooled[i] for i in found), reverse=True), worst, rtol=1e-4)
    sizes = [len(chosen(run("pyramidkv", {"layer_idx": i}, token_budget=20, beta=5.0)[3], 0, 0)) for i in range(4)]
    assert sizes == [36, 25, 15, 4] and sum(sizes) == 80


def test_magicpig_samples_where_two_tables_agree_and_is_unbiased():
    before, queries, step = make_view(length=120, heads_q=2)
    selector = built(SELECTORS["magicpig"](bits=2, tables=10), before)
    got = selector.select(step, queries)
    planes = selector.planes.unflatten(1, (10, 2))
    for h in range(2):
        center = before.keys[0, h, mid(before, 0)].mean(0)
        want = set()
        for i in mid(step, 0):
            agree = 0
            for table in range(10):
                a = (step.keys[0, h, i] - center) @ planes[:, table] > 0
                agree += bool((a == (queries.rot[0, h, 0] @ planes[:, table] > 0)).all())
            if agree >= 2:
                want.add(i)
        assert chosen(got, 0, h) == want
    cosine = torch.tensor([0.3])
    p = (1 - math.acos(0.3) / math.pi) ** 2
    want = sum(math.comb(10, n) * p**n * (1 - p) ** (10 - n) for n in range(2, 11))
    assert float(sampling_probability(cosine, 2, 10)) == pytest.approx(want, rel=1e-4)
    full, total = full_attention(step, queries), []
    for seed in range(60):
        selector = built(SELECTORS["magicpig"](bits=2, tables=10, seed=seed), before)
        total.append(sparse_step(step, queries, selector, None).out.double())
    one = float((total[0] - full).norm() / full.norm())
    assert float((torch.stack(total).mean(0) - full).norm() / full.norm()) < max(0.05, one / 2)


class LiteralLFPS:
    """LFPS §4.2 with dictionaries, one query head a list."""

    def __init__(self, view, b: int, h: int, gamma: float, rows: int = 64):
        self.gamma, self.v, self.s = gamma, {}, {}
        for u in range(rows):
            t = view.length - rows + u
            q = view.recent_queries[b, h, -rows + u]
            seen = {i: float(q @ view.keys[b, h // view.group, i] * view.scale) for i in mid(view, b) if i <= t}
            for i, a in (softmax(seen) if seen else {}).items():
                weight = (1 - gamma) * gamma ** (rows - 1 - u) * a / 2
                self.v[i] = self.v.get(i, 0.0) + weight
                self.s[t - i] = self.s.get(t - i, 0.0) + weight

    @staticmethod
    def stats(table: dict[int, float], count: int, alpha: float) -> tuple[float, float]:
        x = np.array(list(table.values()) + [0.0] * (count - len(table)))
        mean, variance = x.mean(), x.var()
        kurtosis = ((x - mean) ** 4).mean() / variance**2
        return mean, mean + alpha * 2.2 * variance**0.5 * (count / kurtosis)**0.5

    def step(self, view, queries, b: int, h: int, k: int, alpha: float) -> set[int]:
        t = view.length - 1
        count = t + 1 - int(view.regions.starts[b])
        (mean_v, thr_v), (mean_s, thr_s) = (self.stats(x, count, alpha) for x in (self.v, self.s))
        inside = set(mid(view, b))
        first = {i for i in inside if self.v.get(i, 0) > thr_v or self.s.get(t - i, 0) > thr_s}
        near = {i + o for i in first for o in (-1, 0, 1, 2)} & inside
        near = {i for i in near if self.v.get(i, 0) > mean_v or self.s.get(t - i, 0) > mean_s}
        exact = scores(view, queries, b, h, 0)
        read = best({i: exact[i] for i in near}, k)
        weights = softmax({i: exact[i] for i in read}) if read else {}
        self.v = {i: x * self.gamma for i, x in self.v.items()}
        self.s = {j: x * self.gamma for j, x in self.s.items()}
        for i, a in weights.items():
            self.v[i] = self.v.get(i, 0.0) + (1 - self.gamma) / 2 * a
            self.s[t - i] = self.s.get(t - i, 0.0) + (1 - self.gamma) / 2 * a
        return read


@pytest.mark.parametrize("case", [{"heads_q": 2}, {"batch": 2, "pads": (0, 3), "heads_q": 2}])
def test_lfps(case):
    case = {**case, "length": 150}
    before = make_view(**case)[0]
    selector = built(SELECTORS["lfps"](token_budget=8, alpha=0.3, per_query_head=True), before)
    literal = {(b, h): LiteralLFPS(before, b, h, GAMMA) for b in range(before.keys.shape[0]) for h in range(2)}
    for seed in range(4):
        _, queries, _ = make_view(**case, seed=seed + 10)
        _, _, step = make_view(**case)
        got = selector.fork().select(step, queries)
        again = selector.select(step, queries)
        assert torch.equal(got.as_tokens().sort().values, again.as_tokens().sort().values)
        for (b, h), table in literal.items():
            assert chosen(again, b, h) == table.step(step, queries, b, h, 8, 0.3)


@pytest.mark.parametrize("queries_at_once", [1, 2])
def test_lfps_without_a_candidate_reads_the_anchors(queries_at_once):
    """Thresholds that no place passes, in every head: nothing is read, and steps go on."""
    before, queries, step = make_view(length=150, new=queries_at_once)
    selector = built(SELECTORS["lfps"](token_budget=8, alpha=1e9), before)
    want = sparse_step(step, queries, SELECTORS["streaming"](), None)
    for _ in range(2):
        got = sparse_step(step, queries, selector, None)
        assert not got.selection.counts().any()
        torch.testing.assert_close(got.out, want.out)


def test_lfps_bypasses_heads_that_look_at_the_sink():
    before, queries, step = make_view(heads_q=2, length=200)
    step.keys[0, 0, 0] = queries.rot[0, 0, 0] * 40
    selector = built(SELECTORS["lfps"](token_budget=8), before)
    got = selector.select(step, queries)
    out, lse = got.rest
    assert not chosen(got, 0, 0) and torch.isfinite(lse[0, 0])
    torch.testing.assert_close(out[0, 0], step.values[0, 0, mid(step, 0)].mean(0))
    done = sparse_step(step, queries, selector, None)
    torch.testing.assert_close(done.out[0, 0, 0], step.values[0, 0, 0], rtol=1e-2, atol=1e-2)
    searched = built(SELECTORS["lfps"](token_budget=8, eta=1.0), before).select(step, queries)
    assert chosen(searched, 0, 0) and torch.isneginf(searched.rest[1]).all()


def test_budgets_of_the_worked_example():
    regions = Regions.at_prefill_end(torch.zeros(1, dtype=torch.long), 16384, 4, 16)
    assert int(tokens_of_budget(0.05, regions, accounting="worst_case")) == 800
    cache = 64 * (64 + 2) / (2 * 64)
    assert int(tokens_of_budget(0.03, regions, accounting="worst_case", completion_tokens=cache)) == 439
    assert int(tokens_of_budget(0.05, regions)) == 820 and int(tokens_of_budget(77, regions)) == 77
    with pytest.raises(SparseKVError, match="infeasible"):
        tokens_of_budget(0.001, regions, accounting="worst_case")
