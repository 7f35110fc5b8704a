"""What feature maps are trained by, with its gradient: rows of logits, a teacher's and a student's, that are read a few
times and never copied. In plain torch the same terms are some sixty passes over them, and most of a training step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsekv.kernels.launch import on_device, padded, power_of_two

NEG = -1e9
LONGEST = 8192
"""Keys of the longest row that a program holds."""
QUERIES_AT_ONCE, KEYS_AT_ONCE, WIDTH, WARPS = 64, 32, 64, 8
"""Queries and keys of a block, and how much of the head dimension is taken together."""


class Weights(NamedTuple):
    """Of the terms of `kl_huber`: the thresholds of the top band and of far keys and Huber's δ [nats], and weights."""

    band: float
    far: float
    delta: float
    top: float
    distant: float
    partition: float
    under: float


class Terms(NamedTuple):
    """Of every query `[H, T]`, zero where it has no key: divergence, mean Huber loss of the top band and of far keys,
    log mass of the student over the teacher's, whether it has a key; and the gradient of their weighted sum, the mean
    over queries not taken, `[H, T, N]`."""

    kl: Tensor
    near: Tensor
    away: Tensor
    gap: Tensor
    alive: Tensor
    gradient: Tensor


def kl_huber(student: Tensor, teacher: Tensor, mask: Tensor, weights: Weights) -> Terms:
    """The terms of the feature-map loss (completion paper §5, appendix B; `models.losses.KLHuber`): student, teacher
    `[H, T, N]`, mask broadcastable, true where a key counts."""
    fits = on_device(student) and student.shape[-1] <= LONGEST
    return (launch_kl_huber if fits else kl_huber_reference)(student, teacher, mask, weights)


def kl_huber_reference(student: Tensor, teacher: Tensor, mask: Tensor, weights: Weights) -> Terms:
    """`kl_huber` in plain torch."""
    delta, outside = weights.delta, ~mask
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
    slope = weights.partition * gap.clamp(0.0, delta) + weights.under * gap.clamp(-delta, 0.0)
    gradient = (q * (1 + slope)).sub_(p)

    band = (a >= -weights.band).logical_and_(mask)
    share = 1.0 / band.sum(-1, keepdim=True).clamp_(min=1)
    error = difference.mul_(band)
    pull = error.clamp(-delta, delta)
    near = _huber_sum(error, pull) * share[..., 0]
    gradient.add_(pull.mul_(share * weights.top))

    far = (a < -weights.far).logical_and_(mask)
    share = 1.0 / far.sum(-1, keepdim=True).clamp_(min=1)
    error = b.add_(weights.band).clamp_(min=0.0).mul_(far)
    pull = error.clamp(max=delta)
    away = _huber_sum(error, pull) * share[..., 0]
    gradient.add_(pull.mul_(share * weights.distant))
    lives = alive[..., 0].to(kl.dtype)
    return Terms(kl * lives, near * lives, away * lives, gap[..., 0] * lives, lives, gradient.mul_(alive))


def _huber_sum(error: Tensor, pull: Tensor) -> Tensor:
    """`Σ huber(error)` over the last dimension, given `pull = clamp(error, −δ, δ)`: `pull·error − ½ pull²`."""
    return torch.einsum("htn,htn->ht", pull, error) - 0.5 * torch.einsum("htn,htn->ht", pull, pull)


def launch_kl_huber(student: Tensor, teacher: Tensor, mask: Tensor, weights: Weights) -> Terms:
    """`kl_huber` through Triton: one program a query."""
    from sparsekv.kernels.losses_triton import kl_huber_kernel

    student, teacher, mask, strides = _rows_of(student, teacher, mask)
    heads, count, length = student.shape
    gradient = torch.empty(heads, count, length, dtype=torch.float32, device=student.device)
    kl, near, away, gap, alive = torch.empty(5, heads, count, dtype=torch.float32, device=student.device)
    wide = power_of_two(length)
    terms = Terms(kl, near, away, gap, alive, gradient)
    kl_huber_kernel[(heads * count,)](
        student, teacher, mask, terms, weights, count, length, *strides, PADDED=wide, num_warps=row_warps(wide))
    return terms


class Outputs(NamedTuple):
    """What of a head's output its maps are judged by: values of the drawn keys `[Hkv, N, d]`, partial attention over
    the anchors `[H, T, d]` and its log mass `[H, T]`, and for how many keys each drawn one stands."""

    values: Tensor
    anchor_out: Tensor
    anchor_lse: Tensor
    log_count: Tensor | float


def output_error(
    student: Tensor, teacher: Tensor, mask: Tensor, outputs: Outputs, read: float,
) -> tuple[Tensor, Tensor]:
    """Relative L2 error of every query's output, cases added, `[H, T]` (`models.losses.OutputError`), and its gradient
    with respect to the student's logits `[H, T, N]`."""
    fits = on_device(student) and student.shape[-1] <= LONGEST
    return (launch_output_error if fits else output_error_reference)(student, teacher, mask, outputs, read)


