"""The selector sketch against its formulas written out; its codes grow, are forked and reordered with the cache."""

from __future__ import annotations

import copy
import math
import warnings
from dataclasses import dataclass, replace

import pytest
import torch
from test_selectors import CASES, best, chosen, each, group_of, mid
from tiny import attach, make_model, prompt
from tiny_artifacts import artifacts
from views import built, extended, make_view

import sparsekv
from sparsekv.core.buckets import Moves
from sparsekv.core.index import RouterLayer
from sparsekv.core.layer import LayerView
from sparsekv.core.selectors import SELECTORS
from sparsekv.kernels import Sketch, decode_codes
from sparsekv.util.errors import SparseKVError

BYTES, WIDE, BUDGET = 4, 2, 7


@dataclass
class Trained:
    """Six buckets and a random sketch for every layer, two KV heads of dimension 8."""

    sketched: bool = True

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(4)
        self.centroids = torch.nn.functional.normalize(torch.randn(1, 2, 6, 8, generator=g), dim=-1)
        rank = 2 * BYTES - WIDE
        self.sketch = Sketch(torch.randn(1, 2, 8, rank, generator=g), torch.randn(1, 2, rank, generator=g),
                             torch.randn(1, 2, 8, rank, generator=g)) if self.sketched else None

    def layer(self, layer_idx: int) -> RouterLayer:
        sketch = None if self.sketch is None else Sketch(*(x[0] for x in self.sketch))
        return RouterLayer(self.centroids[0], None, "rot", "mean_key", sketch, BYTES if self.sketched else 0)


def selector(view: LayerView, **options):
    return built(SELECTORS["sketch"](**{"token_budget": BUDGET, "layer": Trained().layer(0), **options}), view)


def bin_of(share: float) -> int:
    """Eight to a doubling, and one for all that is below 2⁻²⁵."""
    mantissa, exponent = math.frexp(share)
    return 8 * exponent + math.floor(16 * mantissa) - 8 if share >= 2**-25 else -1000


def literal(found, view, queries, b: int, h: int, t: int, candidates: list[int]) -> set[int]:
    """The best candidates by codes made one number at a time, of one bin the first."""
    sketch = found.sketch
    keys, centre = (x[h] if found.basis is None else x[b, h] for x in sketch[:2])
    asks = sketch.queries[b, h]
    largest = [127] * WIDE + [7] * (sketch.rank - WIDE)
    shares = []
    for g in group_of(view, h):
        scores = {}
        for i in candidates:
            code = [max(-m, min(m, math.floor(x + 0.5)))
                    for x, m in zip((view.keys[b, h, i] @ keys - centre).tolist(), largest, strict=True)]
            scores[i] = float(sum(x * y for x, y in zip(code, (queries.rot[b, g, t] @ asks).tolist(), strict=True)))
        top = max(scores.values(), default=0.0)
        weights = {i: math.exp((s - top) * view.scale) for i, s in scores.items()}
        shares.append({i: w / sum(weights.values()) for i, w in weights.items()})
    return best({i: bin_of(sum(s[i] for s in shares)) for i in candidates}, BUDGET)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("fit", ["fixed", "fitted"])
@pytest.mark.parametrize("candidates", [0.4, 1.0])
def test_sketch(case: dict, fit: str, candidates: float) -> None:
    before, queries, step = make_view(**case)
    found = selector(before, fit=fit, candidates=candidates, adapt=False)
    for b in range(before.keys.shape[0]):  # a share of the context, and four times the budget where there are as many
        wanted = max(math.ceil(candidates * float(before.regions.context[b])), 4 * BUDGET)
        assert int(found.pool[b]) == min(wanted, len(mid(before, b)))
    listed = built(SELECTORS["router"](token_budget=candidates, layer=Trained().layer(0), adapt=False), before)
    listed.budget, listed.widest = found.pool, found.widest_pool
    pool, read = listed.select(step, queries), found.select(step, queries)
    for row, b, t in each(step, queries):
        for h in range(step.num_kv_heads):
            among = mid(step, b) if candidates == 1 else [i for i in pool.tokens[row, h].tolist() if i >= 0]
            assert chosen(read, row, h) == literal(found, step, queries, b, h, t, among)


