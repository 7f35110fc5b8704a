"""Seconds of a prompt, read densely and sparsely, and the rate of the kernels that read it.

    python benchmarks/prefill.py [--cases 8b-128k-b1 ...] [--methods sparse ...] [--share 0.3] [--output FOLDER]
    python benchmarks/prefill.py --cases 8b-quarter-128k-b1 --methods sparse --profile
    python benchmarks/prefill.py --kernels --share 0.1 [--output FOLDER]

Rows take the place of those of the same case, method and metric in `prefill`, and are written as soon as each is
measured. `8b` has the shape of Llama 3.1 8B, with random weights, `8b-quarter` eight of its 32 layers (80 GB hold no
512k tokens of all); `coder` is the model of --model. All methods read the
same ids with the same model.

- dense: attached, full attention, by the faster of torch's kernels of cuDNN and FlashAttention, which one layer of the
  case's length tells;
- sparse: `prefill="sparse"`, decoded by `sketch` at 1 % with maps of the shape and width that the recipe trains;
  sparse@0.2, sparse@0.1:least=8192 and the like: at that share, with these fields of `SparsePrompts`;
- token_select: the paper's own prefill at its published settings.

`prompt_s`: the prompt in pieces of 32,768 tokens, then index and summary. `first_token_s`: prompt and first token by
`generate`, the prompt in one piece, for cases that fit. Both are of a second run; `cold_`: of the first, in which
kernels are loaded and cuDNN makes its plans. `peak_gb`: most memory held in any. --profile: what host and device do in
a run after the first, and no rows.

Kernels, a layer of 32 query and 8 KV heads of 128, the last 16,384 queries of 32k, 128k and 512k tokens, at
--share: first they are checked against the twins in float64 on a short cache. `dense_ms` full attention of the queries
(`dense_attention`); `score_ms`, `list_ms` and `attend_ms` the three steps by blocks; `rate` of the last per pair of
query and key as a share of dense, `tflops` alike; `select_share` of the first two as a share of dense.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sparsekv
from benchmarks._rows import RESULTS, add_rows, row
from benchmarks.generate import artifacts, by_model, make_room, prompts, timed
from sparsekv.artifacts.fingerprint import model_fingerprint
from sparsekv.core.prefill import SparsePrompts
from sparsekv.core.selectors import SELECTORS
from sparsekv.kernels import block_attention as blocks
from sparsekv.kernels import dense_attention

CASES = {"8b-32k-b1": ("8b", 32_768, 1), "8b-128k-b1": ("8b", 131_072, 1), "8b-512k-b1": ("8b", 524_288, 1),
         "8b-quarter-128k-b1": ("8b-quarter", 131_072, 1), "8b-quarter-512k-b1": ("8b-quarter", 524_288, 1),
         "coder-30k-b8": ("coder", 30_000, 8), "tiny-6k-b2": ("tiny", 6000, 2)}
METHODS = ("dense", "sparse", "token_select")
CHUNK, ONE_PIECE = 32_768, 262_144
HEADS_Q, HEADS_KV, DIM, QUERIES = 32, 8, 128, 16_384
CONTEXTS = (32_768, 131_072, 524_288)
ROWS: list[dict[str, Any]] = []


def how_of(method: str, trained: Any, prompts: SparsePrompts) -> dict[str, Any]:
    if method == "token_select":
        return {"selector": "token_select", **SELECTORS["token_select"].PUBLISHED}
    if method == "dense":
        return {"selector": "dense"}
    prompts = replace(prompts, **sizes_of(method)[1])
    return {"router": trained[0], "phi": trained[1], "selector": "sketch", "token_budget": 0.01, "prefill": prompts}


def sizes_of(method: str) -> tuple[str, dict[str, Any]]:
    """A method and its fields of `SparsePrompts`: `sparse@0.1:least=8192`."""
    kind, _, sizes = method.partition("@")
    share, *rest = sizes.split(":")
    words = {"share": share} if share else {}
    words |= dict(word.split("=", 1) for word in rest)
    return kind, {name: json.loads(value) for name, value in words.items()}


def known(method: str) -> str:
    """A method as it is said, if it is one."""
    kind, sizes = sizes_of(method)
    if kind not in METHODS or (sizes and kind != "sparse"):
        raise ValueError(method)
    replace(SparsePrompts(), **sizes)
    return method


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

    mark, length = model_fingerprint(model), min(length, CHUNK * 4)
    dim = mark["head_dim"]
    q, k, v = (torch.randn(1, length, heads, dim, device=model.device, dtype=model.dtype).transpose(1, 2) for heads in (
        mark["num_query_heads"], mark["num_kv_heads"], mark["num_kv_heads"]))
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
    sizes = SparsePrompts(share=options.share, least=options.least, shortest=0)
    trained = artifacts(model_fingerprint(model))
    units = {"s": "seconds", "gb": "GB", "speedup": "dense / method"}
    dense: dict[str, float] = {}
    for method in options.methods:
        make_room(device)
        began = time.perf_counter()
        said = f"sparse@{options.share}" if method == "sparse" else method

        def keep(name: str, value: float) -> None:
            ROWS.append(row(case, said, name, round(value, 3), units[name.rpartition("_")[2]]))  # noqa: B023

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


def tensors(length: int, count: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    """Queries, some heads of which are keener than others, keys and values, the queries the last."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, heads, DIM, device=device, dtype=dtype).transpose(1, 2) for n, heads in (
        (count, HEADS_Q), (length, HEADS_KV), (length, HEADS_KV)))
    return q * torch.linspace(0.5, 3, HEADS_Q, device=device).to(dtype)[:, None, None], k, v


