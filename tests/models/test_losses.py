import pytest
import torch

from sparsekv.core import offline
from sparsekv.models.losses import KLHuber, OutputError, bucket_kl

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


@pytest.mark.parametrize("read", [0.0, 0.1])
def test_output_error_is_the_error_that_is_measured(read: float) -> None:
    torch.manual_seed(3)
    queries, (keys, values) = torch.randn(4, 6, 8, dtype=F64), torch.randn(2, 2, 40, 8, dtype=F64)
    positions = torch.tensor([[39, 35, 30, 28, 20, 4]])  # the last query has no mid region
    scene = offline.make_scene(queries, keys, values, positions, scale=0.7, sink_size=2, window_size=3)
    guess = (scene.scores.clamp(min=-50) + 0.5 * torch.randn(4, 6, 40, dtype=F64)).requires_grad_()
    anchors = scene.scores.masked_fill(~scene.anchors, offline.NEG_INF)
    loss = OutputError(read)(scene.scores, guess, scene.mid, values, offline.output(scene), anchors.logsumexp(-1))
    reads = [None]
    if read:
        reads.append(offline.best(scene.scores.masked_fill(~scene.mid, offline.NEG_INF), torch.full((1, 6), 4)))
    other = guess.detach().clone().requires_grad_()
    truth = sum(offline.relative_error(scene, offline.output(scene, r, other)) for r in reads)
    torch.testing.assert_close(loss, truth)
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=F64)
    (loss * weight).sum().backward()
    (truth[:, None] * weight[:, None]).sum().backward()
    # where there is nothing to estimate the error is zero, and its slope there no number
    torch.testing.assert_close(guess.grad[:, :5], other.grad[:, :5])
    assert float(guess.grad[:, 5].abs().max()) == 0.0 and float(loss.detach().min()) > 0
    perfect = OutputError(read)(scene.scores, scene.scores.clamp(min=-50), scene.mid, values, offline.output(scene),
                                anchors.logsumexp(-1))
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