@pytest.mark.parametrize("fit", ["fixed", "fitted"])
def test_without_a_share_all_codes_are_scored_until_they_outweigh_the_means(fit: str, monkeypatch) -> None:
    """Six buckets of dimension 8 and codes of 4 bytes: 12 tokens."""
    monkeypatch.setattr(sparsekv.core.selectors.router, "ALONE", sparsekv.core.buckets.BEFORE_CODES)
    monkeypatch.setattr(sparsekv.core.selectors.sketch, "ALL_CODES", 0)
    before, queries, step = make_view(batch=2, pads=(0, 8), length=24, new=40)
    assert int(before.regions.mid_sizes.max()) == 11
    found, every = (selector(before, fit=fit, candidates=c) for c in (None, 1.0))
    assert found.buckets is None and every.buckets is None
    assert found.cost_bytes(before) == every.cost_bytes(before)
    assert torch.equal(found.select(step, queries).tokens, every.select(step, queries).tokens)
    short = found.fork()
    extended(found, step, 60)
    assert found.buckets is not None and short.buckets is None
    buckets = built(SELECTORS["router"](token_budget=found.pool.max().item(), layer=Trained().layer(0)), step)
    assert torch.equal(found.buckets.order, buckets.buckets.order)
    pool = buckets.select(step, queries)
    read = found.select(step, queries)
    for row, _, _ in each(step, queries):
        assert all(chosen(read, row, h) <= chosen(pool, row, h) for h in range(2))


def test_rows_are_chosen_where_there_is_no_index() -> None:
    before, _, _ = make_view(batch=2, pads=(0, 30))
    found = selector(before, candidates=1.0)
    codes = found.codes
    found.take_rows(torch.tensor([1, 0, 1]))
    assert found.buckets is None and torch.equal(found.codes, codes[[1, 0, 1]])


def test_the_fitted_basis_tells_keys_apart_as_the_request_asks() -> None:
    """With queries of few directions a code of few channels chooses what exact scores choose."""
    before, queries, step = make_view(new=2, length=300)
    few = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)) * torch.tensor([3.0, 2.0] + [0.01] * 6)[:, None]
    before, step = (replace(v, recent_queries=v.recent_queries @ few) for v in (before, step))
    queries = replace(queries, rot=queries.rot @ few)
    exact = built(SELECTORS["topk"](token_budget=10), before).select(step, queries)
    shared = {}
    for fit in ("fixed", "fitted"):
        read = selector(before, fit=fit, candidates=1.0, token_budget=10).select(step, queries)
        shared[fit] = sum(len(chosen(read, row, h) & chosen(exact, row, h)) for row in range(2) for h in range(2)) / 40
    assert shared["fitted"] > 0.85 > 0.6 > shared["fixed"]


def test_codes_grow_as_if_made_at_once() -> None:
    before, queries, step = make_view(batch=2, pads=(0, 30), new=40)
    found = selector(before, fit="fixed", adapt=False)
    other = found.fork()
    extended(found, step, 110)
    assert torch.equal(found.side, other.side)
    assert found.codes.shape[2] == 110 and other.codes.shape[2] == 80
    built(once := other.fork(), step)
    assert torch.equal(found.codes, once.codes) and not torch.equal(found.side, once.side)
    once.side = other.side
    assert torch.equal(found.select(step, queries).tokens, once.select(step, queries).tokens)
    found.take_rows(torch.tensor([1, 0, 1]))
    assert torch.equal(found.codes[0], once.codes[1]) and torch.equal(found.side[2], other.side[1])
    assert torch.equal(found.pool, once.pool[[1, 0, 1]])


def test_the_basis_is_the_requests_own_until_it_has_doubled() -> None:
    before, _, step = make_view(batch=2, pads=(0, 30), new=120)
    found = selector(before, adapt=False, fit="fitted")
    basis, codes = found.basis, found.codes
    assert basis.keys.shape[0] == 2
    extended(found, step, 110)
    assert found.basis is basis and torch.equal(found.codes[:, :, :80], codes) and found.codes.shape[2] == 110
    extended(found, step, 200)
    assert found.basis is not basis and found.codes.shape[2] == 200
    once = selector(step, adapt=False, fit="fitted")
    step.regions = step.regions.moved(200, step.length)
    built(once, step)
    torch.testing.assert_close(found.basis.keys, once.basis.keys)
    first = found.basis.keys[0]
    found.take_rows(torch.tensor([1, 0]))
    assert torch.equal(found.basis.keys[1], first)


def test_without_queries_of_the_prompt_the_basis_is_the_artifacts() -> None:
    before, _, _ = make_view()
    found, fixed = (selector(replace(before, recent_queries=None), fit=fit) for fit in ("fitted", "fixed"))
    assert found.basis is None and torch.equal(found.codes, fixed.codes)
    assert decode_codes(found.codes, 2 * BYTES - WIDE).abs().max() <= 127


