"""A decode step outside attention: products of a few rows by cuBLAS and by Triton, and what can be fused with them.

    python benchmarks/experiments/step_parts.py [--shapes 8b 1.5b] [--rows 1 2 4 8] [--seconds 95] [--output FOLDER]

Every time is of a CUDA graph whose calls go through copies of the weights that together exceed the L2. First every
launch is compared with torch: its distance from float32 may be at most twice that of torch's own code in the same
precision, and a rounding step. `parts`: one product or one fused form, microseconds and GB/s of its weights, cuBLAS
against the fastest launch of `step_kernels.py`. `layers`: all decoder layers without attention in one graph,
milliseconds a token, from today's launches to five a layer; `+ overlap` begins a launch while the one before it ends.
The rows go to step-parts.json. Launches are compiled by processes of their own. Where --seconds are over, what is left
is named and not timed. Without a GPU, under TRITON_INTERPRET=1, only the comparison runs, at a tiny shape.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks._rows import RESULTS, add_rows, row
from benchmarks.experiments.step_kernels import add_norm_kernel, dot_kernel, gate_kernel, sum_kernel
from sparsekv.kernels import rms_norm, rotate_pair
from sparsekv.kernels.launch import power_of_two

CUDA = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float16)
ROUNDING = 2**-8 if CUDA else 2**-11
POOL = 400e6
"""Bytes of the copies of one weight: eight times the L2 of an H100."""
EPS = 1e-6
WRONG: list[str] = []
"""What differs from torch, or was not launched."""


class Shape(NamedTuple):
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    inner: int
    words: int


SHAPES = {"8b": Shape(32, 4096, 32, 8, 128, 14336, 128256), "1.5b": Shape(28, 1536, 12, 2, 128, 8960, 151936),
          "tiny": Shape(2, 96, 6, 2, 16, 176, 208)}


class Launch(NamedTuple):
    kind: str
    block_n: int
    block_k: int
    warps: int
    stages: int = 1


SUMS = [Launch("sum", *n) for n in ((1, 1024, 4), (2, 1024, 4), (2, 2048, 8), (4, 512, 4), (4, 1024, 4), (4, 1024, 8),
                                    (8, 512, 4), (8, 1024, 8))]
DOTS = [Launch("dot", *n) for n in ((16, 256, 4, 4), (16, 512, 4, 3), (32, 256, 4, 3), (32, 128, 4, 5),
                                    (64, 128, 4, 4))]
FORMS = {  # parts, norm, gated, added
    "product": (1, False, False, False), "+ residual": (1, False, False, True), "q k v": (3, False, False, False),
    "norm + q k v": (3, True, False, False), "gate · up": (1, False, True, False),
    "norm + gate · up": (1, True, True, False)}


def launches_of(rows: int, form: str) -> list[Launch]:
    sums = [] if rows > 4 else [n for n in SUMS if n.block_n * n.block_k * rows * (1 + ("gate" in form)) <=
                                64 * 32 * n.warps]
    return sums + (DOTS if rows > 1 else [])


def flags(form: str, overlap: bool) -> dict[str, Any]:
    return dict(zip(("PARTS", "NORM", "GATED", "ADDED"), FORMS[form], strict=True)) | {"OVERLAP": overlap}


def options(launch: Launch, overlap: bool) -> dict[str, Any]:
    return {"num_warps": launch.warps, "num_stages": launch.stages} | ({"launch_pdl": True} if overlap else {})


def many(launch: Launch, form: str, x: Tensor, weights: list[Tensor], norm: Tensor | None, residual: Tensor | None,
         overlap: bool) -> Tensor:
    """x `[R, K]` times the transposed weights `[n, K]`, side by side, in this form."""
    kernel = sum_kernel if launch.kind == "sum" else dot_kernel
    parts = FORMS[form][0]
    sizes = [w.shape[0] for w in weights[:parts]] + [0] * (3 - parts)
    three = [*weights, weights[0], weights[0]][:3]
    out = torch.empty(x.shape[0], sum(sizes), dtype=x.dtype, device=x.device)
    blocks = sum(-(-n // launch.block_n) for n in sizes)
    kernel[(blocks,)](x, x if norm is None else norm, *three, x if residual is None else residual, out, *sizes,
                      x.shape[1], EPS, x.shape[0], BLOCK_N=launch.block_n, BLOCK_K=launch.block_k,
                      **flags(form, overlap), **options(launch, overlap))
    return out


def compiled(job: tuple[Launch, str, int, bool]) -> str | None:
    """Compile a launch into Triton's cache on disk; what went wrong."""
    launch, form, rows, overlap = job
    kernel = sum_kernel if launch.kind == "sum" else dot_kernel
    try:
        kernel.warmup(*[DTYPE] * 7, 4096, 1024 if "q k v" in form else 0, 1024 if "q k v" in form else 0, 4096, EPS,
                      rows, BLOCK_N=launch.block_n, BLOCK_K=launch.block_k, **flags(form, overlap),
                      **options(launch, overlap), grid=(1,))
    except Exception as problem:
        return f"{job}: {str(problem)[:200]}"
    return None


