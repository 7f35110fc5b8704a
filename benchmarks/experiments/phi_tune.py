# ruff: noqa: E402, E501, B023
"""Forms and launches of the attention kernel that completes, checked against the float64 twin and then timed.

    python benchmarks/experiments/phi_tune.py OUTPUT.json [--quick] [--only SHAPE …] [--no-steps]

A row a shape: microseconds of split and merge, a CUDA graph of 20 calls over copies of the cache that together exceed
the L2; `plain` is attention without a completion. A form is `kernel/units/block/warps/programs/stages`; `lean-bl` is
`phi_kernel.lean_kernel` with BIASED = b and LATE = l, `lean-bla` with AHEAD off. On a machine without a GPU, under
TRITON_INTERPRET=1, only the checks run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "kernels")]

import checks

from benchmarks.experiments.phi_kernel import lean_kernel
from sparsekv.kernels import CompletionQuery, KeyFeatures, attend, attend_triton, phi_sums
from sparsekv.kernels.attend import Launch, launch_attend
from sparsekv.kernels.launch import power_of_two

DEVICE, DTYPE = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float16)
PRESENT = attend_triton.completed_kernel
FORMS = [  # kernel, block, warps, programs, stages
    ("present", 128, 8, 132, 1), ("present", 64, 4, 264, 1), ("present", 64, 4, 132, 1), ("present", 128, 8, 132, 2),
    ("lean-00", 128, 8, 132, 1), ("lean-00", 64, 4, 264, 1), ("lean-10", 64, 4, 264, 1), ("lean-11", 64, 4, 264, 1),
    ("lean-20", 128, 8, 132, 1), ("lean-21", 128, 8, 132, 1), ("lean-21", 64, 4, 132, 1), ("lean-21", 64, 4, 264, 1),
    ("lean-21", 64, 8, 132, 1), ("lean-21", 128, 8, 132, 2), ("lean-21", 64, 4, 132, 2), ("lean-21", 64, 4, 132, 3),
    ("lean-21a", 128, 8, 132, 1), ("lean-11a", 64, 4, 264, 1), ("lean-21p", 128, 8, 132, 1), ("lean-21p", 64, 4, 264, 1),
    ("lean-21", 128, 8, 264, 1), ("lean-11", 64, 4, 528, 1), ("lean-10", 64, 4, 132, 1),
]
STEPS = [("present", 128, 8, 132, 1), ("lean-21", 128, 8, 132, 1), ("lean-21", 128, 8, 132, 2),
         ("lean-10", 64, 4, 264, 1), ("lean-21", 64, 4, 264, 1), ("lean-21", 64, 4, 132, 3)]
STEP_CASES = ("32x8-128k-b1", "32x8-512k-b1", "32x8-1M-b1", "32x8-128k-b4", "32x8-128k-b8")
SHAPES = [  # name, query heads, KV heads, dimension, tokens, rows, sink, tail
    ("128k", 32, 8, 128, 131_072, 1, 4, 16), ("128k tail 2047", 32, 8, 128, 131_072, 1, 1, 2047),
    ("32k", 32, 8, 128, 32_768, 1, 4, 16), ("512k", 32, 8, 128, 524_288, 1, 4, 16),
    ("1M", 32, 8, 128, 1_048_576, 1, 1, 2047), ("4 x 128k", 32, 8, 128, 131_072, 4, 4, 16),
    ("8 x 128k", 32, 8, 128, 131_072, 8, 4, 16), ("8 x 128k tail 2047", 32, 8, 128, 131_072, 8, 1, 2047),
    ("12/2 30k", 12, 2, 128, 30_000, 1, 4, 16), ("14/2 30k d64", 14, 2, 64, 30_000, 1, 4, 16),
]


class Lean:
    """`lean_kernel` in place of `completed_kernel`."""

    def __init__(self, name: str):
        self.how = {"BIASED": int(name[5]), "LATE": name[6] == "1", "AHEAD": "a" not in name[7:],
                    "PHI": "p" not in name[7:]}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, HALF: int, **constants: Any) -> Any:
            return lean_kernel[grid](*arguments, QUARTER=max(4, power_of_two(constants["GROUP"])), **self.how,
                                     **constants)

        return launch


def take(name: str, *launch: int) -> None:
    attend_triton.completed_kernel = PRESENT if name == "present" else Lean(name)
    if launch:
        attend.COMPLETED, attend.COMPLETED_ROW = Launch(*launch), 1 << 20


def random(*size: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*size, device=DEVICE) * scale


def key_map(batch: int, heads: int, dim: int, units: int) -> KeyFeatures:
    return KeyFeatures(random(heads, dim, units, scale=dim**-0.5).to(DTYPE), random(batch, heads, units),
                       random(heads, units, dim, scale=units**-0.5).to(DTYPE), random(heads, dim),
                       torch.zeros(batch, heads, dim, device=DEVICE))


class Case:
    """One copy of a shape, 1 % of its tokens listed."""

    def __init__(self, heads_q: int, heads: int, dim: int, length: int, batch: int, sink: int, tail: int, seed: int):
        torch.manual_seed(seed)
        self.k, self.v = (torch.randn(batch, heads, length, dim, device=DEVICE, dtype=DTYPE) for _ in range(2))
        self.q = random(batch, heads_q, dim).to(DTYPE)
        mid = length - sink - tail
        self.tokens = torch.stack([torch.randperm(mid, device=DEVICE)[:length // 100] + sink
                                   for _ in range(batch * heads)]).reshape(batch, heads, -1).int()
        self.edges = {"starts": torch.zeros(batch, dtype=torch.long, device=DEVICE), "sink_size": sink,
                      "tail_starts": torch.full((batch,), length - tail, device=DEVICE),
                      "lengths": torch.full((batch,), length, device=DEVICE), "scale": dim**-0.5}
        self.features = torch.rand(batch, heads_q, dim, device=DEVICE).to(DTYPE)
        self.of_keys: dict[int, tuple[KeyFeatures, CompletionQuery]] = {}

    def completed(self, units: int) -> CompletionQuery:
        """Of the sums of its own maps, half of the mass estimated."""
        if units not in self.of_keys:
            batch, heads = self.k.shape[:2]
            made = key_map(batch, heads, self.k.shape[3], units)
            first, last = torch.full((batch,), self.edges["sink_size"], device=DEVICE), self.edges["tail_starts"]
            sums = phi_sums(self.k, self.v, first, last, made)
            made = made._replace(shift=sums.m)
            each = self.features.float().unflatten(1, (heads, -1))
            mass = torch.einsum("bhgr,bhr->bhg", each, sums.z).flatten(1)
            numerator = torch.einsum("bhgr,bhrd->bhgd", each, sums.s).flatten(1, 2)
            lse = launch_attend(self.q, self.k, self.v, self.tokens, **self.edges)[1]
            self.of_keys[units] = (made, CompletionQuery(self.features, lse - mass.log(), mass, numerator, None, made))
        return self.of_keys[units][1]

    def attend(self, units: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        return launch_attend(self.q, self.k, self.v, self.tokens, **self.edges,
                             completion=self.completed(units) if units else None)

    def error(self, units: int) -> float:
        """Against the twin in float64, a row of it."""
        found, whole = self.attend(units)[0][:1].double(), self.completed(units)
        maps = checks.double(whole.keys)
        own = whole._replace(**{n: x[:1].double() for n, x in whole._asdict().items() if n in (
            "features", "log_scale", "mass", "numerator")}, keys=maps._replace(bias=maps.bias[:1], shift=maps.shift[:1]))
        edges = {n: x[:1] if isinstance(x, torch.Tensor) else x for n, x in self.edges.items()}
        listed = self.tokens[:1].long()
        # the twin gathers what is read: the cache itself is not widened
        kept = torch.cat([listed, torch.full_like(listed[..., :1], 0)], -1)
        keys, values = (x[:1].gather(2, kept[..., None].expand(-1, -1, -1, x.shape[3])).double() for x in
                        (self.k, self.v))
        places = torch.arange(listed.shape[2], device=DEVICE).expand_as(listed)
        read = attend.attend_tokens_reference(
            self.q[:1].double(), keys, values, places, scale=edges["scale"], starts=edges["starts"], sink_size=0,
            tail_starts=edges["starts"], lengths=edges["starts"], completion=own)
        anchors = torch.cat([torch.arange(edges["sink_size"], device=DEVICE),
                             torch.arange(int(edges["tail_starts"]), int(edges["lengths"]), device=DEVICE)])
        beside = attend.attend_gathered(self.q[:1].double(), self.k[:1, :, anchors].double(),
                                        self.v[:1, :, anchors].double(),
                                        torch.ones(1, self.k.shape[1], len(anchors), dtype=torch.bool, device=DEVICE),
                                        edges["scale"])
        out = attend.merge(torch.stack([read[0], beside[0]]), torch.stack([read[1], beside[1]]))[0]
        return float((found - out).norm() / out.norm())


def timed(calls: list[Any], repeat: int = 20) -> float:
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(repeat):
            calls[i % len(calls)]()
    graph.replay()
    torch.cuda.synchronize()
    best = float("inf")
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end) * 1000 / repeat)
    return round(best, 2)


def check(name: str, dtypes: tuple[torch.dtype, ...], device: str, shapes: list[tuple[int, ...]]) -> None:
    """The project's own checks of the attention kernels, with this form of the completed one."""
    take(name)
    for dtype in dtypes:
        for shape in shapes:
            checks.check_attention(shape, dtype, device)
            checks.check_what_is_left(shape, dtype, device)
            print("check", name, dtype, shape, "ok", flush=True)


