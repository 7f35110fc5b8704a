"""A prompt read sparsely in chunks against a literal transcription (TokenSelect §5.2)."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tiny import attach, make_model, prompt
from views import make_view

from sparsekv.core import prefill
from sparsekv.core.prefill import prefill_chunks
from sparsekv.core.regions import Regions
from sparsekv.core.selectors import SELECTORS
from sparsekv.util.errors import SparseKVError

SINK, WINDOW, CHUNK, BUDGET = 3, 10, 16, 12


def literal(view, query, budget: int, scaled: bool, contiguous: bool) -> torch.Tensor:
    """Token by token, head by head, in float64: what each attends to, and the softmax over it."""
    batch, heads, count, dim = query.shape
    total, group = view.keys.shape[2], heads // view.keys.shape[1]
    out = torch.zeros(batch, heads, count, dim, dtype=torch.float64)
    zero = torch.zeros(1, dtype=torch.long)
    pre = view.keys_pre(0, total)
    for b in range(batch):
        start = int(view.regions.starts[b])
        for first in range(total - count, total, CHUNK):
            chunk = range(first, min(first + CHUNK, total))
            tail = max(start, first - WINDOW)
            mid = list(range(min(start + SINK, tail), tail))
            votes = dict.fromkeys(mid, 0.0)
            for h in range(heads):
                q = query[b, h, [t - total + count for t in chunk]]
                if contiguous:
                    q = torch.stack([view.rope.turn(x[None], torch.tensor([t]), zero)[0]
                                     for x, t in zip(q, chunk, strict=True)])
                keys = pre if contiguous else view.keys
                s = {i: float(q.mean(0) @ keys[b, h // group, i]) * (view.scale if scaled else 1) for i in mid}
                top = max(s.values(), default=0.0)
                mass = sum(math.exp(x - top) for x in s.values())
                for i, x in s.items():
                    votes[i] += math.exp(x - top) / mass
            chosen = sorted(mid, key=lambda i: -votes[i])[:budget]
            before = sorted({*range(start, min(start + SINK, tail)), *chosen, *range(tail, first)})
            for t in chunk:
                seen = before + list(range(max(first, start), t + 1))
                for h in range(heads):
                    q, k = query[b, h, t - total + count], view.keys[b, h // group, seen]
                    if contiguous:
                        q = view.rope.turn(q[None], torch.tensor([t]), torch.tensor([len(seen) - 1]))[0]
                        k = view.rope.turn(k, torch.tensor(seen), torch.arange(len(seen)))
                    if seen:
                        weights = (k.double() @ q.double() * view.scale).softmax(0)
                        out[b, h, t - total + count] = weights @ view.values[b, h // group, seen].double()
    return out


@pytest.mark.parametrize(("case", "options"), [
    ({"length": 90}, {}), ({"length": 90}, {"scaled": True}), ({"length": 77, "heads_q": 6}, {"extrapolate": True}),
    ({"length": 90, "batch": 3, "pads": (0, 5, 60)}, {})])
@pytest.mark.parametrize("count", [40, 90])
def test_every_chunk_attends_to_what_its_mean_query_selects(case, options, count: int) -> None:
    view = make_view(**case, sink=SINK)[0]
    count = min(count, view.length)
    query = torch.randn(view.keys.shape[0], view.num_query_heads, count, view.keys.shape[3],
                        generator=torch.Generator().manual_seed(4)) * 1.5
    selector = SELECTORS["token_select"](token_budget=BUDGET, prefill_chunk=CHUNK, **options)
    found = prefill_chunks(view, query, selector.reader(SINK, WINDOW))
    want = literal(view, query, BUDGET, options.get("scaled", False), options.get("extrapolate", False))
    torch.testing.assert_close(found.double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", ["soft", "topk"])
def test_chunks_select_together_what_each_selects_alone(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an odd last chunk, a budget that grows, and room for the votes of two chunks. Hard votes have ties."""
    view = make_view(length=90, batch=2, sink=SINK)[0]
    query = torch.randn(2, 4, 70, 8, generator=torch.Generator().manual_seed(4)) * 1.5
    reader = SELECTORS["token_select"](token_budget=0.2, prefill_chunk=CHUNK, vote=how).reader(SINK, WINDOW)
    monkeypatch.setattr(prefill, "MOST_VOTES", 2 * 4 * 2 * 4 * 90)
    found = prefill_chunks(view, query, reader)
    alone = []
    for at in range(0, 70, CHUNK):
        end = 20 + min(at + CHUNK, 70)
        part = replace(view, keys=view.keys[:, :, :end], values=view.values[:, :, :end],
                       regions=Regions.at_prefill_end(view.regions.starts, end, SINK, WINDOW))
        alone.append(prefill_chunks(part, query[:, :, at:at + CHUNK], reader))
    torch.testing.assert_close(found, torch.cat(alone, dim=2), rtol=1e-4, atol=1e-5)


