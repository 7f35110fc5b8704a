# ruff: noqa: E501
"""Forms and launches of the attention kernel that completes, each in a process of its own.

    python benchmarks/experiments/phi_tune.py OUTPUT.jsonl --all
    python benchmarks/experiments/phi_tune.py OUTPUT.jsonl --form ships --launch 32/4/132

One process measures one form: first a check in bf16 against the twin in float64, of odd sizes and guarded buffers, then
microseconds of split and merge by case: a CUDA graph of 32 calls whose token lists, maps and sums rotate, so that they
exceed the L2 together. Forms are `plain` (attention without a completion) and `ships` (`completed_kernel`). A launch is
`block/warps/programs[/stages]`. A line of JSON a form, launch and case goes to the file. `--all` compiles all in many processes first, then measures in one process a GPU at a
time, some 90 seconds in all; a table comes last. Under TRITON_INTERPRET=1 only the check runs, in float16. ptxas 12.8
assembles some launches wrongly (docs/log/decode.md, "Completion without kept features"); TRITON_PTXAS_PATH names
another one.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

RUNS = [("plain", "32/1/1024"), ("ships", "128/8/132"), ("ships", "32/4/132"),
        ("ships", "64/4/132")]
"""Blocks of 64 in one stage are wrong as ptxas 12.8 assembles them: the last shows it."""
CASES = [  # name, query heads, KV heads, tokens, rows; 1 % is listed, an odd count, 4 + 16 anchors
    ("128k b1", 32, 8, 131_072, 1), ("8k b1", 32, 8, 8_192, 1), ("512k b1", 32, 8, 524_288, 1),
    ("128k b8", 32, 8, 131_072, 8), ("12/2 30k b1", 12, 2, 30_000, 1), ("12/2 30k b24", 12, 2, 30_000, 24)]
DIM, SINK, TAIL, SETS = 128, 4, 16, 16
LIMIT_S, TOTAL_S = 25, 150


def take(form: str, how: Any) -> None:
    """`launch_attend` with this form and launch, whatever fits."""
    from sparsekv.kernels import attend

    if form == "plain":
        attend.PLAIN = how
        return
    attend.completed_launch = lambda *sizes: how


class Case:
    """One cache, and `sets` of queries, lists, maps and sums."""

    def __init__(self, heads_q: int, heads: int, length: int, batch: int, sets: int, device: str, dtype: Any,
                 listed: int = 0, uneven: bool = False, units: int = DIM, features: int = DIM, dim: int = DIM):
        import torch

        from sparsekv.kernels import CompletionQuery, KeyFeatures

        torch.manual_seed(length)
        listed = listed or length // 100 | 1
        on: dict[str, Any] = {"device": device}

        def guarded(*size: int, scale: float = 1.0, to: Any = torch.float32) -> Any:
            # numbers between two lines of NaN: what is read beside them shows
            count = 1
            for n in size:
                count *= n
            room = torch.full((count + 128,), float("nan"), dtype=to, **on)
            inside = room[64:-64].view(size)
            inside.normal_()
            return inside.mul_(scale)

        self.k, self.v = (guarded(batch, heads, length, dim, to=dtype) for _ in range(2))
        self.edges = {"starts": torch.zeros(batch, dtype=torch.long, **on), "sink_size": SINK,
                      "tail_starts": torch.full((batch,), length - TAIL, **on),
                      "lengths": torch.full((batch,), length, **on), "scale": dim**-0.5}
        self.sets = []
        for _ in range(sets):
            # strided picks, shuffled: no token twice
            step = (length - SINK - TAIL) // listed
            first = torch.randint(0, step, (batch, heads, listed), **on)
            order = torch.rand(batch, heads, listed, **on).argsort(-1)
            tokens = (first + order * step + SINK).int()
            if uneven:  # row b of B lists b/(B - 1) of them, the first none
                kept = torch.arange(batch, **on) * listed // max(1, batch - 1)
                tokens[torch.arange(listed, **on) >= kept[:, None, None].expand(-1, heads, 1)] = -1
            maps = KeyFeatures(guarded(heads, dim, units, scale=dim**-0.5, to=dtype), guarded(batch, heads, units),
                               guarded(heads, units, features, scale=units**-0.5, to=dtype), guarded(heads, features),
                               torch.randint(-1, 2, (batch, heads, features), **on).float())
            asked = torch.rand(batch, heads_q, features, **on).to(dtype)
            # a third to a half is of the listed keys, and what is left weighs as much as what is read
            mass = (torch.rand(batch, heads_q, **on) + 2.0) * listed * features
            numerator = guarded(batch, heads_q, dim) * 2.0 * listed**0.5 * features
            log_scale = torch.randn(batch, heads_q, **on) - mass.log() + math.log(listed)
            made = CompletionQuery(asked, log_scale, mass, numerator, None, maps)
            self.sets.append((guarded(batch, heads_q, dim, to=dtype), tokens, made))

    def call(self, index: int, completed: bool) -> Any:
        from sparsekv.kernels.attend import launch_attend

        q, tokens, made = self.sets[index % len(self.sets)]
        return launch_attend(q, self.k, self.v, tokens, **self.edges, completion=made if completed else None)

    def errors(self, completed: bool) -> tuple[float, float]:
        """Of the output, relative, and of the log mass, absolute, against the twin in float64."""
        from sparsekv.kernels.attend import attend_tokens_reference

        q, tokens, made = self.sets[0]
        maps = made.keys
        assert maps is not None
        made = made._replace(**{n: x.double() for n, x in made._asdict().items() if hasattr(x, "double")},
                             keys=type(maps)(*(x.double() for x in maps)))
        found = self.call(0, completed)
        out, lse = attend_tokens_reference(q.double(), self.k.double(), self.v.double(), tokens, **self.edges,
                                           completion=made if completed else None)
        return float((found[0].double() - out).norm() / out.norm()), float((found[1].double() - lse).abs().max())


def check(form: str, device: str, dtype: Any) -> str:
    """Odd sizes: many slices for few tokens, a slice without any, rows of which one lists nothing, a group that is no
    power of two."""
    completed, worst, wrong = form != "plain", (0.0, 0.0), []
    shapes = [(32, 8, 1_501, 1, 111), (32, 8, 9_001, 1, 4_001), (32, 8, 403, 8, 33), (12, 2, 1_201, 1, 333),
              *((32, 8, 20_001, 1, n) for n in (1, 63, 64, 65, 127, 128, 129, 511, 513, 1023, 1025, 2049, 8191))]
    if device == "cpu":
        shapes = [(8, 2, 203, 1, 65), (6, 2, 91, 2, 33)]
    for heads_q, heads, length, batch, listed in shapes:
        # the batch's shapes are of the timed kernels, so that nothing is compiled for the check alone
        error = Case(heads_q, heads, length, batch, 1, device, dtype, listed, batch > 1).errors(completed)
        worst = max(worst[0], error[0]), max(worst[1], error[1])
        if not (error[0] < 1e-2 and error[1] < 2e-2):
            wrong.append(f"{(heads_q, heads, length, batch, listed)}: out {error[0]:.1e}, lse {error[1]:.1e}")
    return f"WRONG at {'; '.join(wrong)}" if wrong else f"ok: out {worst[0]:.1e}, lse {worst[1]:.1e}"


def timed(case: Case, completed: bool, calls: int = 32) -> float:
    """Microseconds a call: the best of nine replays."""
    import torch

    for i in range(2):
        case.call(i, completed)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            case.call(i, completed)
    graph.replay()
    torch.cuda.synchronize()
    best = float("inf")
    for _ in range(9):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end) * 1000 / calls)
    return round(best, 2)


def measure(form: str, launch: str, output: str, warm: bool) -> None:
    import torch

    from sparsekv.kernels.attend import Launch

    cuda = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float16)
    how = Launch(*map(int, launch.split("/")))
    take(form, how if cuda else how._replace(programs=min(how.programs, 16)))
    said = check(form, device, dtype)
    print(f"{form} {launch} check {said}", flush=True)
    row = {"form": form, "launch": launch, "check": said, "device": torch.cuda.get_device_name() if cuda else "cpu"}
    if not cuda:
        return
    for name, heads_q, heads, length, batch in CASES:
        if warm:  # the same kernels, of a short cache
            case = Case(heads_q, heads, 3_000, batch, 1, device, dtype)
            case.call(0, form != "plain")
            torch.cuda.synchronize()
            continue
        case = Case(heads_q, heads, length, batch, SETS, device, dtype)
        us = timed(case, form != "plain")
        print(f"{form} {launch} {name}: {us} µs" + ("" if said.startswith("ok") else " WRONG"), flush=True)
        with Path(output).open("a") as f:
            f.write(json.dumps({**row, "case": name, "us": us}) + "\n")
        del case
        torch.cuda.empty_cache()


def start(form: str, launch: str, output: str, gpu: int, limit: float, *more: str) -> str:
    """A process of one form; what it said, or what became of it."""
    began = time.time()
    command = [sys.executable, __file__, output, "--form", form, "--launch", launch, *more]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(1.0, limit),
                              env={**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)})
        said, code = done.stdout, done.returncode
        why = [line for line in done.stderr.splitlines() if "Error" in line or "error" in line][-1:]
        said += f"{form} {launch} FAILED ({code}): {' '.join(why)[:300]}\n" if code else ""
    except subprocess.TimeoutExpired as late:
        said = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        said += f"{form} {launch} STOPPED after {limit:.0f} s\n"
    return said + f"{form} {launch} {' '.join(more)} {time.time() - began:.0f} s"


def drive(output: str, gpus: int, workers: int, runs: list[tuple[str, str]]) -> None:
    began = time.time()
    Path(output).parent.mkdir(parents=True, exist_ok=True)

    def say(text: str) -> None:
        print(text, flush=True)

    def left() -> float:
        return TOTAL_S - (time.time() - began)

    with ThreadPoolExecutor(workers) as pool:  # a form that fails here is started again below, to say so there
        for said in pool.map(lambda at: start(*runs[at], output, at % gpus, min(90, left()), "--warm"), range(len(runs))):
            say(said)
    say(f"compiled: {time.time() - began:.0f} s")

    def serially(gpu: int) -> None:
        for form, launch in ([runs[0]] if gpu else []) + runs[gpu::gpus]:  # `plain` on each GPU
            if left() < 8:
                say(f"{form} {launch} not started: no time left")
            else:
                say(start(form, launch, output, gpu, min(LIMIT_S, left())))

    with ThreadPoolExecutor(gpus) as pool:
        list(pool.map(serially, range(gpus)))
    say(f"all: {time.time() - began:.0f} s")
    table(output)


def table(output: str) -> None:
    rows = [json.loads(line) for line in Path(output).read_text().splitlines()] if Path(output).exists() else []
    print(f"{'form':22}" + "".join(f"{name:>14}" for name, *_ in CASES) + "  check")
    found: dict[str, dict[str, float]] = {}
    checks: dict[str, str] = {}
    for row in rows:
        form = f"{row['form']} {row['launch']}"
        found.setdefault(form, {})[row["case"]] = min(row["us"], found.get(form, {}).get(row["case"], float("inf")))
        checks[form] = row["check"]
    for form, by_case in found.items():
        print(f"{form:22}" + "".join(f"{by_case.get(name, float('nan')):14.2f}" for name, *_ in CASES) + "  "
              + checks[form], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output")
    parser.add_argument("--form", choices=["plain", "ships"], default="ships")
    parser.add_argument("--launch", default="128/8/132")
    parser.add_argument("--warm", action="store_true", help="compile and check, time nothing")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--gpus", type=int, default=0, help="as many as there are if 0")
    parser.add_argument("--workers", type=int, default=8, help="processes that compile at once")
    parser.add_argument("--only", nargs="+", help="form:launch of --all")
    options = parser.parse_args()
    if options.all:
        chosen = [tuple(run.split(":")) for run in options.only] if options.only else RUNS
        gpus = options.gpus or subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.count("GPU ")
        drive(options.output, max(1, gpus), options.workers, chosen)
    else:
        measure(options.form, options.launch, options.output, options.warm)


if __name__ == "__main__":
    main()
