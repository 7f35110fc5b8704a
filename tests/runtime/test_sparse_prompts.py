"""Prompts read by blocks: against a literal transcription, and through `attach`."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import pytest
import torch
from tiny import attach, make_model, prompt
from tiny_artifacts import artifacts
from views import make_view

from sparsekv.core import prefill
from sparsekv.core.layer import LayerView
from sparsekv.core.prefill import SparsePrompts
from sparsekv.core.regions import Regions
from sparsekv.kernels.block_attention import block_attention
from sparsekv.util.errors import SparseKVError

FEW = SparsePrompts(share=0.25, least=100, exact=130, shortest=0)
BLOCK, STRIDE = 128, 8


def masses(q: torch.Tensor, keys: torch.Tensor, own: int, scale: float) -> list[float]:
    """What a block of queries `[128, d]` of one head gives to each of `own` blocks of keys before it and to itself, by
    antidiagonals."""
    found = [0.0] * (own + 1)
    for group in range(BLOCK // STRIDE):
        asking = q[group * STRIDE:(group + 1) * STRIDE]
        scores = []
        for other in range(own * BLOCK // STRIDE + group + 1):
            given = keys[other * STRIDE:(other + 1) * STRIDE]
            scores.append(float((asking.flip(0) * given).sum()) * scale / STRIDE)
        top = max(scores)
        weights = [math.exp(x - top) for x in scores]
        for other, weight in enumerate(weights):
            found[other * STRIDE // BLOCK] += weight / sum(weights)
    return found


def literal(view: LayerView, query: torch.Tensor, prompts: SparsePrompts, after: int) -> tuple[torch.Tensor, int]:
    """The output in float64, and how many pairs of query and key in blocks were not read."""
    batch, heads, count, _ = query.shape
    total, begin, group = view.keys.shape[2], view.keys.shape[2] - count, view.group
    q, k, v = query.double(), view.keys.double(), view.values.double()
    out, left = torch.zeros_like(q), 0
    for b in range(batch):
        chosen: dict[int, set[tuple[int, int]]] = {}
        for own in range(total // BLOCK):
            first, last = own * BLOCK, (own + 1) * BLOCK
            if first < begin or last > total + after - prompts.exact:
                continue
            rows = slice(first - begin, last - begin)
            mass = {(h, j): x for h in range(heads)
                    for j, x in enumerate(masses(q[b, h, rows], k[b, h // group], own, view.scale))}
            mass |= {(h, j): math.inf for h in range(heads) for j in (0, own)}
            wanted = heads * (max(math.ceil(prompts.least / BLOCK), int(prompts.share * own + 0.5)) + 2)
            chosen[own] = set(sorted(mass, key=lambda x: -mass[x])[:wanted])
            left += BLOCK * BLOCK * (len(mass) - len(chosen[own]))
        for h in range(heads):
            for t in range(begin, total):
                seen = torch.arange(t + 1)
                if t // BLOCK in chosen:
                    read = [j for i, j in chosen[t // BLOCK] if i == h]
                    seen = seen[torch.isin(seen // BLOCK, torch.tensor(read))]
                scores = k[b, h // group, seen] @ q[b, h, t - begin] * view.scale
                if view.sinks is not None:
                    scores = torch.cat([scores, view.sinks[h].double()[None]])
                out[b, h, t - begin] = scores.softmax(0)[:len(seen)] @ v[b, h // group, seen]
    return out, left


def case(length: int, *, batch: int = 1, heads_q: int = 4, sinks: bool = False) -> tuple[LayerView, torch.Tensor]:
    view = make_view(length=length, batch=batch, heads_q=heads_q, dim=16)[0]
    query = torch.randn(batch, heads_q, length, 16, generator=torch.Generator().manual_seed(4)) * 1.5
    return replace(view, sinks=torch.linspace(1, 6, heads_q)) if sinks else view, query


def until(view: LayerView, end: int) -> LayerView:
    return replace(view, keys=view.keys[:, :, :end], values=view.values[:, :, :end])


@pytest.mark.parametrize(("given", "count"), [
    ({"length": 900}, 900), ({"length": 896, "heads_q": 6, "batch": 2}, 640), ({"length": 850, "sinks": True}, 700),
    ({"length": 300}, 40), ({"length": 60}, 60)], ids=str)
@pytest.mark.parametrize("after", [0, 40, 999])
def test_blocks_against_a_literal_transcription(given, count: int, after: int) -> None:
    view, query = case(**given)
    found = FEW.read(view, query[:, :, -count:], after=after)
    want, left = literal(view, query[:, :, -count:], FEW, after)
    torch.testing.assert_close(found.double(), want, rtol=1e-4, atol=1e-5)
    assert bool(left) == (given["length"] > 300)


def test_pieces_that_are_not_whole_blocks() -> None:
    """What stands outside whole blocks of a piece reads everything; pieces of whole blocks are the prompt at once."""
    view, query = case(900)
    for begin, end in ((0, 300), (300, 820), (820, 900)):
        found = FEW.read(until(view, end), query[:, :, begin:end], after=900 - end)
        want, _ = literal(until(view, end), query[:, :, begin:end], FEW, 900 - end)
        torch.testing.assert_close(found.double(), want, rtol=1e-4, atol=1e-5)
    parts = [FEW.read(until(view, end), query[:, :, begin:end], after=900 - end)
             for begin, end in ((0, 256), (256, 640), (640, 768), (768, 896), (896, 900))]
    torch.testing.assert_close(torch.cat(parts, dim=2), FEW.read(view, query), rtol=1e-4, atol=1e-5)


def test_a_turn_shorter_than_the_last_tokens_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands across a border of blocks."""
    view, query = case(900)
    calls, plain = [], prefill.dense
    monkeypatch.setattr(prefill, "dense", lambda *a: calls.append(a[2]) or plain(*a))
    found = FEW.read(until(view, 780), query[:, :, 740:780])
    assert calls == [780]
    torch.testing.assert_close(found, plain(until(view, 780), query[:, :, 740:780], 780))


