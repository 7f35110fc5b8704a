"""Losses of the two trained parts. All take a batch of heads as leading dimension and return one value a head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

NEG = -1e9
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
        outside = ~mask
        a = teacher.masked_fill(outside, NEG)
        top = a.amax(-1, keepdim=True)
        alive = top > NEG / 2
        top = torch.where(alive, top, 0.0)
        a.sub_(top)
        b = (student - top).masked_fill_(outside, NEG)
        lse_a, lse_b = a.logsumexp(-1, keepdim=True), b.logsumexp(-1, keepdim=True)
        p, q = torch.exp(a - lse_a), torch.exp(b - lse_b)
        difference, gap = b - a, lse_b - lse_a
        kl = gap[..., 0] - torch.einsum("htn,htn->ht", p, difference)
        slope = o.PARTITION_WEIGHT * gap.clamp(0.0, DELTA) + o.under_weight * gap.clamp(-DELTA, 0.0)
        gradient = (q * (1 + slope)).sub_(p)

        band = (a >= -o.BAND).logical_and_(mask)
        weight = 1.0 / band.sum(-1, keepdim=True).clamp_(min=1)
        error = difference.mul_(band)
        pull = error.clamp(-DELTA, DELTA)
        near = _huber_sum(error, pull) * weight[..., 0]
        gradient.add_(pull.mul_(weight * o.TOP_WEIGHT))

        far = (a < -o.FAR).logical_and_(mask)
        weight = 1.0 / far.sum(-1, keepdim=True).clamp_(min=1)
        error = b.add_(o.BAND).clamp_(min=0.0).mul_(far)
        pull = error.clamp(max=DELTA)
        away = _huber_sum(error, pull) * weight[..., 0]
        gradient.add_(pull.mul_(weight * o.FAR_WEIGHT))

        over, under = _huber(gap.clamp(min=0.0))[..., 0], _huber(gap.clamp(max=0.0))[..., 0]
        alive = alive[..., 0].to(kl.dtype)
        count = alive.sum(-1).clamp(min=1)
        ctx.save_for_backward(gradient.mul_((alive / count[:, None])[..., None]))
        terms = [(x * alive).sum(-1) / count for x in (kl, near, away, over, under)]
        weights = (1.0, o.TOP_WEIGHT, o.FAR_WEIGHT, o.PARTITION_WEIGHT, o.under_weight)
        loss = torch.stack([w * x for w, x in zip(weights, terms, strict=True)]).sum(0)
        ctx.mark_non_differentiable(*terms)
        return (loss, *terms)

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_loss[:, None, None], None, None, None


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
        return _OutputErrorFunction.apply(student, teacher, mask, values, anchor_out, anchor_lse, log_count, self.read)


class _OutputErrorFunction(torch.autograd.Function):
    """With `p_i` the share of key i in the output `o` and `g = ∂error/∂o`: `∂error/∂ŝ_i = p_i (v_i − o)·g`."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, mask: Tensor, values: Tensor, anchor_out: Tensor,
                anchor_lse: Tensor, log_count: Tensor | float, read: float) -> Tensor:
        heads_kv, count, dim = values.shape
        outside = ~mask

        def attend(logits: Tensor) -> tuple[Tensor, Tensor]:
            lse = torch.logaddexp(logits.logsumexp(-1), anchor_lse)[..., None]
            share = torch.exp(logits - lse)
            mid = (share.reshape(heads_kv, -1, count) @ values).reshape(anchor_out.shape)
            return torch.exp(anchor_lse[..., None] - lse) * anchor_out + mid, share

        a, b = ((x + log_count).masked_fill_(outside, NEG) for x in (teacher, student))
        full, _ = attend(a)
        size = full.norm(dim=-1, keepdim=True).clamp(min=1e-6)
        cases: list[Tensor | None] = [None]
        if read > 0:
            best = a.topk(max(1, round(read * count)), dim=-1).values[..., -1:]
            cases.append(a >= best)
        total = torch.zeros_like(anchor_lse[:, 0])
        gradient = torch.zeros_like(b)
        for exact in cases:
            out, share = attend(b if exact is None else torch.where(exact, a, b))
            error = out - full
            length = error.norm(dim=-1, keepdim=True)
            total = total + (length / size)[..., 0].mean(-1)
            slope = error / (length * size).clamp(min=1e-12)
            along = (slope.reshape(heads_kv, -1, dim) @ values.mT).reshape(share.shape)
            along.sub_((out * slope).sum(-1, keepdim=True)).mul_(share)
            gradient.add_(along if exact is None else along.masked_fill_(exact, 0.0))
        ctx.save_for_backward(gradient.div_(anchor_lse.shape[1]))
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return (gradient * grads[0][:, None, None], *[None] * 7)


def _huber_sum(error: Tensor, pull: Tensor) -> Tensor:
    """`Σ huber(error)` over the last dimension, given `pull = clamp(error, −δ, δ)`: `pull·error − ½ pull²`."""
    return torch.einsum("htn,htn->ht", pull, error) - 0.5 * torch.einsum("htn,htn->ht", pull, pull)


def _huber(x: Tensor) -> Tensor:
    size = x.abs()
    return torch.where(size <= DELTA, 0.5 * x * x, DELTA * (size - 0.5 * DELTA))
