"""Seconds of a prompt, read densely and sparsely, and the rate of the kernels that read it.

    python benchmarks/prefill.py [--cases 8b-128k-b1 ...] [--methods sparse ...] [--share 0.1] [--output FOLDER]
    python benchmarks/prefill.py --kernels [--output FOLDER]

Rows take the place of those of the same case, method and metric in prefill.json. Models have random weights: `8b` has
the shape of Llama 3.1 8B, `coder` that of Qwen2.5-Coder-1.5B. All methods read the same ids with the same model.

- dense: attached, full attention; `prompt_s` and `first_token_s` by the faster of torch's kernels of cuDNN and
  FlashAttention;
- sparse: `prefill="sparse"`, decoded by `sketch` at 1 %; sparse_phi: the same completed by maps of the shape and width
  that the recipe trains, in the prompt and after it;
- token_select: the paper's own prefill at its published settings.

`prompt_s`: the prompt in chunks of 32,768 tokens, then index and estimates. `first_token_s`: prompt and first token by
`generate`, the prompt in one piece, for cases that fit. `peak_gb`: most memory held in either.

Kernels, a layer of 32 query and 8 KV heads of 128, one chunk after 32k, 128k and 512k tokens: first they are checked
against the twins in float64 on a short cache. `dense_ms` full attention of the chunk (`dense_attention`); `triton_ms`
and `gathered_ms` the chunk with its list, by the Triton kernel and by gathered rows and cuDNN's; `rate` of each per
pair of query and key as a share of dense; `select_ms` and `select_share` the list, and as a share of dense; `rest_ms`
the completion.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sparsekv
from benchmarks._rows import RESULTS, add_rows, row
from benchmarks.generate import artifacts, make_model, synchronize
from sparsekv.core.prefill import SparsePrompts
from sparsekv.core.selectors import SELECTORS
from sparsekv.kernels import add_rest, chunk_tokens, dense_attention, phi_less, phi_sums, representatives
from sparsekv.kernels.chunk_attention import (
    chunk_attention_reference,
    gathered_attention,
    launch_chunk_attention,
)
from sparsekv.kernels.dense import splits
from sparsekv.kernels.types import FeatureMapWeights, KeyFeatures, PhiState

CASES = {"8b-32k-b1": ("8b", 32_768, 1), "8b-128k-b1": ("8b", 131_072, 1), "8b-512k-b1": ("8b", 524_288, 1),
         "coder-30k-b8": ("coder", 30_000, 8), "tiny-6k-b2": ("tiny", 6000, 2)}
METHODS = ("dense", "sparse", "sparse_phi", "token_select")
CHUNK, ONE_PIECE, WARM = 32_768, 262_144, 9000
HEADS_Q, HEADS_KV, DIM, FEATURES = 32, 8, 128, 128
CONTEXTS = (32_768, 131_072, 524_288)
ROWS: list[dict[str, Any]] = []


def how_of(method: str, trained: Any, prompts: SparsePrompts) -> dict[str, Any]:
    if method == "token_select":
        return {"selector": "token_select", **SELECTORS["token_select"].PUBLISHED}
    if method == "dense":
        return {"selector": "dense"}
    made = {"router": trained[0], "selector": "sketch", "token_budget": 0.01, "prefill": prompts}
    return made | ({"phi": trained[1]} if method.endswith("_phi") else {})


def timed(work: Callable[[], Any], ids: torch.Tensor) -> float:
    gc.collect()
    synchronize(ids)
    began = time.perf_counter()
    work()
    synchronize(ids)
    return time.perf_counter() - began


def prompt(model: Any, how: dict[str, Any], ids: torch.Tensor) -> dict[str, float]:
    found: dict[str, float] = {}

    def chunks(some: torch.Tensor) -> None:
        cache = attachment.prefill(some[:, :-1], chunk_size=CHUNK, cache=attachment.cache(some.shape[1] + 8))
        attachment.step(some[:, -1:], cache)

    with sparsekv.attach(model, **how) as attachment:
        chunks(ids[:, :WARM])
        found["prompt_s"] = timed(lambda: chunks(ids), ids)
        if ids.numel() <= ONE_PIECE:
            attachment.generate(ids[:, :WARM], max_new_tokens=1)
            found["first_token_s"] = timed(lambda: attachment.generate(ids, max_new_tokens=1), ids)
    return found


def fastest(model: Any, ids: torch.Tensor) -> dict[str, float]:
    """Full attention by each of torch's kernels, the faster of them by metric."""
    if not ids.is_cuda:
        return prompt(model, {"selector": "dense"}, ids)
    from torch.nn.attention import SDPBackend, sdpa_kernel

    runs = []
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel([backend, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], set_priority=True):
            runs.append(prompt(model, {"selector": "dense"}, ids))
        print(f"    dense by {backend.name}: {runs[-1]}", flush=True)
    return {name: min(run[name] for run in runs) for name in runs[0]}