@pytest.mark.parametrize("limits", [{"MOST_BLOCKS": 2}, {"MOST_BYTES": 3 * 4 * 4 * 16 * 6}, {"MOST_BYTES": 1}],
                         ids=str)
def test_a_few_blocks_of_queries_at_once(limits: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    view, query = case(900)
    want, sizes, plain = FEW.read(view, query), [], prefill.block_scores
    for name, value in limits.items():
        monkeypatch.setattr(prefill, name, value)

    def scores(q: torch.Tensor, k: torch.Tensor, **how: float) -> torch.Tensor:
        sizes.append(q.shape[2] // BLOCK)
        return plain(q, k, **how)

    monkeypatch.setattr(prefill, "block_scores", scores)
    torch.testing.assert_close(FEW.read(view, query), want, rtol=1e-4, atol=1e-5)
    assert sizes == {2: [2, 2, 2], 1: [1] * 6}.get(next(iter(limits.values())), [3, 3])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device runs them")
def test_a_prompt_by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    view, query = case(650, sinks=True)
    want = FEW.read(view, query, after=130)
    monkeypatch.setattr(sys.modules[block_attention.__module__], "on_device", lambda x: True)
    torch.testing.assert_close(FEW.read(view, query, after=130), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_lists_of_everything_are_full_attention(family: str) -> None:
    model, ids = make_model(family), prompt(900, 2)
    with attach(model, selector="dense") as dense:
        full = dense.prefill(ids)
    with attach(model, selector="dense", prefill=replace(FEW, share=1.0)) as attachment:
        every = attachment.prefill(ids)
    with attach(model, selector="dense", prefill=FEW) as attachment:
        few, parts = attachment.prefill(ids), attachment.prefill(ids, chunk_size=128)
    for a, b, c, d in zip(full.layers, every.layers, few.layers, parts.layers, strict=True):
        torch.testing.assert_close(a.keys, b.keys, rtol=1e-4, atol=1e-4)
        if family != "gemma3":  # its first layer has a window: keys of all layers differ from the next on
            torch.testing.assert_close(c.keys, d.keys, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(full.layers[-1].keys, few.layers[-1].keys, rtol=1e-2)


def test_prompts_that_are_short_are_read_densely() -> None:
    model, ids = make_model("llama"), prompt(900, 1)
    with attach(model, selector="dense") as dense:
        full = dense.prefill(ids)
    for shortest, same in ((901, True), (900, False)):
        with attach(model, selector="dense", prefill=replace(FEW, shortest=shortest)) as attachment:
            for found in (attachment.prefill(ids), attachment.prefill(ids, chunk_size=256)):
                assert torch.allclose(full.layers[-1].keys, found.layers[-1].keys, rtol=1e-4, atol=1e-4) == same


@pytest.mark.parametrize("completed", [False, True])
def test_an_answer_after_a_sparse_prompt(completed: bool) -> None:
    """Maps complete steps; what the prompt's tokens are does not depend on them."""
    model, ids = make_model("llama"), prompt(700, 1)
    router, phi = artifacts(model)
    how = {"router": router, "selector": "sketch", "token_budget": 12, "prefill": FEW}
    with attach(model, **how) as attachment:
        want = attachment.prefill(ids)
    with attach(model, **how, **({"phi": phi} if completed else {})) as attachment:
        cache = attachment.prefill(ids)
        found = attachment.generate(ids, max_new_tokens=5)
        assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), found)
        assert attachment.report()["sparse_calls"]
    assert found.shape == (1, 705)
    assert all(torch.equal(a.keys, b.keys) for a, b in zip(want.layers, cache.layers, strict=True))


def test_rows_with_padding_are_read_densely() -> None:
    model, ids = make_model("llama"), prompt(900, 2)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    with attach(model, selector="dense") as dense:
        full = dense.prefill(ids, mask)
    with attach(model, selector="dense", prefill=FEW) as attachment:
        found = attachment.prefill(ids, mask)
    for a, b in zip(full.layers, found.layers, strict=True):
        torch.testing.assert_close(a.keys, b.keys, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bad", [{"share": 1.5}, {"share": float("nan")}, {"least": -1}, {"exact": 2.5},
                                 {"shortest": -1}])
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
    how = {"selector": "dense", "prefill": SparsePrompts(share=0.2, least=256, exact=100, shortest=0)}
    with attach(model, **how) as attachment:
        want = attachment.prefill(ids)
    there = make_model("llama", attention_bias=False).cuda()
    with attach(there, **how) as attachment:
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