def output_error_reference(
    student: Tensor, teacher: Tensor, mask: Tensor, outputs: Outputs, read: float,
) -> tuple[Tensor, Tensor]:
    """`output_error` in plain torch. With `p_i` the share of key i in the output `o` and `g = ∂error/∂o`: `∂error/∂ŝ_i
    = p_i (v_i − o)·g`."""
    values, anchor_out, anchor_lse, log_count = outputs
    heads_kv, length, dim = values.shape
    outside = ~mask

    def attend(logits: Tensor) -> tuple[Tensor, Tensor]:
        lse = torch.logaddexp(logits.logsumexp(-1), anchor_lse)[..., None]
        share = torch.exp(logits - lse)
        mid = (share.reshape(heads_kv, -1, length) @ values).reshape(anchor_out.shape)
        return torch.exp(anchor_lse[..., None] - lse) * anchor_out + mid, share

    a, b = ((x + log_count).masked_fill_(outside, NEG) for x in (teacher, student))
    full, _ = attend(a)
    cases: list[Tensor | None] = [None]
    if read > 0:
        cases.append(a >= a.topk(best_of(read, length), dim=-1).values[..., -1:])
    total, gradient = torch.zeros_like(anchor_lse), torch.zeros_like(b)
    for exact in cases:
        out, share = attend(b if exact is None else torch.where(exact, a, b))
        error, slope = slope_of(out, full)
        total += error
        along = (slope.reshape(heads_kv, -1, dim) @ values.mT).reshape(share.shape)
        along.sub_((out * slope).sum(-1, keepdim=True)).mul_(share)
        gradient.add_(along if exact is None else along.masked_fill_(exact, 0.0))
    return total, gradient


def best_of(read: float, length: int) -> int:
    """Keys that are read exactly of `length` drawn ones."""
    return max(1, round(read * length))


def slope_of(out: Tensor, full: Tensor) -> tuple[Tensor, Tensor]:
    """The relative error of outputs `[..., d]` and its gradient with respect to them."""
    size = full.norm(dim=-1, keepdim=True).clamp(min=1e-6)
    error = out - full
    length = error.norm(dim=-1, keepdim=True)
    return (length / size)[..., 0], error / (length * size).clamp(min=1e-12)


def launch_output_error(
    student: Tensor, teacher: Tensor, mask: Tensor, outputs: Outputs, read: float,
) -> tuple[Tensor, Tensor]:
    """`output_error` through Triton: log masses a query, outputs, gradient."""
    from sparsekv.kernels.losses_triton import mass_kernel, output_gradient_kernel, outputs_kernel

    student, teacher, mask, strides = _rows_of(student, teacher, mask)
    (heads, count, length), device = student.shape, student.device
    values, dim, rows = outputs.values.contiguous(), outputs.values.shape[2], heads * count
    # logits stay as they are: the anchors weigh so much less instead
    anchor = (outputs.anchor_lse.float() - outputs.log_count).contiguous()
    cases, wide = 2 + (read > 0), power_of_two(length)
    masses = torch.empty(cases, heads, count, dtype=torch.float32, device=device)
    threshold = torch.empty(heads, count, dtype=torch.float32, device=device)
    mass_kernel[(rows,)](
        student, teacher, mask, anchor, threshold, masses, rows, count, length, best_of(read, length), *strides,
        PADDED=wide, READS=read > 0, num_warps=row_warps(wide))
    of_head, width = rows // values.shape[0], min(WIDTH, padded(dim))
    tile: dict[str, Any] = {"ROWS": QUERIES_AT_ONCE, "BLOCK": KEYS_AT_ONCE, "WIDTH": width, "READS": read > 0,
                            "num_warps": WARPS}
    outs = torch.empty(cases, heads, count, dim, dtype=torch.float32, device=device)
    grid = values.shape[0], -(-of_head // QUERIES_AT_ONCE)
    outputs_kernel[(*grid, -(-dim // width))](
        student, teacher, mask, values, threshold, masses, outs, rows, of_head, count, length, dim, *strides, **tile)
    outs += torch.exp(anchor - masses)[..., None] * outputs.anchor_out
    error, slopes = slope_of(outs[1:], outs[0])
    along = (outs[1:] * slopes).sum(-1)
    gradient = torch.empty(heads, count, length, dtype=torch.float32, device=device)
    output_gradient_kernel[(*grid, -(-length // KEYS_AT_ONCE))](
        student, teacher, mask, values, threshold, masses, slopes.contiguous(), along.contiguous(), gradient, rows,
        of_head, count, length, dim, *strides, **tile)
    return error.sum(0), gradient


def _rows_of(student: Tensor, teacher: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
    """Rows that lie one behind the other, and the mask's strides."""
    mask = mask.expand(student.shape)
    return student.contiguous(), teacher.contiguous(), mask, mask.stride()


def row_warps(wide: int) -> int:
    """Warps of a program that holds a row of so many logits."""
    return min(16, max(1, wide // 256))