def measure(case: str, model: Any, options: argparse.Namespace, device: str) -> None:
    _, length, rows = CASES[case]
    torch.manual_seed(1)
    ids = torch.randint(1, model.config.vocab_size, (rows, length), device=device)
    prompts = SparsePrompts(share=options.share, least=options.least, chunk=options.chunk)
    trained = artifacts(model, device)
    dense = None
    for method in options.methods:
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            found = fastest(model, ids) if method == "dense" else prompt(model, how_of(method, trained, prompts), ids)
        except RuntimeError as error:
            print(f"{case} {method}: {type(error).__name__} {str(error).splitlines()[0]}", flush=True)
            continue
        dense = found if method == "dense" else dense
        if dense is not None and method != "dense":
            found |= {name.replace("_s", "_speedup"): dense[name] / found[name] for name in dense
                      if name.endswith("_s") and name in found}
        if device == "cuda":
            found["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        units = {"s": "seconds", "gb": "GB", "speedup": "dense / method"}
        ROWS.extend(row(case, method, name, round(value, 3), units[name.rpartition("_")[2]])
                    for name, value in found.items())
        print(case, method, {k: round(v, 3) for k, v in found.items()}, flush=True)
        add_rows("prefill", ROWS, options.output)


def milliseconds(work: Callable[[], Any], device: str) -> float:
    """Median of some runs, each after the caches were written over."""
    if device == "cpu":
        began = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - began)
    for _ in range(3):
        work()
    taken = []
    for _ in range(7):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        work()
        events[1].record()
        torch.cuda.synchronize()
        taken.append(events[0].elapsed_time(events[1]))
    return sorted(taken)[len(taken) // 2]


def check(dtype: torch.dtype, device: str) -> None:
    """Stops where a kernel is not right."""
    torch.manual_seed(0)
    q = torch.randn(1, 700, 8, DIM, device=device).to(dtype).transpose(1, 2)
    k, v = (torch.randn(1, 2, 3000, DIM, device=device).to(dtype) for _ in range(2))
    asking = representatives(q, 2)
    tokens = chunk_tokens(asking, k, 16, 2000, 333, scale=DIM**-0.5)
    scores = (asking.double() @ k[:, :, 16:2000].double().mT * DIM**-0.5).softmax(-1).sum(2)
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, tokens.long() - 16, True)
    low, high = scores.masked_fill(~chosen, torch.inf).amin(-1), scores.masked_fill(chosen, 0.0).amax(-1)
    if int(chosen.sum(-1).min()) != 333 or not bool((low >= 0.85 * high).all()):
        sys.exit("chunk_tokens is not right")
    truth = chunk_attention_reference(q.double(), k.double(), v.double(), tokens, scale=DIM**-0.5)
    ways = [launch_chunk_attention] if device == "cuda" else [chunk_attention_reference]
    if device == "cuda" and splits(dtype, 8, 2, DIM, q.device):
        ways.append(gathered_attention)
    for way in ways:
        out, lse = way(q, k, v, tokens, scale=DIM**-0.5)
        error = float((out.double() - truth[0]).norm() / truth[0].norm())
        gap = float((lse.double() - truth[1]).abs().max())
        print(f"{way.__name__}: error {error:.1e}, lse {gap:.1e}", flush=True)
        if not error < 1e-2 or not gap < 2e-2:
            sys.exit("attention of a chunk is not right")


