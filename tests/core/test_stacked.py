"""Layers that are built side by side as rows of one batch have what each has that is built by itself."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sparsekv.artifacts.phi import PhiLayer
from sparsekv.core import stacked
from sparsekv.core.estimators import PhiEstimator
from sparsekv.core.index import RouterLayer
from sparsekv.core.layer import LayerView, Queries
from sparsekv.core.regions import Regions
from sparsekv.core.rope import RopeTable
from sparsekv.core.selectors import SELECTORS
from sparsekv.core.selectors.base import Selector
from sparsekv.core.step import build, build_layers, sparse_step
from sparsekv.kernels import QueryModel, Sketch
from sparsekv.models.feature_map import CentredMap, FeatureMap, FeatureMaps

HEADS, DIM, BUCKETS, LENGTH, BYTES, WIDE = 2, 8, 12, 150, 4, 2


def tables(rows: int, pads: tuple[int, ...]) -> RopeTable:
    places = (torch.arange(LENGTH + 1) - torch.tensor(pads[:rows])[:, None]).clamp(min=0)
    angle = places[..., None] * (10.0 ** -torch.linspace(0, 2, DIM // 2))
    angle = torch.cat([angle, angle], dim=-1)
    return RopeTable("half", angle.cos(), angle.sin())


def layers_of(count: int, pads: tuple[int, ...], space: str, scores: str, sketched: bool):
    g, rows = torch.Generator().manual_seed(7), len(pads)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    regions = Regions.at_prefill_end(torch.tensor(pads), LENGTH, 3, 9)
    rope, rank = tables(rows, pads), 2 * BYTES - WIDE
    views, trained = [], []
    for layer in range(count):
        keys, values = draw(rows, HEADS, LENGTH + 1, DIM) * 1.5 + layer, draw(rows, HEADS, LENGTH + 1, DIM)
        views.append(LayerView(keys, values, regions=regions, scale=DIM**-0.5, num_query_heads=2 * HEADS,
                               layer_idx=layer, num_layers=count, rope=rope,
                               recent_queries=draw(rows, 2 * HEADS, 20, DIM), recent_end=LENGTH))
        weights = QueryModel(draw(HEADS, DIM, 5), draw(HEADS, 5), draw(HEADS, 5, BUCKETS), draw(HEADS, BUCKETS))
        sketch = Sketch(draw(HEADS, DIM, rank), draw(HEADS, rank), draw(HEADS, DIM, rank))
        trained.append(RouterLayer(torch.nn.functional.normalize(draw(HEADS, BUCKETS, DIM), dim=-1),
                                   weights if scores == "mlp" else None, space, scores, sketch if sketched else None,
                                   BYTES if sketched else 0))
    return [replace(v, keys=v.keys[:, :, :LENGTH], values=v.values[:, :, :LENGTH]) for v in views], views, trained


def lengthened(view: LayerView, step: LayerView):
    """A view's regions with one more token, and then with the border moved: those before it, first none."""
    step.regions = view.regions.grown(LENGTH + 1)
    yield None
    old, step.regions = step.regions, step.regions.moved(LENGTH - 4, LENGTH)
    yield old


def same(a: object, b: object, name: str) -> None:
    if isinstance(a, tuple):
        for x, y in zip(a, b, strict=True):
            same(x, y, name)
    elif isinstance(a, Tensor):
        torch.testing.assert_close(a, b, msg=lambda text: f"{name}: {text}")
    else:
        assert a == b, name


@pytest.mark.parametrize(("name", "options", "scores", "sketched"), [
    ("router", {}, "mean_key", False), ("router", {"adapt": False}, "mean_key", False), ("router", {}, "mlp", False),
    ("sketch", {}, "mean_key", True), ("sketch", {"candidates": 0.5}, "mean_key", True),
    ("sketch", {"candidates": 0.5, "fit": "fitted"}, "mean_key", True), ("quest", {}, "mean_key", False)])
@pytest.mark.parametrize("pads", [(0,), (0, 31, 90)])
@pytest.mark.parametrize("space", ["rot", "pre"])
def test_layers_side_by_side_are_each_by_itself(monkeypatch, name, options, scores, sketched, pads, space) -> None:
    views, steps, trained = layers_of(5, pads, space, scores, sketched)
    layer_bytes = views[0].keys.numel() * views[0].keys.element_size()
    monkeypatch.setattr(stacked, "STACKED_BYTES", 3 * layer_bytes)

    def selectors() -> list[Selector]:
        made = [SELECTORS[name](token_budget=0.1, **options) for _ in trained]
        for one, layer in zip(made, trained, strict=True):
            if one.is_trained():
                one.layer = layer
        return made

    builds = []
    kind = SELECTORS[name]
    monkeypatch.setattr(kind, "build", lambda self, view, own=kind.build: (builds.append(1), own(self, view))[1])
    together, alone = selectors(), selectors()
    build_layers([copy.copy(v) for v in views], together, [None] * len(views))
    stacks = name != "quest" and scores != "mlp"
    assert len(builds) == (2 if stacks else 5)  # groups of 2 and 3
    for view, step, one, other in zip(views, steps, together, alone, strict=True):
        build(view, other, None)
        assert set(one.__dict__) == set(other.__dict__)
        for key in one.__dict__.keys() - {"layer"}:
            same(getattr(one, key), getattr(other, key), key)
        if one.is_trained():
            assert one.layer is other.layer
        # chosen alike, and grown alike
        queries = Queries.last(torch.randn(len(pads), 2 * HEADS, 1, DIM, dtype=torch.float64), LENGTH + 1, view.rope)
        for old in lengthened(view, step):
            for x in (one, other) if old else ():
                x.prepare(step)
                x.extend(step, old)
            found, wanted = (sparse_step(step, queries, x, None) for x in (one, other))
            torch.testing.assert_close(found.out, wanted.out)
            assert torch.equal(found.selection.as_tokens(), wanted.selection.as_tokens())


