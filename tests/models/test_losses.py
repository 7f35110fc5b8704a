import pytest
import torch

from sparsekv.models.losses import KLHuber, bucket_kl

F64 = torch.float64


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_analytic_gradient_is_that_of_the_formula(temperature: float) -> None:
    torch.manual_seed(0)
    loss = KLHuber(temperature=temperature, band=1.0, far=2.0, delta=0.7)
    teacher, student = torch.randn(3, 5, 20, dtype=F64) * 3, torch.randn(3, 5, 20, dtype=F64) * 3
    mask = torch.rand(3, 5, 20) < 0.7
    mask[1, 2] = False
    one, other = student.clone().requires_grad_(), student.clone().requires_grad_()
    terms = loss(teacher, one, mask)
    truth = loss.reference(teacher, other, mask)
    torch.testing.assert_close(terms["loss"], truth)
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
