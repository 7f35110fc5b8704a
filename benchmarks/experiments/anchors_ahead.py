"""Attention over sink and tail beside the selection, on a second stream, so that only the list is left after it.

    python benchmarks/experiments/anchors_ahead.py OUTPUT.json

Steps of one layer by sketches at 1 % with φ, microseconds in a CUDA graph over rotating caches. Places:
`after`, as the product has it, anchors and list in one kernel; `first`, anchors on the second stream, ahead of φ's
query side; `last`, behind it. Every place is first compared with `after`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import torch
from torch import Tensor

from benchmarks import decode
from sparsekv.core.streams import beside
from sparsekv.kernels.attend import launch_anchors, launch_attend

CASES = {  # query heads, KV heads, tokens, rows, caches
    "32x8 32k b1": (32, 8, 32_768, 1, 6), "32x8 128k b1": (32, 8, 131_072, 1, 4), "32x8 32k b8": (32, 8, 32_768, 8, 3),
    "32x8 128k b4": (32, 8, 131_072, 4, 3), "32x8 128k b8": (32, 8, 131_072, 8, 2),
    "12x2 30k b1": (12, 2, 30_000, 1, 6), "12x2 30k b8": (12, 2, 30_000, 8, 4), "12x2 30k b24": (12, 2, 30_000, 24, 3)}
PLACES = ("after", "first", "last")


def step(b: decode.Buffers, place: str) -> tuple[Tensor, Tensor]:
    """Output and log mass."""
    view, queries, selector, estimator = b.view, b.queries, b.sketch_router(), b.completion()
    q, bounds = queries.folded, view.bounds(queries)
    ahead = None
    with beside(view.device) as join:
        if place == "first":
            ahead = launch_anchors(q, view.keys, view.values, sizes=estimator.key_sizes, **bounds)
        query = estimator.query(view, queries)
        if place == "last":
            ahead = launch_anchors(q, view.keys, view.values, sizes=estimator.key_sizes, **bounds)
    selection = selector.select(view, queries)
    join()
    return launch_attend(q, view.keys, view.values, selection.as_tokens(), completion=query, anchored=ahead, **bounds)


def main() -> None:
    rows = []
    for case, (heads_q, heads, length, batch, count) in CASES.items():
        sets = [decode.Buffers(heads_q, heads, length, batch, seed=i) for i in range(count)]
        wanted = step(sets[0], "after")
        for place in PLACES:
            found = step(sets[0], place)
            error = float((found[0].float() - wanted[0].float()).abs().max() / wanted[0].float().abs().max())
            assert error < 1e-2, (case, place, error)
            us = decode.timed([lambda b=b, p=place: step(b, p)[0] for b in sets])
            rows.append({"case": case, "place": place, "us": us, "error": error})
            Path(sys.argv[1]).write_text(json.dumps(rows))
        mine = {r["place"]: r["us"] for r in rows if r["case"] == case}
        print(f"{case:14} " + "".join(f"{p} {mine[p]:8.2f}  " for p in PLACES), flush=True)
        del sets
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