def test_what_reads_a_prompt_reads_it_in_chunks() -> None:
    view = make_view(length=90, sink=SINK)[0]
    query = torch.randn(1, 4, 60, 8, generator=torch.Generator().manual_seed(4))
    reader = SELECTORS["token_select"](token_budget=BUDGET, prefill_chunk=CHUNK).reader(SINK, WINDOW)
    want = prefill_chunks(view, query, reader)
    view.regions = Regions.at_prefill_end(view.regions.starts, 90, 0, 0)  # their starts count alone
    assert reader.shortest == 0 and all(torch.equal(reader.read(view, query, after=n), want) for n in (0, 90))


@pytest.mark.gpu
@pytest.mark.parametrize("extrapolate", [False, True])
def test_the_kernels_read_a_prompt_as_their_twins_do(extrapolate: bool) -> None:
    view = make_view(length=400, heads_q=6, dim=64, sink=SINK)[0]
    query = torch.randn(1, 6, 400, 64, generator=torch.Generator().manual_seed(4)) * 1.5
    selector = SELECTORS["token_select"](token_budget=40, prefill_chunk=64, extrapolate=extrapolate)
    want = prefill_chunks(view, query, selector.reader(SINK, WINDOW))
    regions = replace(view.regions, **{n: getattr(view.regions, n).cuda() for n in ("starts", "tail_starts")})
    rope = type(view.rope)("half", *(t.cuda() for t in view.rope.tables()))
    there = replace(view, keys=view.keys.cuda(), values=view.values.cuda(), regions=regions, rope=rope)
    found = prefill_chunks(there, query.cuda(), selector.reader(SINK, WINDOW))
    torch.testing.assert_close(found.cpu(), want, rtol=1e-3, atol=1e-3)


def test_padding_has_no_contiguous_positions() -> None:
    view = make_view(length=90, batch=2, pads=(0, 5), sink=SINK)[0]
    rope = replace(view, rope=type(view.rope)("half", *(t.expand(2, -1, -1) for t in view.rope.tables())))
    selector = SELECTORS["token_select"](token_budget=BUDGET, prefill_chunk=CHUNK, extrapolate=True)
    with pytest.raises(SparseKVError, match="one sequence at a time"):
        prefill_chunks(rope, torch.randn(2, 4, 90, 8), selector.reader(SINK, WINDOW))


def attached(model, budget: int, **options):
    return attach(model, selector="token_select", token_budget=budget, sink_size=SINK, window_size=WINDOW,
                           prefill_chunk=CHUNK, dense_below=0, **options)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_prompt_in_chunks_is_the_prompt_at_once(family: str) -> None:
    model, ids = make_model(family), prompt(100, 2)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    with attached(model, BUDGET) as attachment:
        whole = attachment.prefill(ids, mask)
        parts = attachment.prefill(ids, mask, chunk_size=2 * CHUNK)
    with attach(model, selector="dense") as dense:
        full = dense.prefill(ids, mask)
    for a, b in zip(whole.layers, parts.layers, strict=True):
        torch.testing.assert_close(a.keys, b.keys, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(whole.layers[-1].keys, full.layers[-1].keys, rtol=1e-2)


@pytest.mark.parametrize("extrapolate", [False, True])
def test_a_budget_for_everything_is_full_attention(extrapolate: bool) -> None:
    model, ids = make_model("llama"), prompt(100, 1)
    given = {"max_new_tokens": 3, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    plain = model.generate(ids, **given)
    with attached(model, 10_000, extrapolate=extrapolate):
        found = model.generate(ids, **given)
    for a, b in zip(plain.logits, found.logits, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("extrapolate", [False, True])
def test_the_published_settings_are_arguments_of_attach(extrapolate: bool) -> None:
    """A prompt shorter than sink and window is read whole."""
    model, ids = make_model("llama"), prompt(60, 1)
    plain = model.generate(ids, max_new_tokens=3, do_sample=False)
    with attach(model, selector="token_select", extrapolate=extrapolate, dense_below=0,
                         **SELECTORS["token_select"].PUBLISHED) as attachment:
        assert torch.equal(attachment.generate(ids, max_new_tokens=3), plain)
        decoding = attachment.decoding
    assert (decoding.sink_size, decoding.window_size, decoding.selector.token_budget) == (128, 512, 2048)
    assert decoding.selector.prefill_chunk == 512