def steps() -> list[dict[str, Any]]:
    """Whole steps of decode.py with some forms: the sketch alone, and with φ."""
    from benchmarks import decode

    rows = []
    for case, heads_q, heads, length, batch in decode.SHAPES:
        if case not in STEP_CASES:
            continue
        sets = [decode.Buffers(heads_q, heads, length, batch, seed=i) for i in range(3)]
        row: dict[str, Any] = {"shape": case, "sketch": round(decode.timed([decode.of(b, "sparse_sketch") for b in sets]), 1)}
        for form, *launch in STEPS:
            take(form, *launch)
            label = f"{form}/128/" + "/".join(map(str, launch))
            try:
                row[label] = round(decode.timed([decode.of(b, "sparse_sketch_phi") for b in sets]), 1)
            except Exception as problem:
                print(case, label, str(problem).splitlines()[:1], flush=True)
        print("step", row, flush=True)
        rows.append(row)
        del sets
        torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output")
    parser.add_argument("--quick", action="store_true", help="the first two shapes alone")
    parser.add_argument("--only", nargs="+", default=[s[0] for s in SHAPES])
    parser.add_argument("--no-steps", action="store_true")
    options = parser.parse_args()
    names = ("lean-00", "lean-10", "lean-21", "lean-21a")
    if not torch.cuda.is_available():
        attend.COMPLETED = attend.COMPLETED._replace(block=32, programs=8)
        for name in names:
            check(name, (torch.float16,), "cpu", [(6, 2, 24, 40, 4, 8, 3, 1)])
        return
    began, out = time.time(), []
    for name in names:
        check(name, (torch.bfloat16,), "cuda", [
            (32, 8, 128, 1000, 4, 111, 5, 1), (12, 2, 128, 900, 4, 16, 0, 2), (14, 2, 64, 700, 1, 63, 3, 1),
            (3, 3, 80, 111, 1, 30, 7, 3)])
    for name, heads_q, heads, dim, length, batch, sink, tail in SHAPES[:2] if options.quick else SHAPES:
        if name not in options.only:
            continue
        sizes = (heads_q, heads, dim, length, batch, sink, tail)
        cases = [Case(*sizes, seed=i) for i in range(2 if length * batch > 600_000 else 4)]
        row: dict[str, Any] = {"shape": name, "plain": timed([c.attend for c in cases])}
        first, last = torch.full((batch,), sink, device=DEVICE), cases[0].edges["tail_starts"]
        for units in (128, 64):
            made = cases[0].completed(units).keys
            assert made is not None
            row[f"sums {units}"] = timed([lambda c=c, m=made: phi_sums(c.k, c.v, first, last, m) for c in cases], 4)
            for form, *launch in FORMS:
                if units == 64 and form not in ("present", "lean-00", "lean-21"):
                    continue
                take(form, *launch)
                label = f"{form}/{units}/" + "/".join(map(str, launch))
                try:
                    error = cases[0].error(units)
                    us = timed([lambda c=c, u=units: c.attend(u) for c in cases])
                except Exception as problem:  # does not fit, does not compile
                    print(name, label, str(problem).splitlines()[:1], flush=True)
                    continue
                if error > 1e-2 and "p" not in form[7:]:
                    print(name, label, f"WRONG: error {error:.1e}", flush=True)
                    us = float("nan")
                row[label] = us
                row.setdefault("errors", {})[label] = error
        out.append(row)
        Path(options.output).write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": out}, indent=1))
        ranked = sorted((v, k) for k, v in row.items() if "/" in k and isinstance(v, float) and v == v)
        print(f"{name}: plain {row['plain']}, sums {row['sums 128']} / {row['sums 64']} ({time.time() - began:.0f} s)")
        print("   " + "; ".join(f"{k} {v}" for v, k in ranked), flush=True)
        del cases, made
        torch.cuda.empty_cache()
    if not options.no_steps:
        found = {"device": torch.cuda.get_device_name(), "rows": out, "steps": steps()}
        Path(options.output).write_text(json.dumps(found, indent=1))
    print("seconds", round(time.time() - began))


if __name__ == "__main__":
    main()
