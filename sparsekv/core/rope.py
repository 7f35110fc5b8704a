"""Rotary position embedding, forward and back, without knowing the model: two layouts, any tables.

A rotation at position p is `x' = x·cos_p + rot(x)·sin_p` on the first `rotary_dim` channels. The tables come from the
model's own rotary module and may carry an attention scaling `a` (yarn, longrope: `cos² + sin² = a²`), so the inverse
divides by `cos² + sin²`. A pure leaf: imports no stage.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sparsekv.util.errors import SparseKVError

Layout = Literal["half", "interleaved"]
LAYOUTS: tuple[Layout, ...] = ("half", "interleaved")
ROUND_TRIP = 1e-4


@dataclass(frozen=True)
class LayerRope:
    """The rotation of a layer: the layout, and whether the model's table holds every angle once (`repeat`)."""

    layout: Layout
    repeat: bool

    def table(self, table: Tensor) -> Tensor:
        """The model's `cos` or `sin [..., width]` as float32, full width in the layout."""
        table = table.float()
        if not self.repeat:
            return table
        if self.layout == "interleaved":
            return table[..., : table.shape[-1] // 2].repeat_interleave(2, dim=-1)
        return torch.cat([table, table], dim=-1)


def find_layout(attention: torch.nn.Module, cos: Tensor, sin: Tensor, head_dim: int) -> LayerRope | None:
    """Find the layout whose rotation equals the rotary function of the attention's own module, and whose inverse undoes
    it, on random vectors. Nothing is inferred from a name.

    Args:
        attention: an attention module of the model.
        cos, sin: `[n, width]`, as the model passes them.
        head_dim: d.

    Returns:
        How the layer rotates; None where no layout does.
    """
    apply = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    if apply is None:
        return None
    cos, sin = cos.float(), sin.float()
    x = torch.randn(1, 2, cos.shape[0], head_dim, generator=torch.Generator("cpu").manual_seed(0), device="cpu",
                    dtype=torch.float32).to(cos.device)
    try:
        truth = apply(x, x, cos[None], sin[None])[0]
    except (RuntimeError, TypeError, ValueError):
        return None
    for layout in LAYOUTS:
        for repeat in (False, True):
            rope = LayerRope(layout, repeat)
            tables = rope.table(cos), rope.table(sin)
            if tables[0].shape[-1] > head_dim:
                continue
            forward = (rotate(x, *tables, layout) - truth).abs().max().item()
            if max(forward, (unrotate(truth, *tables, layout) - x).abs().max().item()) < ROUND_TRIP:
                return rope
    return None


class RopeTable:
    """`cos, sin [B or 1, N, width]` float32, full width in `layout`, of every column of a cache: what the model itself
    used when the token was computed."""

    def __init__(self, layout: Layout, cos: Tensor, sin: Tensor):
        self.layout: Layout = layout
        self._tables = cos, sin

    def tables(self) -> tuple[Tensor, Tensor]:
        return self._tables

    def unrotate(self, x: Tensor, columns: Tensor) -> Tensor:
        """Remove RoPE: x `[B, H, n, d]` of the tokens at `columns [n]`."""
        cos, sin = (t[:, columns.to(t.device)][:, None].to(x.device) for t in self.tables())
        return unrotate(x, cos, sin, self.layout)

    def turn(self, x: Tensor, old: Tensor, new: Tensor) -> Tensor:
        """Move rotated vectors to other positions: x `[..., n, d]`, old and new int64 `[..., n]`, broadcastable. Raises
        SparseKVError for a batch with padding."""
        cos, sin = self.tables()
        if cos.shape[0] > 1:
            raise SparseKVError("contiguous positions work on one sequence at a time, found a batch with padding")
        for positions, function in ((old, unrotate), (new, rotate)):
            x = function(x, cos[0][positions], sin[0][positions], self.layout)
        return x


def rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    """Apply RoPE, in float32 at least.

    Args:
        x: `[..., d]` without RoPE; channels past `rotary_dim` pass through.
        cos, sin: `[..., rotary_dim]`, broadcastable, full width in `layout`.

    Returns:
        As x.
    """
    dtype = torch.promote_types(torch.promote_types(x.dtype, cos.dtype), torch.float32)
    width = cos.shape[-1]
    part, sin = x[..., :width].to(dtype), sin.to(dtype)
    # the quarter turn of every pair: half-split `[−x₂, x₁]`, interleaved `[−x₁, x₀, −x₃, x₂, …]`
    first, second = ((slice(width // 2), slice(width // 2, width)) if layout == "half" else
                     (slice(0, width, 2), slice(1, width, 2)))
    turned = part * cos.to(dtype)
    turned[..., first].addcmul_(part[..., second], sin[..., first], value=-1)
    turned[..., second].addcmul_(part[..., first], sin[..., second])
    if width == x.shape[-1]:
        return turned.to(x.dtype)
    return torch.cat([turned.to(x.dtype), x[..., width:]], dim=-1)


def unrotate(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    """Remove RoPE, the inverse of `rotate` for the same tables, attention scaling included."""
    return rotate(x, *inverse(cos, sin), layout)


def inverse(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The tables with which `rotate` undoes a rotation by these, float32 at least."""
    cos, sin = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (cos, sin))
    norm = cos.square() + sin.square()
    return cos / norm, -sin / norm