def test_an_artifact_without_sketches_decodes_by_buckets_alone_and_says_so() -> None:
    before, queries, step = make_view(batch=2, pads=(0, 20))
    with pytest.warns(UserWarning, match="trained without sketches and decodes by buckets alone; train it again"):
        sparsekv.attach(model := make_model(), selector="sketch", router=artifacts(model, sketched=False)[0])
    found = selector(before, layer=Trained(sketched=False).layer(0), candidates=1.0)
    plain = built(SELECTORS["router"](token_budget=BUDGET, layer=Trained(sketched=False).layer(0)), before)
    assert torch.equal(found.select(step, queries).tokens, plain.select(step, queries).tokens)
    extended(found, step, 85)
    assert found.codes is None


@pytest.mark.parametrize(("options", "message"), [
    ({"fit": "turned"}, "unknown fit 'turned': expected one of fixed, fitted"),
    ({"candidates": 1.5}, "candidates are a share of the context between 0 and 1, found 1.5"),
    ({"probes": 3, "token_budget": None}, "reads tokens and no whole buckets")])
def test_bad_options_are_refused(options: dict, message: str) -> None:
    with pytest.raises(SparseKVError, match=message):
        SELECTORS["sketch"](**{"token_budget": 3, "layer": Trained().layer(0), **options}).validate()


@pytest.mark.parametrize("fit", ["fixed", "fitted"])
def test_everything_selected_is_the_plain_model(fit: str) -> None:
    model, ids = make_model(), prompt(75)
    plain = model.generate(ids, max_new_tokens=9, do_sample=False)
    router, _ = artifacts(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with attach(model, router=router, token_budget=1.0, fit=fit, dense_layers=()) as attachment:
            assert torch.equal(model.generate(ids, max_new_tokens=9, do_sample=False), plain)
    assert attachment.decoding.selector.name == "sketch" and attachment.report()["sparse_calls"] > 0
    for options in ({"router": artifacts(model, sketched=False)[0]}, {"router": router, "probes": 2}):
        assert attach(model, **options).decoding.selector.name == "router"


def test_a_prefix_has_the_codes_it_was_saved_with(tmp_path) -> None:
    """Codes are made when decoding begins, from keys and queries that the prefix holds."""
    model, ids = make_model(), prompt(90)
    router, _ = artifacts(model)
    with attach(model, router=router, token_budget=9) as attachment:
        cache = attachment.prefill(ids[:, :80])
        attachment.save_prefix(cache, tmp_path / "prefix")
        again = attachment.load_prefix(tmp_path / "prefix")
        for held in (cache, again):
            model(ids[:, 80:81], past_key_values=held, use_cache=True)
        for a, b in zip(cache.layers[1:], again.layers[1:], strict=True):
            assert torch.equal(a.state.selector.codes, b.state.selector.codes)


@pytest.mark.parametrize("scores", ["mean_key", "mlp"])
@pytest.mark.parametrize("fit", ["fixed", "fitted"])
def test_a_padded_row_chooses_as_it_does_alone(fit: str, scores: str, monkeypatch) -> None:
    """Up to 25 tokens of the mid region all codes are scored: rows that stay short, outgrow that, and are long; keys
    that something is fitted to are spaced apart."""
    monkeypatch.setattr(sparsekv.core.index, "FITTED_KEYS", 16)
    monkeypatch.setattr(sparsekv.core.selectors.router, "BEFORE_CODES", Moves(4, 2))
    model = copy.deepcopy(make_model()).double()
    router, _ = artifacts(model, scores=scores, space="rot")
    rows = [prompt(length, seed=length) for length in (9, 24, 90, 41)]
    new = prompt(14, seed=5)

    def logits(ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        options = {"router": router, "fit": fit, "token_budget": 3, "sink_size": 0, "window_size": 0}
        with torch.no_grad(), attach(model, decode_window=2, **options) as attachment:
            cache, found = attachment.prefill(ids, mask), []
            for token in new[0]:
                places = {}
                if mask is not None:
                    mask = torch.cat([mask, mask.new_ones(len(ids), 1)], dim=1)
                    places = {"attention_mask": mask, "position_ids": mask.sum(-1, keepdim=True) - 1}
                found.append(model(token.expand(len(ids), 1), past_key_values=cache, use_cache=True, **places).logits)
        return torch.cat(found, dim=1)

    for batch in (rows, rows[:2], rows[:1], rows[1:2]):
        width = max(row.shape[1] for row in batch) + 3
        mask = torch.stack([torch.arange(width) >= width - row.shape[1] for row in batch]).long()
        padded = torch.stack([torch.cat([row.new_zeros(width - row.shape[1]), row[0]]) for row in batch])
        alone = torch.cat([logits(row, None) for row in batch])
        torch.testing.assert_close(logits(padded, mask), alone, rtol=1e-6, atol=1e-6)
