"""Keys and values in CPU memory: time a token, memory and bytes over the bus, beside all that keeps them there.

    python benchmarks/offload.py [--cases coder-30k-b1 8b-128k-b1 ...] [--methods full_host sketch_phi-1% ...]
                                 [--model PATH] [--artifacts FOLDER] [--tokens 64] [--minutes 25] [--output FOLDER]

Cases, models and prompts are those of `generate.py` and two more; of the cases `8b-*` caches and tokens are drawn and
weights random, and so is which rows are asked for again: hits of these are no model's. Methods, in one run over one
cache on the GPU and one in CPU memory:

- full: full attention, keys on the GPU; full_most: the same of as many requests as fit there (`rows`);
  full_host: full attention whose kernel reads keys and values of every layer but the first in CPU memory;
  transformers_offloaded: transformers' `DynamicCache(offloading=True)`, which moves layer by layer;
  faiss: exact top-k, 1 % of the context, by a flat Faiss index in CPU memory, where keys are attended to (top-k paper);
- sketch-S and sketch_phi-S: S of the context read from CPU memory by a captured step (placement offload), rows that
  were read lately on the device; the same with `@cold`: all rows fetched (kv_memory 0); with `@gpu`: keys on the GPU.

`ms`: a token, mean of --tokens steps; `bus_mb`: keys and values that a token moves over the bus; `hit_rate`: share of
the listed rows that lay on the device; `gpu_gb`: most GPU memory from the index on, weights included; `host_gb`: keys
and values in CPU memory; `prompt_s`: prompt and index, where one is read; `index_s`: the index alone; `same_tokens`:
tokens until the first that differs from those of `@gpu`. The case `bus` has what the bus gives [GB/s]: to a copy of
page-locked memory, and to a step's kernel in rows of 512 bytes.
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
from benchmarks import generate
from benchmarks._rows import RESULTS, add_rows, row
from benchmarks.generate import AT_ONCE, artifacts, by_model, draw, make_room, prompts, synchronize
from sparsekv.artifacts.fingerprint import model_fingerprint
from sparsekv.kernels import fetch_rows
from sparsekv.runtime.decoding import load_artifacts
from sparsekv.runtime.hf.cache import HostLayer, SparseCache
from sparsekv.runtime.hf.storage import Growing
from sparsekv.util.errors import SparseKVError
from sparsekv.util.memory import free_host_memory, free_memory

CASES = {**generate.CASES, "8b-128k-b16": ("8b", 131_072, 16), "tiny-4k-b2": ("tiny", 4096, 2)}
SHARES = {"1%": 0.01, "2%": 0.02, "5%": 0.05}
KINDS = ("sketch", "sketch_phi")
METHODS = ["full", "full_most", *(f"{kind}-1%@gpu" for kind in KINDS),
           *(f"{kind}-{share}" for share in SHARES for kind in KINDS), *(f"{kind}-1%@cold" for kind in KINDS),
           "full_host", "faiss", "transformers_offloaded"]
DEFAULT = ["coder-30k-b1", "coder-30k-b8", "8b-128k-b1", "8b-512k-b1", "8b-128k-b4"]
UNITS = {"ms": "milliseconds", "tokens_s": "tokens/s", "gpu_gb": "GB", "host_gb": "GB", "bus_mb": "MB/token",
         "hit_rate": "share", "prompt_s": "seconds", "index_s": "seconds", "same_tokens": "tokens", "rows": "requests"}
WARM, PEER_TOKENS, ROOM = 24, 4, 256
SPARE = 4e9
"""Bytes of the GPU that requests of full attention leave to a step."""


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
def steps(
    step: Callable[[Tensor], Tensor], token: Tensor, count: int, warm: int, begin: Callable[[], Any] = lambda: None,
    drawn: int = 0,
) -> tuple[float, Tensor]:
    """Milliseconds a token of the last `count`, and the likeliest tokens after all `[B, warm + count]`. begin: called
    before the first that is timed. drawn: the next token is one of so many, in place of the likeliest, of which a model
    of random weights repeats some."""
    made = []
    others = torch.randint(1, max(2, drawn), (warm + count, *token.shape), device=token.device,
                           generator=torch.Generator(token.device).manual_seed(3))
    for i in range(warm + count):
        if i == warm:
            begin()
            synchronize(token)
            began = time.perf_counter()
        token = step(token)[:, -1].argmax(-1, keepdim=True).clone()
        made.append(token)
        if drawn:
            token = others[i]
    synchronize(token)
    return 1e3 * (time.perf_counter() - began) / count, torch.cat(made, dim=1).cpu()


def attached(model: Any, method: str, trained: Any) -> Any:
    """The attachment of a method of ours."""
    if method.startswith("full"):
        return sparsekv.attach(model, selector="dense")
    if method == "faiss":
        return sparsekv.attach(model, selector="faiss", token_budget=SHARES["1%"], dense_below=0, placement="cpu")
    what, _, place = method.partition("@")
    kind, _, share = what.partition("-")
    more = {"phi": trained[1]} if kind.endswith("phi") else {"completion": "none"}
    return sparsekv.attach(model, router=trained[0], selector="sketch", token_budget=SHARES[share], dense_below=0,
                           placement="gpu" if place == "gpu" else "offload", kv_memory=0 if place == "cold" else None,
                           **more)


class Held:
    """The cache of a case, of all but the last token of its prompts, on the GPU or but for the first layer in CPU
    memory; methods take it one after the other."""

    def __init__(self, model: Any, trained: Any, ids: Tensor, drawn: bool, room: int) -> None:
        self.model, self.trained, self.ids, self.drawn, self.room = model, trained, ids, drawn, room
        self.vocabulary = model.config.vocab_size if drawn else 0
        """Tokens that steps are drawn from; 0: they take the likeliest."""
        self.cache: SparseCache | None = None
        self.kind = ""
        self.seconds = 0.0
        """What reading the prompts took."""

    def get(self, on_host: bool, rows: int | None = None) -> SparseCache:
        """The cache; on the GPU of so many rows. Raises SparseKVError where there is too little memory."""
        ids, kind = self.ids[:rows], f"{on_host}-{rows}"
        if self.cache is not None and self.kind == kind:
            self.cache.crop(ids.shape[1] - 1)
            return self.cache
        self.drop()
        tokens, config = ids.shape[1] + self.room, self.model.config
        size = len(ids) * tokens * bytes_of_token(self.model)
        free = free_host_memory() if on_host or not ids.is_cuda else free_memory(ids.device) - SPARE
        if size > free:
            raise SparseKVError(f"skipped: keys and values take {size / 1e9:.1f} GB "
                                f"{'of CPU memory' if on_host else 'of the GPU'}, and {free / 1e9:.1f} GB are free")
        cache = SparseCache(config, host_layers=range(1, config.num_hidden_layers) if on_host else (), reserve=tokens)
        torch.manual_seed(2)
        synchronize(ids)
        began = time.perf_counter()
        if self.drawn:
            draw(self.model, cache, ids)
        else:
            with attached(self.model, "full", self.trained) as attachment:
                attachment.prefill(ids[:, :-1], chunk_size=max(1, AT_ONCE // len(ids)), cache=cache)
        synchronize(ids)
        self.seconds = time.perf_counter() - began
        print(f"    {len(ids)} x {ids.shape[1]} tokens {'in CPU memory' if on_host else 'on the device'} in "
              f"{self.seconds:.1f} s", flush=True)
        self.cache, self.kind = cache, kind
        return cache

    def forget(self) -> None:
        """Free what a method built."""
        if self.cache is not None:
            self.cache.plan = None
            for layer in self.cache.layers:
                layer.state = None  # type: ignore[union-attr]

    def drop(self) -> None:
        self.forget()
        self.cache = None
        gc.collect()
        if self.ids.is_cuda:
            torch.cuda.empty_cache()


def bytes_of_token(model: Any) -> int:
    """Of keys and values of all layers."""
    config = model.config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * config.num_key_value_heads * dim * model.dtype.itemsize


def ours(held: Held, method: str, tokens: int) -> tuple[Any, Tensor]:
    model, ids, rows = held.model, held.ids, None
    on_host = not (method in ("full", "full_most") or method.endswith("@gpu"))
    if method == "full_most":
        each = (ids.shape[1] + held.room) * bytes_of_token(model)
        held.drop()
        fit = int((free_memory(ids.device) - SPARE) // each) if ids.is_cuda else 1
        if not 0 < fit < len(ids):
            raise SparseKVError(f"skipped: {fit} requests of {len(ids)} fit on the GPU")
        rows = fit
    cache = held.get(on_host, rows)
    with attached(model, method, held.trained) as attachment:
        if ids.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        found: dict[str, float] = {}

        def begin() -> None:
            """What the first steps counted goes; the index was built in the first."""
            report = attachment.report()
            if report["index_seconds"]:
                found["index_s"] = report["index_seconds"]
            attachment.counters.clear()

        count, warm = {"full_host": (max(4, tokens // 8), 4), "faiss": (PEER_TOKENS, 1)}.get(method, (tokens, WARM))
        ms, made = steps(lambda token: attachment.step(token, cache), ids[:rows, -1:], count, warm, begin,
                         held.vocabulary)
        report = attachment.report()
        print(f"    {method}: {report['replayed_steps']} steps planned, {report['captures']} captures, "
              f"{report['selectivity']:.4f} read, {report['not_replayed']}", flush=True)
        host = [layer for layer in cache.layers if isinstance(layer, HostLayer)]
        found["ms"], found["host_gb"] = ms, sum(x.data.numel() * x.data.element_size() for x in host) / 1e9
        new = sum(x.both[:, :, :1].numel() * x.both.element_size() for x in host)
        moved = report["bus_bytes"] / count + new
        if method == "full_host":
            moved += sum(x.both.numel() * x.both.element_size() for x in host)
        if method != "faiss":
            found["bus_mb"] = moved / 1e6
        if report["hit_rate"] is not None:
            found["hit_rate"] = report["hit_rate"]
        if not held.drawn:
            found["prompt_s"] = held.seconds + found.get("index_s", 0.0)
        if rows is not None:
            found["rows"] = rows
        return found, made


def theirs(held: Held) -> tuple[Any, Tensor]:
    """transformers' offloaded cache, from the keys and values of a prompt that ours has read."""
    from transformers import DynamicCache

    ids, model, size = held.ids, held.model, 0
    if not ids.is_cuda:
        raise SparseKVError("skipped: transformers' offloaded cache wants a CUDA device")
    cache = held.get(True)
    if (needed := ids.numel() * bytes_of_token(model)) > free_host_memory():
        raise SparseKVError(f"skipped: a second copy in CPU memory takes {needed / 1e9:.1f} GB")
    peer = DynamicCache(config=model.config, offloading=True)
    for i, layer in enumerate(cache.layers):
        keys, values = (x.to(ids.device) for x in (layer.keys, layer.values))
        size += 2 * keys.numel() * keys.element_size()
        peer.update(keys, values, i)
    gc.collect()
    torch.cuda.reset_peak_memory_stats()

    def step(token: Tensor) -> Tensor:
        place = torch.full_like(token, peer.get_seq_length())
        return model(input_ids=token, position_ids=place, past_key_values=peer, use_cache=True).logits

    ms, made = steps(step, ids[:, -1:], PEER_TOKENS, 2, drawn=held.vocabulary)
    return {"ms": ms, "host_gb": size / 1e9, "bus_mb": size / 1e6}, made


