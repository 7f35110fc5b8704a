"""Dense or sparse: from which length on sparse decoding is faster than full attention. Under `attach` both are timed on
the device at hand, one layer's step at two lengths, for the number of rows, heads and the method that are decoded with.
A server's batch has any number of rows and the engine's own attention kernel: there the length is a measured one.

Two lines through these times cross at the length, the break-even length. Times are kept (`timing.Kept`) in
`break_even.json`.
"""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any, NamedTuple

import torch

from sparsekv.core.estimators import Estimator
from sparsekv.core.layer import LayerView, Queries
from sparsekv.core.regions import Regions
from sparsekv.core.rope import RopeTable
from sparsekv.core.selectors import Selector
from sparsekv.core.step import build, sparse_step
from sparsekv.kernels import decode_attention, dense_attention
from sparsekv.runtime.timing import Kept, device_words, microseconds
from sparsekv.util.memory import free_memory

LENGTHS = {"cuda": (4096, 32_768), "cpu": (1024, 8192)}
"""Tokens at which both are timed, by type of device."""
MOST_BYTES = 1 << 29
"""Keys and values of a layer that is timed: the longer length is less where they would be more."""
MEASURED_BYTES = {"cuda": (190_000_000, 4), "cpu": (32_000_000, 1)}
"""What a layer's keys and values of a batch take from which on its decode step is faster sparse, all requests together,
where that cannot be timed, and the part of it that a request holds at least: on one H200, beside FlashAttention 3, 32/8
heads of 128; on a CPU of every request (docs/results/speed.md, router at 2 %)."""
NEVER = 1 << 62


class Shape(NamedTuple):
    """The shape of a layer: rows, query heads, KV heads, head dimension, precision, device."""

    rows: int
    heads_q: int
    heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        """A token's keys and values, of all rows."""
        return 2 * self.rows * self.heads * self.dim * self.dtype.itemsize


class Times(NamedTuple):
    """Microseconds of a layer's step at two lengths [tokens]."""

    lengths: tuple[int, int]
    full: tuple[float, float]
    sparse: tuple[float, float]

    @property
    def break_even(self) -> int:
        """The length from which the sparse step is the faster one; `NEVER` where the lines do not cross."""
        (first, last), gap = self.lengths, self.sparse[0] - self.full[0]
        if gap <= 0:
            return first
        gain = ((self.full[1] - self.full[0]) - (self.sparse[1] - self.sparse[0])) / (last - first)
        return NEVER if gain <= 0 else first + math.ceil(gap / gain)

    def describe(self, name: str) -> str:
        first, last = self.lengths
        return (f"a layer's step takes full attention {self.full[0]:.0f} µs at {first} tokens and "
                f"{self.full[1]:.0f} µs at {last}, {name} {self.sparse[0]:.0f} µs and {self.sparse[1]:.0f} µs")


class DenseRule(NamedTuple):
    """The lengths below which full attention decodes. shortest: of a cache [tokens]; together: of all other caches of a
    batch [tokens]; why: a sentence; times: the times that decided, if any did."""

    shortest: int
    together: int
    why: str
    times: Times | None = None


