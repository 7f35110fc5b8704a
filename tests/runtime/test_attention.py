"""Exact part, completion and their sum against literal attention."""

from __future__ import annotations

import pytest
import torch
from views import full_attention, make_view

from sparsekv.core.estimators.phi import PhiCompletion
from sparsekv.core.rows import attend_rows
from sparsekv.core.selectors.random import Random
from sparsekv.core.selectors.streaming import Streaming
from sparsekv.core.selectors.topk import TopK
from sparsekv.kernels import PhiCache, phi_cache
from sparsekv.kernels.reference import attend_tokens
from sparsekv.runtime.attention import dense_attention, sparse_attention

CASES = [{}, {"batch": 3, "pads": (0, 5, 60)}, {"new": 4}, {"batch": 2, "pads": (2, 0), "new": 3, "heads_q": 2}]


class ExactKernel:
    """The exact kernel in place of φ: one feature a key, `log φ_k` zero at the key itself, `log φ_q` its score."""

    offset = torch.zeros(1)

    def __init__(self, view):
        self.view = view

    def log_phi_k(self, keys: torch.Tensor) -> torch.Tensor:
        own = self.view.keys[: 1 if keys.shape[0] == 1 else None]
        if own.shape[0] != keys.shape[0]:
            own = own.repeat_interleave(keys.shape[0] // own.shape[0], dim=0)
        same = (keys[:, :, :, None] == own[:, :, None]).all(-1)
        return torch.where(same, 0.0, float("-inf"))

    def log_phi_q(self, q: torch.Tensor) -> torch.Tensor:
        keys = self.view.keys.repeat_interleave(self.view.group, dim=1)
        return (q @ keys.mT) * self.view.scale


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("selector", [
    Random(token_budget=20), TopK(token_budget=20, per_query_head=True), Streaming()], ids=lambda s: s.name)
def test_completion_with_the_exact_kernel_is_full_attention(case, selector):
    before, queries, step = make_view(**case)
    selector = selector.fork()
    selector.build(before)
    completion = PhiCompletion(ExactKernel(step))
    completion.build(step)
    done = sparse_attention(step, queries, selector, completion)
    torch.testing.assert_close(done.out.double(), full_attention(step, queries), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_everything_selected_is_full_attention(case):
    before, queries, step = make_view(**case)
    for selector in (TopK(token_budget=1.0), TopK(token_budget=1000, per_query_head=True)):
        selector.build(before)
        done = sparse_attention(step, queries, selector, None)
        torch.testing.assert_close(done.out.double(), full_attention(step, queries), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(done.loaded, done.context.to(done.loaded.dtype))


@pytest.mark.parametrize("batch", [1, 2])
def test_subtraction_is_the_cache_built_without_the_selection(batch):
    before, queries, step = make_view(batch=batch)
    maps = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Tanh())

    class Maps:
        offset = torch.zeros(1)

        def log_phi_k(self, x):
            return maps(x).detach() * 3

        log_phi_q = log_phi_k

    selector, completion = TopK(token_budget=25), PhiCompletion(Maps())
    selector.build(before)
    completion.build(before)
    selection = selector.select(step, queries)
    got = completion.partial(step, queries, selection)
    keep = step.regions.mid_mask()[:, None].repeat(1, step.num_kv_heads, 1)
    keep.scatter_(2, selection.as_tokens(), False)
    rest = phi_cache(Maps().log_phi_k(step.keys), step.values, keep)
    other = PhiCompletion(Maps())
    other.cache = PhiCache(*rest)
    want = other.partial(step, queries, Streaming().select(step, queries))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_completion_grows_as_if_built_at_once():
    before, queries, step = make_view(new=30)
    layer = ExactKernel(step)
    once, grown = PhiCompletion(layer), PhiCompletion(layer)
    grown.build(before)
    old, step.regions = step.regions, step.regions.moved(100)
    grown.extend(step, old)
    once.build(step)
    nothing = Streaming().select(step, queries)
    torch.testing.assert_close(once.partial(step, queries, nothing), grown.partial(step, queries, nothing))


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("case", CASES)
def test_rows_equal_the_reference(case, dtype, per_head):
    _, queries, step = make_view(dtype=dtype, **case)
    count = queries.count
    heads = step.num_query_heads if per_head else step.num_kv_heads
    starts, tails, lengths = step.regions.per_query(count)
    mid = step.regions.mid_mask().repeat_interleave(count, 0)
    order = torch.rand(mid.shape[0], heads, mid.shape[1]).masked_fill(~mid[:, None], -1).topk(30, dim=-1)
    tokens = torch.where(order.values >= 0, order.indices, -1)
    tokens[:, :, ::7] = -1
    common = {"scale": step.scale, "starts": starts, "sink_size": step.regions.sink_size, "tail_starts": tails,
              "lengths": lengths}
    q = queries.folded(queries.rot)
    got = attend_rows(q, step.keys, step.values, tokens, **common)
    k, v = (x.repeat_interleave(count, 0) for x in (step.keys, step.values))
    want = attend_tokens(q, k, v, tokens, **common)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype != torch.bfloat16 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(got[0], want[0], **close)
    torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-5)


def test_rows_of_nothing():
    q, kv = torch.randn(1, 2, 4), torch.randn(1, 1, 3, 4)
    zero = torch.zeros(1, dtype=torch.long)
    out, lse = attend_rows(q, kv, kv, torch.full((1, 1, 2), -1), scale=1.0, starts=zero, sink_size=0,
                           tail_starts=zero, lengths=zero)
    assert torch.equal(out, torch.zeros(1, 2, 4)) and torch.isneginf(lse).all()


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("block", [3, 1024])
def test_dense_attention_in_blocks(window, block):
    q, k, v = torch.randn(2, 4, 30, 8), torch.randn(2, 2, 50, 8), torch.randn(2, 2, 50, 8)
    mask = torch.ones(2, 50)
    mask[1, :6] = 0
    rows, columns = torch.arange(20, 50)[:, None], torch.arange(50)
    seen = (columns <= rows) & (columns > rows - (window or 1000))
    seen = seen & mask[:, None, None].bool()
    scores = (q @ k.repeat_interleave(2, 1).mT) * 0.3
    want = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v.repeat_interleave(2, 1)
    got = dense_attention(q, k, v, scale=0.3, key_mask=mask, window=window, block=block)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
