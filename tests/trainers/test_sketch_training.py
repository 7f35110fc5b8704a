"""The sketch that train-router makes: of all windows, and sound where queries or keys are constant."""

from __future__ import annotations

from dataclasses import replace

import torch

from sparsekv.core.sketch import code_size, fit_sketch, second_moment
from sparsekv.trainers.pool import Pool
from sparsekv.trainers.sketch import closed_form


def pool(seed: int = 0) -> Pool:
    """Three windows of 90 tokens, four KV heads of dimension 8, groups of two, the sink unlike the rest."""
    g = torch.Generator().manual_seed(seed)
    keys = torch.randn(3, 4, 90, 8, generator=g) @ torch.randn(8, 8, generator=g)
    keys += 20 * torch.randn(4, 1, 8, generator=g)
    keys[:, :, :4] *= -9
    return Pool(keys, keys, torch.randn(3, 8, 30, 8, generator=g), torch.arange(60, 90).expand(3, -1),
                torch.zeros(3, 8, 30), 0.3, 2)


def test_it_is_the_closed_form_over_all_windows() -> None:
    given = pool()
    made = closed_form(given, 3, 1)
    for head in range(4):
        keys = given.keys[:, head, 4:].reshape(-1, 8).double()
        queries = given.queries[:, 2 * head:2 * head + 2].reshape(-1, 8).double()
        away = keys - keys.mean(0)
        want = fit_sketch((queries.mT @ queries / len(queries))[None], keys.mean(0)[None],
                          (away.mT @ away / len(keys))[None], 3, 1)
        for a, b in (((made.keys @ made.queries.mT)[head], (want.keys @ want.queries.mT)[0]),
                     (made.keys[head].abs(), want.keys[0].abs()), (made.centre[head].abs(), want.centre[0].abs())):
            torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-3)


def test_heads_whose_queries_or_keys_are_constant_have_a_sound_sketch() -> None:
    given = pool()
    same = replace(given, queries=given.queries[:, :, :1].expand(-1, -1, 30, -1))
    for odd in (same, replace(given, queries=torch.zeros_like(given.queries)),
                replace(given, keys=torch.ones_like(given.keys))):
        made = closed_form(odd, 4, 0)
        assert all(bool(x.isfinite().all()) for x in made)
    assert second_moment(same.queries[:1], 4).isfinite().all()


def test_sizes() -> None:
    assert code_size(None, None, 64) == (16, 2) and code_size(None, None, 128) == (32, 4)
    assert code_size(24, None, 64) == (24, 3) and code_size(8, 8, 64) == (8, 8) and code_size(0, 3, 64) == (0, 0)