def dense_rule(
    given: int | None, *, on_host: bool = False, times: Times | None = None, name: str = "", token_bytes: int = 0,
    device: str = "cuda",
) -> DenseRule:
    """Choose between full and sparse attention, by the first of these that is known.

    Args:
        given: a length [tokens].
        on_host: keys lie in CPU memory.
        times: of this device; name: the method that was timed.
        token_bytes: a token's keys and values in a layer; device: its type. By these, where nothing else is known, what
            was measured elsewhere.
    """
    if given is not None:
        return DenseRule(given, 0, f"dense_below={given} was given")
    if on_host:
        return DenseRule(0, 0, "keys and values lie in CPU memory")
    if times is not None:
        return DenseRule(times.break_even, 0, times.describe(name), times)
    batch, part = MEASURED_BYTES.get(device, (0, 1))
    together, least = (-(-batch // (token_bytes * n)) for n in (1, part))
    return DenseRule(least, together if part > 1 else 0, (
        f"a layer's sparse step was measured to be faster from {batch / 1e6:.0f} MB of keys and values on, at "
        f"{token_bytes} bytes a token"))


def _times(entry: Any) -> Times | None:
    """Times as they are kept; None for anything else."""
    try:
        lengths, full, sparse = ((float(a), float(b)) for a, b in entry)
        return Times((int(lengths[0]), int(lengths[1])), full, sparse)
    except (TypeError, ValueError, OverflowError):
        return None


KEPT = Kept("break_even.json", _times)


def times_of(shape: Shape, selector: Selector, estimator: Estimator | None, sinks: int, window: int) -> Times:
    """The times of this shape, kept or taken. selector, estimator: of one layer, not built yet; sinks, window: tokens
    of sink and local window."""
    times: Times = KEPT.get(key_of(shape, selector, estimator, sinks, window),
                            lambda: _timed(shape, selector, estimator, sinks, window))
    return times


def shortest(device: torch.device, sinks: int, window: int) -> int:
    """The shorter length that is timed: at least twice what is always read. Shorter caches are decoded with full
    attention, untimed."""
    return max(LENGTHS.get(device.type, LENGTHS["cpu"])[0], 2 * (sinks + window))


def key_of(shape: Shape, selector: Selector, estimator: Estimator | None, sinks: int, window: int) -> str:
    """Name all that the times depend on."""
    how = [f"{f.name}={getattr(selector, f.name)}" for f in fields(selector) if f.metadata]
    layer = getattr(selector, "layer", None)
    if layer is not None:
        how += [f"buckets={layer.centroids.shape[-2]}", f"key_space={layer.key_space}", f"scores={layer.scores}",
                f"code={getattr(layer, 'sketch_bytes', 0)}"]
    kind = type(selector)
    completion = "none" if estimator is None else type(estimator).__qualname__
    return ", ".join([
        device_words(shape.device), str(shape.dtype), *(
            f"{name}={value}" for name, value in zip(shape._fields[:4], shape[:4], strict=True)),
        f"sinks={sinks}", f"window={window}", f"{kind.__module__}.{kind.__qualname__}", *how,
        f"completion={completion}"])


def _timed(shape: Shape, selector: Selector, estimator: Estimator | None, sinks: int, window: int) -> Times:
    first, last = shortest(shape.device, sinks, window), LENGTHS.get(shape.device.type, LENGTHS["cpu"])[1]
    most = MOST_BYTES
    if shape.device.type == "cuda":
        most = min(most, free_memory(shape.device) // 4)
    last = max(2 * first, min(last, most // shape.token_bytes))
    with torch.no_grad():
        pairs = [_step_times(shape, selector.fork(), None if estimator is None else estimator.fork(), sinks, window, n)
                 for n in (first, last)]
    return Times((first, last), (pairs[0][0], pairs[1][0]), (pairs[0][1], pairs[1][1]))


def _step_times(shape: Shape, selector: Selector, estimator: Estimator | None, sinks: int, window: int,
                length: int) -> tuple[float, float]:
    """Microseconds of full attention and of the sparse step of a layer of made-up keys."""
    view, queries = made_up(shape, sinks, window, length)
    build(view, selector, estimator)
    steps = (lambda: full_step(view, queries), lambda: sparse_step(view, queries, selector, estimator))
    captured = shape.device.type == "cuda" and selector.replayable and (estimator is None or estimator.in_kernel)
    full, sparse = (microseconds(step, shape.device, captured, shape.rows) for step in steps)
    return full, sparse


def made_up(shape: Shape, sinks: int, window: int, length: int) -> tuple[LayerView, Queries]:
    """A layer of drawn keys and values, and the query after them."""
    rows, heads_q, heads, dim, dtype, device = shape
    generator = torch.Generator(device).manual_seed(0)

    def draw(count: int, tokens: int) -> torch.Tensor:
        return torch.randn(rows, count, tokens, dim, dtype=torch.float32, device=device,
                           generator=generator).to(dtype)

    regions = Regions.at_prefill_end(torch.zeros(rows, dtype=torch.long, device=device), length, sinks, window)
    angles = torch.zeros(1, length, dim, device=device)
    rope = RopeTable("half", angles.cos(), angles)
    view = LayerView(draw(heads, length), draw(heads, length), regions=regions, scale=dim**-0.5,
                     num_query_heads=heads_q, rope=rope, recent_queries=draw(heads_q, 32), recent_end=length)
    return view, Queries.last(draw(heads_q, 1), length, rope)


def full_step(view: LayerView, queries: Queries) -> Any:
    """Full attention of a layer, as a plan runs it."""
    if view.device.type == "cuda":
        return decode_attention(queries.folded, view.keys, view.values, view.regions.starts, queries.lengths,
                                scale=view.scale)
    return dense_attention(queries.rot, view.keys, view.values, scale=view.scale)
