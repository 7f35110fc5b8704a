"""Losses of the two trained parts. All take a batch of heads as leading dimension and return one value a head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

NEG = -1e9


def bucket_kl(logits: Tensor, target: Tensor) -> Tensor:
    """`KL(target ‖ softmax(logits))` averaged over queries: `[H, T, C]` each -> `[H]` (Saap §4.2).

    target: attention mass per bucket, rows summing to one.
    """
    entropy = torch.special.entr(target).sum(-1)
    return (-(target * logits.log_softmax(-1)).sum(-1) - entropy).mean(-1)


@dataclass(frozen=True)
class KLHuber:
    """The feature-map loss (completion paper §5): distribution, top band, far keys, partition.

    With logits shifted by the teacher's maximum, `ã = a − a*`, `b̃ = b − a*`:
    `L = T²·KL(softmax(ã/T) ‖ softmax(b̃/T)) + λ_top·mean_B huber(b̃ − ã) + λ_far·mean_F huber(relu(b̃ + τ))
    + λ_z·huber(relu(lse b̃ − lse ã)) + λ_under·huber(relu(lse ã − lse b̃))` with `B = {ã ≥ −τ}`, `F = {ã < −τ_far}`.
    The last term is ours: the paper punishes only overestimated mass; 0 switches it off.
    """

    temperature: float = 1.0
    band: float = 3.0
    far: float = 6.0
    delta: float = 1.0
    top_weight: float = 0.1
    far_weight: float = 0.1
    partition_weight: float = 0.2
    under_weight: float = 0.2

    def __call__(self, teacher: Tensor, student: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """teacher, student `[H, T, N]`; mask broadcastable, true where a key counts -> every term `[H]`, and `loss`.

        A query with no key in its support counts as zero.
        """
        teacher = teacher.masked_fill(~mask, NEG)
        top = teacher.amax(-1, keepdim=True)
        some = (top > NEG / 2)
        shift = torch.where(some, top, 0.0)
        a, b = teacher - shift, (student - shift).masked_fill(~mask, NEG)
        t = self.temperature
        log_p, log_q = (a / t).log_softmax(-1), (b / t).log_softmax(-1)
        p = log_p.exp()
        kl = t * t * (p * (log_p - log_q)).sum(-1)
        in_band, is_far = (a >= -self.band) & mask, (a < -self.far) & mask
        near = _masked_mean(_huber(torch.where(in_band, b - a, 0.0), self.delta), in_band)
        away = _masked_mean(_huber(F.relu(b + self.band).masked_fill(~is_far, 0.0), self.delta), is_far)
        gap = b.logsumexp(-1) - a.logsumexp(-1)
        over, under = _huber(F.relu(gap), self.delta), _huber(F.relu(-gap), self.delta)
        alive = some[..., 0].to(kl.dtype)
        terms = {"kl": kl, "top": near, "far": away, "partition": over, "under": under}
        count = alive.sum(-1).clamp(min=1)
        terms = {name: (value * alive).sum(-1) / count for name, value in terms.items()}
        terms["loss"] = (terms["kl"] + self.top_weight * terms["top"] + self.far_weight * terms["far"]
                         + self.partition_weight * terms["partition"] + self.under_weight * terms["under"])
        return terms


def _huber(x: Tensor, delta: float) -> Tensor:
    size = x.abs()
    return torch.where(size <= delta, 0.5 * x * x, delta * (size - 0.5 * delta))


def _masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    return x.sum(-1) / mask.sum(-1).clamp(min=1)