def torch_form(form: str, x: Tensor, weights: list[Tensor], norm: Tensor, residual: Tensor | None) -> Tensor:
    """A form as a model's own code has it, in the precision of what it is given."""
    if "norm" in form:
        wide = x.float()
        x = norm * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)
    if "gate" in form:
        return F.silu(F.linear(x, weights[0])) * F.linear(x, weights[1])
    y = torch.cat([F.linear(x, w) for w in weights], -1)
    return y if residual is None else residual + y


def check(name: str, found: Tensor, own: Tensor, exact: Tensor) -> None:
    size = float(exact.abs().max())
    error, allowed = float((found.float() - exact).abs().max()), float((own.float() - exact).abs().max())
    if not error <= 2 * allowed + ROUNDING * size:
        raise ValueError(f"{name}: {error / size:.1e} from float32, torch's own code {allowed / size:.1e}")


def microseconds(calls: list[Callable[[], Any]], repeats: int = 5) -> float:
    """One call's, the fastest replay of a graph of all."""
    if not CUDA:
        calls[0]()
        return float("nan")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.current_stream().wait_stream(stream)
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(repeats + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / len(calls))
    return min(times[1:])


class Weights:
    """Copies of every weight of a layer, and of the last product's."""

    def __init__(self, shape: Shape):
        torch.manual_seed(0)
        kv = shape.kv_heads * shape.dim
        sizes = {"q": (shape.hidden, shape.hidden), "k": (kv, shape.hidden), "v": (kv, shape.hidden),
                 "o": (shape.hidden, shape.hidden), "gate": (shape.inner, shape.hidden),
                 "up": (shape.inner, shape.hidden), "down": (shape.hidden, shape.inner),
                 "head": (shape.words, shape.hidden)}
        self.pools = {}
        for name, (n, k) in sizes.items():
            copies = max(2, min(256, int(POOL / (2 * n * k)))) if CUDA else 2
            self.pools[name] = torch.randn(copies, n, k, device=DEVICE, dtype=DTYPE) * k**-0.5
        self.norm = (1 + 0.1 * torch.randn(shape.hidden, device=DEVICE)).to(DTYPE)

    def of(self, names: str, i: int) -> list[Tensor]:
        return [self.pools[n][i % len(self.pools[n])] for n in names.split()]


PARTS = (("q, o", "q", "product"), ("k, v", "k", "product"), ("gate, up", "gate", "product"),
         ("down", "down", "product"), ("head", "head", "product"), ("o + residual", "o", "+ residual"),
         ("down + residual", "down", "+ residual"), ("q k v", "q k v", "q k v"),
         ("norm + q k v", "q k v", "norm + q k v"), ("gate · up", "gate up", "gate · up"),
         ("norm + gate · up", "gate up", "norm + gate · up"))


