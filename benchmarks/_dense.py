"""A step of a layer that decodes densely: `decode_attention` against cuDNN, flash attention and FlashInfer."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks._rows import row
from sparsekv.kernels import decode_attention
from sparsekv.kernels.stored import decode_attention_reference

HEADS = [(12, 2, 128), (14, 2, 64), (4, 1, 128), (32, 8, 128)]
"""Query heads, KV heads, head dimension."""
LENGTHS = {"4k": 4096, "8k": 8192, "16k": 16_384, "30k": 30_000, "128k": 131_072}
ROWS = (1, 8, 24)
MOST, CACHED = 7 * 2**30, 256 * 2**20
"""Bytes of the largest case; bytes over which buffer sets rotate, so that no figure is the cache's."""
BANDWIDTHS = {"H200": 4.8e12, "H100": 3.35e12}
"""Bytes a second by the cards' data sheets."""
PAGE = 16
"""Tokens of a page of FlashInfer's."""


class DenseStep:
    """One buffer set: a cache of keys and values, and the query of every row."""

    def __init__(self, heads_q: int, heads: int, dim: int, length: int, batch: int, seed: int):
        generator = torch.Generator("cuda").manual_seed(seed)
        self.q, self.k, self.v = (
            torch.randn(batch, h, n, dim, device="cuda", dtype=torch.bfloat16, generator=generator)
            for h, n in ((heads_q, 1), (heads, length), (heads, length)))
        self.starts = torch.zeros(batch, dtype=torch.long, device="cuda")
        self.lengths = torch.full_like(self.starts, length)

    def ours(self) -> torch.Tensor:
        """As a plan of the runtime calls it, the new token's keys in place."""
        return decode_attention(self.q[:, :, 0], self.k, self.v, self.starts, self.lengths,
                                scale=self.q.shape[-1]**-0.5)[0]

    def sdpa_cudnn(self) -> torch.Tensor:
        """Grouped heads as such, its fastest form."""
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(self.q, self.k, self.v, enable_gqa=True)

    def sdpa_flash(self) -> torch.Tensor:
        """The heads of a group as rows of one KV head, its fastest form."""
        grouped = self.q.view(self.q.shape[0], self.k.shape[1], -1, self.q.shape[-1])
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(grouped, self.k, self.v)

    def flashinfer(self) -> torch.Tensor:
        """One row as a cache, several as pages."""
        import flashinfer

        if len(self.q) > 1:
            wrapper, pages = self.paged
            return wrapper.run(self.q[:, :, 0], pages)
        return flashinfer.single_decode_with_kv_cache(self.q[0, :, 0], self.k[0], self.v[0], kv_layout="HND",
                                                      use_tensor_cores=True)

    @functools.cached_property
    def paged(self) -> Any:
        """FlashInfer's plan for these rows, made once as a server makes it once a step, and their pages."""
        import flashinfer

        batch, heads, length, dim = self.k.shape
        count = length // PAGE
        if length % PAGE:
            raise RuntimeError(f"{length} tokens are no whole pages of {PAGE}")
        ends = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * count
        last = torch.full((batch,), PAGE, dtype=torch.int32, device="cuda")
        workspace = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
        wrapper.plan(ends, torch.arange(batch * count, dtype=torch.int32, device="cuda"), last, self.q.shape[1], heads,
                     dim, PAGE, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)
        pages = tuple(x.view(batch, heads, count, PAGE, dim).transpose(1, 2).flatten(0, 1).contiguous()
                      for x in (self.k, self.v))
        return wrapper, pages


METHODS = ("ours", "sdpa_cudnn", "sdpa_flash", "flashinfer")


def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every case that fits: its name, and query heads, KV heads, head dimension, tokens, rows."""
    for heads_q, heads, dim in HEADS:
        for name, length in LENGTHS.items():
            for batch in ROWS:
                if 4 * heads * dim * length * batch <= MOST:
                    yield f"dense-{heads_q}x{heads}-d{dim}-{name}-b{batch}", (heads_q, heads, dim, length, batch)


def buffers(shape: tuple[int, ...]) -> list[DenseStep]:
    """As many sets as fill the cache, at least two."""
    _, heads, dim, length, batch = shape
    sets = min(16, max(2, -(-CACHED // (4 * heads * dim * length * batch))))
    return [DenseStep(*shape, seed=i) for i in range(sets)]


def floor_us(shape: tuple[int, ...]) -> float | None:
    """What memory allows by the data sheet, every key and value once; None on another card."""
    _, heads, dim, length, batch = shape
    name = torch.cuda.get_device_name()
    rate = next((rate for card, rate in BANDWIDTHS.items() if card in name), None)
    return None if rate is None else 4 * heads * dim * length * batch / rate * 1e6


def check() -> None:
    """Against float64, rows of several lengths of which the rest of the storage is poison; raises where they differ."""
    for heads_q, heads, dim in HEADS:
        for length, batch in ((1, 1), (777, 3), (30_011, 2)):
            b = DenseStep(heads_q, heads, dim, length + 5, batch, seed=length)
            for i in range(batch):
                b.lengths[i], b.starts[i] = max(1, length - 13 * i), 7 * i
                for x in (b.k, b.v):
                    x[i, :, b.lengths[i]:] = float("nan")
            call: dict[str, Any] = {"scale": dim**-0.5}
            out, lse = decode_attention(b.q[:, :, 0], b.k, b.v, b.starts, b.lengths, **call)
            truth = decode_attention_reference(b.q[:, :, 0].double(), b.k, b.v, b.starts, b.lengths, **call)
            error, gap = float((out - truth[0]).norm() / truth[0].norm()), float((lse - truth[1]).abs().max())
            if not (error < 5e-3 and gap < 1e-2):
                raise SystemExit(f"{heads_q}/{heads} of {dim}, {length} tokens: the kernel differs from its twin by "
                                 f"{error:.1e} and {gap:.1e}; no speed is reported")
    print("check decode_attention: as its twin", flush=True)


def measure(timed: Callable[[list[Callable[[], torch.Tensor]]], float]) -> Iterator[list[dict[str, Any]]]:
    """Microseconds a step, the rows of one case after another. A peer that cannot run a case, or gives another result,
    is left out and said."""
    check()
    for case, shape in shapes():
        sets, floor = buffers(shape), floor_us(shape)
        found = {} if floor is None else {"floor": floor}
        truth = sets[0].ours().float().flatten()
        for method in METHODS:
            try:
                mine = getattr(sets[0], method)().float().flatten()
                if float((truth - mine).norm() / truth.norm()) > 2e-2:
                    raise RuntimeError("gives another result")
                found[method] = timed([functools.partial(_call, b, method) for b in sets])
            except (RuntimeError, ImportError) as error:
                print(f"{case} {method}: {str(error).splitlines()[0]}")
        best = min((t for m, t in found.items() if m in ("sdpa_cudnn", "flashinfer")), default=float("nan"))
        print(case, {m: round(t, 1) for m, t in found.items()}, f"{found['ours'] / best:.2f} x the faster peer",
              flush=True)
        yield [row(case, m, "us", round(t, 2), "microseconds a step") for m, t in found.items()]
        del sets
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()


def _call(b: DenseStep, method: str) -> torch.Tensor:
    found: torch.Tensor = getattr(b, method)()
    return found
