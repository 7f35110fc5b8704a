import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import huber_loss

from sparsekv.kernels.losses import NEG
from sparsekv.models.losses import KLHuber, OutputError, bucket_kl

F64 = torch.float64


def written_out(o: KLHuber, teacher: Tensor, student: Tensor, mask: Tensor) -> Tensor:
    """The loss `[H]` as its formula reads, for automatic differentiation."""
    def huber(x: Tensor) -> Tensor:
        return huber_loss(x, torch.zeros_like(x), reduction="none")

    def mean(x: Tensor, where: Tensor) -> Tensor:
        return (x * where).sum(-1) / where.sum(-1).clamp(min=1)

    top = teacher.masked_fill(~mask, NEG).amax(-1, keepdim=True)
    some = top > NEG / 2
    shift = torch.where(some, top, 0.0)
    a, b = ((x - shift).masked_fill(~mask, NEG) for x in (teacher, student))
    log_p, log_q = a.log_softmax(-1), b.log_softmax(-1)
    gap = b.logsumexp(-1) - a.logsumexp(-1)
    total = ((log_p.exp() * (log_p - log_q)).sum(-1) + o.TOP_WEIGHT * mean(huber(b - a), (a >= -o.BAND) & mask)
             + o.FAR_WEIGHT * mean(huber((b + o.BAND).relu()), (a < -o.FAR) & mask)
             + o.PARTITION_WEIGHT * huber(gap.relu()) + o.under_weight * huber((-gap).relu()))
    alive = some[..., 0].to(total.dtype)
    return (total * alive).sum(-1) / alive.sum(-1).clamp(min=1)


@pytest.mark.parametrize("under", [0.0, 0.2])
def test_the_analytic_gradient_is_that_of_the_formula(under: float) -> None:
    torch.manual_seed(0)
    loss = KLHuber(under)
    teacher, student = torch.randn(3, 5, 20, dtype=F64) * 6, torch.randn(3, 5, 20, dtype=F64) * 6
    mask = torch.rand(3, 5, 20) < 0.7
    mask[1, 2] = False
    one, other = student.clone().requires_grad_(), student.clone().requires_grad_()
    terms = loss(teacher, one, mask)
    truth = written_out(loss, teacher, other, mask)
    torch.testing.assert_close(terms["loss"], truth)
    assert all(float(terms[name].max()) > 0 for name in ("kl", "top", "far", "partition", "under"))
    weight = torch.tensor([1.0, 2.0, 3.0], dtype=F64)
    (terms["loss"] * weight).sum().backward()
    (truth * weight).sum().backward()
    torch.testing.assert_close(one.grad, other.grad)
    assert float(one.grad[1, 2].abs().sum()) == 0.0 and float(one.grad.abs().sum()) > 0


def test_every_term_is_zero_for_a_perfect_student_and_positive_for_a_wrong_scale() -> None:
    torch.manual_seed(1)
    teacher = torch.randn(2, 4, 30, dtype=F64) * 4
    mask = torch.ones(2, 4, 30, dtype=torch.bool)
    perfect = KLHuber()(teacher, teacher, mask)
    assert all(float(v.abs().max()) < 1e-12 for v in perfect.values())
    # softmax alone would forgive a constant; the sum of exact and estimated mass does not
    shifted = KLHuber()(teacher, teacher + 0.5, mask)
    assert float(shifted["kl"].abs().max()) < 1e-12
    assert float(shifted["top"].min()) > 0.1 and float(shifted["partition"].min()) > 0.1
    assert float(KLHuber()(teacher, teacher - 0.5, mask)["under"].min()) > 0.1


def test_bucket_kl_is_zero_at_the_target_and_equals_torch() -> None:
    torch.manual_seed(2)
    target = torch.rand(2, 6, 9, dtype=F64).softmax(-1)
    assert float(bucket_kl(target.log(), target).abs().max()) < 1e-12
    logits = torch.randn(2, 6, 9, dtype=F64)
    want = torch.nn.functional.kl_div(logits.log_softmax(-1), target, reduction="none").sum(-1).mean(-1)
    torch.testing.assert_close(bucket_kl(logits, target), want)


@pytest.mark.parametrize("read", [0.0, 0.1])
def test_output_error_is_that_of_the_output_written_out(read: float) -> None:
    torch.manual_seed(3)
    heads, kv, count, length, dim = 4, 2, 6, 40, 8
    scores = torch.randn(heads, count, length, dtype=F64) * 2
    values, place = torch.randn(kv, length, dim, dtype=F64), torch.tensor([36, 32, 27, 25, 17, 1])
    mid = (torch.arange(length) >= 2) & (torch.arange(length) <= place[:, None])  # the last query has no mid region
    guess = (scores + 0.5 * torch.randn(heads, count, length, dtype=F64)).requires_grad_()
    anchor_out, anchor_lse = torch.randn(heads, count, dim, dtype=F64), torch.randn(heads, count, dtype=F64)

    def output(weights: torch.Tensor) -> torch.Tensor:
        weights = torch.where(mid, weights.exp(), 0.0)
        mass = anchor_lse.exp()[..., None]
        total = anchor_out * mass + weights @ values.repeat_interleave(heads // kv, 0)
        return total / (mass + weights.sum(-1, keepdim=True))

    full = output(scores)
    cases = [torch.zeros_like(scores, dtype=torch.bool)]
    if read:
        best = torch.where(mid, scores, -math.inf)
        cases.append(best >= best.topk(4, dim=-1).values[..., -1:])
    loss = OutputError(read)(scores, guess, mid, values, anchor_out, anchor_lse)
    other = guess.detach().clone().requires_grad_()
    errors = [(output(torch.where(exact, scores, other)) - full)[:, :5] for exact in cases]
    truth = sum((e.norm(dim=-1) / full[:, :5].norm(dim=-1)).sum(-1) / count for e in errors)
    torch.testing.assert_close(loss, truth)
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=F64)
    (loss * weight).sum().backward()
    (truth * weight).sum().backward()
    # where there is nothing to estimate the error is zero, and its slope there no number
    torch.testing.assert_close(guess.grad[:, :5], other.grad[:, :5])
    assert float(guess.grad[:, 5].abs().max()) == 0.0 and float(loss.detach().min()) > 0
    perfect = OutputError(read)(scores, scores, mid, values, anchor_out, anchor_lse)
    torch.testing.assert_close(perfect, torch.zeros(4, dtype=F64), atol=1e-9, rtol=0)


def test_output_error_counts_keys_that_were_not_drawn() -> None:
    torch.manual_seed(4)
    teacher, student = torch.randn(2, 2, 3, 5, dtype=F64)
    values, out = torch.randn(1, 5, 4, dtype=F64), torch.randn(2, 3, 4, dtype=F64)
    mask, lse = torch.ones(2, 3, 5, dtype=torch.bool), torch.randn(2, 3, dtype=F64)
    twice = OutputError(0.0)(*(torch.cat([x, x], -1) for x in (teacher, student, mask)),
                             torch.cat([values, values], 1), out, lse)
    once = OutputError(0.0)(teacher, student, mask, values, out, lse, log_count=float(torch.tensor(2.0).log()))
    torch.testing.assert_close(once, twice)
