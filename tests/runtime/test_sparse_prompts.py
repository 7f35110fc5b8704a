"""Prompts read by one list a KV head for every chunk: against a literal transcription, and through `attach`."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from test_phi_precision import layer
from tiny import attach, make_model, prompt
from tiny_artifacts import artifacts
from views import make_view

from sparsekv.core import prefill
from sparsekv.core.estimators import PhiEstimator
from sparsekv.core.prefill import SparsePrompts, prefill_chunks
from sparsekv.core.regions import Regions
from sparsekv.foundation.errors import SparseKVError
from sparsekv.kernels import add_centre, add_rest, chunk_attention, chunk_tokens, dense_attention, log_phi, phi_sums
from sparsekv.kernels.histogram import bins_of

FEW = SparsePrompts(share=0.1, least=5, chunk=16, sink=3, window=10, exact=20, shortest=0)


def spans(total: int, count: int) -> list[tuple[int, int, bool]]:
    border = max(total - count, total - FEW.exact)
    found = [(a, min(a + FEW.chunk, border), True) for a in range(total - count, border, FEW.chunk)]
    return [*found, (border, total, False)]


def chosen(q: torch.Tensor, keys: torch.Tensor, mid: list[int], count: int, scale: float) -> list[int]:
    """The best tokens by the means of runs of the queries `[G, c, d]`, 128 // G runs at most, a power of two; of one
    bin of a histogram the first."""
    runs = 1
    while 2 * runs * q.shape[0] <= 128 and 2 * runs <= q.shape[1]:
        runs *= 2
    size = -(-q.shape[1] // runs)
    every = torch.cat([q, q[:, -1:].expand(-1, size * runs - q.shape[1], -1)], dim=1)
    means = every.reshape(-1, size, q.shape[2]).mean(1)
    bins = bins_of((means @ keys[mid].T * scale).softmax(-1).sum(0)).int()
    return sorted(mid[i] for i in bins.argsort(descending=True, stable=True)[:count].tolist())


@pytest.mark.parametrize(("case", "count", "completed"), [
    ({"length": 100}, 100, False), ({"length": 93, "heads_q": 6, "batch": 2}, 70, False), ({"length": 100}, 90, True)])
def test_chunks_against_a_literal_transcription(case, count: int, completed: bool) -> None:
    view = make_view(**case, sink=3, dim=32)[0]
    batch, heads_kv, total, dim = view.keys.shape
    group = view.group
    maps = layer(torch.randn(2, 2, 500, 32), centred=True)._replace(capped=False)
    query = torch.randn(batch, view.num_query_heads, count, dim, generator=torch.Generator().manual_seed(4)) * 1.5
    estimator = PhiEstimator(maps) if completed else None
    found = prefill_chunks(view, query, FEW, estimator)
    mean, built, read = None, 0, 0
    for first, end, sparse in spans(total, count):
        mid = list(range(3, max(first - 10, 3)))
        budget = max(5, -(-first // 10))
        sparse &= budget < len(mid)
        read += sparse
        for b in range(batch):
            if sparse and (mean is None or len(mid) > 2 * built):
                mean, built = view.keys[:, :, mid].mean(2), len(mid)
            for h in range(heads_kv):
                mine = slice(h * group, h * group + group)
                at = slice(first - total + count, end - total + count)
                q = query[b, mine, at]
                taken = chosen(q, view.keys[b, h], mid, budget, view.scale) if sparse else mid
                before = [*range(min(3, first)), *taken, *range(max(first - 10, min(3, first)), first)]
                left = [i for i in mid if i not in taken]
                for t in range(first, end):
                    seen = [*before, *range(first, t + 1)]
                    for g in range(group):
                        one = q[g, t - first].double()
                        weights = (view.keys[b, h, seen].double() @ one * view.scale).exp()
                        values = view.values[b, h, seen].double()
                        if completed and sparse:
                            logs = add_centre(log_phi(q[g:g + 1, t - first][:, None], type(maps.maps.query)(
                                *(w[h * group + g:h * group + g + 1] for w in maps.query_map))),
                                q[g:g + 1, t - first][:, None], view.scale * mean[b, h:h + 1])[0, 0]
                            keys = maps.maps.log_phi_k(view.keys[b:b + 1], mean[b:b + 1])[0, h, left]
                            estimates = (logs + keys).double().exp().sum(-1)
                            weights, values = torch.cat([weights, estimates]), torch.cat([
                                values, view.values[b, h, left].double()])
                        want = weights @ values / weights.sum()
                        got = found[b, h * group + g, t - total + count].double()
                        torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-4)
    assert read > 2


@pytest.mark.parametrize("most", [2, 5])
@pytest.mark.parametrize(("batch", "kind"), [(1, None), (2, None), (1, "plain"), (2, "centred"), (1, "capped")])
def test_chunks_together_are_as_one_by_one(most: int, batch: int, kind: str | None, monkeypatch) -> None:
    view = make_view(length=300, batch=batch, sink=3, dim=32)[0]
    maps = layer(torch.randn(2, 2, 500, 32), centred=kind != "plain")._replace(capped=kind == "capped")
    maps = maps._replace(offsets=torch.stack([maps.offset, maps.offset + 1]), shares=(0.02, 0.3))
    query = torch.randn(batch, view.num_query_heads, 290, 32, generator=torch.Generator().manual_seed(4)) * 1.5
    wide = replace(FEW, share=0.01, least=8)
    found, sizes = [], []

    def listed(self, past, q):
        sizes.append(len(q) // batch)
        return plain(self, past, q)

    plain = SparsePrompts.listed
    monkeypatch.setattr(SparsePrompts, "listed", listed)
    for chunks in (1, most):
        monkeypatch.setattr(prefill, "MOST_CHUNKS", chunks)
        estimator = None if kind is None else PhiEstimator(maps)
        found.append(prefill_chunks(view, query, wide, estimator))
        assert max(sizes) == chunks
        if estimator is not None:
            found[-1] = (found[-1], *estimator.state[:3], *(estimator.state.moments or ()))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device has what stands in here")
@pytest.mark.parametrize(("batch", "completed"), [(1, False), (2, False), (1, True), (2, True)])
def test_a_prompt_by_gathered_rows(batch: int, completed: bool, monkeypatch) -> None:
    """The way of a GPU that has cuDNN's kernel, for which plain attention stands here; all else by its kernels."""

    def attention(q, k, v, scale, *, causal):
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        scores = q @ k.mT * scale
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), float("-inf"))
        return scores.softmax(-1) @ v, scores.logsumexp(-1)

    pytest.importorskip("triton")
    view = make_view(length=300, batch=batch, sink=3, dim=32)[0]
    query = torch.randn(batch, view.num_query_heads, 280, 32, generator=torch.Generator().manual_seed(4)) * 1.5
    maps = layer(torch.randn(2, 2, 500, 32), centred=True)._replace(capped=True)
    reader = replace(FEW, least=30)
    want = prefill_chunks(view, query, reader, PhiEstimator(maps) if completed else None)
    modules = [sys.modules[x.__module__] for x in (chunk_attention, chunk_tokens, dense_attention, phi_sums, add_rest)]
    for module in modules:
        monkeypatch.setattr(module, "on_device", lambda x: True)
    monkeypatch.setattr(modules[0], "splits", lambda *shape: True)
    monkeypatch.setattr(modules[0], "cudnn_attention", attention)
    found = prefill_chunks(view, query, reader, PhiEstimator(maps) if completed else None)
    torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-3)


