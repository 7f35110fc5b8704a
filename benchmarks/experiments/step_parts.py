"""A decode step outside attention: products of a few rows by cuBLAS and by `kernels/few_rows.py`, launch by launch.

    python benchmarks/experiments/step_parts.py [--shapes 8b 1.5b] [--rows 1 2 4 8] [--seconds 95] [--output FOLDER]

Every time is of a CUDA graph whose calls go through copies of the weights that together exceed the L2. First every
launch is compared with torch: its distance from float32 may be at most twice that of torch's own code in the same
precision, and a rounding step. `parts`: one product, or products of the same rows in one launch, microseconds and GB/s
of the weights: cuBLAS, the launch that ships (`launch_of`), and the fastest of those tried. `layers`: all decoder
layers without attention in one graph, milliseconds a token: the model's own products, the same with the gate in one
launch, and products of few rows where they are faster. The rows go to step-parts.json. Launches are compiled by
processes of their own. Where --seconds are over, what is left is named and not timed. Without a GPU, under
TRITON_INTERPRET=1, only the comparison runs, at a tiny shape.
"""

from __future__ import annotations

import argparse
import functools
import gc
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
from sparsekv.kernels import rms_norm, rotate_pair
from sparsekv.kernels.between import launch_silu_product
from sparsekv.kernels.few_rows import (
    SUMMED_ROWS,
    Launch,
    few_rows_gated_reference,
    few_rows_reference,
    launch_few_rows,
    launch_few_rows_gated,
    launch_of,
)

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


SUMS = [Launch(*n) for n in ((1, 1024, 4), (2, 1024, 4), (2, 2048, 8), (4, 512, 4), (4, 1024, 8), (8, 512, 4))]
DOTS = [Launch(*n) for n in ((16, 256, 4, 4), (16, 512, 4, 3), (32, 256, 4, 3), (32, 128, 4, 5), (64, 128, 4, 4))]
PARTS = {"q, o": "q", "k, v": "k", "gate, up": "gate", "down": "down", "head": "head", "q k v": "q k v",
         "gate · up": "gate up"}
GATED = "gate · up"


def launches_of(rows: int, gated: bool) -> list[Launch]:
    if rows > SUMMED_ROWS:
        return DOTS
    return [n for n in SUMS if n.outputs * n.inputs * rows * (1 + gated) <= 64 * 32 * n.warps]


def product(name: str, x: Tensor, weights: list[Tensor], how: Launch | None = None) -> Tensor:
    """A part by our kernel, its outputs side by side."""
    if name == GATED:
        return launch_few_rows_gated(x, weights, [None, None], how)
    return torch.cat(launch_few_rows(x, weights, [None] * len(weights), how), -1)


def torch_product(name: str, x: Tensor, weights: list[Tensor]) -> Tensor:
    """A part as a model's own code has it, in the precision of what it is given."""
    if name == GATED:
        return few_rows_gated_reference(x, weights, [None, None])
    return torch.cat(few_rows_reference(x, weights, [None] * len(weights)), -1)


def compiled(job: tuple[Launch, str, int]) -> str | None:
    """Compile a launch into Triton's cache on disk; what went wrong."""
    from sparsekv.kernels.few_rows_triton import dot_kernel, sum_kernel

    how, name, rows = job
    parts = 1 if name == GATED else len(PARTS[name].split())
    sizes = [1024 if i < parts else 0 for i in range(3)]
    try:
        (dot_kernel if rows > SUMMED_ROWS else sum_kernel).warmup(
            *[DTYPE] * 8, *sizes, 4096, rows, PARTS=parts, GATED=name == GATED, BIAS=False, BLOCK_N=how.outputs,
            BLOCK_K=how.inputs, num_warps=how.warps, num_stages=how.stages, grid=(1,))
    except Exception as problem:
        return f"{job}: {str(problem)[:200]}"
    return None


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


