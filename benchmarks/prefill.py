"""Seconds of a prompt, read densely and sparsely, and the rate of the kernels that read it.

    python benchmarks/prefill.py [--cases 8b-128k-b1 ...] [--methods sparse ...] [--share 0.1] [--output FOLDER]
    python benchmarks/prefill.py --cases 8b-quarter-128k-b1 --methods sparse_phi --profile
    python benchmarks/prefill.py --kernels [--sweep] [--output FOLDER]

Rows take the place of those of the same case, method and metric in prefill.json, and are written as soon as each is
measured. `8b` has the shape of Llama 3.1 8B, with random weights, `8b-quarter` eight of its 32 layers (80 GB hold no
512k tokens of all); `coder` is the model of --model. All methods read the
same ids with the same model.

- dense: attached, full attention, by the faster of torch's kernels of cuDNN and FlashAttention, which one layer of the
  case's length tells;
- sparse: `prefill="sparse"`, decoded by `sketch` at 1 %; sparse_phi: the same completed by maps of the shape and width
  that the recipe trains, in the prompt and after it; sparse@0.2, sparse_phi@0.1:chunk=4096 and the like: at that share,
  with these fields of `SparsePrompts`;
- token_select: the paper's own prefill at its published settings.

`prompt_s`: the prompt in chunks of 32,768 tokens, then index and estimates. `first_token_s`: prompt and first token by
`generate`, the prompt in one piece, for cases that fit. Both are of a second run; `cold_`: of the first, in which
kernels are loaded and cuDNN makes its plans. `peak_gb`: most memory held in any. --profile: what host and device do in
a run after the first, and no rows.

Kernels, a layer of 32 query and 8 KV heads of 128, one chunk after 32k, 128k and 512k tokens: first they are checked
against the twins in float64 on a short cache. `dense_ms` full attention of the chunk (`dense_attention`); `triton_ms`
and `gathered_ms` the chunk with its list, by the Triton kernel and by gathered rows and cuDNN's; `rate` of each per
pair of query and key as a share of dense, `tflops` alike; `select_ms` and `select_share` the list, and as a share of
dense; `rest_ms` the completion. Four chunks of 2048 after 128k: `together_ms` lists and attention of all in one set of
calls, `apart_ms` one by one. --sweep: how the kernels may be launched, one after the other, and no rows.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sparsekv
from benchmarks._prompts import sizes_of
from benchmarks._rows import RESULTS, add_rows, row
from benchmarks.generate import artifacts, by_model, prompts, synchronize
from sparsekv.artifacts.fingerprint import model_fingerprint
from sparsekv.core.prefill import SparsePrompts
from sparsekv.core.selectors import SELECTORS
from sparsekv.kernels import (
    add_rest,
    chunk_attention,
    chunk_rows,
    chunk_tokens,
    chunks_of,
    dense_attention,
    phi_left,
    phi_sums,
    representatives,
)
from sparsekv.kernels.chunk_attention import (
    Launch,
    chunk_attention_reference,
    gathered_attention,
    launch_chunk_attention,
)
from sparsekv.kernels.dense import splits
from sparsekv.kernels.types import FeatureMapWeights, KeyFeatures, PhiState

CASES = {"8b-32k-b1": ("8b", 32_768, 1), "8b-128k-b1": ("8b", 131_072, 1), "8b-512k-b1": ("8b", 524_288, 1),
         "8b-quarter-128k-b1": ("8b-quarter", 131_072, 1), "8b-quarter-512k-b1": ("8b-quarter", 524_288, 1),
         "coder-30k-b8": ("coder", 30_000, 8), "tiny-6k-b2": ("tiny", 6000, 2)}
METHODS = ("dense", "sparse", "sparse_phi", "token_select")
CHUNK, ONE_PIECE = 32_768, 262_144
HEADS_Q, HEADS_KV, DIM, FEATURES = 32, 8, 128, 128
SINK, WINDOW, TOGETHER = 16, 512, 4
CONTEXTS, CHUNKS = (32_768, 131_072, 524_288), (512, 1024, 2048, 4096)
ROWS: list[dict[str, Any]] = []


def how_of(method: str, trained: Any, prompts: SparsePrompts) -> dict[str, Any]:
    if method == "token_select":
        return {"selector": "token_select", **SELECTORS["token_select"].PUBLISHED}
    if method == "dense":
        return {"selector": "dense"}
    kind, sizes = sizes_of(method)
    prompts = replace(prompts, **sizes)
    made = {"router": trained[0], "selector": "sketch", "token_budget": 0.01, "prefill": prompts}
    return made | ({"phi": trained[1]} if kind.endswith("_phi") else {})


def known(method: str) -> str:
    """A method as it is said, if it is one."""
    kind, sizes = sizes_of(method)
    if kind not in METHODS or (sizes and not kind.startswith("sparse")):
        raise ValueError(method)
    replace(SparsePrompts(), **sizes)
    return method


def timed(work: Callable[[], Any], ids: torch.Tensor) -> float:
    gc.collect()
    synchronize(ids)
    began = time.perf_counter()
    work()
    synchronize(ids)
    return time.perf_counter() - began


def prompt(model: Any, how: dict[str, Any], ids: torch.Tensor) -> Iterator[tuple[str, float]]:
    """The metrics of a method, each as soon as it is there."""

    def chunks(some: torch.Tensor) -> None:
        cache = attachment.prefill(some[:, :-1], chunk_size=CHUNK, cache=attachment.cache(some.shape[1] + 8))
        attachment.step(some[:, -1:], cache)

    with sparsekv.attach(model, **how) as attachment:
        whole: list[tuple[str, Callable[[], Any]]] = [("prompt_s", lambda: chunks(ids))]
        if ids.numel() <= ONE_PIECE:
            whole.append(("first_token_s", lambda: attachment.generate(ids, max_new_tokens=1)))
        for name, work in whole:
            yield f"cold_{name}", timed(work, ids)
            yield name, timed(work, ids)


def profile(model: Any, how: dict[str, Any], ids: torch.Tensor) -> None:
    """The operations of a prompt that take most of the device's and of the host's time."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if ids.is_cuda:
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with sparsekv.attach(model, **how) as attachment:
        alone = timed(lambda: attachment.prefill(ids), ids), timed(lambda: attachment.prefill(ids), ids)
        with torch.profiler.profile(activities=kinds) as found:
            watched = timed(lambda: attachment.prefill(ids), ids)
    print(f"first {alone[0]:.3f} s, second {alone[1]:.3f} s, watched {watched:.3f} s")
    events = found.key_averages()
    device = [(e.self_device_time_total, e) for e in events if str(e.device_type).endswith("CUDA")]
    host = [(e.self_cpu_time_total, e) for e in events if str(e.device_type).endswith("CPU")]
    for name, times in (("device", device), ("host", host)):
        print(f"{name}: {sum(t for t, _ in times) / 1e6:.3f} s in {sum(e.count for _, e in times)} events")
        for taken, e in sorted(times, key=lambda x: -x[0])[:17]:
            print(f"{taken / 1e3:9.1f} ms {e.count:7}  {e.key[:80]}")