def parts(case: str, weights: Weights, rows: int, say: Callable[..., None]) -> dict[str, tuple[Launch, float, float]]:
    """Of every part: the fastest launch, its microseconds, torch's."""
    found = {}
    for name, names, form in PARTS:
        first = weights.of(names, 0)
        copies = range(max(len(weights.pools[n]) for n in names.split()))
        x = torch.randn(rows, first[0].shape[1], device=DEVICE, dtype=DTYPE)
        residual = torch.randn(rows, first[0].shape[0], device=DEVICE, dtype=DTYPE) if "residual" in form else None
        norm = weights.norm if "norm" in form else None
        own = torch_form(form, x, first, weights.norm, residual)
        exact = torch_form(form, x.float(), [w.float() for w in first], weights.norm.float(),
                           None if residual is None else residual.float())

        def today(i: int, x: Any = x, names: str = names, form: str = form, residual: Any = residual) -> Any:
            y = rms_norm(x, weights.norm, EPS) if "norm" in form else x
            ys = [F.linear(y, w) for w in weights.of(names, i)]
            return F.silu(ys[0]) * ys[1] if "gate ·" in form else ys if residual is None else residual + ys[0]

        times = {}
        for launch in launches_of(rows, form):
            try:
                check(f"{case} {name} {launch}", many(launch, form, x, first, norm, residual, False), own, exact)
            except Exception as problem:  # wrong, or more than this device holds: not timed, and named at the end
                WRONG.append(f"{case} {name} {launch}: {str(problem)[:200]}")
                continue
            times[launch] = microseconds([
                functools.partial(many, launch, form, x, weights.of(names, i), norm, residual, False) for i in copies])
        cublas = microseconds([functools.partial(today, i) for i in copies])
        best = min(times, key=lambda n: times[n])
        found[name] = (best, times[best], cublas)
        size = 2e-3 * sum(w.numel() for w in first)
        say(case, "parts", name, cublas, times[best], best, size)
        for launch, us in times.items():
            say(case, "launches", f"{name} {'/'.join(map(str, launch))}", us)
    return found


def add_norm(x: Tensor, y: Tensor, weight: Tensor, warps: int = 8, overlap: bool = False) -> tuple[Tensor, Tensor]:
    total, out = torch.empty_like(x), torch.empty_like(x)
    add_norm_kernel[(x.shape[0],)](x, y, weight, total, out, x.shape[1], EPS, WIDTH=power_of_two(x.shape[1]),
                                   OVERLAP=overlap, num_warps=warps, **({"launch_pdl": True} if overlap else {}))
    return total, out