def measure(case: str, options: argparse.Namespace, device: str, model: Any, tokenizer: Any) -> None:
    _, length, rows = CASES[case]
    drawn = tokenizer is None
    ids = prompts(model, tokenizer, rows, length, device)
    router, phi = load_artifacts(options.artifacts, None, None) if not drawn else (None, None)
    trained = artifacts(model_fingerprint(model)) if router is None else (router, phi)
    held = Held(model, trained, ids, drawn, WARM + options.tokens + ROOM)
    answers: dict[str, Tensor] = {}
    for method in options.methods:
        if time.monotonic() > options.until:
            print(f"{case} {method}: not begun, the time is over", flush=True)
            continue
        make_room(device)
        began = time.monotonic()
        try:
            found, made = theirs(held) if method == "transformers_offloaded" else ours(held, method, options.tokens)
        except (RuntimeError, SparseKVError) as error:
            print(f"{case} {method}: {type(error).__name__} {str(error).splitlines()[0]}", flush=True)
            continue
        finally:
            held.forget()
        if device == "cuda":
            found["gpu_gb"] = torch.cuda.max_memory_allocated() / 1e9
        found["tokens_s"] = 1e3 * len(made) / found["ms"]
        answers[method] = made
        other = answers.get(f"{method.partition('@')[0]}@gpu")
        if other is not None and not method.endswith("@gpu"):
            found["same_tokens"] = int((other == made).all(0).long().cumprod(0).sum())
        made_rows = [row(case, method, name, round(value, 4), UNITS[name]) for name, value in found.items()]
        add_rows("offload", made_rows, options.output)
        print(case, method, {name: round(value, 3) for name, value in found.items()},
              f"{time.monotonic() - began:.0f} s", flush=True)
    held.drop()


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