def fastest(model: Any, length: int) -> Any:
    """A context in which torch reads a prompt by its fastest kernel, as one layer of it tells."""
    if model.device.type == "cpu":
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    config = model.config
    length, dim = min(length, CHUNK * 4), config.head_dim
    q, k, v = (torch.randn(1, length, heads, dim, device=model.device, dtype=model.dtype).transpose(1, 2) for heads in (
        config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads))
    found = {}
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel([backend]):
            found[backend] = milliseconds(lambda: dense_attention(q, k, v, scale=dim**-0.5), "cuda", 2)
        print(f"    a layer of {length} tokens by {backend.name}: {found[backend]:.1f} ms", flush=True)
    best = min(found, key=found.__getitem__)
    return sdpa_kernel([best, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], set_priority=True)


def measure(case: str, model: Any, tokenizer: Any, options: argparse.Namespace, device: str) -> None:
    _, length, rows = CASES[case]
    ids = prompts(model, tokenizer, rows, length, device)
    sizes = SparsePrompts(share=options.share, least=options.least, chunk=options.chunk, shortest=0)
    trained = artifacts(model_fingerprint(model))
    units = {"s": "seconds", "gb": "GB", "speedup": "dense / method"}
    dense: dict[str, float] = {}
    for method in options.methods:
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()

        def keep(name: str, value: float) -> None:
            ROWS.append(row(case, method, name, round(value, 3), units[name.rpartition("_")[2]]))  # noqa: B023

        if options.profile:
            profile(model, how_of(method, trained, sizes), ids)
            continue
        try:
            with fastest(model, length) if method == "dense" else contextlib.nullcontext():
                for name, seconds in prompt(model, how_of(method, trained, sizes), ids):
                    keep(name, seconds)
                    if method == "dense":
                        dense[name] = seconds
                    elif name in dense and not name.startswith("cold"):
                        keep(name.replace("_s", "_speedup"), dense[name] / seconds)
                    print(f"{case} {method} {name} {seconds:.3f}", flush=True)
                    add_rows("prefill", ROWS, options.output)
        except (RuntimeError, ValueError) as error:
            print(f"{case} {method}: {type(error).__name__} {str(error).splitlines()[0]}", flush=True)
            continue
        if device == "cuda":
            keep("peak_gb", torch.cuda.max_memory_allocated() / 1e9)
        add_rows("prefill", ROWS, options.output)
        print(f"    {time.perf_counter() - began:.0f} s with its warm-up", flush=True)


