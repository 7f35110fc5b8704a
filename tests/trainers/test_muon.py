"""Muon over a batch of heads against torch's own over single matrices, and what its steps are."""

import pytest
import torch

from sparsekv.trainers.muon import RMS, Muon, orthogonal


@pytest.mark.parametrize("shape", [(3, 17, 40), (2, 40, 17), (1, 9, 9)])
def test_steps_are_nearly_orthogonal_and_keep_the_singular_vectors(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape)
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    inner = u.mT @ orthogonal(x, steps=5) @ v.mT
    values = inner.diagonal(dim1=-2, dim2=-1)
    assert values.min() > 0.5 and values.max() < 1.3
    assert (inner - torch.diag_embed(values)).abs().max() < 1e-3
    assert torch.equal(orthogonal(torch.zeros(shape)), torch.zeros(shape))


@pytest.mark.parametrize("shape", [(12, 30), (30, 12)])
def test_a_head_moves_as_with_torchs_own_muon(shape: tuple[int, int]) -> None:
    theirs_type = getattr(torch.optim, "Muon", None)
    if theirs_type is None:
        pytest.skip("this torch has no Muon")
    torch.manual_seed(1)
    heads = torch.randn(3, *shape)
    ours = torch.nn.Parameter(heads.clone())
    singles = [torch.nn.Parameter(h.clone()) for h in heads]
    mine = Muon([ours], lr=torch.tensor(0.1), weight_decay=0.3)
    # torch's "match_rms_adamw" is a root mean square of 0.2
    theirs = theirs_type(singles, lr=0.1 * RMS / 0.2, weight_decay=0.3 * 0.2 / RMS, adjust_lr_fn="match_rms_adamw",
                         ns_steps=3)
    for _ in range(4):
        gradient = torch.randn(3, *shape)
        ours.grad = gradient.clone()
        for single, g in zip(singles, gradient, strict=True):
            single.grad = g.clone()
        mine.step()
        theirs.step()
    moved = (ours - heads).detach()
    other = torch.stack([s.detach() for s in singles]) - heads
    # theirs orthogonalises in bfloat16
    assert (moved - other).norm() < 0.02 * other.norm()


def test_a_head_does_not_know_of_the_others() -> None:
    torch.manual_seed(2)
    heads, gradient = torch.randn(4, 8, 5), torch.randn(4, 8, 5)
    found = []
    for rows in (slice(None), slice(2, 3)):
        p = torch.nn.Parameter(heads[rows].clone())
        p.grad = gradient[rows].clone()
        Muon([p], lr=0.05).step()
        found.append(p.detach())
    assert torch.allclose(found[0][2:3], found[1], atol=1e-6)