def test_lists_of_other_sizes_and_too_many_bytes_are_read_apart(monkeypatch) -> None:
    view = make_view(length=300, sink=3, dim=32)[0]
    sizes = SparsePrompts(least=40, share=0.25, chunk=16, sink=3, window=10, shortest=0)
    assert [sizes.together(a, 9, view) for a in (0, 48, 64, 160, 176)] == [1, 1, 7, 1, 1]
    monkeypatch.setattr(prefill, "MOST_BYTES", 3 * 53 * 2 * 2 * 32 * 4)
    assert sizes.together(64, 9, view) == 3 and sizes.together(64, 2, view) == 2


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_a_list_of_everything_is_full_attention(family: str) -> None:
    model, ids = make_model(family), prompt(150, 2)
    with attach(model, selector="dense") as dense:
        full = dense.prefill(ids)
    with attach(model, selector="dense", prefill=replace(FEW, share=1.0)) as attachment:
        every = attachment.prefill(ids)
    with attach(model, selector="dense", prefill=FEW) as attachment:
        few, parts = attachment.prefill(ids), attachment.prefill(ids, chunk_size=32)
    for a, b, c, d in zip(full.layers, every.layers, few.layers, parts.layers, strict=True):
        torch.testing.assert_close(a.keys, b.keys, rtol=1e-4, atol=1e-5)
        if family != "gemma3":  # its first layer has a window: keys of all layers differ from the next on
            torch.testing.assert_close(c.keys, d.keys, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(full.layers[-1].keys, few.layers[-1].keys, rtol=1e-2)


def test_prompts_that_are_short_are_read_densely() -> None:
    model, ids = make_model("llama"), prompt(150, 1)
    with attach(model, selector="dense") as dense:
        full = dense.prefill(ids)
    for shortest, same in ((151, True), (150, False)):
        with attach(model, selector="dense", prefill=replace(FEW, shortest=shortest)) as attachment:
            for found in (attachment.prefill(ids), attachment.prefill(ids, chunk_size=40)):
                assert torch.allclose(full.layers[-1].keys, found.layers[-1].keys, rtol=1e-4, atol=1e-5) == same


@pytest.mark.parametrize("completed", [False, True])
def test_an_answer_after_a_sparse_prompt(completed: bool) -> None:
    model, ids = make_model("llama"), prompt(200, 1)
    router, phi = artifacts(model)
    how = {"router": router, "selector": "sketch", "token_budget": 12, "prefill": FEW}
    with attach(model, **how, **({"phi": phi} if completed else {})) as attachment:
        found = attachment.generate(ids, max_new_tokens=5)
        assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), found)
        assert attachment.report()["sparse_calls"]
    assert found.shape == (1, 205)


