"""Products of at most eight rows with the weights of a layer, in one launch where a model's own code takes two or
three: queries, keys and values of the same rows, and both products of an MLP with the gate after them. What such a
product costs is the bytes of its weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from sparsekv.kernels.between import silu_product_reference
from sparsekv.kernels.launch import shared_bytes

MOST_ROWS, MOST_PARTS, SUMMED_ROWS = 8, 3, 2
"""Rows of a launch, weights side by side in it, and rows up to which threads sum for themselves."""
MANY_OUTPUTS = 1 << 15
"""Outputs of the product with a vocabulary, which are more than any layer's."""
HALVES = (torch.bfloat16, torch.float16)


class Launch(NamedTuple):
    """Outputs and inputs of a block, warps, and blocks on their way."""

    outputs: int
    inputs: int
    warps: int
    stages: int = 1


SUM, SUM_MANY, SUM_JOINT = Launch(2, 2048, 8), Launch(2, 1024, 4), Launch(1, 1024, 4)
DOT, DOT_JOINT = Launch(16, 512, 4, 3), Launch(64, 128, 4, 4)


def launch_of(rows: int, outputs: int, joint: bool) -> Launch:
    """The launch of so many rows and outputs that was fastest on an H100; joint: of several weights."""
    if rows <= SUMMED_ROWS:
        return SUM_JOINT if joint else SUM_MANY if outputs > MANY_OUTPUTS else SUM
    return DOT_JOINT if joint or outputs > MANY_OUTPUTS else DOT


def fits_few_rows(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> bool:
    """Return whether a launch takes them: x `[..., K]` of at most eight rows in half precision, weights `[n, K]` dense
    and of the same precision, with rows of whole 16 bytes, biases `[n]` of all or of none."""
    dim, given = x.shape[-1], [b for b in biases if b is not None]
    return (0 < x.numel() <= MOST_ROWS * dim and x.dtype in HALVES and dim % 8 == 0 and len(weights) <= MOST_PARTS
            and len(given) in (0, len(weights))
            and all(w.dtype == x.dtype and w.device == x.device and w.shape[-1] == dim and w.is_contiguous()
                    and w.data_ptr() % 16 == 0 for w in weights)
            and all(b.dtype == x.dtype and b.device == x.device and b.is_contiguous() for b in given))


def few_rows(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """`x Wᵀ + b` for every weight: x `[..., K]`, weights `[n, K]`, at most three, biases `[n]` or None -> `[..., n]`
    each, summed in float32 and rounded once."""
    if x.is_cuda and fits_few_rows(x, weights, biases):
        return launch_few_rows(x, weights, biases)
    return few_rows_reference(x, weights, biases)


def few_rows_reference(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """`few_rows` in plain torch."""
    return tuple(functional.linear(x, w, b) for w, b in zip(weights, biases, strict=True))


def few_rows_gated(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor:
    """`SiLU(x Gᵀ + g) · (x Uᵀ + u)`, weights G, U `[n, K]`, biases g, u `[n]` or None -> `[..., n]`. Both products and
    SiLU are rounded to x's precision, as models do it."""
    if x.is_cuda and fits_few_rows(x, weights, biases):
        return launch_few_rows_gated(x, weights, biases)
    return few_rows_gated_reference(x, weights, biases)


def few_rows_gated_reference(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor:
    """`few_rows_gated` in plain torch."""
    return silu_product_reference(*few_rows_reference(x, weights, biases))


def launch_few_rows(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None],
                    how: Launch | None = None) -> tuple[Tensor, ...]:
    """`few_rows` through Triton, a program for some outputs of one weight."""
    sizes = [w.shape[0] for w in weights]
    rows = x.numel() // x.shape[-1]
    out = torch.empty(rows * sum(sizes), dtype=x.dtype, device=x.device)
    _launch(x, weights, biases, sizes, out, False, how or launch_of(rows, sum(sizes), len(weights) > 1))
    parts = out.split([rows * n for n in sizes])
    return tuple(part.view(*x.shape[:-1], n) for part, n in zip(parts, sizes, strict=True))


def launch_few_rows_gated(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None],
                          how: Launch | None = None) -> Tensor:
    """`few_rows_gated` through Triton, a program for some outputs."""
    outputs = weights[0].shape[0]
    out = torch.empty(*x.shape[:-1], outputs, dtype=x.dtype, device=x.device)
    _launch(x, weights, biases, [outputs], out, True, how or launch_of(x.numel() // x.shape[-1], outputs, True))
    return out


def fitting(how: Launch, weights: int, size: int, room: int) -> Launch:
    """A launch of matrix units with as many blocks on their way as `room` bytes of shared memory hold; weights: read in
    step by a program; size: bytes of a number."""
    block = (how.outputs * weights + 16) * how.inputs * size
    return how._replace(stages=max(1, min(how.stages, room // block)))


def _launch(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], sizes: list[int], out: Tensor,
            gated: bool, how: Launch) -> None:
    from sparsekv.kernels.few_rows_triton import dot_kernel, sum_kernel

    rows, dim = x.numel() // x.shape[-1], x.shape[-1]
    given = [b for b in biases if b is not None]
    three = [[*tensors, *[x] * MOST_PARTS][:MOST_PARTS] for tensors in (weights, given)]
    counts = [*sizes, 0, 0][:MOST_PARTS]
    if rows > SUMMED_ROWS and x.is_cuda:
        how = fitting(how, 1 + gated, x.element_size(), shared_bytes(x.device))
    blocks = sum(-(-n // how.outputs) for n in sizes)
    (sum_kernel if rows <= SUMMED_ROWS else dot_kernel)[(blocks,)](
        x.contiguous(), *three[0], *three[1], out, *counts, dim, rows, PARTS=len(sizes), GATED=gated, BIAS=bool(given),
        BLOCK_N=how.outputs, BLOCK_K=how.inputs, num_warps=how.warps, num_stages=how.stages)
