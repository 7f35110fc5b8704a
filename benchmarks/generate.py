"""What a user waits for: the first token, every token after it, the longest pause between two; ours and transformers'.

    python benchmarks/generate.py [--cases 8b-128k-b1 ...] [--methods router ...] [--model PATH] [--artifacts FOLDER]
                                  [--tokens 400] [--profile] [--output FOLDER]

Rows take the place of those of the same case, method, metric and machine in `generate`.

`8b` has the shape of Llama 3.1 8B (32 layers, 32 query and 8 KV heads of 128; 80 GB do not hold 512k tokens of it), and
`smollm2` the shape of SmolLM2-135M, with random weights and prompts. `coder` is the model of --model
(Qwen2.5-Coder-1.5B-Instruct: a folder or a GGUF file) on prompts of Python's own library, with what --artifacts holds;
without it router and maps are random, of the shape and width that the recipes train. Every method reads the prompt
itself; caches of the cases in `DRAWN` are filled with drawn keys and values, and have no first token.

- dense: attached, full attention; router: buckets by mean_key scores; sketch: codes of a basis; router_phi, sketch_phi:
  the same completed by maps; untrained: sketches fitted to the request and bucket means; topk, topk_phi and quest,
  where they are named; all at 1 % of the context, sparse at every length;
- transformers, where named: sdpa, dynamic cache; transformers_compiled: static cache and torch.compile, as its
  `generate` chooses it;
- default: what a user gets who gives artifacts and no option, full attention where that is timed to be faster.

`first_token_s`: from the call to the first token, prompt and index in it; `prefill_s`: the same of full attention;
`index_s`: index and estimates alone. `longest_gap_ms`: the longest pause between two tokens, that between the first and
the second included. These are of a process that has answered before; `cold_first_token_s` and `cold_gap_ms` are of the
method's first answer in the process. `loop_ms` (`attachment.generate`) and `generate_ms` (`model.generate`): median of
the last tokens. `sparse_from`: the length from which `default` decodes sparsely. `peak_gb`: most memory held.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sparsekv
from benchmarks._profile import print_kernels
from benchmarks._rows import RESULTS, add_rows, row
from sparsekv.artifacts.fingerprint import model_fingerprint
from sparsekv.artifacts.hub.models import load_model
from sparsekv.artifacts.phi import PhiArtifact, PhiArtifactConfig
from sparsekv.artifacts.router import RouterArtifact, RouterArtifactConfig
from sparsekv.core.sketch import code_size
from sparsekv.kernels import Sketch
from sparsekv.models.feature_map import CentredMap, FeatureMap, FeatureMaps
from sparsekv.runtime.decoding import load_artifacts
from sparsekv.runtime.hf.cache import SparseCache, SparseLayer
from sparsekv.trainers.options import DEFAULT
from sparsekv.trainers.phi import RECIPES

CASES = {
    "8b-8k-b1": ("8b", 8192, 1), "8b-16k-b16": ("8b", 16_384, 16), "8b-32k-b1": ("8b", 32_768, 1),
    "8b-32k-b16": ("8b", 32_768, 16), "8b-128k-b1": ("8b", 131_072, 1), "8b-512k-b1": ("8b", 524_288, 1),
    "8b-128k-b4": ("8b", 131_072, 4), "smollm2-8k-b1": ("smollm2", 8192, 1), "smollm2-32k-b1": ("smollm2", 32_768, 1),
    "coder-30k-b1": ("coder", 30_000, 1), "coder-30k-b8": ("coder", 30_000, 8), "coder-30k-b24": ("coder", 30_000, 24),
    "coder-16k-b8": ("coder", 16_384, 8), "coder-16k-b24": ("coder", 16_384, 24),
    "coder-16k-b64": ("coder", 16_384, 64), "coder-32k-b64": ("coder", 32_768, 64),
    "coder-64k-b8": ("coder", 65_536, 8), "tiny-512-b2": ("tiny", 512, 2),
}
DRAWN = ("8b-512k-b1", "8b-128k-b4", "smollm2-32k-b1", "coder-16k-b8", "coder-16k-b24", "coder-16k-b64",
         "coder-32k-b64", "coder-64k-b8")
SHAPES: dict[str, dict[str, Any]] = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128_256, "rope_theta": 5e5},
    "32b": {"hidden_size": 5120, "intermediate_size": 25_600, "num_hidden_layers": 64, "num_attention_heads": 64,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "rope_theta": 1e6},
    "smollm2": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
                "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49_152, "rope_theta": 1e5,
                "tie_word_embeddings": True},
    "coder": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
              "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 151_936, "rope_theta": 1e6,
              "tie_word_embeddings": True},
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 97},
}
SHAPES["8b-quarter"] = SHAPES["8b"] | {"num_hidden_layers": 8}
METHODS = ("dense", "router", "router_phi", "sketch", "sketch_phi", "untrained", "default")
NAMED = ("topk", "topk_phi", "quest", "transformers", "transformers_compiled")
"""Methods that run only where they are named."""
BUCKETS, SINK, WINDOW, FEATURES = 1024, 1, 2047, RECIPES[DEFAULT].features
BUDGET = 0.01
MAP_WIDTH, BLOCKS, KEY_WIDTH = RECIPES[DEFAULT].width, RECIPES[DEFAULT].query_blocks, RECIPES[DEFAULT].key_width
AT_ONCE = 131_072
"""Tokens of all rows that one pass of a prompt reads, at most."""
TOKENS, COLD_TOKENS, LAST, PEER_TOKENS = 400, 32, 96, 48
ROWS: list[dict[str, Any]] = []


class Clock:
    """When each token was seen, as a streamer (whose prompt does not count) and as a stopping criterion."""

    def __init__(self, streams: bool = False) -> None:
        self.times: list[float] = []
        self.prompts = int(streams)

    def put(self, value: Tensor) -> None:
        if self.prompts:
            self.prompts -= 1
        else:
            self.times.append(time.perf_counter())

    def end(self) -> None:
        pass

    def __call__(self, ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        synchronize(ids)
        self.times.append(time.perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    @property
    def gaps(self) -> list[float]:
        """Between two tokens [ms]."""
        return [1e3 * (b - a) for a, b in zip(self.times, self.times[1:], strict=False)]

    @property
    def pace(self) -> float:
        """Of the last tokens [ms]."""
        return statistics.median(self.gaps[max(len(self.gaps) - LAST, len(self.gaps) // 2):])


def make_model(shape: str, device: str, path: str | None) -> tuple[Any, Any]:
    """The model, and its tokenizer if it is a real one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if shape == "coder":
        if path is None:
            sys.exit("the cases coder-* are of a model of your own: give --model PATH, a folder or a GGUF file")
        return load_model(path, dtype="bfloat16" if device == "cuda" else "float32", device=device)
    known = dict(SHAPES[shape])
    theta = known.pop("rope_theta", 1e4)
    config = LlamaConfig(**known, max_position_embeddings=1 << 20, bos_token_id=None, eos_token_id=None,
                         pad_token_id=0, rope_parameters={"rope_type": "default", "rope_theta": theta},
                         dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
    with torch.device(device):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    return model.eval().requires_grad_(False), None


def artifacts(
    mark: dict[str, Any], *, buckets: int = BUCKETS, sink: int = SINK, window: int = WINDOW,
) -> tuple[RouterArtifact, PhiArtifact]:
    """Router and maps of the shape and width that the recipes train, random, for the model of a fingerprint."""
    layers, heads_q, heads, dim = (mark[n] for n in ("num_layers", "num_query_heads", "num_kv_heads", "head_dim"))
    common: dict[str, Any] = {"model": mark, "layers": list(range(layers)), "sink_size": sink, "window_size": window}
    centroids = torch.nn.functional.normalize(torch.randn(layers, heads, buckets, dim), dim=-1)
    width, wide = code_size(None, None, dim)
    sketch = Sketch(*(torch.randn(layers, heads, *n, 2 * width - wide) * dim**-0.5 for n in ((dim,), (), (dim,))))
    config = RouterArtifactConfig(num_buckets=buckets, key_space="rot", scores="mean_key", sketch_bytes=width,
                                  sketch_wide=wide, **common)
    router = RouterArtifact(config, centroids, None, sketch=sketch)
    keys = CentredMap(layers * heads, dim, FEATURES, KEY_WIDTH, shared=True)
    maps = FeatureMaps(FeatureMap(layers * heads_q, dim, FEATURES, MAP_WIDTH, BLOCKS).weights(), keys.plain.weights(),
                       keys.centred.weights()).map(lambda w: w.detach().unflatten(0, (layers, -1)))
    of_maps = PhiArtifactConfig(num_features=FEATURES, width=MAP_WIDTH, query_blocks=BLOCKS, key_width=KEY_WIDTH,
                                shared=True, centred=True, capped=True, **common)
    phi = PhiArtifact(of_maps, maps, torch.zeros(layers, 1, heads_q), torch.ones(layers, heads_q))
    return router, phi


def prompts(model: Any, tokenizer: Any, rows: int, length: int, device: str) -> Tensor:
    """Ids `[rows, length]`: drawn, or of Python's library where there is a tokenizer, every row of another stretch."""
    torch.manual_seed(1)
    if tokenizer is None:
        return torch.randint(1, model.config.vocab_size, (rows, length), device=device)
    found: list[int] = []
    for path in sorted(Path(os.__file__).parent.glob("*.py")) + sorted(Path(os.__file__).parent.glob("*/*.py")):
        found += tokenizer(path.read_text(encoding="utf-8", errors="ignore"))["input_ids"]
        if len(found) >= rows * length:
            return torch.tensor(found[:rows * length], device=device).reshape(rows, length)
    sys.exit(f"Python's library has {len(found)} tokens, and {rows} x {length} are asked for")


def read(attachment: Any, ids: Tensor, cache: SparseCache) -> Tensor:
    """Of a prompt that is too much for one pass all but the last token, and the tokens that are left."""
    rows, length = ids.shape
    if rows * length <= AT_ONCE:
        return ids
    attachment.prefill(ids[:, :-1], chunk_size=max(1, AT_ONCE // rows), cache=cache)
    return ids[:, -1:]


def draw(model: Any, cache: SparseCache, ids: Tensor) -> None:
    """Fill all but the last token of a cache with drawn keys and values."""
    config = model.config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = ids.shape[0], config.num_key_value_heads, ids.shape[1] - 1, dim
    for layer in cache.layers:
        assert isinstance(layer, SparseLayer)
        layer.update(*(torch.randn(shape, device=ids.device, dtype=model.dtype) for _ in range(2)))


def synchronize(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()


def timed(work: Callable[[], Any], x: Tensor) -> float:
    """Seconds of work on a tensor's device, garbage collected before."""
    gc.collect()
    synchronize(x)
    began = time.perf_counter()
    work()
    synchronize(x)
    return time.perf_counter() - began


def make_room(device: str) -> None:
    """Free what nothing refers to, and begin to count the most memory held."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def profile(cache: SparseCache) -> None:
    """The kernels of one replayed step; the cache is of no use afterwards."""
    if cache.plan is not None and cache.plan.graph is not None:
        print_kernels(cache.plan.graph.replay, 3)


def options_of(method: str, trained: Any) -> dict[str, Any]:
    """The arguments of `attach`."""
    if method == "dense":
        return {}
    if method == "default":
        return {"router": trained[0], "phi": trained[1]}
    if method == "untrained":
        return {"token_budget": BUDGET, "dense_below": 0}
    if method in ("topk", "quest"):
        return {"selector": method, "token_budget": BUDGET, "dense_below": 0, "completion": "none"}
    options = {"router": trained[0], "selector": method.partition("_")[0], "token_budget": BUDGET, "dense_below": 0}
    return options | ({"phi": trained[1]} if method.endswith("_phi") else {"completion": "none"})


def answer(model: Any, method: str, ids: Tensor, trained: Any, tokens: int, drawn: bool) -> tuple[Any, ...]:
    """One answer to a prompt: the seconds to its first token, when each token came, the attachment's report, and the
    attachment, entered, with its cache."""
    attachment = sparsekv.attach(model, **options_of(method, trained)).__enter__()
    cache, clock = attachment.cache(ids.shape[1] + tokens + 64), Clock(streams=True)
    if drawn:
        draw(model, cache, ids)
    synchronize(ids)
    began = time.perf_counter()
    left = ids[:, -1:] if drawn else read(attachment, ids, cache)
    attachment.generate(left, max_new_tokens=tokens, streamer=clock, cache=cache, eos_token_id=[])
    if method not in ("dense", "default"):
        attachment.check_in_force(method)
    return clock.times[0] - began, clock, attachment.report(), attachment, cache


def ours(
    model: Any, method: str, ids: Tensor, trained: Any, tokens: int, profiled: bool, drawn: bool,
) -> dict[str, float]:
    found: dict[str, float] = {}
    for cold in (True, False):
        first, clock, report, attachment, cache = answer(model, method, ids, trained, COLD_TOKENS if cold else tokens,
                                                         drawn)
        try:
            at = "cold_" if cold else ""
            found[f"{at}first_token_s"], found[f"{at}gap_ms" if cold else "longest_gap_ms"] = first, max(clock.gaps)
            if cold:
                continue
            found["loop_ms"], found["index_s"] = clock.pace, report["index_seconds"]
            if method == "dense":
                found["prefill_s"] = first
            if method == "default" and report["sparse_from"] is not None:
                found["sparse_from"] = report["sparse_from"]
            found["capture_ms"] = 1e3 * report["capture_seconds"] / max(report["captures"], 1)
            print(f"    {method}: gap {clock.gaps.index(max(clock.gaps)) + 1} of {len(clock.gaps)} is the longest; "
                  f"{report['replayed_steps']} steps planned, {report['captures']} captures, "
                  f"{report['selectivity']:.3f} read, {report['not_replayed']}; {report['sparse_why']}", flush=True)
            cache.crop(ids.shape[1] - 1)
            clock = Clock()
            model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, do_sample=False,
                           max_new_tokens=tokens, min_new_tokens=tokens, stopping_criteria=[clock])
            found["generate_ms"] = clock.pace
            if profiled:
                profile(cache)
        finally:
            attachment.__exit__(None, None, None)
            cache.reset()
            del attachment, cache  # what it placed is not the next answer's
            gc.collect()
        if drawn:
            for name in ("first_token_s", "cold_first_token_s", "prefill_s"):
                found.pop(name, None)
    return found


def theirs(model: Any, method: str, ids: Tensor, tokens: int, drawn: bool) -> dict[str, float]:
    """transformers' own, from the keys and values of a prompt that ours has read."""
    from transformers import DynamicCache, StaticCache

    length, config, compiled = ids.shape[1] - 1, model.config, method == "transformers_compiled"
    with sparsekv.attach(model) as attachment:
        cache = attachment.cache(length + 1)
        if drawn:
            draw(model, cache, ids)
        else:
            attachment.prefill(ids[:, :length], chunk_size=max(1, AT_ONCE // len(ids)), cache=cache)
    peer: Any = (StaticCache(config=config, max_cache_len=length + 2 * tokens + 8) if compiled
                 else DynamicCache(config=config))
    for i, layer in enumerate(cache.layers):
        peer.update(layer.keys[:, :, :length], layer.values[:, :, :length], i)
        layer.reset()
    found: dict[str, float] = {}
    with torch.no_grad():
        clock = Clock()
        out = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=peer, do_sample=False,
                             max_new_tokens=tokens, min_new_tokens=tokens, stopping_criteria=[clock])
        found["generate_ms"] = clock.pace
        step = model.get_compiled_call(None) if compiled else model
        clock, token = Clock(), out[:, -1:].clone()
        place = torch.full_like(token, out.shape[1] - 1)
        for _ in range(tokens):
            logits = step(input_ids=token, position_ids=place, past_key_values=peer, use_cache=True).logits
            token = logits[:, -1].argmax(-1, keepdim=True).clone()
            place = place + 1
            synchronize(token)
            clock.put(token)
        found["loop_ms"] = clock.pace
    return found


def measure(case: str, options: argparse.Namespace, device: str, model: Any, tokenizer: Any) -> None:
    _, length, rows = CASES[case]
    ids = prompts(model, None if case in DRAWN else tokenizer, rows, length, device)
    router, phi = load_artifacts(options.artifacts, None, None) if tokenizer is not None else (None, None)
    trained = artifacts(model_fingerprint(model)) if router is None else (router, phi)
    units = {"ms": "milliseconds", "s": "seconds", "gb": "GB", "from": "tokens"}
    for method in options.methods:
        make_room(device)
        try:
            if method.startswith("transformers"):
                found = theirs(model, method, ids, min(options.tokens, PEER_TOKENS), case in DRAWN)
            else:
                found = ours(model, method, ids, trained, options.tokens, options.profile, case in DRAWN)
        except (RuntimeError, ValueError) as error:
            print(f"{case} {method}: {type(error).__name__} {str(error).splitlines()[0]}", flush=True)
            continue
        if device == "cuda":
            found["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        budget = {} if method in ("dense", "default") or method.startswith("transformers") else {"budget": BUDGET}
        ROWS.extend(row(case, method, name, round(value, 3), units[name.rpartition("_")[2]], **budget)
                    for name, value in found.items())
        print(case, method, {k: round(v, 3) for k, v in found.items()}, flush=True)
        add_rows("generate", ROWS, options.output)


def by_model(
    cases: Sequence[str], shapes: Mapping[str, Any], path: str | None, device: str,
    work: Callable[[str, Any, Any], None],
) -> None:
    """`work(case, model, tokenizer)` for every case, `shapes` by case first of all the shape; a model is made once for
    cases of one shape that follow each other, and gone before the next is made."""
    model, tokenizer, shape = None, None, None
    for case in cases:
        if shapes[case][0] != shape:
            model, shape = None, shapes[case][0]
            gc.collect()
            model, tokenizer = make_model(shape, device, path)
        work(case, model, tokenizer)
        make_room(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES,
                        default=[c for c in CASES if not c.startswith(("tiny", "coder"))])
    parser.add_argument("--methods", nargs="+", choices=METHODS + NAMED, default=list(METHODS))
    parser.add_argument("--tokens", type=int, default=TOKENS, help="generated tokens of each run [tokens]")
    parser.add_argument("--model", help="the model of the cases coder-*: a folder or a GGUF file")
    parser.add_argument("--artifacts", help="a folder of router and feature maps of that model; without it random ones")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--profile", action="store_true", help="print the kernels of a step of every method")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    by_model(options.cases, CASES, options.model, device,
             lambda case, model, tokenizer: measure(case, options, device, model, tokenizer))
    print(add_rows("generate", ROWS, options.output))


if __name__ == "__main__":
    main()
