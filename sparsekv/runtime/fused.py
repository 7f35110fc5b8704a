"""Norms, rotations and gates of a planned step in one launch each, where the model's own code takes eight or ten.

A model's code runs as it is until, on the first pass, a kernel has given what it gave: from then on the kernel runs in
its place, for the time of a pass. Norms are found by their class, the rotation as the function that the models of
transformers have under one name; what differs stays the model's own.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sparsekv.kernels import rms_norm, rotate_pair, silu_product
from sparsekv.runtime.process import NOW

ROTATION = "apply_rotary_pos_emb"
CLOSE = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-5, torch.float64: 1e-12}
"""Largest difference from the model's own, as a share of its largest number: a step of its precision."""
NORMS: tuple[dict[str, Any], ...] = ({}, {"rounds": False}, {"rounds": False, "shift": 1.0}, {"shift": 1.0})
"""Ways in which models multiply by the weight of a norm."""
_GATE = threading.Lock()


class Fused:
    """What of a model runs as one launch; `known` from its first pass on: the kernel in place of the model's code by
    what it is called with, None: the model's own stays."""

    def __init__(self, model: nn.Module, attention: Any):
        self.norms = [m for m in model.modules() if type(m).__name__.endswith("RMSNorm") and _eps(m) is not None
                      and [name for name, _ in m.named_parameters()] == ["weight"]]
        self.gates = [m for m in model.modules() if _is_gated(m)]
        self.known: dict[Any, Callable[..., Any] | None] = {}
        self.used = next(model.parameters()).is_cuda
        """Whether launches count: on a CPU the model's own code does as well."""
        self._put = False
        wrap_rotation(type(attention))

    def put(self) -> None:
        """For the time of a pass."""
        if not self.used:
            return
        self._put = True
        for norm in self.norms:
            norm.__dict__["forward"] = functools.partial(self._norm, norm)
        for mlp in self.gates:
            mlp.__dict__["forward"] = functools.partial(self._gated, mlp)

    def restore(self) -> None:
        """The modules as they were; any number of times."""
        if self._put:
            for module in (*self.norms, *self.gates):
                module.__dict__.pop("forward", None)
            self._put = False

    def _norm(self, norm: Any, x: Tensor) -> Tensor:
        def called(how: dict[str, Any], x: Tensor, weight: Tensor, eps: float) -> Tensor:
            return rms_norm(x, weight, eps, **how)

        return self.taken((type(norm), x.dtype, x.shape[-1]), functools.partial(type(norm).forward, norm),
                          [functools.partial(called, how) for how in NORMS], (x,), (x, norm.weight, _eps(norm)))

    def _gated(self, mlp: Any, x: Tensor) -> Tensor:
        return self.taken((type(mlp), x.dtype, x.shape[-1]), functools.partial(type(mlp).forward, mlp), [gated_mlp],
                          (x,), (mlp, x))

    def rotation(self, own: Callable[..., Any], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        """Queries and keys of one token `[B, H, 1, d]` with RoPE."""
        fits = q.dim() == 4 and q.shape[2] == 1 and cos.dim() == 3 and cos.shape[-1] == q.shape[-1]
        if not self.used or not fits or cos.dtype != q.dtype:
            return own(q, k, cos, sin)
        return self.taken((own, q.dtype, q.shape[-1]), own, [rotate_pair], (q, k, cos, sin), (q, k, cos, sin))

    def taken(self, key: Any, own: Callable[..., Any], kernels: list[Any], args: Any, kernel_args: Any) -> Any:
        """The kernel's result where it is known to be the model's own, else that."""
        if key in self.known:
            kernel = self.known[key]
            return own(*args) if kernel is None else kernel(*kernel_args)
        wanted = own(*args)
        if not (args[0].is_cuda and torch.cuda.is_current_stream_capturing()):
            apart = [(_apart(kernel(*kernel_args), wanted), i) for i, kernel in enumerate(kernels)]
            error, best = min(apart)
            self.known[key] = kernels[best] if error <= CLOSE.get(args[0].dtype, 0.0) else None
        return wanted


def gated_mlp(mlp: Any, x: Tensor) -> Tensor:
    """An MLP whose gate is one launch."""
    down: Tensor = mlp.down_proj(silu_product(mlp.gate_proj(x), mlp.up_proj(x)))
    return down


def wrap_rotation(attention: type) -> None:
    """Let the rotation of this attention class's module ask the plan that runs in its thread; elsewhere it is what it
    was. Once a process, as with attention functions that are registered."""
    space = vars(sys.modules[attention.__module__])
    with _GATE:
        own = space.get(ROTATION)
        if own is None or hasattr(own, "without_plan"):
            return

        @functools.wraps(own)
        def rotation(*args: Any, **kwargs: Any) -> Any:
            plan = NOW.plan
            if plan is None or len(args) != 4 or kwargs:
                return own(*args, **kwargs)
            return plan.layers.fused.rotation(own, *args)

        rotation.without_plan = own  # type: ignore[attr-defined]
        space[ROTATION] = rotation


def _is_gated(mlp: Any) -> bool:
    """Whether this is an MLP whose gate is a SiLU, as the models of transformers name its parts."""
    parts = [getattr(mlp, n, None) for n in ("gate_proj", "up_proj", "down_proj")]
    return all(isinstance(p, nn.Linear) for p in parts) and "SiLU" in type(getattr(mlp, "act_fn", None)).__name__


def _eps(norm: Any) -> float | None:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


@torch.no_grad()
def _apart(found: Any, wanted: Any) -> float:
    """The largest difference as a share of the largest number; of other shapes or types infinite."""
    pairs = list(zip(found, wanted, strict=True)) if isinstance(wanted, tuple) else [(found, wanted)]
    if any(a.shape != b.shape or a.dtype != b.dtype for a, b in pairs):
        return float("inf")
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=torch.finfo(b.dtype).tiny)) for a, b in pairs)
