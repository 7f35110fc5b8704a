"""The plain-torch twins against independent float64 truth."""

import math

import pytest
import torch

from sparsekv import kernels
from sparsekv.kernels.routing import bucket_logits_reference

F64 = torch.float64


def setup(batch=2, heads_q=6, heads_kv=2, length=50, dim=8, scale=0.3, logits=1.0):
    torch.manual_seed(0)
    q = torch.randn(batch, heads_q, dim, dtype=F64) * logits
    k, v = (torch.randn(batch, heads_kv, length, dim, dtype=F64) for _ in range(2))
    group = heads_q // heads_kv
    scores = torch.einsum("bhgd,bhnd->bhgn", q.view(batch, heads_kv, group, dim), k) * scale
    return q, k, v, scores


def anchors(starts, lengths, sink=3, window=9):
    return {"starts": starts, "sink_size": sink, "tail_starts": (lengths - window).maximum(starts), "lengths": lengths}


@pytest.mark.parametrize("logits", [1.0, 1e4])
def test_every_bucket_and_the_anchors_are_full_attention(logits: float) -> None:
    q, k, v, scores = setup(logits=logits)
    starts, lengths = torch.tensor([0, 5]), torch.tensor([50, 50])
    options = anchors(starts, lengths)
    assignment = kernels.assign_buckets(k, torch.randn(2, 7, 8, dtype=F64))
    order, offsets = kernels.build_index(assignment, 7, starts + 3, options["tail_starts"])
    out, lse = kernels.attend_buckets(q, k, v, order, offsets, torch.arange(7).expand(2, 2, 7), scale=0.3, **options)
    scores[1, ..., :5] = float("-inf")
    full = (scores.softmax(-1) @ v).reshape(2, 6, 8)
    torch.testing.assert_close(out, full, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(lse, scores.logsumexp(-1).reshape(2, 6))


def test_an_empty_set_is_zero_and_minus_infinity_and_merges() -> None:
    q, k, v, _ = setup()
    none = torch.empty(2, 2, 0, dtype=torch.long)
    lengths = torch.tensor([0, 0])
    out, lse = kernels.attend_tokens(q, k, v, none, scale=0.3, starts=lengths, sink_size=0, tail_starts=lengths,
                                 lengths=lengths)
    assert torch.equal(out, torch.zeros_like(out)) and torch.isneginf(lse).all()
    both, both_lse = kernels.merge(torch.stack([out, out]), torch.stack([lse, lse]))
    assert torch.equal(both, torch.zeros_like(both)) and torch.isneginf(both_lse).all()


def test_merge_of_parts_is_the_whole() -> None:
    _, _, v, scores = setup()
    parts = [scores[..., :11], scores[..., 11:12], scores[..., 12:]]
    values = [v[:, :, :11], v[:, :, 11:12], v[:, :, 12:]]
    outs = torch.stack([p.softmax(-1) @ x for p, x in zip(parts, values, strict=True)])
    out, lse = kernels.merge(outs, torch.stack([p.logsumexp(-1) for p in parts]))
    torch.testing.assert_close(out, scores.softmax(-1) @ v)
    torch.testing.assert_close(lse, scores.logsumexp(-1))


def exact_features(q, k, scale):
    """The softmax kernel itself as features: key i has the one feature i, whose query feature is its weight. The keys
    that say so, one hot, and the map that makes features 1 and nearly 0 of them; queries' log features `[Q, Hq, n]`."""
    batch, heads, length, _ = k.shape
    unit = torch.eye(length, dtype=F64)
    maps = kernels.KeyFeatures(
        (80 * unit).expand(heads, -1, -1), torch.full((batch, heads, length), -40.0, dtype=F64),
        (40 * unit).expand(heads, -1, -1), torch.full((heads, length), -1600.0, dtype=F64),
        torch.zeros(batch, heads, length, dtype=F64))
    log_q = torch.einsum("bhgd,bhnd->bhgn", q.view(q.shape[0], k.shape[1], -1, q.shape[2]), k) * scale
    return log_q.reshape(*q.shape[:2], length), unit.expand(batch, heads, -1, -1), maps


def query_of(log_q, cache, maps=None):
    """The query's side from its log-features `[Q, Hq, r]`, as many queries as rows."""
    group = log_q.shape[1] // cache.m.shape[1]
    log = log_q + math.log(2) * cache.m.repeat_interleave(group, 1)
    top = log.amax(-1)
    features = torch.exp(log - top[..., None])
    z, s = (x.repeat_interleave(group, 1) for x in cache[1:])
    return kernels.CompletionQuery(features, top, (features * z).sum(-1), torch.einsum("bhr,bhrd->bhd", features, s),
                                   None, maps if maps is None else maps._replace(shift=cache.m))


def summed(keys, v, maps, first=0, last=None):
    """The cache of the tokens from first to last of all rows."""
    edges = (torch.full((keys.shape[0],), x) for x in (first, keys.shape[2] if last is None else last))
    return kernels.phi_sums(keys, v, *edges, maps)


@pytest.mark.parametrize("logits", [1.0, 100.0])
@pytest.mark.parametrize("retrieved", [0, 7, 38])
def test_completion_with_the_exact_kernel_is_full_attention(retrieved: int, logits: float) -> None:
    q, k, v, scores = setup(logits=logits)
    options = anchors(torch.tensor([0, 0]), torch.tensor([50, 50]))
    mid = slice(3, 41)
    log_q, hot, maps = exact_features(q, k[:, :, mid], 0.3)
    cache = summed(hot, v[:, :, mid], maps)
    chosen = torch.stack([torch.randperm(38)[:retrieved] for _ in range(4)]).reshape(2, 2, retrieved)
    query = query_of(log_q, cache, maps)
    exact = kernels.attend_tokens(q, k, v, chosen + 3, scale=0.3, **options)
    values = v[:, :, mid].gather(2, chosen[..., None].expand(-1, -1, -1, 8))
    read = hot.gather(2, chosen[..., None].expand(-1, -1, -1, 38))
    left = kernels.remainder(query, kernels.key_features(read, query.keys), values,
                             torch.ones_like(chosen, dtype=torch.bool))
    assert torch.isneginf(left[1]).all() == (retrieved == 38)
    merged, lse = kernels.merge(*(torch.stack(x) for x in zip(exact, left, strict=True)))
    # what is left of an estimate is dropped below a hundred-thousandth of it
    close = {"rtol": 1e-8, "atol": 1e-10} if retrieved == 0 or logits == 1 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(merged, (scores.softmax(-1) @ v).reshape(2, 6, 8), **close)
    torch.testing.assert_close(lse, scores.logsumexp(-1).reshape(2, 6), **close)


def random_keys(batch: int, heads: int, length: int, features: int, spread: float = 1.0):
    """Keys, values, and a map of them with nothing in common."""
    keys, v = torch.randn(2, batch, heads, length, 8, dtype=F64)
    maps = kernels.KeyFeatures(*(spread * torch.randn(*size, dtype=F64) for size in (
        (heads, 8, 12), (batch, heads, 12), (heads, 12, features), (heads, features), (batch, heads, features))))
    return keys, v, maps._replace(shift=torch.zeros_like(maps.shift))


def test_what_is_left_equals_rebuilding_without_what_was_read_and_keeps_to_its_cap() -> None:
    torch.manual_seed(1)
    keys, v, maps = random_keys(2, 3, 40, 16)
    cache = summed(keys, v, maps)
    log_q = torch.randn(2, 6, 16, dtype=F64)
    query = query_of(log_q, cache, maps)
    features = kernels.key_features(keys, query.keys)
    used = torch.arange(40).expand(2, 3, -1) < 25
    found = kernels.remainder(query, features, v, used)
    rebuilt = query_of(log_q, summed(keys, v, maps, first=25))
    live = ~torch.isneginf(found[1])
    assert live.any()
    torch.testing.assert_close(found[0][live], (rebuilt.numerator / rebuilt.mass[..., None])[live], rtol=1e-6,
                               atol=1e-8)
    torch.testing.assert_close(found[1][live], (rebuilt.log_scale + rebuilt.mass.log())[live], rtol=1e-6, atol=1e-8)
    # a key that is not used may have features of any size
    wild = torch.where(used[..., None], features, torch.inf)
    torch.testing.assert_close(kernels.remainder(query, wild, v, used), found)
    cap = found[1].nan_to_num(neginf=0.0) - 1.0
    lower = kernels.remainder(query._replace(cap=cap), features, v, used)
    torch.testing.assert_close(lower[1][live], cap[live])
    assert torch.equal(lower[0], found[0])


def test_a_step_takes_out_what_its_keys_are_estimated_at() -> None:
    """By the features made of them, for lists of every kind."""
    torch.manual_seed(5)
    k, v, maps = random_keys(2, 3, 40, 16, spread=0.5)
    q = torch.randn(2, 6, 8, dtype=F64)
    query = query_of(torch.randn(2, 6, 16, dtype=F64), summed(k, v, maps, 4, 30), maps)
    edges = {"scale": 0.3, "sink_size": 4, "starts": torch.zeros(2, dtype=torch.long),
             "tail_starts": torch.full((2,), 30), "lengths": torch.full((2,), 40)}
    for heads in (1, 3, 6):
        tokens = torch.stack([torch.randperm(26)[:9] for _ in range(2 * heads)]).reshape(2, heads, 9) + 4
        tokens[..., 5] = -1
        found = kernels.attend_tokens(q, k, v, tokens, **edges, completion=query)
        exact = kernels.attend_tokens(q, k, v, tokens, **edges)
        each = tokens.expand(2, max(heads, 3), 9).repeat_interleave(6 // max(heads, 3), 1)
        own, values = (x.repeat_interleave(2, 1).gather(2, each.clamp(min=0)[..., None].expand(-1, -1, -1, 8))
                       for x in (k, v))
        wide = kernels.KeyFeatures(*(x.repeat_interleave(2, x.dim() - (3 if i in (0, 2) else 2))
                                     for i, x in enumerate(query.keys)))
        left = kernels.remainder(query, kernels.key_features(own, wide), values, each >= 0)
        torch.testing.assert_close(found, kernels.merge(*(torch.stack(x) for x in zip(exact, left, strict=True))))


def test_extension_equals_building_at_once() -> None:
    torch.manual_seed(2)
    keys, v, maps = random_keys(1, 2, 30, 4, spread=2.0)
    whole = summed(keys, v, maps)
    for middle in (0, 11, 30):
        grown = kernels.phi_join(summed(keys, v, maps, last=middle), summed(keys, v, maps, first=middle))
        for one, other in zip(grown, whole, strict=True):
            torch.testing.assert_close(one, other)
    assert torch.equal(whole.m, whole.m.ceil())


def test_index_keeps_every_key_of_the_range_once() -> None:
    torch.manual_seed(3)
    assignment = torch.randint(0, 5, (2, 3, 40))
    first, last = torch.tensor([4, 0]), torch.tensor([33, 40])
    order, offsets = kernels.build_index(assignment, 6, first, last)
    for b in range(2):
        for h in range(3):
            for c in range(6):
                found = order[b, h, offsets[b, h, c]:offsets[b, h, c + 1]].tolist()
                want = [i for i in range(int(first[b]), int(last[b])) if assignment[b, h, i] == c]
                assert found == want
    assert (order[0, :, 29:] == -1).all()


def test_route_sums_over_the_group_and_passes_over_empty_buckets() -> None:
    p = kernels.group_probability(torch.tensor([[[3.0, 0.0, 0.0, 2.9], [0.0, 3.0, 0.0, 2.9]]]), 1)
    assert kernels.top_buckets(p, torch.ones(1, 1, 4), 1).tolist() == [[[3]]]
    assert kernels.top_buckets(p, torch.tensor([[[1, 0, 0, 0]]]), 3).tolist() == [[[0, -1, -1]]]


def test_scores_of_buckets_are_those_of_each_row() -> None:
    """Two queries a row give what each row gives alone; empty buckets are -inf in both kinds of scores."""
    torch.manual_seed(5)
    q, counts = torch.randn(4, 6, 8, dtype=F64), torch.tensor([[[2, 0, 1], [1, 1, 1]], [[0, 0, 0], [3, 1, 0]]])
    model = kernels.QueryModel(*(torch.randn(*s, dtype=F64) for s in ((2, 8, 5), (2, 5), (2, 5, 3), (2, 3))))
    plain = torch.randn(2, 2, 3, 8, dtype=F64)
    means = kernels.BucketMeans(*kernels.round_means(plain, torch.ones(2, 2, 3)), 0.3, torch.rand(2, 2, 3, dtype=F64))
    for scores in (model, means):
        found = bucket_logits_reference(q, scores, counts)
        assert torch.equal(torch.isneginf(found), (counts == 0).repeat_interleave(2, 0).repeat_interleave(3, 1))
        for row in range(2):
            own = scores if scores is model else kernels.BucketMeans(
                means.means[row:row + 1], means.steps[row:row + 1], 0.3, means.spread[row:row + 1])
            alone = bucket_logits_reference(q[2 * row:2 * row + 2], own, counts[row:row + 1])
            torch.testing.assert_close(found[2 * row:2 * row + 2], alone)
    bucket, member = 2, means.means[0, 1, 2] * means.steps[0, 1, 2].double()
    limit = float(means.steps[0, 1, 2]) / 2
    torch.testing.assert_close(member, plain[0, 1, 2] - plain[0, 1].mean(0), rtol=1e-6, atol=limit * (1 + 1e-6))
    expected = q[1, 4] @ member * 0.3 + counts[0, 1, 2].double().log() + 0.09 * q[1, 4].square().sum() * means.spread[
        0, 1, 2]
    torch.testing.assert_close(bucket_logits_reference(q, means, counts)[1, 4, bucket], expected)


def test_a_bucket_of_keys_around_their_mean_has_its_mass_to_the_second_order() -> None:
    """Scores of normal keys have the log-mass `log n + mean + variance / 2`; the spread is half the variance a
    direction."""
    torch.manual_seed(0)
    keys, q = 3 + 0.7 * torch.randn(1, 1, 200_000, 8, dtype=F64), torch.randn(1, 1, 8, dtype=F64)
    bucket = torch.zeros(1, 1, keys.shape[2], dtype=torch.int32)
    counts, sums = kernels.bucket_sums(keys, bucket, None, 2)
    spread = kernels.half_variance(kernels.square_sums(keys, bucket, None, 2), sums, counts)
    torch.testing.assert_close(spread[0, 0], torch.tensor([0.245, 0.0], dtype=F64), rtol=0.01, atol=0)
    means = kernels.BucketMeans(*kernels.round_means(sums, counts), 0.5, spread)
    middle = 0.5 * q[0, 0] @ (sums / 200_000)[0, 0, 0]  # of all keys: what every score of the query is less
    found = bucket_logits_reference(q, means, counts)[0, 0, 0] + middle
    exact = (0.5 * keys[0, 0] @ q[0, 0]).logsumexp(0)
    assert abs(float(found - exact)) < 0.02 < float(exact - found + 0.25 * q.square().sum() * spread[0, 0, 0])


@pytest.mark.parametrize("budget", [0, 1, 4, 5, 9, 20, 50])
def test_the_budget_rule_is_a_literal_loop_over_buckets(budget: int) -> None:
    torch.manual_seed(budget)
    assignment = torch.randint(0, 6, (2, 2, 20))
    assignment[assignment == 4] = 5  # an empty bucket
    order, offsets = kernels.build_index(assignment, 6, torch.tensor([0, 2]), torch.tensor([20, 17]))
    density = torch.randint(0, 3, (4, 4, 6)).double()  # ties
    found = kernels.choose_tokens(density, order, offsets, torch.full((4,), budget), budget)
    for q in range(4):
        for h in range(4):
            b, kv, want = q // 2, h // 2, []
            for c in sorted(range(6), key=lambda c: (-density[q, h, c], c)):
                want += order[b, kv, offsets[b, kv, c]:offsets[b, kv, c + 1]].tolist()
            kept = found[q, h][found[q, h] >= 0].tolist()
            assert kept == sorted(want[:budget], key=order[b, kv].tolist().index), "in the order of the buckets"


def test_the_budget_rule_reads_by_probability_over_tokens() -> None:
    """A bucket of little probability and one token goes before a probable one of many."""
    order, offsets = torch.arange(10)[None, None].int(), torch.tensor([[[0, 9, 10]]], dtype=torch.int32)
    model = kernels.QueryModel(torch.zeros(1, 4, 3), torch.zeros(1, 3), torch.zeros(1, 3, 2),
                               torch.tensor([[0.8, 0.2]]).log())
    q = torch.randn(1, 2, 4)
    assert kernels.route_tokens(q, model, order, offsets, torch.tensor([3]), 3).tolist() == [[[0, 1, 9]]]
    assert kernels.route(q, model, offsets.diff(dim=-1), 1).tolist() == [[[0]]]


@pytest.mark.parametrize("lists", [1, 2, 6])
def test_attention_over_tokens_is_a_masked_softmax(lists: int) -> None:
    """Several queries a row that see different lengths, lists of one, every KV or every query head, weights; and the
    same without anchors."""
    q, k, v, _ = setup(batch=4)
    k, v = k[:2], v[:2]
    regions = {"scale": 0.3, "starts": torch.tensor([0, 0, 5, 5]), "sink_size": 3,
               "tail_starts": torch.tensor([40, 40, 41, 41]), "lengths": torch.tensor([49, 50, 49, 50])}
    tokens = torch.stack([torch.randperm(30)[:6] + 9 for _ in range(4 * lists)]).reshape(4, lists, 6)
    tokens[..., 4] = -1
    weights = torch.randn(4, lists, 6, dtype=F64)
    place = torch.arange(50)
    for anchored in (True, False):
        how = dict(regions) if anchored else regions | dict.fromkeys(("tail_starts", "lengths"), regions["starts"])
        start, tail, end = (how[n][:, None] for n in ("starts", "tail_starts", "lengths"))
        seen = ((place >= start) & (place < (start + 3).minimum(tail))) | ((place >= tail) & (place < end))
        out, lse = kernels.attend_tokens(q, k, v, tokens, **how, log_weights=weights)
        for row in range(4):
            for head in range(6):
                logits = torch.full((50,), float("-inf"), dtype=F64)
                scores = k[row // 2, head // 3] @ q[row, head] * 0.3
                logits[seen[row]] = scores[seen[row]]
                for t, w in zip(tokens[row, head * lists // 6], weights[row, head * lists // 6], strict=True):
                    if t >= 0:
                        logits[t] = scores[t] + w
                torch.testing.assert_close(out[row, head], logits.softmax(-1) @ v[row // 2, head // 3])
                torch.testing.assert_close(lse[row, head], logits.logsumexp(-1))


@pytest.mark.parametrize(("count", "window", "softcap", "padded"), [
    (1, None, None, False), (1, 5, None, True), (30, None, None, False), (7, None, None, False), (7, 5, None, False),
    (30, 5, 3.0, True), (7, None, 3.0, False), (7, None, None, True), (1, None, None, True), (30, 5, None, True)])
@pytest.mark.parametrize("sunk", [False, True])
def test_dense_attention_is_a_masked_softmax(count, window, softcap, padded, sunk) -> None:
    torch.manual_seed(count)
    q, k, v = torch.randn(2, 6, count, 8), torch.randn(2, 2, 30, 8), torch.randn(2, 2, 30, 8)
    rows, columns = torch.arange(30 - count, 30)[:, None], torch.arange(30)
    mask = (columns <= rows) & (columns > rows - (window or 99))
    starts = torch.tensor([0, 26]) if padded else None
    if starts is not None:
        mask = mask & (columns >= starts[:, None, None, None])
    scores = (q @ k.repeat_interleave(3, 1).mT) * 0.3
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    sinks = 2 * torch.randn(6) if sunk else None
    logits = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None and softcap is not None:
        with pytest.raises(ValueError, match="found both"):
            kernels.dense_attention(q, k, v, scale=0.3, softcap=softcap, sinks=sinks)
        return
    if sinks is not None:
        logits = torch.cat([logits, sinks[:, None, None].expand(2, 6, count, 1)], dim=-1)
    want = logits.softmax(-1).nan_to_num(0.0)[..., :30] @ v.repeat_interleave(3, 1)
    key_mask = None if starts is None else (columns >= starts[:, None]).long()
    found = kernels.dense_attention(q, k, v, scale=0.3, window=window, softcap=softcap, key_mask=key_mask,
                                    sinks=sinks)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


def test_sinks_have_a_gradient_and_keep_what_half_precision_drops() -> None:
    torch.manual_seed(3)
    q, k, v, sinks = torch.randn(1, 4, 9, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8), 3 * torch.randn(4)
    scores = (q @ k.repeat_interleave(2, 1).mT * 0.3).masked_fill(~torch.ones(9, 9).tril().bool(), float("-inf"))
    leaves = sinks.clone().requires_grad_(), sinks.clone().requires_grad_()
    logits = torch.cat([scores, leaves[0][:, None, None].expand(1, 4, 9, 1)], dim=-1)
    want = logits.softmax(-1)[..., :9] @ v.repeat_interleave(2, 1)
    found = kernels.dense_attention(q, k, v, scale=0.3, sinks=leaves[1])
    want.square().sum().backward()
    found.square().sum().backward()
    torch.testing.assert_close(leaves[1].grad, leaves[0].grad, rtol=1e-4, atol=1e-5)
    half = kernels.dense_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), scale=0.3, sinks=sinks)
    torch.testing.assert_close(half.float(), want, rtol=0.03, atol=0.03)


@pytest.mark.parametrize(("length", "buckets", "joins"),
                         [(63, 5, 9), (111, 40, 1), (7, 3, 0), (1, 4, 6), (1000, 17, 250)])
def test_an_extended_index_equals_one_built_anew(length, buckets, joins):
    torch.manual_seed(length)
    total, none = length + joins, torch.tensor([0, 0])
    assignment = torch.randint(0, buckets, (2, 3, total))
    have, until = torch.tensor([length, max(length - 2, 0)]), torch.tensor([total, max(total - 1, 0)])
    order, offsets = kernels.build_index(assignment[..., :length], buckets, none, have)
    positions = torch.arange(max(length - 2, 0), total).expand(2, -1)
    inside = (positions >= have[:, None]) & (positions < until[:, None])
    joined = torch.where(inside[:, None], assignment.gather(2, positions[:, None].expand(-1, 3, -1)), -1)
    mine, edges = kernels.extend_index(order, offsets, joined, positions)
    truth, right = kernels.build_index(assignment, buckets, none, until)
    assert torch.equal(edges, right)
    count = int(right[..., -1].max())
    assert torch.equal(mine[..., :count], truth[..., :count])
    assert mine.dtype == edges.dtype == torch.int32
