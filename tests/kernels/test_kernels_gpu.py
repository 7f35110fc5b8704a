"""Every kernel against its twin in float64 on a CUDA device: fresh random inputs, odd sizes, outputs poisoned first."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparsekv import kernels as ops
from sparsekv.kernels import reference

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}
DTYPES = pytest.mark.parametrize("dtype", list(LIMITS), ids=str)
# query heads, KV heads, head dim, tokens, sink, window, left padding
SHAPES = [(4, 2, 64, 63, 4, 16, 0), (3, 3, 80, 111, 1, 30, 7), (16, 1, 96, 40, 4, 60, 0), (6, 2, 128, 1, 4, 16, 0),
          (32, 8, 128, 1000, 1, 111, 5), (8, 8, 256, 300, 4, 16, 0)]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: Any) -> None:
    made = torch.empty

    def empty(*shape: Any, **how: Any) -> torch.Tensor:
        x = made(*shape, **how)
        return x.fill_(float("nan")) if x.is_floating_point() else x.fill_(-7)

    monkeypatch.setattr(torch, "empty", empty)


def error(mine: torch.Tensor, truth: torch.Tensor) -> float:
    return float((mine.double() - truth).norm() / truth.norm().clamp(min=1e-30))


def scene(shape: tuple[int, ...], dtype: torch.dtype, logits: float = 1.0) -> dict[str, Any]:
    heads_q, heads, dim, length, sink, window, pad = shape
    torch.manual_seed(length)
    batch, buckets = 2, 9
    q = (torch.randn(batch, heads_q, dim, device=DEVICE) * logits).to(dtype)
    k, v = (torch.randn(batch, heads, length + 3, dim, device=DEVICE).to(dtype)[:, :, :length] for _ in range(2))
    starts = torch.tensor([0, pad], device=DEVICE)
    lengths = torch.tensor([length, max(1, length - 2)], device=DEVICE)
    tails = (lengths - window).clamp(min=0).maximum(starts)
    assignment = torch.randint(0, buckets, (batch, heads, length), device=DEVICE)
    assignment[:, 0] = 3
    order, offsets = reference.build_index(assignment, buckets, (starts + sink).minimum(tails), tails)
    chosen = torch.rand(batch, heads, buckets, device=DEVICE).argsort(-1)[..., :5].to(torch.int32)
    chosen[..., 3] = -1
    regions = {"scale": dim**-0.5, "starts": starts, "sink_size": sink, "tail_starts": tails, "lengths": lengths}
    place = torch.arange(length, device=DEVICE)
    mid = (place >= (starts + sink)[:, None]) & (place < tails[:, None])
    return {"q": q, "k": k, "v": v, "order": order, "offsets": offsets, "chosen": chosen, "regions": regions,
            "mid": mid}


def completion(
    s: dict[str, Any], features: int = 32, heavy: torch.Tensor | None = None,
) -> list[reference.PhiRest]:
    """A completion in the tensors' dtype, and the same numbers in float64. Features of the tokens `heavy [B, Hkv, K]` a
    thousand times the others', of a mass that leaves these some weight."""
    q, k, v = s["q"], s["k"], s["v"]
    kept = torch.rand(*k.shape[:3], features, device=DEVICE)
    if heavy is not None:
        listed = (heavy[..., None, :] == torch.arange(k.shape[2], device=DEVICE)[:, None]).any(-1)
        kept = torch.where(listed[..., None], kept, kept / 1000)
    kept = kept.to(q.dtype)
    counted = kept.double() * s["mid"][:, None, :, None]
    m = torch.randn(*k.shape[:2], features, device=DEVICE)
    store = reference.PhiStore(m, counted.sum(2), counted.mT @ v.double(), kept)
    logs = torch.randn(*q.shape[:2], features, device=DEVICE)
    logs[0, 0] = float("-inf")
    rest = reference.phi_query(logs if heavy is None else logs + 7, store, q.dtype)
    if heavy is None:
        rest = rest._replace(cap=torch.randn(*q.shape[:2], device=DEVICE))
    return [rest._replace(whole=rest.whole.float(), base=rest.base.float()), rest.map(torch.Tensor.double)]