def check(dtype: torch.dtype, device: str) -> None:
    """Stops where a kernel is not right."""
    q, k, v = tensors(2048, 1024, dtype, device)
    scale = DIM**-0.5
    scores = blocks.block_scores(q, k, scale=scale)
    gap = float((scores - blocks.block_scores_reference(q.double(), k.double(), scale=scale)).nan_to_num(0).abs().max())
    lists, twin = blocks.block_lists(scores, 0.2, 1), blocks.block_lists_reference(
        scores, blocks.share_bits(0.2), 1)
    other = int((lists.counts - twin.counts).abs().sum())
    out, lse = blocks.block_attention(q, k, v, lists, scale=scale)
    truth = blocks.block_attention_reference(q.double(), k.double(), v.double(), lists, scale=scale)
    error, far = float((out.double() - truth[0]).norm() / truth[0].norm()), float((lse.double() - truth[1]).abs().max())
    print(f"scores {gap:.1e}, blocks of other lists {other}, error {error:.1e}, lse {far:.1e}", flush=True)
    if not (gap < 2e-2 and other < 4 and error < 1e-2 and far < 2e-2):
        sys.exit("attention by blocks is not right")


def kernels(options: argparse.Namespace, device: str) -> None:
    dtype, scale = torch.bfloat16 if device == "cuda" else torch.float32, DIM**-0.5
    check(dtype, device)
    least = -(-options.least // blocks.BLOCK)
    for length in CONTEXTS if device == "cuda" else (2048,):
        case, count = f"32x8-{length // 1024}k", min(QUERIES, length // 2)
        q, k, v = tensors(length, count, dtype, device)
        scores = blocks.block_scores(q, k, scale=scale)
        lists = blocks.block_lists(scores, options.share, least)
        whole = count * (length - count / 2)
        part = float((lists.counts - 0.5).sum()) / HEADS_Q * blocks.BLOCK**2
        steps: dict[str, Callable[[], Any]] = {
            "dense": lambda: dense_attention(q, k, v, scale=scale),  # noqa: B023
            "score": lambda: blocks.block_scores(q, k, scale=scale),  # noqa: B023
            "list": lambda: blocks.block_lists(scores, options.share, least),  # noqa: B023
            "attend": lambda: blocks.block_attention(q, k, v, lists, scale=scale)}  # noqa: B023
        found = {f"{name}_ms": milliseconds(step, device) for name, step in steps.items()}
        found |= {"pairs_share": part / whole, "dense_tflops": tflops(whole, found["dense_ms"]),
                  "attend_tflops": tflops(part, found["attend_ms"]),
                  "attend_rate": (part / found["attend_ms"]) / (whole / found["dense_ms"]),
                  "select_share": (found["score_ms"] + found["list_ms"]) / found["dense_ms"]}
        units = {"ms": "milliseconds", "share": "of dense", "rate": "of dense, per pair", "tflops": "TFLOP/s"}
        ROWS.extend(row(case, "kernels", name, round(value, 4), units[name.rpartition("_")[2]])
                    for name, value in found.items())
        add_rows("prefill", ROWS, options.output)
        print(case, {name: round(value, 3) for name, value in found.items()}, flush=True)


def tflops(pairs: float, ms: float) -> float:
    """Of the attention of so many pairs of query and key to all query heads."""
    return 4 * DIM * HEADS_Q * pairs / ms / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES,
                        default=[c for c in CASES if not c.startswith(("tiny", "coder", "8b-quarter"))])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), type=known, metavar="METHOD",
                        help=f"{', '.join(METHODS)}, or sparse with @SHARE[:FIELD=TOKENS …]")
    parser.add_argument("--kernels", action="store_true", help="time the kernels instead of prompts")
    parser.add_argument("--profile", action="store_true", help="tell what takes time instead")
    parser.add_argument("--model", help="the model of the cases coder-*: a folder or a GGUF file")
    standard = SparsePrompts()
    parser.add_argument("--share", type=float, default=standard.share, help="tokens that queries choose, a share")
    parser.add_argument("--least", type=int, default=standard.least, help="and at least [tokens]")
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
