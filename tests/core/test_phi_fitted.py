"""Completion φ whose values are fitted to the request: the fit written out, and when it is made."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from literal import literal_step
from steps import tiny, trained

import sparsekv
from sparsekv.core.estimators import FittedPhi, PhiEstimator
from sparsekv.core.estimators.phi_fitted import AHEAD, RIDGE
from sparsekv.core.layer import LayerView, Queries, Selection
from sparsekv.core.regions import Regions
from sparsekv.core.rope import RopeTable, rotate
from sparsekv.core.selectors import SELECTORS
from sparsekv.foundation.errors import SparseKVError

HEADS, DIM, LENGTH, ASKED, SHARE = 2, 10, 61, 7, 0.1
STARTS = (0, 11, 55)
"""The first of the last row's queries is of no token."""


def tables(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin `[…, d]` of positions, scaled as some models do."""
    angles = positions[..., None].double() / 30.0 ** (torch.arange(DIM // 2) / (DIM // 2))
    angles = torch.cat([angles, angles], dim=-1)
    return 1.2 * angles.cos(), 1.2 * angles.sin()


def made(group: int, starts=STARTS) -> tuple[LayerView, torch.Tensor]:
    """A prefill, and its last queries `[B, Hq, w, d]` without RoPE."""
    torch.manual_seed(7)
    batch, starts = len(starts), torch.tensor(starts)
    keys, values = torch.randn(2, batch, HEADS, LENGTH, DIM, dtype=torch.float64)
    plain = torch.randn(batch, HEADS * group, ASKED, DIM, dtype=torch.float64)
    cos, sin = tables((torch.arange(LENGTH) - starts[:, None]).clamp(min=0))
    recent = rotate(plain, cos[:, None, -ASKED:], sin[:, None, -ASKED:], "half")
    regions = Regions.at_prefill_end(starts, LENGTH, 3, 1)
    return LayerView(keys, values, regions, 0.4, HEADS * group, rope=RopeTable("half", cos, sin),
                     recent_queries=recent, recent_end=LENGTH), plain


def built(kind, group: int, view: LayerView, share: float | torch.Tensor = SHARE):
    estimator = kind(trained(tiny(group, DIM, torch.float64))[1].layer(1))
    estimator.build(view)
    estimator.reads(view, share)
    return estimator


@pytest.mark.parametrize("group", [1, 3, 4])
def test_the_correction_is_the_least_squares_of_the_formulas_written_out(group: int) -> None:
    view, plain = made(group)
    found = built(FittedPhi, group, view)
    given = found.fork()
    zero = given.correction._replace(s=torch.zeros_like(given.correction.s))
    width = zero.s.shape[2]
    rows: list[list[list[torch.Tensor]]] = [[[] for _ in range(2 * HEADS)] for _ in STARTS]
    for ahead in AHEAD:
        there = LENGTH - 1 - torch.tensor(STARTS) + torch.minimum(
            torch.tensor(ahead), LENGTH - 1 - torch.tensor(STARTS))
        cos, sin = tables(there[:, None])
        q = rotate(plain, cos[:, None], sin[:, None], "half")
        queries = Queries(q, torch.full((len(STARTS) * ASKED,), LENGTH), view.rope)
        best = SELECTORS["topk"](token_budget=SHARE)
        best.prepare(view)
        selection = best.select(view, queries)
        every = Selection(tokens=torch.arange(LENGTH).expand(len(STARTS) * ASKED, HEADS, -1).clone())
        inside = view.regions.mid_mask(0, LENGTH).repeat_interleave(ASKED, 0)[:, None]
        every.tokens = torch.where(inside, every.tokens, -1)

        def out(correction, selection=selection, queries=queries):
            given.correction = correction
            return literal_step(view, queries, SimpleNamespace(selection=selection), SimpleNamespace(), given)

        full, without = out(zero, every), out(zero)
        size = full.norm(dim=-1, keepdim=True)
        unit = [torch.zeros_like(zero.s) for _ in range(width)]
        for j, s in enumerate(unit):
            s[:, :, j, 0] = found.state.z[:, :, j]
        adds = torch.stack([(out(zero._replace(s=s)) - without)[..., 0] / size[..., 0] for s in unit], dim=-1)
        lacks = (full - without) / size
        for b, start in enumerate(STARTS):
            known = torch.arange(LENGTH - ASKED, LENGTH) >= start
            for h in range(HEADS):
                heads = slice(h * group, (h + 1) * group)
                rows[b][2 * h].append(adds[b, heads][:, known].flatten(0, 1))
                rows[b][2 * h + 1].append(lacks[b, heads][:, known].flatten(0, 1))
    for b in range(len(STARTS)):
        for h in range(HEADS):
            a, e = (torch.cat(rows[b][2 * h + i]) for i in range(2))
            level = math.sqrt(RIDGE * float(a.square().sum(0).mean()))
            if level == 0.0:
                expected = torch.zeros_like(zero.s[b, h])
            else:
                whole = torch.cat([a, level * torch.eye(width, dtype=a.dtype)])
                target = torch.cat([e, torch.zeros(width, DIM, dtype=a.dtype)])
                expected = found.state.z[b, h, :, None] * torch.linalg.lstsq(whole, target).solution
            torch.testing.assert_close(found.correction.s[b, h], expected, rtol=1e-5, atol=1e-9)
    assert (found.correction.s.flatten(1).abs().amax(1) > 1e-3).all()


def test_without_the_queries_of_a_prompt_it_is_phi() -> None:
    view, _ = made(3)
    for recent in (None, view.recent_queries[:, :, :0]):
        bare = replace(view, recent_queries=recent)
        for got, expected in zip(built(FittedPhi, 3, bare).state[:3], built(PhiEstimator, 3, bare).state[:3],
                                 strict=True):
            assert torch.equal(got, expected)


def test_mass_is_that_of_phi() -> None:
    view, _ = made(3)
    fitted, plain = built(FittedPhi, 3, view), built(PhiEstimator, 3, view)
    assert torch.equal(fitted.state.z, plain.state.z) and not torch.equal(fitted.state.s, plain.state.s)


def test_another_share_is_fitted_anew_where_it_is_far_from_the_first() -> None:
    view, _ = made(3, STARTS[:2])
    estimator = built(FittedPhi, 3, view)
    first = estimator.correction.s
    estimator.reads(view, SHARE * 1.2)
    assert estimator.correction.s is first
    estimator.reads(view, torch.tensor([SHARE, 0.3], dtype=torch.float64))
    alone = built(FittedPhi, 3, view, 0.3)
    torch.testing.assert_close(estimator.correction.s[0], first[0])
    torch.testing.assert_close(estimator.correction.s[1], alone.correction.s[1])
    torch.testing.assert_close(estimator.state.s[1], alone.state.s[1])


def test_a_rotation_that_is_unknown_is_refused() -> None:
    view, _ = made(1)
    with pytest.raises(SparseKVError, match="use completion='phi'"):
        built(FittedPhi, 1, replace(view, rope=None))


def test_it_needs_maps() -> None:
    with pytest.raises(SparseKVError, match="completion phi_fitted needs trained feature maps"):
        sparsekv.attach(tiny(1, DIM, torch.float64), selector="topk", token_budget=0.1, completion="phi_fitted")


@pytest.mark.parametrize("placement", ["cpu", "offload"])
def test_keys_in_cpu_memory(placement: str) -> None:
    model = tiny(3, DIM, torch.float64)
    router, phi = trained(model)
    ids = torch.randint(1, 61, (1, 90), generator=torch.Generator().manual_seed(2))
    found = []
    for where in ("gpu", placement):
        with sparsekv.attach(model, selector="router", router=router, phi=phi, completion="phi_fitted",
                             token_budget=0.1, placement=where, dense_below=0):
            found.append(model.generate(ids, max_new_tokens=4, do_sample=False, output_logits=True,
                                        return_dict_in_generate=True).logits)
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)
