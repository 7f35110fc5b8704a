"""Keys and values in CPU memory: time a token, memory and bytes over the bus, beside all that keeps them there.

    python benchmarks/offload.py [--cases coder-30k-b1 8b-128k-b1 ...] [--methods full_host sketch_phi-1% ...]
                                 [--model PATH] [--artifacts FOLDER] [--tokens 64] [--minutes 25] [--output FOLDER]

Cases, models and prompts are those of `generate.py`; caches of the cases `8b-*` are drawn. Methods, in one run:

- full: full attention, keys on the GPU; full_host: full attention whose kernel reads keys and values of every layer in
  CPU memory; transformers_offloaded: transformers' `DynamicCache(offloading=True)`, which moves layer by layer;
- sketch-S and sketch_phi-S: S of the context read from CPU memory by a captured step (placement offload);
  the same with `@gpu`: keys on the GPU.

`ms`: a token, mean of --tokens steps; `bus_mb`: keys and values that a token moves over the bus; `gpu_gb`: most GPU
memory while it decodes, weights included; `host_gb`: keys and values in CPU memory; `prompt_s`: prompt and index, where
one is read; `same_tokens`: tokens until the first that differs from those of `@gpu`. The case `bus` has what the bus
gives [GB/s]: to a copy of page-locked memory, and to a step's kernel in rows of 512 bytes.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sparsekv
from benchmarks._rows import RESULTS, add_rows, row
from benchmarks.generate import AT_ONCE, CASES, artifacts, by_model, draw, prompts, synchronize
from sparsekv.artifacts.fingerprint import model_fingerprint
from sparsekv.kernels import fetch_rows
from sparsekv.runtime.decoding import load_artifacts
from sparsekv.runtime.hf.cache import HostLayer, SparseCache
from sparsekv.runtime.hf.storage import Growing
from sparsekv.util.errors import SparseKVError

SHARES = {"1%": 0.01, "2%": 0.02, "5%": 0.05}
METHODS = ["full", "sketch-1%@gpu", "sketch_phi-1%@gpu",
           *(f"{kind}-{share}" for share in SHARES for kind in ("sketch", "sketch_phi")), "full_host",
           "transformers_offloaded"]
DEFAULT = ["coder-30k-b1", "coder-30k-b8", "8b-128k-b1"]
UNITS = {"ms": "milliseconds", "tokens_s": "tokens/s", "gpu_gb": "GB", "host_gb": "GB", "bus_mb": "MB/token",
         "prompt_s": "seconds", "same_tokens": "tokens"}
WARM, PEER_TOKENS, ROOM = 12, 4, 256


def bus(device: str, size: int) -> dict[str, float]:
    """What the bus gives [GB/s]: `size` bytes in one copy, and the same in rows of 512 bytes in no order."""
    store = Growing(on_host=True)
    rows = store.empty((1, 1, size // 512, 256), torch.empty(0, dtype=torch.bfloat16)).zero_()
    there = torch.empty(rows.shape, dtype=rows.dtype, device=device)
    index = torch.randperm(rows.shape[2], device=device)[None, None].int()

    def speed(work: Callable[[], Any]) -> float:
        work()
        synchronize(there)
        began = time.perf_counter()
        for _ in range(3):
            work()
        synchronize(there)
        return 3 * rows.numel() * 2 / (time.perf_counter() - began) / 1e9

    return {"copy": speed(lambda: there.copy_(rows, non_blocking=True)),
            "rows": speed(lambda: fetch_rows(rows, index, there))}


@torch.no_grad()
def steps(step: Callable[[Tensor], Tensor], token: Tensor, count: int, warm: int) -> tuple[float, Tensor]:
    """Milliseconds a token of the last `count`, and all tokens `[B, warm + count]`."""
    made = []
    for i in range(warm + count):
        if i == warm:
            synchronize(token)
            began = time.perf_counter()
        token = step(token)[:, -1].argmax(-1, keepdim=True).clone()
        made.append(token)
    synchronize(token)
    return 1e3 * (time.perf_counter() - began) / count, torch.cat(made, dim=1).cpu()


def attached(model: Any, method: str, trained: Any) -> Any:
    """The attachment of a method of ours."""
    if method.startswith("full"):
        return sparsekv.attach(model, selector="dense")
    kind, _, share = method.removesuffix("@gpu").partition("-")
    more = {"phi": trained[1]} if kind.endswith("phi") else {"completion": "none"}
    return sparsekv.attach(model, router=trained[0], selector="sketch", token_budget=SHARES[share], dense_below=0,
                           placement="gpu" if method.endswith("@gpu") else "offload", **more)


def filled(attachment: Any, method: str, ids: Tensor, drawn: bool, room: int) -> tuple[SparseCache, float]:
    """A cache of all but the last token, and the seconds that reading them took."""
    model, tokens = attachment.model, ids.shape[1] + room
    cache = attachment.cache(tokens) if method != "full_host" else SparseCache(
        model.config, host_layers=range(model.config.num_hidden_layers), reserve=tokens)
    torch.manual_seed(2)
    synchronize(ids)
    began = time.perf_counter()
    if drawn:
        draw(model, cache, ids)
    else:
        attachment.prefill(ids[:, :-1], chunk_size=max(1, AT_ONCE // len(ids)), cache=cache)
    synchronize(ids)
    return cache, time.perf_counter() - began


def ours(model: Any, method: str, ids: Tensor, trained: Any, tokens: int, drawn: bool) -> tuple[Any, Tensor]:
    with attached(model, method, trained) as attachment:
        cache, seconds = filled(attachment, method, ids, drawn, tokens + ROOM)
        if ids.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        count = max(4, tokens // 8) if method == "full_host" else tokens
        ms, made = steps(lambda token: attachment.step(token, cache), ids[:, -1:], count, WARM)
        report = attachment.report()
        print(f"    {method}: {report['replayed_steps']} steps planned, {report['captures']} captures, "
              f"{report['selectivity']:.4f} read, {report['not_replayed']}", flush=True)
        host = [layer for layer in cache.layers if isinstance(layer, HostLayer)]
        size = sum(x.data.numel() * x.data.element_size() for x in host)
        moved = 0
        for layer in host:
            read = int(layer.state.selector.widest) if layer.state is not None else layer.get_seq_length()
            moved += layer.both[:, :, :1].numel() * layer.both.element_size() * (read + 1)
        return {"ms": ms, "host_gb": size / 1e9, "bus_mb": moved / 1e6,
                **({} if drawn else {"prompt_s": seconds + report["index_seconds"]})}, made


def theirs(model: Any, ids: Tensor, trained: Any, drawn: bool) -> tuple[Any, Tensor]:
    """transformers' offloaded cache, from the keys and values of a prompt that ours has read."""
    from transformers import DynamicCache

    if not ids.is_cuda:
        raise RuntimeError("transformers' offloaded cache wants a CUDA device")
    with attached(model, "full", trained) as attachment:
        cache, _ = filled(attachment, "full", ids, drawn, 1)
    peer, size = DynamicCache(config=model.config, offloading=True), 0
    for i, layer in enumerate(cache.layers):
        size += 2 * layer.keys.numel() * layer.keys.element_size()
        peer.update(layer.keys, layer.values, i)
        layer.reset()
    del cache
    gc.collect()
    torch.cuda.reset_peak_memory_stats()

    def step(token: Tensor) -> Tensor:
        place = torch.full_like(token, peer.get_seq_length())
        return model(input_ids=token, position_ids=place, past_key_values=peer, use_cache=True).logits

    ms, made = steps(step, ids[:, -1:], PEER_TOKENS, 2)
    return {"ms": ms, "host_gb": size / 1e9, "bus_mb": size / 1e6}, made