def gated(gate: Tensor, up: Tensor, block: int = 512, overlap: bool = False) -> Tensor:
    out = torch.empty_like(gate)
    gate_kernel[(-(-out.numel() // block),)](gate, up, out, out.numel(), BLOCK=block, OVERLAP=overlap, num_warps=4,
                                             **({"launch_pdl": True} if overlap else {}))
    return out


def small(case: str, shape: Shape, rows: int, say: Callable[..., None]) -> None:
    """Residual add and norm, SiLU and product: today's launches against one."""
    x, y, g, u = (torch.randn(rows, n, device=DEVICE, dtype=DTYPE) for n in (shape.hidden, shape.hidden, shape.inner,
                                                                              shape.inner))
    weight = torch.randn(shape.hidden, device=DEVICE, dtype=DTYPE)
    wanted = rms_norm(x + y, weight, EPS)
    for warps in (4, 8, 16):
        total, out = add_norm(x, y, weight, warps)
        check(f"{case} add + norm", out, wanted, wanted.float())
        check(f"{case} add + norm", total, x + y, x.float() + y.float())
        say(case, "small", f"add + norm, {warps} warps", microseconds([lambda: rms_norm(x + y, weight, EPS)] * 50),
            microseconds([functools.partial(add_norm, x, y, weight, warps)] * 50))
    for block in (512, 1024):
        check(f"{case} SiLU", gated(g, u, block), F.silu(g) * u, F.silu(g.float()) * u.float())
        say(case, "small", f"SiLU · up, blocks of {block}", microseconds([lambda: F.silu(g) * u] * 50),
            microseconds([functools.partial(gated, g, u, block)] * 50))


def layer(shape: Shape, weights: Weights, best: dict[str, Any], way: str, i: int, hidden: Tensor,
          tables: tuple[Tensor, Tensor], pending: Tensor | None, overlap: bool) -> tuple[Tensor, Tensor | None]:
    """A decoder layer with the queries in place of attention's output; what is still to be added to its rows."""
    rows, sizes = hidden.shape[0], (shape.hidden, shape.kv_heads * shape.dim, shape.kv_heads * shape.dim)
    q, k, v, o, gate, up, down = weights.of("q k v o gate up down", i)

    def product(name: str, x: Tensor, w: Tensor) -> Tensor:
        launch, ours, cublas = best[name]
        if way in ("today", "small fused") or cublas < ours:
            return F.linear(x, w)
        return many(launch, "product", x, [w], None, None, overlap)

    def turned(a: Tensor, b: Tensor) -> Tensor:
        a, b = rotate_pair(a.view(rows, shape.heads, 1, shape.dim), b.view(rows, shape.kv_heads, 1, shape.dim), *tables)
        return a.view(rows, shape.hidden)

    def form(name: str, form: str, x: Tensor, ws: list[Tensor], residual: Tensor | None = None) -> Tensor:
        return many(best[name][0], form, x, ws, weights.norm if "norm" in form else None, residual, overlap)

    if way in ("five launches", "seven launches"):
        folded = way == "five launches"
        if folded:
            a, b, _ = form("norm + q k v", "norm + q k v", hidden, [q, k, v]).split(sizes, -1)
        else:
            a, b, _ = form("q k v", "q k v", rms_norm(hidden, weights.norm, EPS), [q, k, v]).split(sizes, -1)
        hidden = form("o + residual", "+ residual", turned(a, b), [o], hidden)
        if folded:
            y = form("norm + gate · up", "norm + gate · up", hidden, [gate, up])
        else:
            y = form("gate · up", "gate · up", rms_norm(hidden, weights.norm, EPS), [gate, up])
        return form("down + residual", "+ residual", y, [down], hidden), None
    if pending is not None:
        hidden, x = add_norm(hidden, pending, weights.norm, 8, overlap)
    else:
        x = rms_norm(hidden, weights.norm, EPS)
    a, b, _ = product("q, o", x, q), product("k, v", x, k), product("k, v", x, v)
    y = product("q, o", turned(a, b), o)
    if way in ("small fused", "products + small"):
        hidden, x = add_norm(hidden, y, weights.norm, 8, overlap)
        y = gated(product("gate, up", x, gate), product("gate, up", x, up), 512, overlap)
        return hidden, product("down", y, down)
    hidden = hidden + y
    x = rms_norm(hidden, weights.norm, EPS)
    return hidden + product("down", F.silu(product("gate, up", x, gate)) * product("gate, up", x, up), down), None


WAYS = ("today", "small fused", "products", "products + small", "seven launches", "five launches")


def layers(case: str, shape: Shape, weights: Weights, rows: int, best: dict[str, Any],
           say: Callable[..., None]) -> None:
    tables = tuple(torch.randn(1, 1, shape.dim, device=DEVICE, dtype=DTYPE) for _ in range(2))
    hidden, wanted = torch.randn(rows, shape.hidden, device=DEVICE, dtype=DTYPE), None
    tables = (tables[0].cos(), tables[1].sin())

    def step(way: str, overlap: bool, count: int = shape.layers) -> Tensor:
        x, pending = hidden, None
        for i in range(count):
            x, pending = layer(shape, weights, best, way, i, x, tables, pending, overlap)
        return x if pending is None else x + pending

    for way, overlap in itertools.product(WAYS, (False, True) if CUDA else (False,)):
        if overlap and way == "today":
            continue
        found = step(way, overlap, 1).float()
        wanted = found if wanted is None else wanted
        apart = float((found - wanted).norm() / wanted.norm())
        if not apart < 4 * ROUNDING:
            WRONG.append(f"{case} {way}, overlap {overlap}: a layer's rows differ from today's by {apart:.1e}")
            continue
        us = microseconds([functools.partial(step, way, overlap)], 7)
        say(case, "layers", way + (" + overlap" if overlap else ""), us, apart)


def main() -> None:
    began = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["8b", "1.5b"] if CUDA else ["tiny"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8], choices=[1, 2, 4, 8])
    parser.add_argument("--seconds", type=float, default=95.0)
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    rows_out: list[dict[str, Any]] = []
    table: list[str] = []

    def say(case: str, table_of: str, name: str, us: float, *rest: Any) -> None:
        metric = "step_us" if table_of == "layers" else "part_us"
        if table_of == "launches":
            rows_out.append(row(case, name, metric, round(us, 2), "microseconds"))
            return
        if table_of == "parts":
            ours, launch, size = rest
            line = (f"{case:9} {name:22} torch {us:8.2f} us {size / us:6.0f} GB/s   Triton {ours:8.2f} us "
                    f"{size / ours:6.0f} GB/s  {us / ours:5.2f} x  {'/'.join(map(str, launch))}")
            rows_out.extend([row(case, f"{name}, torch", metric, round(us, 2), "microseconds"),
                             row(case, f"{name}, Triton", metric, round(ours, 2), "microseconds")])
        elif table_of == "small":
            line = f"{case:9} {name:26} today {us:6.2f} us, one launch {rest[0]:6.2f} us"
            rows_out.extend([row(case, f"{name}, today", metric, round(us, 2), "microseconds"),
                             row(case, f"{name}, one launch", metric, round(rest[0], 2), "microseconds")])
        else:
            line = f"{case:9} layers, {name:28} {us / 1e3:7.3f} ms a token  (a layer's rows apart {rest[0]:.1e})"
            rows_out.append(row(case, f"layers, {name}", metric, round(us, 1), "microseconds"))
        table.append(line)

    if CUDA:
        jobs = {(launch, form, rows if launch.kind == "sum" else 8, overlap) for form in FORMS for rows in given.rows
                for launch in launches_of(rows, form) for overlap in (False, True)}
        with ProcessPoolExecutor(min(14, os.cpu_count() or 1), multiprocessing.get_context("spawn")) as pool:
            problems = [p for p in pool.map(compiled, sorted(jobs), chunksize=4) if p]
        print(f"{len(jobs)} launches compiled, {time.perf_counter() - began:.1f} s", *problems, sep="\n", flush=True)
    gc.collect()
    gc.freeze()  # a capture begins with a collection
    left: list[str] = []
    with torch.no_grad():
        for name in given.shapes:
            weights = Weights(SHAPES[name])
            for rows in given.rows:
                case = f"{name}-b{rows}"
                if time.perf_counter() - began > given.seconds:
                    left.append(case)
                    continue
                best = parts(case, weights, rows, say)
                small(case, SHAPES[name], rows, say)
                layers(case, SHAPES[name], weights, rows, best, say)
                add_rows("step-parts", rows_out, given.output)
                print(f"{case} done, {time.perf_counter() - began:.1f} s", flush=True)
            del weights
    print("\n".join(table))
    if left:
        print(f"not timed, {given.seconds:.0f} seconds were over: {', '.join(left)}")
    if WRONG:
        sys.exit("\n".join(["wrong:", *WRONG]))


if __name__ == "__main__":
    main()