@DTYPES
@pytest.mark.parametrize("logits", [1.0, 1e4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_and_completion(shape: tuple[int, ...], dtype: torch.dtype, logits: float) -> None:
    s = scene(shape, dtype, logits)
    q, k, v, regions = s["q"], s["k"], s["v"], s["regions"]
    wide = [x.double() for x in (q, k, v)]
    tokens = reference.bucket_tokens(s["order"], s["offsets"], s["chosen"])
    per_head = tokens.repeat_interleave(q.shape[1] // k.shape[1], 1).clone()
    per_head[:, ::2, :2] = -1
    everything = torch.where(s["mid"][:, None], torch.arange(k.shape[2], device=DEVICE), -1)
    everything = everything.to(torch.int32).expand(-1, k.shape[1], -1)
    rest, exact = completion(s)
    sums = reference.phi_bucket_sums(exact.features, v.double(), s["order"], s["offsets"])
    by_bucket = [r._replace(features=None, bucket_z=sums[0].to(r.a.dtype), bucket_s=sums[1].to(r.a.dtype))
                 for r in (rest, exact)]
    rounded = by_bucket[1]._replace(bucket_z=by_bucket[0].bucket_z.double(), bucket_s=by_bucket[0].bucket_s.double())
    cases = [(x, y) for x, y in ((None, None), (rest, exact))]
    found = [(ops.attend_tokens(q, k, v, t, **regions, rest=a), reference.attend_tokens(*wide, t, **regions, rest=b))
             for t in (tokens, per_head, tokens[..., :0], everything) for a, b in cases]
    listed = (s["order"], s["offsets"], s["chosen"])
    for a, b in [*cases, (by_bucket[0], rounded)]:
        found.append((ops.attend_buckets(q, k, v, *listed, **regions, rest=a),
                      reference.attend_buckets(*wide, *listed, **regions, rest=b)))
    # a logit of 1e4 is exact to 1e-3 in float32: so are the weights of near ties
    limit = LIMITS[dtype] if logits == 1 else 1e-2
    for mine, truth in found:
        assert error(mine[0], truth[0]) < limit
        assert float((mine[1].double() - truth[1]).abs().max()) < limit * 4 * max(1.0, float(truth[1].abs().max()) / 8)


@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_is_left_where_nearly_all_is_read(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    s = scene(shape, dtype)
    tokens = reference.bucket_tokens(s["order"], s["offsets"], s["chosen"])
    rest, exact = completion(s, heavy=tokens)
    found = ops.attend_tokens(s["q"], s["k"], s["v"], tokens, **s["regions"], rest=rest)
    truth = reference.attend_tokens(*(s[n].double() for n in "qkv"), tokens, **s["regions"], rest=exact)
    # of estimates in bf16, kept as two numbers, a thousandth is known to one in a hundred
    assert error(found[0], truth[0]) < (2e-2 if dtype == torch.bfloat16 else 5e-3)


@DTYPES
@pytest.mark.parametrize(("heads_q", "heads", "dim", "hidden", "buckets", "probes"),
                         [(6, 2, 24, 40, 37, 5), (4, 4, 64, 100, 64, 64), (16, 1, 16, 7, 9, 20),
                          (32, 8, 128, 1024, 1024, 32)])
@pytest.mark.parametrize("batch", [1, 5])
def test_routing(heads_q: int, heads: int, dim: int, hidden: int, buckets: int, probes: int, batch: int,
                 dtype: torch.dtype) -> None:
    torch.manual_seed(buckets)

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, device=DEVICE) * scale).to(dtype)

    q = random(batch, heads_q, dim, scale=dim**-0.5)
    weights = reference.RouterWeights(random(heads, dim, hidden), random(heads, hidden),
                                      random(heads, hidden, buckets, scale=hidden**-0.5), random(heads, buckets))
    wide = reference.RouterWeights(*(w.double() for w in weights))
    means = reference.BucketMeans(random(batch, heads, buckets, dim), 0.3)
    exact = reference.BucketMeans(means.means.double(), 0.3)
    counts = torch.randint(0, 3, (batch, heads, buckets), dtype=torch.int32, device=DEVICE)
    counts[0, 0] = 0
    for model, twin, by_mean, right in ((weights, wide, None, None), (None, None, means, exact),
                                        (weights, wide, means, exact)):
        found = ops.route(q, model, heads, probes, counts, means=by_mean)
        truth = reference.route(q.double(), twin, heads, probes, counts, means=right)
        logits = torch.zeros((), device=DEVICE, dtype=torch.float64)
        if twin is not None:
            logits = logits + reference.router_logits(q.double(), twin)
        if right is not None:
            logits = logits + reference.mean_key_logits(q.double(), right.means, counts, 0.3)
        logits = logits.masked_fill((counts == 0).repeat_interleave(heads_q // heads, 1), float("-inf"))
        mass = logits.softmax(-1).nan_to_num(0.0).reshape(batch, heads, -1, buckets).sum(2)
        reached = [torch.where(c >= 0, mass.gather(-1, c.clamp(min=0).long()), 0.0).sum(-1) for c in (found, truth)]
        assert torch.equal(found >= 0, truth >= 0)
        assert float((reached[0] - reached[1]).abs().max()) < (1e-5 if dtype == torch.float32 else 2e-2)


@DTYPES
def test_completion_cache_and_query(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for heads, dim, features, keys, spread in ((2, 64, 16, 63, 1.0), (3, 80, 48, 111, 1e4), (1, 128, 128, 1000, 1.0)):
        logs = torch.randn(2, heads, keys, features, device=DEVICE) * spread
        v = torch.randn(2, heads, keys, dim, device=DEVICE).to(dtype)
        mask = torch.rand(2, heads, keys, device=DEVICE) < 0.7
        mask[0, 0] = False
        found, truth = ops.phi_cache(logs, v, mask), reference.phi_cache(logs.double(), v.double(), mask)
        assert torch.equal(found.m.double(), truth.m)
        assert max(error(a, b) for a, b in zip(found[1:], truth[1:], strict=True)) < 1e-4
        width, heads_q = 40, heads * 2

        def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(*shape, device=DEVICE) * scale).to(dtype)

        maps = reference.FeatureMapWeights(
            random(heads_q, dim, width, scale=dim**-0.5), random(heads_q, width),
            random(heads_q, width, width, scale=width**-0.5), random(heads_q, width),
            random(heads_q, width, width, scale=width**-0.5), random(heads_q, 1),
            random(heads_q, width, features, scale=width**-0.5), random(heads_q, features))
        q = random(2, heads_q, dim)
        cache = reference.phi_cache(torch.randn_like(logs), v.float())
        centre = torch.randn(2, heads, dim, device=DEVICE) * dim**-0.5
        moments = reference.ScoreMoments(
            centre + 0.1, torch.randn(2, heads, 16, dim, device=DEVICE) * dim**-0.5,
            torch.rand(2, heads, dim, device=DEVICE) / dim, torch.rand(2, device=DEVICE) * 50,
            torch.tensor([float("inf"), 1.5], device=DEVICE))
        store = reference.PhiStore(*cache, torch.ones(1, device=DEVICE), centre=centre, moments=moments)
        log_q = reference.log_phi(q.double()[:, :, None], reference.FeatureMapWeights(*(w.double() for w in maps)))
        log_q = reference.add_centre(log_q, q.double()[:, :, None], centre)
        for shape in ((heads_q,), (2, heads_q)):
            offset = torch.randn(shape, device=DEVICE)
            offset[..., 0] = float("-inf")
            mine = ops.phi_query(q, maps, offset, store)
            right = reference.phi_query(log_q[:, :, 0] + offset[..., None],
                                        reference.PhiStore(*(x.double() for x in store[:4])))
            scaled = [x.base.double() * x.c.double().exp()[..., None] for x in (mine, right)]
            assert error(*scaled) < (1e-4 if dtype == torch.float32 else 3e-2)
            wide = reference.ScoreMoments(*(x.double() for x in moments))
            cap = reference.moments_cap(q.double(), wide, offset)
            torch.testing.assert_close(mine.cap[:, 1:].double(), cap[:, 1:].double(), atol=1e-3, rtol=1e-3)


@DTYPES
def test_index_and_votes(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for heads_q, heads, dim, keys, buckets in ((4, 2, 64, 63, 5), (3, 3, 80, 111, 70), (16, 1, 64, 1, 1),
                                               (32, 8, 128, 1000, 130)):
        k = torch.randn(2, heads, keys, dim, device=DEVICE).to(dtype)
        q = torch.randn(2, heads_q, dim, device=DEVICE).to(dtype)
        centroids = torch.randn(heads, buckets, dim, device=DEVICE).to(dtype)
        scores = torch.einsum("bhnd,hcd->bhnc", k.double(), centroids.double())
        assigned = ops.assign_buckets(k, centroids).long()
        assert float((scores.amax(-1) - scores.gather(-1, assigned[..., None])[..., 0]).max()) < 1e-3
        first = torch.tensor([0, min(3, keys - 1)], device=DEVICE)
        last = torch.tensor([keys, max(keys - 5, 0)], device=DEVICE)
        table = torch.stack([torch.randperm(keys, device=DEVICE) for _ in range(2)])
        for pages in (None, table):
            for per_group in (False, True):
                how: dict[str, Any] = {"scale": dim**-0.5, "table": pages, "per_group": per_group}
                found = ops.paged_scores(q, k, first, last, **how)
                assert error(found, reference.paged_scores(q.double(), k.double(), first, last, **how)) < LIMITS[dtype]