def measure(case: str, options: argparse.Namespace, device: str, model: Any, tokenizer: Any) -> None:
    _, length, rows = CASES[case]
    drawn = tokenizer is None
    ids = prompts(model, tokenizer, rows, length, device)
    router, phi = load_artifacts(options.artifacts, None, None) if not drawn else (None, None)
    trained = artifacts(model_fingerprint(model)) if router is None else (router, phi)
    answers: dict[str, Tensor] = {}
    for method in options.methods:
        if time.monotonic() > options.until:
            print(f"{case} {method}: not begun, the time is over", flush=True)
            continue
        gc.collect()
        torch.cuda.empty_cache()
        try:
            found, made = (theirs(model, ids, trained, drawn) if method == "transformers_offloaded" else
                           ours(model, method, ids, trained, options.tokens, drawn))
        except (RuntimeError, SparseKVError) as error:
            print(f"{case} {method}: {type(error).__name__} {str(error).splitlines()[0]}", flush=True)
            continue
        if device == "cuda":
            found["gpu_gb"] = torch.cuda.max_memory_allocated() / 1e9
        found["tokens_s"] = 1e3 * rows / found["ms"]
        answers[method] = made
        other = answers.get(f"{method}@gpu")
        if other is not None:
            found["same_tokens"] = int((other == made).all(0).long().cumprod(0).sum())
        made_rows = [row(case, method, name, round(value, 4), UNITS[name]) for name, value in found.items()]
        add_rows("offload", made_rows, options.output)
        print(case, method, {name: round(value, 3) for name, value in found.items()}, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=DEFAULT)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--tokens", type=int, default=64, help="steps that are timed [tokens]")
    parser.add_argument("--minutes", type=float, default=60.0, help="no measurement is begun after that [min]")
    parser.add_argument("--model", help="the model of the cases coder-*: a folder or a GGUF file")
    parser.add_argument("--artifacts", help="a folder of router and feature maps of that model; without it random ones")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.until = time.monotonic() + 60 * options.minutes
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = bus(device, 1 << 30 if device == "cuda" else 1 << 20)
    print("bus", {name: round(value, 2) for name, value in found.items()}, flush=True)
    add_rows("offload", [row("bus", name, "speed", round(value, 2), "GB/s") for name, value in found.items()],
             options.output)
    by_model(options.cases, CASES, options.model, device,
             lambda case, model, tokenizer: measure(case, options, device, model, tokenizer))


if __name__ == "__main__":
    main()