def summary() -> str:
    """A line a case and method."""
    lines = []
    for case, method in dict.fromkeys((r["case"], r["method"]) for r in ROWS):
        found = {r["metric"]: r["value"] for r in ROWS if (r["case"], r["method"]) == (case, method)}
        lines.append(f"{case:24} {method:12} " + "  ".join(f"{n} {v:.3f}" for n, v in found.items()))
    return "\n".join(lines)


def milliseconds(work: Callable[[], Any], device: str, runs: int = 7) -> float:
    """Median of some runs after some that do not count."""
    if device == "cpu":
        began = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - began)
    for _ in range(min(3, runs)):
        work()
    taken = []
    for _ in range(runs):
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
    for name, way in ways_of(q, 2).items():
        out, lse = way(q, k, v, tokens)
        error = float((out.double() - truth[0]).norm() / truth[0].norm())
        gap = float((lse.double() - truth[1]).abs().max())
        print(f"{name}: error {error:.1e}, lse {gap:.1e}", flush=True)
        if not error < 1e-2 or not gap < 2e-2:
            sys.exit("attention of a chunk is not right")


def ways_of(q: torch.Tensor, heads_kv: int) -> dict[str, Callable[..., Any]]:
    """How queries attend to lists of tokens of k and v, and to themselves."""
    scale = q.shape[3] ** -0.5
    if q.device.type == "cpu":
        return {"twin": lambda q, k, v, tokens: chunk_attention_reference(q, k, v, tokens, scale=scale)}
    ways = {"triton": lambda q, k, v, tokens: launch_chunk_attention(q, k, v, tokens, scale=scale)}
    if splits(q.dtype, q.shape[1], heads_kv, q.shape[3], q.device):
        ways["gathered"] = lambda q, k, v, tokens: gathered_attention(
            q, k, v, chunk_rows(k, v, tokens, q.shape[2], 0, 0), scale=scale)
    return ways


def together(past: int, chunk: int, count: int, dtype: torch.dtype, device: str) -> dict[str, float]:
    """Milliseconds of lists and attention of some chunks, in one set of calls and one by one."""
    q, k, v, _ = chunk_of(past, TOGETHER * chunk, count, dtype, device)

    def read(first: int, chunks: int) -> None:
        end = past + (first + chunks) * chunk
        rows = chunks_of(q[:, :, first * chunk:(first + chunks) * chunk], chunks)
        keys, values = k[:, :, :end], v[:, :, :end]
        chosen = chunk_tokens(representatives(rows, HEADS_KV), keys, SINK, past + first * chunk - WINDOW, count,
                              scale=DIM**-0.5, step=chunk)
        chunk_attention(rows, keys, values, chosen, scale=DIM**-0.5, sink=SINK, window=WINDOW)

    return {"together_ms": milliseconds(lambda: read(0, TOGETHER), device),
            "apart_ms": milliseconds(lambda: [read(i, 1) for i in range(TOGETHER)], device)}


