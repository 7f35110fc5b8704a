"""Launches of choosing tokens by all codes (`kernels/sketch.py: launch_all, launch_histogram, launch_select`), timed on
a GPU. First the bins are held against the twin's. Then one kernel after another is varied, the others as the ones
before were best; last lines: the best of every kernel, and each kernel alone at it.

    python benchmarks/experiments/codes_tune.py OUT.json [--quick] [all binned selected]
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from benchmarks._profile import print_kernels
from benchmarks.decode import timed
from sparsekv.core.sketch import fit_sketch
from sparsekv.kernels import Sketch, encode_keys, histogram, sketch

SHAPES = [(32, 8, 128, 32_768, 1), (32, 8, 128, 65_536, 1), (32, 8, 128, 131_072, 1), (32, 8, 128, 32_768, 8),
          (12, 2, 128, 30_000, 1), (12, 2, 128, 30_000, 24), (14, 2, 64, 30_000, 1)]
"""Query heads, KV heads, head dimension, tokens, rows."""
ALL = [(block, warps, stages, programs, side) for block, warps, stages, side in (
    (256, 4, 3, 8), (128, 4, 3, 8), (256, 4, 2, 8), (256, 4, 5, 8), (512, 4, 3, 8), (512, 8, 3, 8))
    for programs in (132, 264, 528, 792)]
"""Tokens at once, warps, blocks on their way, programs, KiB of a sketch at once."""
BINNED = [(512, 1), (256, 1), (1024, 1), (1024, 2), (512, 4)]
SELECTED = [(2048, 8), (1024, 4), (2048, 4), (4096, 8), (1024, 8)]
"""Candidates at once, warps."""
CACHED = 192 * 2**20


def set_all(how: tuple[int, ...]) -> None:
    sketch.ALL_AT_ONCE, sketch.ALL_WARPS, sketch.ALL_STAGES, sketch.ALL_PROGRAMS = how[:4]
    sketch.SIDE_BYTES = how[4] * 1024


def set_binned(how: tuple[int, ...]) -> None:
    sketch.BINNED_AT_ONCE, sketch.BINNED_WARPS = how


def set_selected(how: tuple[int, ...]) -> None:
    sketch.SELECTED_AT_ONCE, sketch.SELECT_WARPS = how


class Set:
    """Codes of random keys, their sketch, a query."""

    def __init__(self, heads_q: int, heads: int, dim: int, length: int, batch: int, seed: int):
        generator = torch.Generator("cuda").manual_seed(seed)
        self.q = torch.randn(batch, heads_q, dim, device="cuda", dtype=torch.bfloat16, generator=generator) * 2
        keys = torch.randn(batch, heads, length, dim, device="cuda", dtype=torch.bfloat16, generator=generator)
        width, mean = dim // 4, keys[:, :, :4096].float().mean(2)
        spread = keys[:, :, :4096].float() - mean[:, :, None]
        covariance = spread.mT @ spread / spread.shape[2]
        moment = torch.eye(dim, device="cuda").expand_as(covariance)
        self.sketch: Sketch = fit_sketch(moment, mean, covariance, width, width // 8)
        self.codes = encode_keys(keys, self.sketch, width)
        self.first = torch.ones(batch, dtype=torch.long, device="cuda")
        self.last = torch.full_like(self.first, length - 2047)
        self.widest = (length - 2048) // 100
        self.budget = torch.full_like(self.first, self.widest)
        self.scale = dim**-0.5

    def tokens(self) -> torch.Tensor:
        return sketch.launch_tokens(self.q, self.sketch, self.codes, self.scale, self.budget, self.widest, None,
                                    self.first, self.last)


def right(shape: tuple[int, ...]) -> str:
    """Of a short context, whose second row ends earlier: nothing, or what is wrong."""
    b = Set(*shape[:3], 9001, 2, seed=5)
    b.last[1] -= 1234
    scored = sketch.launch_all(b.q, b.sketch, b.codes, b.scale, b.widest, b.first, b.last)
    mine = sketch.launch_histogram(scored, b.budget, b.widest)
    wide = Sketch(*(x.double() for x in b.sketch))
    truth = histogram.bins_of(sketch.sketch_scores_reference(b.q.double(), wide, b.codes, b.scale, None, b.first,
                                                             b.last))
    bins = mine.bins[..., :truth.shape[-1]]
    away = (bins.int() - truth.int()).abs()
    if not torch.equal(bins > 0, truth > 0) or int(away.max()) > 1 or float((away > 0).float().mean()) > 0.2:
        return f"bins differ by up to {int(away.max())}, {float((away > 0).float().mean()):.3f} of them"
    found, chosen = b.tokens(), histogram.best_tokens_reference(bins, None, b.budget, b.widest)
    return "" if torch.equal(found, chosen) else "the tokens are others"


def turn(calls: Iterator[Callable[[], torch.Tensor]]) -> None:
    next(calls)()


def main() -> None:
    began, out, rows = time.time(), Path(sys.argv[1]), []
    quick = "--quick" in sys.argv
    for shape in SHAPES:
        wrong = right(shape)
        print("check", shape, wrong or "as the twin", flush=True)
        if wrong:
            raise SystemExit(1)
    sets = {}
    for shape in SHAPES:
        size = shape[1] * shape[3] * shape[4] * shape[2] // 4
        sets[shape] = [Set(*shape, seed=i) for i in range(min(16, max(2, -(-CACHED // size))))]
    best: dict[str, tuple[int, ...]] = {}
    kernels: list[tuple[str, Callable[[tuple[int, ...]], None], list[tuple[int, ...]]]] = [
        ("all", set_all, ALL), ("binned", set_binned, BINNED), ("selected", set_selected, SELECTED)]
    asked = [name for name, *_ in kernels if name in sys.argv] or [name for name, *_ in kernels]
    for name, put, every in (k for k in kernels if k[0] in asked):
        ratios: dict[tuple[int, ...], list[float]] = {}
        for shape in SHAPES:
            times: dict[tuple[int, ...], float] = {}
            for how in every[:2] if quick else every:
                put(how)
                try:
                    if name != "all" or how[3] != 132 or not right(shape):
                        times[how] = timed([b.tokens for b in sets[shape]], replays=7)
                except Exception as error:
                    print(shape, name, how, str(error).splitlines()[0][:100], flush=True)
            least = min(times.values())
            for how, us in times.items():
                ratios.setdefault(how, []).append(us / least)
                rows.append({"shape": shape, "kernel": name, "how": how, "us": round(us, 2)})
            ranked = sorted(times.items(), key=lambda x: x[1])
            print(f"{shape} {name}: first {times.get(every[0], 0.0):.1f}, " + ", ".join(
                f"{'/'.join(map(str, h))} {t:.1f}" for h, t in ranked[:5]), flush=True)
            out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=1))
        whole = {h: sum(r) / len(r) for h, r in ratios.items() if len(r) == len(SHAPES)}
        best[name] = min(whole, key=lambda h: whole[h])
        put(best[name])
        print(name, "over all:", ", ".join(f"{'/'.join(map(str, h))} {r:.3f}" for h, r in sorted(
            whole.items(), key=lambda x: x[1])[:6]), flush=True)
    for shape in SHAPES:
        calls = [b.tokens for b in sets[shape]]
        print(f"{shape} tokens {timed(calls):.1f} us; each kernel by the profiler:", flush=True)
        before, sketch.overlaps = sketch.overlaps, lambda _: False  # type: ignore[assignment]
        try:
            calls[0]()
            rotated = itertools.cycle(calls)
            print_kernels(functools.partial(turn, rotated), 2 * len(calls), shown=3)
        finally:
            sketch.overlaps = before
    print("best", best, f"{time.time() - began:.0f} s, {torch.cuda.get_device_name()}")


if __name__ == "__main__":
    main()
