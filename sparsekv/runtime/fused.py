"""Fused replacements for norms, RoPE, gated MLPs and small GEMMs of a planned step: fewer launches than the model's own
code takes, or faster ones.

A model's code runs as it is until, on the first pass, a kernel has given what it gave: from then on the kernel runs in
its place, for the time of a pass. Products are timed, too, and taken where they are faster on the device at hand than
what torch calls. Norms are found by their class, the rotation as the function that the models of transformers have
under one name, products as linear layers of torch's own class; what differs stays the model's own.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparsekv.kernels import few_rows, few_rows_gated, fits_few_rows, rms_norm, rotate_pair, silu_product
from sparsekv.runtime import process
from sparsekv.runtime.process import NOW
from sparsekv.runtime.timing import device_words, quicker

ROTATION = "apply_rotary_pos_emb"
CLOSE = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-5, torch.float64: 1e-12}
"""Largest difference from the model's own, as a share of its largest number: a step of its precision."""
NORMS: tuple[dict[str, Any], ...] = ({}, {"rounds": False}, {"rounds": False, "shift": 1.0}, {"shift": 1.0})
"""Ways in which models multiply by the weight of a norm."""
QUERIES, GATES = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
"""Linear layers of the same rows, as the models of transformers name them."""


class Fused:
    """The parts of a model that run by a kernel; `known` from its first pass on: the kernel in place of the model's
    code by what it is called with, None: the model's own stays."""

    def __init__(self, model: nn.Module, attention: Any):
        self.norms = [m for m in model.modules() if type(m).__name__.endswith("RMSNorm") and _eps(m) is not None
                      and [name for name, _ in m.named_parameters()] == ["weight"]]
        self.gates = [m for m in model.modules() if _is_gated(m)]
        self.attentions = [m for m in model.modules() if all(type(p) is nn.Linear for p in _parts(m, QUERIES))]
        joint = {id(p) for modules, names in ((self.attentions, QUERIES), (self.gates, GATES)) for m in modules
                 for p in _parts(m, names)}
        self.products = [m for m in model.modules() if type(m) is nn.Linear and id(m) not in joint]
        """Linear layers that have their rows for themselves."""
        self.known: dict[Any, Callable[..., Any] | None] = {}
        devices = {p.device for p in model.parameters()}
        self.used = len(devices) == 1 and devices.pop().type == "cuda"
        """Whether launches count: not on a CPU, where the model's own code does as well, nor over devices, where no
        step is planned."""
        self._changed: list[nn.Module] = []
        self._held: dict[int, tuple[Tensor, Tensor]] = {}
        """Of a linear layer by its id: the rows it will be asked for, and its product with them."""
        self._loaded: set[int] = set()
        self._module = sys.modules[type(attention).__module__]
        """Of transformers, which has the models' rotation."""

    def enter(self) -> None:
        """Replace the rotation of the model's module, a function and no module, for the time of an attachment."""
        process.replace(self._module, ROTATION, _asking_the_plan, self)

    def leave(self) -> None:
        """Give that function back; any number of times."""
        process.give_back(self._module, ROTATION, self)

    def put(self) -> None:
        """Replace the modules for the time of a pass."""
        if not self.used:
            return
        calls: list[tuple[Any, Callable[..., Any]]] = [
            *((m, functools.partial(self._norm, m)) for m in self.norms),
            *((m, functools.partial(self._gated, m)) for m in self.gates),
            *((m, functools.partial(self._product, m)) for m in self.products)]
        for attention in self.attentions:
            query, *others = parts = _parts(attention, QUERIES)
            if any(type(p) is not nn.Linear for p in parts):
                continue  # replaced since
            calls += [(query, functools.partial(self._queries, attention)),
                      *((m, functools.partial(self._handed, m)) for m in others)]
        self._changed = [m for m, _ in calls]
        for module, call in calls:
            module.__dict__["forward"] = call

    def restore(self) -> None:
        """The modules as they were; any number of times."""
        for module in self._changed:
            module.__dict__.pop("forward", None)
        self._changed = []
        self._held.clear()

    def loads(self, rows: int) -> dict[Any, Callable[[], Any]]:
        """Warm-up calls of a pass of one token with so many rows, keyed by kernel specialisation; none if asked for
        before."""
        calls: dict[Any, Callable[[], Any]] = {}
        if not self.used or rows in self._loaded:
            return calls
        self._loaded.add(rows)
        groups: list[tuple[Callable[..., Any], list[Any]]] = [(few_products, [m]) for m in self.products]
        groups += [(few_products, _parts(m, QUERIES)) for m in self.attentions]
        groups += [(few_gated, _parts(m, GATES)) for m in self.gates]
        for kernel, parts in groups:
            if all(type(p) is nn.Linear for p in parts):
                key = _key(kernel, parts, rows)
                x = parts[0].weight.new_zeros(rows, parts[0].in_features) if key not in calls else None
                if x is not None and _fit(parts, x):
                    calls[key] = functools.partial(kernel, parts, x)
        for norm in self.norms:
            calls.setdefault((type(norm), norm.weight.dtype, norm.weight.shape), functools.partial(_norms, norm, rows))
        for mlp in self.gates:
            weight: Tensor = mlp.gate_proj.weight  # type: ignore[union-attr, assignment]
            calls.setdefault((type(mlp), weight.dtype, weight.shape), functools.partial(_silu, weight, rows))
        return calls

    def _norm(self, norm: Any, x: Tensor) -> Tensor:
        def called(how: dict[str, Any], x: Tensor, weight: Tensor, eps: float) -> Tensor:
            return rms_norm(x, weight, eps, **how)

        return self.taken((type(norm), x.dtype, x.shape[-1]), functools.partial(type(norm).forward, norm),
                          [functools.partial(called, how) for how in NORMS], (x,), (x, norm.weight, _eps(norm)))

    def _gated(self, mlp: Any, x: Tensor) -> Tensor:
        return self.taken((type(mlp), x.dtype, x.shape[-1]), functools.partial(type(mlp).forward, mlp),
                          [self.gated_mlp], (x,), (mlp, x))

    def gated_mlp(self, mlp: Any, x: Tensor) -> Tensor:
        """An MLP whose gate is one launch, by itself or with the products before it."""
        def own(x: Tensor) -> Tensor:
            return silu_product(mlp.gate_proj(x), mlp.up_proj(x))

        down: Tensor = mlp.down_proj(self._few(few_gated, own, _parts(mlp, GATES), x))
        return down

    def _product(self, linear: Any, x: Tensor) -> Tensor:
        product: Tensor = self._few(few_products, functools.partial(_own, [linear]), [linear], x)[0]
        return product

    def _queries(self, attention: Any, x: Tensor) -> Tensor:
        """Queries of these rows; keys and values of the same are held for who asks for them next."""
        parts = _parts(attention, QUERIES)
        if not _fit(parts, x):
            return _own(parts[:1], x)[0]
        query, *others = self._few(few_products, functools.partial(_own, parts), parts, x)
        self._held.update({id(p): (x, y) for p, y in zip(parts[1:], others, strict=True)})
        return query

    def _handed(self, linear: Any, x: Tensor) -> Tensor:
        """Return what is held for a linear layer and these rows, else its own product."""
        rows, held = self._held.pop(id(linear), (None, None))
        return held if held is not None and rows is x else _own([linear], x)[0]

    def _few(self, kernel: Callable[..., Any], own: Callable[[Tensor], Any], parts: list[Any], x: Tensor) -> Any:
        """Products of a few rows by one launch, where it gives what `own` gives and is faster."""
        if not _fit(parts, x):
            return own(x)
        key = _key(kernel, parts, x.numel() // x.shape[-1])
        return self.taken(key, own, [kernel], (x,), (parts, x), timed=True)

    def rotation(self, own: Callable[..., Any], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        """Queries and keys of one token `[B, H, 1, d]` with RoPE."""
        fits = q.dim() == 4 and q.shape[2] == 1 and cos.dim() == 3 and cos.shape[-1] == q.shape[-1]
        if not self.used or not fits or cos.dtype != q.dtype:
            return own(q, k, cos, sin)
        return self.taken((own, q.dtype, q.shape[-1]), own, [rotate_pair], (q, k, cos, sin), (q, k, cos, sin))

    def taken(self, key: Any, own: Callable[..., Any], kernels: list[Any], args: Any, kernel_args: Any,
              timed: bool = False) -> Any:
        """The kernel's result where it is known to be the model's own, and if timed to be faster, else that."""
        if key in self.known:
            kernel = self.known[key]
            return own(*args) if kernel is None else kernel(*kernel_args)
        wanted = own(*args)
        if not args[0].numel() or (args[0].is_cuda and torch.cuda.is_current_stream_capturing()):
            return wanted  # which decides nothing
        try:
            error, best = min((_apart(kernel(*kernel_args), wanted), i) for i, kernel in enumerate(kernels))
        except Exception as problem:
            if type(problem).__module__.partition(".")[0] != "triton":  # more than this device holds, say
                raise
            error, best = float("inf"), 0
        kernel = kernels[best] if error <= CLOSE.get(args[0].dtype, 0.0) else None
        if kernel is not None and timed and args[0].is_cuda:
            device = args[0].device
            if not quicker(f"{device_words(device)}, {_words(key)}", functools.partial(kernel, *kernel_args),
                           functools.partial(own, *args), device):
                kernel = None
        self.known[key] = kernel
        return wanted


def _norms(norm: Any, rows: int) -> None:
    """Every kernel that a norm may run by."""
    for how in NORMS:
        rms_norm(norm.weight.new_zeros(rows, norm.weight.numel()), norm.weight, _eps(norm) or 0.0, **how)


def _silu(weight: Tensor, rows: int) -> None:
    """The gate of an MLP, `weight` of its first linear layer."""
    silu_product(*(weight.new_zeros(rows, 1, weight.shape[0]) for _ in range(2)))


def few_products(parts: list[Any], x: Tensor) -> tuple[Tensor, ...]:
    """The products of linear layers with the same rows."""
    return few_rows(x, [p.weight for p in parts], [p.bias for p in parts])


def few_gated(parts: list[Any], x: Tensor) -> Tensor:
    """Apply the gate of an MLP to its two linear layers' products."""
    return few_rows_gated(x, [p.weight for p in parts], [p.bias for p in parts])


def _asking_the_plan(own: Callable[..., Any]) -> Callable[..., Any]:
    """A model's rotation that asks the plan that runs in its thread; without one it is what it was."""
    @functools.wraps(own)
    def rotation(*args: Any, **kwargs: Any) -> Any:
        plan = NOW.plan
        if plan is None or len(args) != 4 or kwargs:
            return own(*args, **kwargs)
        return plan.layers.fused.rotation(own, *args)

    return rotation


def _is_gated(mlp: Any) -> bool:
    """Return whether this is an MLP whose gate is a SiLU, as the models of transformers name its parts."""
    parts = [getattr(mlp, n, None) for n in ("gate_proj", "up_proj", "down_proj")]
    return all(isinstance(p, nn.Linear) for p in parts) and "SiLU" in type(getattr(mlp, "act_fn", None)).__name__


def _parts(module: Any, names: Sequence[str]) -> list[Any]:
    return [getattr(module, name, None) for name in names]


def _own(parts: list[Any], x: Tensor) -> tuple[Tensor, ...]:
    """The products by these modules' own code."""
    return tuple(type(p).forward(p, x) for p in parts)


def _fit(parts: list[Any], x: Tensor) -> bool:
    """Return whether these are linear layers of torch's own class and plain weights, and the rows are few."""
    return all(type(p) is nn.Linear and type(p.weight) is nn.Parameter for p in parts) and fits_few_rows(
        x, [p.weight for p in parts], [p.bias for p in parts])


def _key(kernel: Callable[..., Any], parts: list[Any], rows: int) -> tuple[Any, ...]:
    """Name all that the result and the time of such a launch depend on."""
    first = parts[0]
    return (kernel, first.weight.dtype, rows, first.in_features, tuple(p.out_features for p in parts),
            first.bias is not None, first.weight.device)


def _words(key: tuple[Any, ...]) -> str:
    kernel, dtype, rows, inputs, outputs, biased, _ = key
    return (f"{kernel.__name__}, {dtype}, rows={rows}, inputs={inputs}, outputs={'+'.join(map(str, outputs))}, "
            f"biases={biased}")


def _eps(norm: Any) -> float | None:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


@torch.no_grad()
def _apart(result: Any, wanted: Any) -> float:
    """The largest difference as a share of the largest number; of other shapes or types infinite."""
    pairs = list(zip(result, wanted, strict=True)) if isinstance(wanted, tuple) else [(result, wanted)]
    if any(a.shape != b.shape or a.dtype != b.dtype for a, b in pairs):
        return float("inf")
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=torch.finfo(b.dtype).tiny)) for a, b in pairs)
