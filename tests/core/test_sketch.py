"""Sketches of keys: what the basis is, that scores of codes are those of the keys, and what a bad input leaves."""

from __future__ import annotations

import pytest
import torch

from sparsekv.core.sketch import check_sketch, fit_queries, fit_sketch, principal, second_moment
from sparsekv.kernels import Sketch, decode_codes, encode_keys
from sparsekv.kernels.sketch import query_side_reference, sketch_scores_reference
from sparsekv.util.errors import SparseKVError

DIM, HEADS, GROUP, LENGTH = 12, 2, 3, 400


def drawn(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys `[2, H, n, d]` in float64, of unequal directions, the keys far from zero."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    queries = draw(2, HEADS * GROUP, 50, DIM) @ (draw(DIM, DIM) * torch.logspace(0, -1.5, DIM, dtype=torch.float64))
    keys = draw(2, HEADS, LENGTH, DIM) @ (draw(DIM, DIM) * torch.logspace(0, -1.5, DIM, dtype=torch.float64))
    return queries, keys + 5 * torch.linspace(-1, 1, HEADS * DIM, dtype=torch.float64).view(HEADS, 1, DIM)


def moments(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mean = keys.mean(2)
    away = keys - mean[:, :, None]
    return mean, away.mT @ away / keys.shape[2]


def fitted(queries: torch.Tensor, keys: torch.Tensor, width: int, wide: int) -> Sketch:
    return fit_sketch(second_moment(queries, HEADS), *moments(keys), width, wide)


def of_codes(queries: torch.Tensor, keys: torch.Tensor, sketch: Sketch, width: int) -> torch.Tensor:
    """Scores `[2, H, G, T, n]` from codes."""
    side = query_side_reference(queries.transpose(1, 2).flatten(0, 1), sketch, 1.0)
    side = side.unflatten(0, (2, -1)).transpose(1, 2).unflatten(1, (HEADS, GROUP))
    return torch.einsum("bhgtr,bhnr->bhgtn", side, decode_codes(encode_keys(keys, sketch, width), sketch.rank).double())


def exact(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bhgtd,bhnd->bhgtn", queries.unflatten(1, (HEADS, GROUP)), keys - keys.mean(2, keepdim=True))


def lost(queries: torch.Tensor, keys: torch.Tensor, sketch: Sketch, width: int) -> float:
    """Mean squared error of the scores over their variance."""
    truth = exact(queries, keys)
    return float((of_codes(queries, keys, sketch, width) - truth).square().mean() / truth.square().mean())


def test_scores_of_codes_are_the_keys_own() -> None:
    queries, keys = drawn()
    assert lost(queries, keys, fitted(queries, keys, DIM, DIM), DIM) < 1e-3
    losses = [lost(queries, keys, fitted(queries, keys, width, wide), width)
              for width, wide in ((6, 2), (6, 0), (3, 0), (1, 0))]
    assert losses[0] < losses[1] < 0.03 and losses[1] < losses[2] < losses[3] < 1


def test_the_basis_loses_least_of_all() -> None:
    """Without rounding: no projection of the same rank has less squared error of the scores, for queries of this second
    moment with its ridge (Eckart and Young)."""
    queries, keys = drawn(1)
    sketch = fitted(queries, keys, 3, 0)
    covariance = moments(keys)[1]
    moment = second_moment(queries, HEADS)
    moment = moment + 0.05 * moment.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None] * torch.eye(DIM)

    def error(product: torch.Tensor) -> torch.Tensor:
        away = torch.eye(DIM) - product
        return torch.einsum("bhij,bhjk,bhkl,bhil->bh", away.mT, moment, away, covariance)

    best = error((sketch.keys @ sketch.queries.mT).mT)
    spread = torch.linalg.eigvalsh(torch.linalg.cholesky(moment).mT @ covariance @ torch.linalg.cholesky(moment))
    torch.testing.assert_close(best, spread[..., :-sketch.rank].sum(-1), rtol=1e-3, atol=0)
    principal = torch.linalg.eigh(covariance).eigenvectors[..., -sketch.rank:]
    assert bool((best < error(principal @ principal.mT)).all())


SPECTRA = {"steep": (-1.5, -1.5), "steeper": (-2.0, -3.0), "flat": (0.0, -0.2), "round": (0.0, 0.0)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("kind", [*SPECTRA, "plateaus", "three directions", "one query"])
def test_codes_err_as_those_of_the_eigenvectors_do(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Scores of the basis by iteration against those of the basis by `eigh`: within 1 % where directions are lost;
    where all that matter have 8 bits, their rounding differs from basis to basis, by far less than the scores vary."""
    dim, width, wide = 64, 16, 8
    generator = torch.Generator().manual_seed(len(kind))

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    of_queries, of_keys = (torch.logspace(0, end, dim, dtype=torch.float64) for end in SPECTRA.get(kind, (-0.5, -1.0)))
    if kind == "plateaus":
        of_keys = torch.tensor([10.0] * 4 + [1.0] * 28 + [0.3] * 32, dtype=torch.float64)
    elif kind == "three directions":
        of_keys = torch.tensor([1.0] * 3 + [0.0] * 61, dtype=torch.float64)
    turns = [torch.linalg.qr(draw(1, HEADS, dim, dim)).Q for _ in range(2)]
    queries = ((draw(1, HEADS, GROUP * 40, dim) * of_queries) @ turns[0]).unflatten(2, (GROUP, 40)).flatten(1, 2)
    keys = (draw(1, HEADS, 2000, dim) * of_keys) @ turns[1] + 3 * draw(1, HEADS, 1, dim)
    if kind == "one query":
        queries = queries[:, :, :1].expand_as(queries)
    queries, keys = queries.to(dtype), keys.to(dtype)

    def error(sketch: Sketch) -> float:
        truth = torch.einsum("bhgtd,bhnd->bhgtn", queries.unflatten(1, (HEADS, GROUP)), keys - keys.mean(2, True))
        numbers = decode_codes(encode_keys(keys, sketch, width), sketch.rank).to(dtype)
        found = torch.einsum("bhgtr,bhnr->bhgtn", queries.unflatten(1, (HEADS, GROUP)) @ sketch.queries[:, :, None],
                             numbers - numbers.mean(2, True))
        return float((found - truth).square().mean() / truth.square().mean())

    mine = error(fitted(queries, keys, width, wide))

    def exact(covariance: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        variance, vectors = torch.linalg.eigh(covariance)
        return variance.flip(-1)[..., :rank], vectors.flip(-1)[..., :rank]

    monkeypatch.setattr("sparsekv.core.sketch.principal", exact)
    assert mine < 1.01 * error(fitted(queries, keys, width, wide)) + 2e-5


@pytest.mark.parametrize("rank", [1, 5, 12])
def test_principal_directions_stand_at_right_angles(rank: int) -> None:
    covariance = moments(drawn(5)[1])[1]
    covariance[0, 0], covariance[0, 1] = 0.0, 1e-30 * covariance[0, 1]
    variance, vectors = principal(covariance, rank)
    torch.testing.assert_close(vectors.mT @ vectors, torch.eye(rank, dtype=torch.float64).expand(2, HEADS, -1, -1))
    assert bool((variance.diff(dim=-1) <= 0).all()) and not variance[0, 0].any()
    torch.testing.assert_close((vectors.mT @ covariance @ vectors).diagonal(dim1=-2, dim2=-1), variance)
    assert bool((variance.sum(-1) >= 0.999 * torch.linalg.eigvalsh(covariance)[..., -rank:].sum(-1)).all())


def test_queries_are_fitted_to_codes_of_another_basis() -> None:
    """Least squares: as the regression of every key on its code, and nearer to the scores than the basis' own side."""
    queries, keys = drawn(3)
    foreign = fitted(*drawn(4), 5, 1)
    codes = encode_keys(keys, foreign, 5)
    used = torch.arange(LENGTH) < torch.tensor([[LENGTH], [100]])
    asks = fit_queries(foreign, codes, keys, used)
    own = decode_codes(codes[1, 1, :100], foreign.rank).double()
    own = own - own.mean(0)
    solved = torch.linalg.lstsq(own, keys[1, 1, :100] - keys[1, 1, :100].mean(0)).solution
    torch.testing.assert_close(asks[1, 1], solved.mT, rtol=1e-2, atol=1e-3)
    everywhere = foreign._replace(queries=fit_queries(foreign, codes, keys, used | True))
    assert lost(queries, keys, everywhere, 5) < 0.9 * lost(queries, keys, foreign, 5)
    for alike in (keys[:, :, :1].expand_as(keys), keys[:, :, :0]):
        nothing = fit_queries(foreign, encode_keys(alike, foreign, 5), alike, used[:, :alike.shape[2]])
        torch.testing.assert_close(nothing, foreign.queries.expand_as(nothing))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_queries_or_keys_that_are_all_alike(dtype: torch.dtype) -> None:
    queries, keys = (x.to(dtype) for x in drawn(2))
    same = queries[:, :, :1].expand_as(queries)
    for q, k in ((same, keys), (torch.zeros_like(queries), keys), (queries, keys[:, :, :1].expand_as(keys)),
                 (queries * 1e-15, keys), (queries[:, :, :0], keys[:, :, :0])):
        mean, covariance = moments(k.float() if k.shape[2] else keys[:, :, :1].float())
        sketch = fit_sketch(second_moment(q, HEADS), mean, covariance, 4, 2)
        assert all(bool(x.isfinite().all()) for x in sketch)
        if k.shape[2]:
            tokens = torch.arange(LENGTH).expand(100, HEADS, -1)
            asked = queries.transpose(1, 2).flatten(0, 1)
            scores = sketch_scores_reference(asked, sketch, encode_keys(k, sketch, 4), 0.3, tokens)
            torch.testing.assert_close(scores.sum(-1), torch.full_like(scores[..., 0], GROUP))


def test_the_second_moment_is_of_the_queries_used() -> None:
    queries, _ = drawn()
    used = torch.arange(50) < torch.tensor([[50], [20]])
    found = second_moment(queries, HEADS, used)
    own = queries[1, GROUP:2 * GROUP, :20].flatten(0, 1)
    torch.testing.assert_close(found[1, 1], own.mT @ own / len(own))
    torch.testing.assert_close(found[0], second_moment(queries, HEADS)[0])
    assert not second_moment(queries, HEADS, used & False).any()


@pytest.mark.parametrize(("width", "wide", "message"), [
    (7, 0, "a sketch of 7 bytes with 0 channels of 8 bits has 14 channels; expected 1 to 12"),
    (0, 0, "has 0 channels; expected 1 to 12"), (4, 5, "has 5 channels of 8 bits; expected 0 to 4"),
    (4, -1, "has -1 channels of 8 bits")])
def test_codes_that_cannot_be(width: int, wide: int, message: str) -> None:
    with pytest.raises(SparseKVError, match=message):
        check_sketch(width, wide, DIM)
