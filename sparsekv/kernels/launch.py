"""What every launch needs: sizes padded for Triton, the dtype of the arithmetic, whether kernels may overlap."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

NEG_INF = float("-inf")
WIDEST = 512
"""Bytes of the widest rows that a kernel holds whole, beside others as wide: 256 numbers in half precision."""


class Heads(NamedTuple):
    """A tensor `[row, head, ...]` as kernels take it: where it begins and its strides; what follows lies dense."""

    base: Tensor
    row: int
    head: int


class Tokens(NamedTuple):
    """A tensor `[row, head, token, channel]` as kernels take it: where it begins and its strides, the last one 1."""

    base: Tensor
    row: int
    head: int
    token: int


def as_heads(x: Tensor) -> Heads:
    """x `[row, head, ...]`, dense from there on."""
    return Heads(x, x.stride(0), x.stride(1))


def as_tokens(x: Tensor) -> Tokens:
    """x `[row, head, token, channel]`, its channels side by side."""
    return Tokens(x, *x.stride()[:3])


def seats_or(seats: Tensor | None, other: Tensor) -> Tensor:
    """Seats as a kernel takes them; without any a tensor that it does not read."""
    return other if seats is None else seats.contiguous()


def acc_dtype(x: Tensor) -> torch.dtype:
    """The dtype of the arithmetic: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of products over all of a context: on CUDA the tensor's own, where half precision is ten times as fast
    and products are summed in float32 all the same; on the CPU that of the arithmetic."""
    return x.dtype if x.is_cuda else acc_dtype(x)


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` of `[n, i, j]` and `[n, j, k]` of one dtype, float32 at least: what half precision would round stays."""
    acc = acc_dtype(a)
    if a.is_cuda and a.dtype != acc:
        return torch.bmm(a, b, out_dtype=acc)
    return torch.bmm(a.to(acc), b.to(acc))


def finite(x: Tensor) -> Tensor:
    """x with zero for what is infinite: a shift that may be of an empty set."""
    return torch.nan_to_num(x, nan=float("nan"), posinf=0.0, neginf=0.0)


def on_device(x: Tensor) -> bool:
    """Return whether the Triton kernels take it: on a CUDA device and not float64."""
    return x.is_cuda and x.dtype != torch.float64


def power_of_two(n: int) -> int:
    """The next power of two, at least 1."""
    return 1 << max(0, n - 1).bit_length()


def padded(n: int) -> int:
    """The next power of two that a matrix product takes, at least 16."""
    return max(16, power_of_two(n))


def at_once(block: int, row_bytes: int, widest: int = WIDEST) -> int:
    """Rows of a block that is held whole: `block`, of rows wider than `widest` bytes fewer in proportion, a power of
    two and at least 16, so that they fit the shared memory of every supported device."""
    return max(16, block // power_of_two(-(-row_bytes // widest)))


def dense_last(x: Tensor) -> Tensor:
    """x with a last dimension of stride one."""
    return x if x.stride(-1) == 1 else x.contiguous()


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """The shared memory that a program can have."""
    properties: Any = torch.cuda.get_device_properties(device)  # torch's own types do not list the one that is wanted
    return getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)


@functools.cache
def overlaps(device: torch.device) -> bool:
    """Return whether a kernel can be prepared while the one before it ends (programmatic dependent launch)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
