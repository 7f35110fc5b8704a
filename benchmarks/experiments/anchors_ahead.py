"""Attention over sink and tail beside the selection, on a second stream, so that only the list is left after it.

    python benchmarks/experiments/anchors_ahead.py OUTPUT.json

Steps of one layer by sketches at 1 %, with and without φ, microseconds in a CUDA graph over rotating caches. Places:
`after`, as the product has it, anchors and list in one kernel; `first`, anchors on the second stream, ahead of φ's
query side; `last`, behind it. Every place is first compared with `after`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

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


def step(b: decode.Buffers, place: str, phi: bool) -> tuple[Tensor, Tensor]:
    """Output and log mass."""
    view, queries, selector = b.view, b.queries, b.sketch_router()
    estimator = b.completion() if phi else None
    q, bounds, query, ahead = queries.folded, view.bounds(queries), None, None
    sizes: Any = None
    if estimator is not None and estimator.key_map is not None:
        sizes = tuple(estimator.key_map.w_out.shape[-2:])

    def anchors() -> Any:
        return launch_anchors(q, view.keys, view.values, **bounds, completed=sizes)

    with beside(view.device) as join:
        if place == "first":
            ahead = anchors()
        if estimator is not None:
            query = estimator.query(view, queries)
        if place == "last":
            ahead = anchors()
    selection = selector.select(view, queries)
    join()
    return launch_attend(q, view.keys, view.values, selection.as_tokens(), completion=query, anchored=ahead, **bounds)


def main() -> None:
    rows = []
    for case, (heads_q, heads, length, batch, count) in CASES.items():
        sets = [decode.Buffers(heads_q, heads, length, batch, seed=i) for i in range(count)]
        for phi in (False, True):
            wanted = step(sets[0], "after", phi)
            for place in PLACES:
                found = step(sets[0], place, phi)
                error = float((found[0].float() - wanted[0].float()).abs().max() / wanted[0].float().abs().max())
                assert error < 1e-2, (case, phi, place, error)
                us = decode.timed([lambda b=b, p=place, f=phi: step(b, p, f)[0] for b in sets])
                rows.append({"case": case, "phi": phi, "place": place, "us": us, "error": error})
                Path(sys.argv[1]).write_text(json.dumps(rows))
            mine = {r["place"]: r["us"] for r in rows if r["case"] == case and r["phi"] == phi}
            print(f"{case:14} {'phi' if phi else 'plain':6}" + "".join(f"{p} {mine[p]:8.2f}  " for p in PLACES),
                  flush=True)
        del sets
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