def test_rows_with_padding_are_read_densely() -> None:
    model, ids = make_model("llama"), prompt(120, 2)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    with attach(model, selector="dense") as dense:
        full = dense.prefill(ids, mask)
    with attach(model, selector="dense", prefill=FEW) as attachment:
        found = attachment.prefill(ids, mask)
    for a, b in zip(full.layers, found.layers, strict=True):
        torch.testing.assert_close(a.keys, b.keys, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bad", [{"share": 1.5}, {"share": float("nan")}, {"chunk": 0}, {"least": -1}, {"window": 2.5}])
def test_settings_that_mean_nothing(bad) -> None:
    with pytest.raises(SparseKVError, match=next(iter(bad))):
        SparsePrompts(**bad)


def test_arguments_that_cannot_work() -> None:
    model = make_model("llama")
    with pytest.raises(SparseKVError, match="prefill"):
        attach(model, selector="dense", prefill="fast")
    with pytest.raises(SparseKVError, match="SparsePrompts"):
        attach(model, selector="dense", prefill=0.1)
    with pytest.raises(SparseKVError, match="leave one of them out"):
        attach(model, selector="token_select", token_budget=9, prefill_chunk=16, prefill="sparse")


@pytest.mark.gpu
def test_the_kernels_read_a_prompt_as_their_twins_do() -> None:
    model, ids = make_model("llama"), prompt(3000, 2)
    how = {"selector": "dense", "prefill": SparsePrompts(share=0.2, least=200, chunk=512, window=64, exact=100,
                                                         shortest=0)}
    with attach(model, **how, phi=artifacts(model)[1]) as attachment:
        want = attachment.prefill(ids)
    there = make_model("llama", attention_bias=False).cuda()
    with attach(there, **how, phi=artifacts(there)[1]) as attachment:
        found = attachment.prefill(ids.cuda())
    for a, b in zip(want.layers, found.layers, strict=True):
        gap = (a.keys - b.keys.cpu()).norm() / a.keys.norm()
        assert float(gap) < 0.02
    there.cpu()


@pytest.mark.parametrize(("length", "sink", "window"), [(100, 3, 10), (8, 3, 10), (12, 3, 10), (10, 0, 0)])
def test_edges_of_equal_rows_are_known(length: int, sink: int, window: int) -> None:
    starts = torch.zeros(2, dtype=torch.long)
    known, read = (make(starts, length, sink, window) for make in (Regions.of_equal_rows, Regions.at_prefill_end))
    assert "edges" in vars(known) and known.edges == read.edges and known.equal == read.equal
    assert Regions.at_prefill_end(torch.tensor([0, 2]), 100, 3, 10).equal is None