def phi_layers(count: int, *, centred: bool, capped: bool, blocks: int = 0) -> list[PhiLayer]:
    torch.manual_seed(5)
    made = []
    for _ in range(count):
        query = FeatureMap(2 * HEADS, DIM, 6, 10).weights()
        keys = CentredMap(HEADS, DIM, 6, 7, shared=True) if centred else None
        plain = FeatureMap(HEADS, DIM, 6, 7, blocks=blocks).weights() if keys is None else keys.plain.weights()
        maps = FeatureMaps(query, plain, None if keys is None else keys.centred.weights())
        made.append(PhiLayer(maps.map(lambda w: w.detach().double()), torch.zeros(1, 2 * HEADS).double(),
                             capped=capped))
    return made


@pytest.mark.parametrize(("centred", "capped", "blocks"), [(True, True, 0), (False, False, 0), (True, False, 0),
                                                          (False, True, 1)])
@pytest.mark.parametrize("pads", [(0,), (0, 31, 90)])
def test_layers_summarised_at_once_are_each_by_itself(monkeypatch, centred, capped, blocks, pads) -> None:
    views, steps, _ = layers_of(5, pads, "rot", "mean_key", False)
    monkeypatch.setattr(stacked, "SUMMED_BYTES", 3 * views[0].keys.numel() * views[0].keys.element_size())
    sums, own_sum = [], PhiEstimator._sum
    monkeypatch.setattr(PhiEstimator, "_sum", lambda *given: (sums.append(1), own_sum(*given))[1])
    maps = phi_layers(5, centred=centred, capped=capped, blocks=blocks)
    together, alone = ([PhiEstimator(layer) for layer in maps] for _ in range(2))
    selectors = [SELECTORS["topk"](token_budget=9) for _ in views]
    build_layers(views, selectors, together)
    assert len(sums) == 2  # groups of 2 and 3
    for view, step, selector, one, other in zip(views, steps, selectors, together, alone, strict=True):
        build(view, selector, other)
        for name in one.__dict__.keys() - {"layer", "calibrated", "of_keys", "key_map"}:
            same(getattr(one, name), getattr(other, name), name)
        same(one.key_map, other.key_map, "key_map")
        assert one.layer.maps is other.layer.maps and all(x.is_contiguous() for x in one.state[:3])
        queries = Queries.last(torch.randn(len(pads), 2 * HEADS, 1, DIM, dtype=torch.float64), LENGTH + 1, view.rope)
        for old in lengthened(view, step):
            for x in (one, other) if old else ():
                x.extend(step, old)
            found, wanted = (sparse_step(step, queries, selector, x) for x in (one, other))
            torch.testing.assert_close(found.out, wanted.out)


def test_layers_without_an_estimate_stand_between() -> None:
    views, _, _ = layers_of(4, (0,), "rot", "mean_key", False)
    first, _, third, _ = maps = phi_layers(4, centred=True, capped=True)
    estimators = [PhiEstimator(first), None, PhiEstimator(third), None]
    build_layers(views, [SELECTORS["topk"](token_budget=9) for _ in maps], estimators)
    for i in (0, 2):
        alone = PhiEstimator(maps[i])
        alone.build(views[i])
        same(estimators[i].state.s, alone.state.s, "s")


def test_layers_that_differ_are_built_apart() -> None:
    views, _, trained = layers_of(4, (0,), "rot", "mean_key", False)
    selectors = [SELECTORS["router"](token_budget=budget, layer=layer)
                 for budget, layer in zip((0.1, 0.2, 0.1, 0.2), trained, strict=True)]
    assert sorted(map(tuple, stacked.alike(views, selectors, stacked.STACKED_BYTES))) == [(0, 2), (1, 3)]
    views[2].scale = 1.0
    assert sorted(map(tuple, stacked.alike(views, selectors, stacked.STACKED_BYTES))) == [(0,), (1, 3), (2,)]


def test_layers_that_grow_alike_read_borders_once() -> None:
    """One object for all of them, though each grows by itself."""
    one = other = Regions.at_prefill_end(torch.tensor([0, 9]), LENGTH, 3, 9)
    assert one.edges == [3, 12, 141, 141]
    for step in range(3):
        one, other = (x.grown(LENGTH + step).moved(LENGTH - 9 + step, LENGTH + step) for x in (one, other))
        assert one is other and one.length == LENGTH + step and one.edges[2:] == [LENGTH - 9 + step] * 2
    assert one.grown(LENGTH + 9).__dict__["edges"] is one.edges, "known without a wait"
