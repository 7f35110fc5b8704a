"""Launches of `decode_attention`, timed on a GPU: keys at once, warps, programs wanted, bytes on their way, columns and
warps of the merge. Each is checked against the twin first. The last lines are the best of every shape, and those that
are best over all.

    python benchmarks/experiments/dense_tune.py OUT.json [--quick]
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from benchmarks._dense import DenseStep, buffers, floor_us
from benchmarks.decode import timed
from sparsekv.kernels import stored
from sparsekv.kernels.stored import decode_attention_reference

SHAPES = [(12, 2, 128, 8192, 1), (12, 2, 128, 30_000, 1), (12, 2, 128, 30_000, 8), (12, 2, 128, 30_000, 24),
          (14, 2, 64, 30_000, 1), (14, 2, 64, 30_000, 24), (4, 1, 128, 30_000, 1), (32, 8, 128, 8192, 1),
          (32, 8, 128, 32_768, 1)]
"""Query heads, KV heads, head dimension, tokens, rows."""
BLOCKS = [(64, 4, 96), (64, 4, 160), (128, 4, 128), (128, 8, 128), (128, 8, 192), (32, 2, 48)]
"""Keys at once, warps, KiB of keys and values on their way."""
PROGRAMS, MERGES = (132, 264, 396, 528), ((32, 2), (16, 1), (64, 4))
FIRST = (64, 4, 96, 264, 32, 2)


def set_to(block: int, warps: int, kib: int, programs: int, columns: int, merge_warps: int) -> None:
    stored.KEYS_AT_ONCE, stored.WARPS, stored.STAGES_BYTES, stored.PROGRAMS = block, warps, kib * 1024, programs
    stored.MERGE_WIDTH, stored.MERGE_WARPS = columns, merge_warps


def right(shape: tuple[int, ...]) -> bool:
    b = DenseStep(*shape[:3], min(shape[3], 5000), 2, seed=3)
    b.lengths[1] -= 77
    b.starts[1] += 5
    found = stored.launch_decode(b.q[:, :, 0], b.k, b.v, b.starts, b.lengths, scale=0.1)[0].double()
    truth = decode_attention_reference(b.q[:, :, 0].double(), b.k, b.v, b.starts, b.lengths, scale=0.1)[0]
    return float((found - truth).norm() / truth.norm()) < 5e-3


def main() -> None:
    began, out = time.time(), Path(sys.argv[1])
    every = [(*b, p, *MERGES[0]) for b, p in itertools.product(BLOCKS, PROGRAMS)]
    every += [(*FIRST[:4], *m) for m in MERGES[1:]]
    if "--quick" in sys.argv:
        every = every[:6]
    rows: list[dict[str, object]] = []
    ratios: dict[tuple[int, ...], list[float]] = {}
    for shape in SHAPES:
        sets, times = buffers(shape), {}
        for how in every:
            set_to(*how)
            try:
                if not right(shape):
                    print(shape, how, "WRONG", flush=True)
                    continue
                times[how] = timed([functools.partial(DenseStep.ours, b) for b in sets], replays=7)
            except Exception as error:
                print(shape, how, str(error).splitlines()[0][:100], flush=True)
        least = min(times.values())
        for how, us in times.items():
            ratios.setdefault(how, []).append(us / least)
            rows.append({"shape": shape, "how": how, "us": round(us, 2)})
        best = sorted(times.items(), key=lambda x: x[1])[:4]
        print(f"{shape} floor {floor_us(shape):.1f} as it ships {times.get(FIRST, math.nan):.1f} best "
              + ", ".join(f"{'/'.join(map(str, h))} {t:.1f}" for h, t in best), flush=True)
        out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=1))
        del sets
        torch.cuda.empty_cache()
    print("over all, block/warps/KiB/programs/columns/warps of the merge: mean and worst ratio to the best of a shape")
    for how, found in sorted(ratios.items(), key=lambda x: sum(x[1]) / len(x[1]))[:10]:
        if len(found) == len(SHAPES):
            print("/".join(map(str, how)), f"{sum(found) / len(found):.3f} {max(found):.3f}")
    print(f"{time.time() - began:.0f} s, {torch.cuda.get_device_name()}")


if __name__ == "__main__":
    main()