def parts(case: str, weights: Weights, rows: int, say: Callable[..., None]) -> set[str]:
    """What is faster by the launch that ships than by cuBLAS."""
    taken = set()
    for name, names in PARTS.items():
        first = weights.of(names, 0)
        copies = range(max(len(weights.pools[n]) for n in names.split()))
        x = torch.randn(rows, first[0].shape[1], device=DEVICE, dtype=DTYPE)
        own, exact = torch_product(name, x, first), torch_product(name, x.float(), [w.float() for w in first])

        def ours(i: int, how: Launch, x: Tensor = x, names: str = names, name: str = name) -> Any:
            launch = launch_few_rows_gated if name == GATED else launch_few_rows
            given: Any = weights.of(names, i)
            return launch(x, given, [None] * len(given), how)

        def today(i: int, x: Tensor = x, names: str = names, name: str = name) -> Any:
            ys = [F.linear(x, w) for w in weights.of(names, i)]
            return F.silu(ys[0]) * ys[1] if name == GATED else ys

        times, outputs = {}, len(exact[0])
        ships = launch_of(rows, outputs, len(first) > 1)
        for how in dict.fromkeys([ships, *launches_of(rows, name == GATED)]):
            try:
                check(f"{case} {name} {how}", product(name, x, first, how), own, exact)
            except Exception as problem:  # wrong, or more than this device holds: not timed, and named at the end
                WRONG.append(f"{case} {name} {how}: {str(problem)[:200]}")
                continue
            times[how] = microseconds([functools.partial(ours, i, how) for i in copies])
        cublas = microseconds([functools.partial(today, i) for i in copies])
        if ships not in times:
            continue
        if times[ships] < cublas:
            taken.add(name)
        best = min(times, key=lambda n: times[n])
        say(case, "parts", name, cublas, times[ships], times[best], best, 2e-3 * sum(w.numel() for w in first))
        for how, us in times.items():
            say(case, "launches", f"{name} {'/'.join(map(str, how))}", us)
    return taken if CUDA else set(PARTS)


def layer(shape: Shape, weights: Weights, taken: set[str], way: str, i: int, hidden: Tensor,
          tables: tuple[Tensor, Tensor]) -> Tensor:
    """A decoder layer with the queries in place of attention's output."""
    rows = hidden.shape[0]
    q, k, v, o, gate, up, down = weights.of("q k v o gate up down", i)
    few = taken if way == "products of few rows" else set()

    def one(name: str, x: Tensor, w: Tensor) -> Tensor:
        return launch_few_rows(x, [w], [None])[0] if name in few else F.linear(x, w)

    x = rms_norm(hidden, weights.norm, EPS)
    a, b, _ = launch_few_rows(x, [q, k, v], [None] * 3) if "q k v" in few else [F.linear(x, w) for w in (q, k, v)]
    a, b = rotate_pair(a.view(rows, shape.heads, 1, shape.dim), b.view(rows, shape.kv_heads, 1, shape.dim), *tables)
    hidden = hidden + one("q, o", a.view(rows, shape.hidden), o)
    x = rms_norm(hidden, weights.norm, EPS)
    if GATED in few:
        y = launch_few_rows_gated(x, [gate, up], [None, None])
    elif way == "own":
        y = F.silu(F.linear(x, gate)) * F.linear(x, up)
    else:
        y = launch_silu_product(F.linear(x, gate), F.linear(x, up))
    return hidden + one("down", y, down)


WAYS = ("own", "gate in one launch", "products of few rows")


def layers(case: str, shape: Shape, weights: Weights, rows: int, taken: set[str], say: Callable[..., None]) -> None:
    angle = torch.randn(1, 1, shape.dim // 2, device=DEVICE).repeat(1, 1, 2)
    tables = angle.cos().to(DTYPE), angle.sin().to(DTYPE)
    hidden, wanted = torch.randn(rows, shape.hidden, device=DEVICE, dtype=DTYPE), None

    def step(way: str, count: int = shape.layers) -> Tensor:
        x = hidden
        for i in range(count):
            x = layer(shape, weights, taken, way, i, x, tables)
        return x

    for way in WAYS:
        found = step(way, 1).float()
        wanted = found if wanted is None else wanted
        apart = float((found - wanted).norm() / wanted.norm())
        if not apart < 4 * ROUNDING:
            WRONG.append(f"{case} {way}: a layer's rows differ from those of its own code by {apart:.1e}")
            continue
        say(case, "layers", way, microseconds([functools.partial(step, way)], 7), apart)


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
            ours, fastest, launch, size = rest
            line = (f"{case:9} {name:10} torch {us:8.2f} us {size / us:6.0f} GB/s   ours {ours:8.2f} us "
                    f"{size / ours:6.0f} GB/s  {us / ours:5.2f} x   best {fastest:8.2f} us "
                    f"{'/'.join(map(str, launch))}")
            rows_out.extend([row(case, f"{name}, torch", metric, round(us, 2), "microseconds"),
                             row(case, f"{name}, ours", metric, round(ours, 2), "microseconds")])
        else:
            line = f"{case:9} layers, {name:22} {us / 1e3:7.3f} ms a token  (a layer's rows apart {rest[0]:.1e})"
            rows_out.append(row(case, f"layers, {name}", metric, round(us, 1), "microseconds"))
        table.append(line)

    if CUDA:
        jobs = {(how, name, rows if rows <= SUMMED_ROWS else 8) for name in PARTS for rows in given.rows
                for how in {launch_of(rows, n, " " in PARTS[name]) for n in (1, 1 << 16)} | set(
                    launches_of(rows, name == GATED))}
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
                layers(case, SHAPES[name], weights, rows, parts(case, weights, rows, say), say)
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
