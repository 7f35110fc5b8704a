"""The plain-torch twins against independent float64 truth."""

import pytest
import torch

from sparsekv.kernels import extend_index
from sparsekv.kernels import reference as ref

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
    assignment = ref.assign_buckets(k, torch.randn(2, 7, 8, dtype=F64))
    order, offsets = ref.build_index(assignment, 7, starts + 3, options["tail_starts"])
    out, lse = ref.attend_buckets(q, k, v, order, offsets, torch.arange(7).expand(2, 2, 7), scale=0.3, **options)
    scores[1, ..., :5] = float("-inf")
    full = (scores.softmax(-1) @ v).reshape(2, 6, 8)
    torch.testing.assert_close(out, full, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(lse, scores.logsumexp(-1).reshape(2, 6))


def test_an_empty_set_is_zero_and_minus_infinity_and_merges() -> None:
    q, k, v, _ = setup()
    none = torch.empty(2, 2, 0, dtype=torch.long)
    lengths = torch.tensor([0, 0])
    out, lse = ref.attend_tokens(q, k, v, none, scale=0.3, starts=lengths, sink_size=0, tail_starts=lengths,
                                 lengths=lengths)
    assert torch.equal(out, torch.zeros_like(out)) and torch.isneginf(lse).all()
    both, both_lse = ref.merge(torch.stack([out, out]), torch.stack([lse, lse]))
    assert torch.equal(both, torch.zeros_like(both)) and torch.isneginf(both_lse).all()


def test_merge_of_parts_is_the_whole() -> None:
    _, _, v, scores = setup()
    parts = [scores[..., :11], scores[..., 11:12], scores[..., 12:]]
    values = [v[:, :, :11], v[:, :, 11:12], v[:, :, 12:]]
    outs = torch.stack([p.softmax(-1) @ x for p, x in zip(parts, values, strict=True)])
    out, lse = ref.merge(outs, torch.stack([p.logsumexp(-1) for p in parts]))
    torch.testing.assert_close(out, scores.softmax(-1) @ v)
    torch.testing.assert_close(lse, scores.logsumexp(-1))


def exact_features(q, k, scale):
    """The softmax kernel itself as a feature map: key i has the one feature i, whose query feature is its weight."""
    length = k.shape[2]
    log_k = torch.full((length, length), -1e30, dtype=F64).fill_diagonal_(0.0).expand(*k.shape[:2], length, length)
    group = q.shape[1] // k.shape[1]
    log_q = torch.einsum("bhgd,bhnd->bhgn", q.view(q.shape[0], k.shape[1], group, -1), k) * scale
    return log_q.reshape(*q.shape[:2], length), log_k


@pytest.mark.parametrize("logits", [1.0, 300.0])
@pytest.mark.parametrize("retrieved", [0, 7, 38])
def test_completion_with_the_exact_kernel_is_full_attention(retrieved: int, logits: float) -> None:
    q, k, v, scores = setup(logits=logits)
    options = anchors(torch.tensor([0, 0]), torch.tensor([50, 50]))
    mid = slice(3, 41)
    log_q, log_k = exact_features(q, k[:, :, mid], 0.3)
    cache = ref.phi_cache(log_k, v[:, :, mid])
    chosen = torch.stack([torch.randperm(38)[:retrieved] for _ in range(4)]).reshape(2, 2, retrieved)
    rows = chosen[..., None].expand(-1, -1, -1, 38)
    values = v[:, :, mid].gather(2, chosen[..., None].expand(-1, -1, -1, 8))
    rest = ref.phi_remainder(cache, log_k.gather(2, rows), values, torch.ones_like(chosen, dtype=torch.bool))
    out, lse = ref.attend_tokens(q, k, v, chosen + 3, scale=0.3, **options)
    extra, extra_lse = ref.phi_partial(log_q, rest, full_z=cache.z)
    assert torch.isneginf(extra_lse).all() == (retrieved == 38)
    merged, _ = ref.merge(torch.stack([out, extra]), torch.stack([lse, extra_lse]))
    torch.testing.assert_close(merged, (scores.softmax(-1) @ v).reshape(2, 6, 8), rtol=1e-8, atol=1e-10)


def test_subtraction_equals_rebuilding_without_the_retrieved() -> None:
    torch.manual_seed(1)
    log_k, v = torch.randn(2, 3, 40, 16, dtype=F64) * 5, torch.randn(2, 3, 40, 8, dtype=F64)
    cache = ref.phi_cache(log_k, v)
    rest = ref.phi_remainder(cache, log_k[:, :, :25], v[:, :, :25], torch.ones(2, 3, 25, dtype=torch.bool))
    rebuilt = ref.phi_cache(log_k[:, :, 25:], v[:, :, 25:])
    log_q = torch.randn(2, 6, 16, dtype=F64)
    for one, other in zip(ref.phi_partial(log_q, rest, eps=0.0), ref.phi_partial(log_q, rebuilt, eps=0.0), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


def test_extension_equals_building_at_once() -> None:
    torch.manual_seed(2)
    log_k, v = torch.randn(1, 2, 30, 4, dtype=F64) * 20, torch.randn(1, 2, 30, 8, dtype=F64)
    grown = ref.phi_extend(ref.phi_cache(log_k[:, :, :11], v[:, :, :11]), log_k[:, :, 11:], v[:, :, 11:])
    for one, other in zip(grown, ref.phi_cache(log_k, v), strict=True):
        torch.testing.assert_close(one, other)
    empty = ref.phi_cache(log_k[:, :, :0], v[:, :, :0])
    for one, other in zip(ref.phi_extend(empty, log_k, v), ref.phi_cache(log_k, v), strict=True):
        torch.testing.assert_close(one, other)


def test_index_keeps_every_key_of_the_range_once() -> None:
    torch.manual_seed(3)
    assignment = torch.randint(0, 5, (2, 3, 40))
    first, last = torch.tensor([4, 0]), torch.tensor([33, 40])
    order, offsets = ref.build_index(assignment, 6, first, last)
    for b in range(2):
        for h in range(3):
            for c in range(6):
                found = order[b, h, offsets[b, h, c]:offsets[b, h, c + 1]].tolist()
                want = [i for i in range(int(first[b]), int(last[b])) if assignment[b, h, i] == c]
                assert found == want
    assert (order[0, :, 29:] == -1).all()


def test_top_buckets_sums_over_the_group_and_passes_over_empty_ones() -> None:
    logits = torch.tensor([[[3.0, 0.0, 0.0, 2.9], [0.0, 3.0, 0.0, 2.9]]])
    assert ref.top_buckets(logits, 1, 1).tolist() == [[[3]]]
    counts = torch.tensor([[[1, 0, 0, 0]]])
    assert ref.top_buckets(logits, 1, 3, counts).tolist() == [[[0, -1, -1]]]


@pytest.mark.parametrize(("length", "buckets", "joins"),
                         [(63, 5, 9), (111, 40, 1), (7, 3, 0), (1, 4, 6), (1000, 17, 250)])
def test_an_extended_index_equals_one_built_anew(length, buckets, joins):
    torch.manual_seed(length)
    total, none = length + joins, torch.tensor([0, 0])
    assignment = torch.randint(0, buckets, (2, 3, total))
    have, until = torch.tensor([length, max(length - 2, 0)]), torch.tensor([total, max(total - 1, 0)])
    order, offsets = ref.build_index(assignment[..., :length], buckets, none, have)
    positions = torch.arange(max(length - 2, 0), total).expand(2, -1)
    inside = (positions >= have[:, None]) & (positions < until[:, None])
    joined = torch.where(inside[:, None], assignment.gather(2, positions[:, None].expand(-1, 3, -1)), -1)
    mine, edges = extend_index(order, offsets, joined, positions)
    truth, right = ref.build_index(assignment, buckets, none, until)
    assert torch.equal(edges, right)
    count = int(right[..., -1].max())
    assert torch.equal(mine[..., :count], truth[..., :count])
    assert mine.dtype == edges.dtype == torch.int32
