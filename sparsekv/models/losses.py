"""Losses of the two trained parts. All take a batch of heads as leading dimension and return one value a head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparsekv.kernels.losses import Outputs, Weights, kl_huber, output_error

TERMS = ("kl", "top", "far", "partition", "under")
DELTA = 1.0
"""Where Huber's loss turns from square to straight (ours)."""


def bucket_kl(logits: Tensor, target: Tensor) -> Tensor:
    """`KL(target ‖ softmax(logits))` averaged over queries: `[H, T, C]` each -> `[H]` (Saap §4).

    target: attention mass per bucket, rows summing to one.
    """
    entropy = torch.special.entr(target).sum(-1)
    return (-(target * logits.log_softmax(-1)).sum(-1) - entropy).mean(-1)


@dataclass(frozen=True)
class KLHuber:
    """The feature-map loss (completion paper §5, appendix B): distribution, top band, far keys, partition.

    With logits shifted by the teacher's maximum, `ã = a − a*`, `b̃ = b − a*`:
    `L = KL(softmax(ã) ‖ softmax(b̃)) + λ_top·mean_B huber(b̃ − ã) + λ_far·mean_F huber(relu(b̃ + τ))
    + λ_z·huber(relu(lse b̃ − lse ã)) + λ_under·huber(relu(lse ã − lse b̃))` with `B = {ã ≥ −τ}`, `F = {ã < −τ_far}`.
    The last term is ours: the paper punishes only overestimated mass; 0 switches it off. The values of its temperature,
    thresholds, weights and Huber's δ are lost in its text: 1, and the constants here, are ours.
    """

    under_weight: float = 0.2
    BAND: ClassVar[float] = 3.0
    """τ [nats]."""
    FAR: ClassVar[float] = 6.0
    """τ_far [nats]."""
    TOP_WEIGHT: ClassVar[float] = 0.1
    FAR_WEIGHT: ClassVar[float] = 0.1
    PARTITION_WEIGHT: ClassVar[float] = 0.2

    def __call__(self, teacher: Tensor, student: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """teacher, student `[H, T, N]`; mask broadcastable, true where a key counts -> every term `[H]`, and `loss`.

        A query with no key in its support counts as zero. Only `loss` carries a gradient, and only to the student; it
        is the analytic one, written in the same pass: automatic differentiation of these terms is bound by memory.
        """
        loss, *terms = _KLHuberFunction.apply(student, teacher, mask, self)
        return {**dict(zip(TERMS, terms, strict=True)), "loss": loss}


class _KLHuberFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, mask: Tensor, o: KLHuber) -> tuple[Tensor, ...]:
        kl, near, away, gap, alive, gradient = kl_huber(student, teacher, mask, Weights(
            o.BAND, o.FAR, DELTA, o.TOP_WEIGHT, o.FAR_WEIGHT, o.PARTITION_WEIGHT, o.under_weight))
        count = alive.sum(-1).clamp(min=1)
        over, under = _huber(gap.clamp(min=0.0)), _huber(gap.clamp(max=0.0))
        terms = [x.sum(-1) / count for x in (kl, near, away, over, under)]
        weights = (1.0, o.TOP_WEIGHT, o.FAR_WEIGHT, o.PARTITION_WEIGHT, o.under_weight)
        loss = torch.stack([w * x for w, x in zip(weights, terms, strict=True)]).sum(0)
        ctx.save_for_backward(gradient, count)
        ctx.mark_non_differentiable(*terms)
        return (loss, *terms)

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        gradient, count = ctx.saved_tensors
        return gradient * (grad_loss / count)[:, None, None], None, None, None


@dataclass(frozen=True)
class OutputError:
    """Relative L2 error of a head's output when the anchors are exact and the mid keys weigh `exp(ŝ)`, plus the same
    error when the best `read` of the keys are exact too: what the maps are for, with the values in it.

    `out = (Σ_A w v + c·Σ ŵ_i v_i) / (Z_A + c·Σ ŵ_i)` against the same with the true weights; `log_count = log c`
    stands for the mid keys that were not drawn. Ours: the paper's losses see weights only. `read` 0 leaves the second
    case out.
    """

    read: float = 0.02

    def __call__(
        self, teacher: Tensor, student: Tensor, mask: Tensor, values: Tensor, anchor_out: Tensor, anchor_lse: Tensor,
        log_count: Tensor | float = 0.0,
    ) -> Tensor:
        """teacher, student `[H, T, N]`, mask broadcastable; values `[Hkv, N, d]`; anchor_out `[H, T, d]` and anchor_lse
        `[H, T]`: partial attention over the anchors -> mean over queries, cases added, `[H]`. The gradient goes to the
        student alone and is the analytic one."""
        outputs = Outputs(values, anchor_out, anchor_lse, log_count)
        return _OutputErrorFunction.apply(student, teacher, mask, outputs, self.read)


class _OutputErrorFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, mask: Tensor, outputs: Outputs, read: float) -> Tensor:
        error, gradient = output_error(student, teacher, mask, outputs, read)
        ctx.save_for_backward(gradient)
        return error.mean(-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * (grads[0] / gradient.shape[1])[:, None, None], *[None] * 4


def _huber(x: Tensor) -> Tensor:
    size = x.abs()
    return torch.where(size <= DELTA, 0.5 * x * x, DELTA * (size - 0.5 * DELTA))