def chunk_of(past: int, chunk: int, count: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    """Queries, keys, values of a chunk after so many tokens, and its list."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, heads, DIM, device=device, dtype=dtype).transpose(1, 2) for n, heads in (
        (chunk, HEADS_Q), (past + chunk, HEADS_KV), (past + chunk, HEADS_KV)))
    return q, k, v, chunk_tokens(representatives(q, HEADS_KV), k, SINK, past - WINDOW, count, scale=DIM**-0.5)


def kernels(options: argparse.Namespace, device: str) -> None:
    dtype, scale = torch.bfloat16 if device == "cuda" else torch.float32, DIM**-0.5
    check(dtype, device)
    if options.sweep:
        return sweep(dtype, device)
    contexts, chunks = (CONTEXTS, CHUNKS) if device == "cuda" else ((4096,), (512,))
    prompts = SparsePrompts(share=options.share, least=options.least)
    for past, chunk in ((p, c) for p in contexts for c in chunks):
        case, began = f"32x8-{past // 1024}k-chunk{chunk}", time.perf_counter()
        count = min(prompts.count(past), past - 1024)
        q, k, v, tokens = chunk_of(past, chunk, count, dtype, device)
        dense = milliseconds(lambda: dense_attention(q, k, v, scale=scale), device)  # noqa: B023
        select = milliseconds(lambda: chunk_tokens(
            representatives(q, HEADS_KV), k, SINK, past - WINDOW, count, scale=scale), device)  # noqa: B023
        whole, part = chunk * (past + chunk / 2), chunk * (count + chunk / 2)
        found = {"dense_ms": dense, "dense_tflops": tflops(whole, dense), "select_ms": select,
                 "select_share": select / dense, "rest_ms": milliseconds(rest_work(q, k, v, tokens), device)}
        for name, way in ways_of(q, HEADS_KV).items():
            taken = milliseconds(lambda: way(q, k, v, tokens), device)  # noqa: B023
            found |= {f"{name}_ms": taken, f"{name}_tflops": tflops(part, taken),
                      f"{name}_rate": (part / taken) / (whole / dense)}
        if (chunk == 2048 and past == 131_072) or device == "cpu":
            found |= together(past, chunk, count, dtype, device)
        units = {"ms": "milliseconds", "share": "of dense", "rate": "of dense, per pair", "tflops": "TFLOP/s"}
        ROWS.extend(row(case, "kernels", name, round(value, 4), units[name.rpartition("_")[2]])
                    for name, value in found.items())
        print(f"{case} list {count}: {time.perf_counter() - began:.1f} s", flush=True)
        add_rows("prefill", ROWS, options.output)


def tflops(pairs: float, ms: float) -> float:
    """Of the attention of so many pairs of query and key to all query heads."""
    return 4 * DIM * HEADS_Q * pairs / ms / 1e9


def sweep(dtype: torch.dtype, device: str) -> None:
    """Milliseconds of the kernels of a chunk by how they are launched, the current ways first."""
    past, chunk, count, runs = (131_072, 2048, 13_312, 5) if device == "cuda" else (2048, 64, 512, 1)
    q, k, v, tokens = chunk_of(past, chunk, count, dtype, device)
    scale, asking = DIM**-0.5, representatives(q, HEADS_KV)
    pairs = chunk * (count + chunk / 2)
    dense = milliseconds(lambda: dense_attention(q, k, v, scale=scale), device, runs)
    print(f"dense {dense:.3f} ms, {tflops(chunk * (past + chunk / 2), dense):.0f} TFLOP/s")
    if "gathered" in ways_of(q, HEADS_KV):
        found = milliseconds(lambda: ways_of(q, HEADS_KV)["gathered"](q, k, v, tokens), device, runs)
        print(f"gathered {found:.3f} ms, {tflops(pairs, found):.0f} TFLOP/s", flush=True)
    attend, select = sys.modules[Launch.__module__], sys.modules[chunk_tokens.__module__]
    rest, add = sys.modules[add_rest.__module__], rest_work(q, k, v, tokens)
    way = launch_chunk_attention if device == "cuda" else chunk_attention_reference
    tried: list[tuple[str, Any, Callable[[], Any], list[dict[str, Any]]]] = [
        ("attention: rows, keys, warps, stages", attend, lambda: way(q, k, v, tokens, scale=scale),
         [{"LAUNCHES": dict.fromkeys((True, False), Launch(*how))} for how in (
             attend.LAUNCHES[True], attend.LAUNCHES[False], (128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3),
             (64, 64, 4, 2), (64, 32, 4, 4))]),
        ("list: keys at once, warps", select,
         lambda: chunk_tokens(asking, k, SINK, past - WINDOW, count, scale=scale),
         [{"KEYS_AT_ONCE": n, "WARPS": w, "PROGRAMS": p} for n, w, p in (
             (select.KEYS_AT_ONCE, select.WARPS, select.PROGRAMS), (128, 4, 264), (128, 4, 1056), (128, 8, 528),
             (64, 4, 528), (64, 8, 528))]),
        ("completion: rows, warps", rest, add,
         [{"ROWS": n, "WARPS": w} for n, w in ((rest.ROWS, rest.WARPS), (32, 4), (64, 4), (128, 8))]),
        ("features of queries: rows, warps, hidden units at once", rest, add,
         [{"MAP_ROWS": n, "MAP_WARPS": w, "INNER": i} for n, w, i in (
             (rest.MAP_ROWS, rest.MAP_WARPS, rest.INNER), (64, 8, 32), (128, 8, 32), (128, 8, 64), (128, 16, 64))]),
    ]
    for title, module, work, ways in tried:
        print(title)
        for how in ways:
            before = {name: getattr(module, name) for name in how}
            for name, value in how.items():
                setattr(module, name, value)
            said = tuple(how["LAUNCHES"][True]) if "LAUNCHES" in how else tuple(how.values())
            try:
                found = milliseconds(work, device, runs)
                rate = f", {tflops(pairs, found):.0f} TFLOP/s" if module is attend else ""
                print(f"    {said}: {found:.3f} ms{rate}", flush=True)
            except Exception as error:  # a launch that does not fit is printed and passed over
                print(f"    {said}: {type(error).__name__} {str(error).splitlines()[0]}", flush=True)
            for name, value in before.items():
                setattr(module, name, value)


def rest_work(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tokens: torch.Tensor) -> Callable[[], Any]:
    """The completion of a chunk, with maps of the recipe's shape: sums of the list, whose rows are there, taken out,
    then all queries."""
    from benchmarks.generate import KEY_WIDTH, MAP_WIDTH
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
    rows = chunk_rows(k, v, tokens, q.shape[2], 0, 0)

    def work() -> None:
        add_rest(out, lse, q, maps, offset, PhiState(*phi_left(whole, *rows, keys)))

    return work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES,
                        default=[c for c in CASES if not c.startswith(("tiny", "coder", "8b-quarter"))])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), type=known, metavar="METHOD",
                        help=f"{', '.join(METHODS)}, or sparse and sparse_phi with @SHARE[:FIELD=TOKENS …]")
    parser.add_argument("--kernels", action="store_true", help="time the kernels instead of prompts")
    parser.add_argument("--profile", action="store_true", help="tell what takes time instead")
    parser.add_argument("--sweep", action="store_true", help="and how they are launched instead of every length")
    parser.add_argument("--model", help="the model of the cases coder-*: a folder or a GGUF file")
    standard = SparsePrompts()
    parser.add_argument("--share", type=float, default=standard.share, help="tokens that a chunk reads, a share")
    parser.add_argument("--least", type=int, default=standard.least, help="and at least [tokens]")
    parser.add_argument("--chunk", type=int, default=standard.chunk, help="queries that share a list [tokens]")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.no_grad():
        if options.kernels:
            kernels(options, device)
        else:
            by_model(options.cases, CASES, options.model, device,
                     lambda case, model, tokenizer: measure(case, model, tokenizer, options, device))
    if ROWS:
        print(add_rows("prefill", ROWS, options.output))
        print(summary())


if __name__ == "__main__":
    main()