def kernels(options: argparse.Namespace, device: str) -> None:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    check(dtype, device)
    contexts = CONTEXTS if device == "cuda" else (4096,)
    for past in contexts:
        k, v = (torch.randn(1, past + 4096, HEADS_KV, DIM, device=device, dtype=dtype).transpose(1, 2)
                for _ in range(2))
        for chunk in (512, 1024, 2048, 4096):
            case = f"32x8-{past // 1024}k-chunk{chunk}"
            q = torch.randn(1, chunk, HEADS_Q, DIM, device=device, dtype=dtype).transpose(1, 2)
            keys, values = k[:, :, :past + chunk], v[:, :, :past + chunk]
            count = min(max(4096, math.ceil(options.share * past)), past - 528)
            scale = DIM**-0.5
            dense = milliseconds(lambda: dense_attention(q, keys, values, scale=scale), device)  # noqa: B023
            select = milliseconds(lambda: chunk_tokens(
                representatives(q, HEADS_KV), keys, 16, past - 512, count, scale=scale), device)  # noqa: B023
            tokens = chunk_tokens(representatives(q, HEADS_KV), keys, 16, past - 512, count, scale=scale)
            ways = {"triton": launch_chunk_attention, "gathered": gathered_attention} if device == "cuda" else {
                "twin": chunk_attention_reference}
            whole, part = chunk * (past + chunk / 2), chunk * (count + chunk / 2)
            found = {"dense_ms": dense, "select_ms": select, "select_share": select / dense,
                     "rest_ms": milliseconds(rest_work(q, keys, values, tokens), device)}
            for name, way in ways.items():
                taken = milliseconds(lambda: way(q, keys, values, tokens, scale=scale), device)  # noqa: B023
                found |= {f"{name}_ms": taken, f"{name}_rate": (part / taken) / (whole / dense)}
            units = {"ms": "milliseconds", "share": "of dense", "rate": "of dense, per pair"}
            ROWS.extend(row(case, "kernels", name, round(value, 4), units[name.rpartition("_")[2]])
                        for name, value in found.items())
            tflops = 4 * DIM * HEADS_Q * whole / dense / 1e9
            print(case, f"list {count}, dense {tflops:.0f} TFLOP/s", {n: round(x, 3) for n, x in found.items()},
                  flush=True)
        add_rows("prefill", ROWS, options.output)


def rest_work(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tokens: torch.Tensor) -> Callable[[], Any]:
    """The completion of a chunk, with maps of the recipe's shape: sums of the list taken out, then all queries."""
    from benchmarks.generate import KEY_WIDTH, MAP_WIDTH
    from sparsekv.kernels import gather_rows
    from sparsekv.models.feature_map import FeatureMap

    maps = FeatureMapWeights(*(w.detach().to(q.device, q.dtype) for w in FeatureMap(
        HEADS_Q, DIM, FEATURES, MAP_WIDTH).weights()))
    keys = KeyFeatures(*(x.to(q.device) for x in (
        torch.randn(HEADS_KV, DIM, 2 * KEY_WIDTH).to(q.dtype) / DIM**0.5, torch.randn(1, HEADS_KV, 2 * KEY_WIDTH),
        torch.randn(HEADS_KV, 2 * KEY_WIDTH, FEATURES).to(q.dtype) / KEY_WIDTH**0.5, torch.randn(HEADS_KV, FEATURES),
        torch.zeros(1, HEADS_KV, FEATURES))))
    first = torch.zeros(1, dtype=torch.long, device=q.device)
    whole = phi_sums(k, v, first, first + k.shape[2], keys)
    offset = torch.zeros(HEADS_Q, device=q.device)
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[:3], device=q.device)

    def work() -> None:
        index = tokens.long()
        read = phi_sums(gather_rows(k, index), gather_rows(v, index), first, first + index.shape[2], keys)
        add_rest(out, lse, q, maps, offset, PhiState(*phi_less(whole, read)))

    return work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[c for c in CASES if not c.startswith("tiny")])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--kernels", action="store_true", help="time the kernels instead of prompts")
    standard = SparsePrompts()
    parser.add_argument("--share", type=float, default=standard.share, help="tokens that a chunk reads, a share")
    parser.add_argument("--least", type=int, default=standard.least, help="and at least [tokens]")
    parser.add_argument("--chunk", type=int, default=standard.chunk, help="queries that share a list [tokens]")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.kernels:
        return kernels(options, device)
    model, shape = None, None
    for case in options.cases:
        if CASES[case][0] != shape:
            model, shape = None, CASES[case][0]
            gc.collect()
            model = make_model(shape, device)
        with torch.no_grad():
            measure(case, model, options, device)
        gc.collect()
    print(add_rows("prefill", ROWS, options.output))


if __name__ == "__main__":
    main()
