"""Milliseconds a token in a user's hands: `model.generate` and the lean loop, ours and transformers', in one run.

    python benchmarks/generate.py [--cases 8b-128k-b1 ...] [--methods router ...] [--profile] [--output FOLDER]

Rows take the place of those of the same case, method and metric in generate.json.

Models have random weights: `8b` has the shape of Llama 3.1 8B (32 layers, 32 query and 8 KV heads of 128), `smollm2`
that of SmolLM2-135M. Up to 128k in one row the cache is prefilled (`prefill_s`); longer and wider ones are filled with
drawn keys and values. Every method goes on from the same cache.

- transformers: sdpa, dynamic cache; transformers_compiled: static cache, torch.compile as its `generate` chooses it
  (reduce-overhead, CUDA graphs);
- dense: attached, full attention; router: 1024 buckets, mean_key scores, 1/32 of the context, sink 1, window 2047;
  sketch: 1 % of the context by codes of a basis; router_phi, sketch_phi: the same completed by maps of the shape and
  width that the recipe trains (128 features, centred, capped).

`generate_ms`, `loop_ms`: median of the last tokens, when layers are compiled. `first_s`: the steps before, in which
index, compilation and capture fall; `index_s`: index and estimates alone, the second time (kernels are loaded).
`peak_gb`: most memory held.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sparsekv
from benchmarks._profile import print_kernels
from benchmarks._rows import RESULTS, add_rows, row
from sparsekv.artifacts.fingerprint import model_fingerprint
from sparsekv.artifacts.phi import PhiArtifact, PhiArtifactConfig
from sparsekv.artifacts.router import RouterArtifact, RouterArtifactConfig
from sparsekv.kernels import Sketch
from sparsekv.models.feature_map import CentredMap, FeatureMap, FeatureMaps
from sparsekv.runtime.cache import SparseCache, SparseLayer
from sparsekv.trainers.options import DEFAULT
from sparsekv.trainers.phi import RECIPES
from sparsekv.trainers.sketch import code_size

CASES = {
    "8b-8k-b1": ("8b", 8192, 1), "8b-32k-b1": ("8b", 32_768, 1), "8b-128k-b1": ("8b", 131_072, 1),
    "8b-512k-b1": ("8b", 524_288, 1), "8b-128k-b4": ("8b", 131_072, 4), "smollm2-8k-b1": ("smollm2", 8192, 1),
    "tiny-512-b2": ("tiny", 512, 2),
}
SHAPES: dict[str, dict[str, Any]] = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128_256, "rope_theta": 5e5},
    "smollm2": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
                "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49_152, "rope_theta": 1e5,
                "tie_word_embeddings": True},
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 97},
}
METHODS = ("dense", "router", "router_phi", "sketch", "sketch_phi", "transformers", "transformers_compiled")
COMPILED = ("8b-8k-b1", "8b-32k-b1", "8b-128k-b1", "smollm2-8k-b1", "tiny-512-b2")
BUCKETS, SINK, WINDOW, FEATURES = 1024, 1, 2047, 128
BUDGETS = {"router": 1 / 32, "sketch": 0.01}
MAP_WIDTH, KEY_WIDTH = RECIPES[DEFAULT].width, RECIPES[DEFAULT].key_width
CHUNK, PREFILLED = 32_768, 131_072
TOKENS, LAST, PEER_TOKENS = 400, 96, 48
ROWS: list[dict[str, Any]] = []


class Clock:
    """When each token was seen, as a streamer and as a stopping criterion."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass

    def __call__(self, ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if ids.is_cuda:
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    def read(self) -> tuple[float, float]:
        """Milliseconds a token, and seconds until that pace was reached."""
        last = max(len(self.times) - LAST, len(self.times) // 2)
        steps = [b - a for a, b in zip(self.times[last:], self.times[last + 1:], strict=False)]
        return 1e3 * statistics.median(steps), self.times[last] - self.times[0]


def make_model(shape: str, device: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

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
    return model.eval().requires_grad_(False)


def artifacts(model: Any, device: str) -> tuple[RouterArtifact, PhiArtifact]:
    """Router and maps of the shape and width that the recipes train, random."""
    mark = model_fingerprint(model)
    layers, heads_q, heads, dim = (mark[n] for n in ("num_layers", "num_query_heads", "num_kv_heads", "head_dim"))
    common: dict[str, Any] = {"model": mark, "layers": list(range(layers)), "sink_size": SINK, "window_size": WINDOW}
    centroids = torch.nn.functional.normalize(torch.randn(layers, heads, BUCKETS, dim), dim=-1)
    width, wide = code_size(None, None, dim)
    sketch = Sketch(*(torch.randn(layers, heads, *n, 2 * width - wide) * dim**-0.5 for n in ((dim,), (), (dim,))))
    config = RouterArtifactConfig(num_buckets=BUCKETS, key_space="rot", scores="mean_key", sketch_bytes=width,
                                  sketch_wide=wide, **common)
    router = RouterArtifact(config, centroids, None, sketch=sketch)
    keys = CentredMap(layers * heads, dim, FEATURES, KEY_WIDTH, shared=True)
    maps = FeatureMaps(FeatureMap(layers * heads_q, dim, FEATURES, MAP_WIDTH).weights(), keys.plain.weights(),
                       keys.centred.weights()).map(lambda w: w.detach().unflatten(0, (layers, -1)))
    of_maps = PhiArtifactConfig(num_features=FEATURES, width=MAP_WIDTH, key_width=KEY_WIDTH, shared=True, centred=True,
                                capped=True, **common)
    phi = PhiArtifact(of_maps, maps, torch.zeros(layers, 1, heads_q), torch.ones(layers, heads_q))
    return router, phi


def fill(model: Any, length: int, rows: int, room: int, ids: Tensor) -> tuple[SparseCache, float | None]:
    """A cache of `length` tokens, and the seconds of its prefill if it had one."""
    with sparsekv.attach(model) as attachment:
        cache = attachment.cache(length + room)
        if rows * length <= PREFILLED:
            attachment.prefill(ids[:, :64])  # kernels load
            synchronize(ids)
            began = time.perf_counter()
            attachment.prefill(ids[:, :length], chunk_size=CHUNK, cache=cache)
            synchronize(ids)
            return cache, time.perf_counter() - began
        config = model.config
        shape = rows, config.num_key_value_heads, length, config.head_dim
        for layer in cache.layers:
            assert isinstance(layer, SparseLayer)
            layer.update(*(torch.randn(shape, device=ids.device, dtype=model.dtype) for _ in range(2)))
        return cache, None


def synchronize(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()


def profile(cache: SparseCache) -> None:
    """The kernels of one replayed step; the cache is of no use afterwards."""
    if cache.plan is not None and cache.plan.graph is not None:
        print_kernels(cache.plan.graph.replay, 3)


def ours(
    model: Any, method: str, cache: SparseCache, ids: Tensor, trained: Any, tokens: int, profiled: bool,
) -> dict[str, float]:
    options: dict[str, Any] = {"sink_size": SINK, "window_size": WINDOW}
    if method == "dense":
        options = {}
    else:
        selector = method.partition("_")[0]
        options |= {"router": trained[0], "selector": selector, "token_budget": BUDGETS[selector]}
    if method.endswith("_phi"):
        options["phi"] = trained[1]
    length = ids.shape[1] - 1
    found: dict[str, float] = {}
    with sparsekv.attach(model, **options) as attachment:
        for name in ("loop", "generate"):
            clock = Clock()
            if name == "loop":
                attachment.generate(ids[:, -1:], max_new_tokens=tokens, streamer=clock, cache=cache)
            else:
                model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, do_sample=False,
                               max_new_tokens=tokens, stopping_criteria=[clock])
            found[f"{name}_ms"], first = clock.read()
            found.setdefault("first_s", first)
            found["index_s"] = attachment.report()["index_seconds"] - found.get("index_s", 0.0)
            if profiled and name == "generate":
                profile(cache)
            cache.crop(length)
            for layer in cache.layers:
                layer.state = None  # type: ignore[union-attr]
        report = attachment.report()
        found["capture_ms"] = 1e3 * report["capture_seconds"] / max(report["captures"], 1)
        print(f"    {method}: {report['replayed_steps']} steps replayed, {report['captures']} captures, "
              f"{report['selectivity']:.3f} read, {report['not_replayed']}", flush=True)
    return found


def theirs(model: Any, method: str, cache: SparseCache, ids: Tensor, tokens: int) -> dict[str, float]:
    """transformers' own, from the same keys and values; the cache given is used up."""
    from transformers import DynamicCache, StaticCache

    length = ids.shape[1] - 1
    config = model.config
    compiled = method == "transformers_compiled"
    peer: Any = (StaticCache(config=config, max_cache_len=length + 2 * tokens + 8) if compiled
                 else DynamicCache(config=config))
    for i, layer in enumerate(cache.layers):
        peer.update(layer.keys[:, :, :length], layer.values[:, :, :length], i)
        layer.reset()
    found: dict[str, float] = {}
    with torch.no_grad():
        clock = Clock()
        out = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=peer, do_sample=False,
                             max_new_tokens=tokens, stopping_criteria=[clock])
        found["generate_ms"], found["first_s"] = clock.read()
        step = model.get_compiled_call(None) if compiled else model
        clock, token = Clock(), out[:, -1:].clone()
        place = torch.full_like(token, out.shape[1] - 1)
        for _ in range(tokens):
            logits = step(input_ids=token, position_ids=place, past_key_values=peer, use_cache=True).logits
            token = logits[:, -1].argmax(-1, keepdim=True).clone()
            place = place + 1
            synchronize(token)
            clock.put(token)
        found["loop_ms"] = clock.read()[0]
    return found


def measure(case: str, options: argparse.Namespace, device: str, model: Any) -> None:
    methods, tokens = options.methods, options.tokens
    _, length, rows = CASES[case]
    torch.manual_seed(1)
    ids = torch.randint(1, model.config.vocab_size, (rows, length + 1), device=device)
    trained = artifacts(model, device)
    cache: Any = None
    for method in methods:
        if method == "transformers_compiled" and case not in COMPILED:
            continue
        if cache is None or not cache.get_seq_length():
            cache = None
            gc.collect()
            cache, seconds = fill(model, length, rows, tokens + 64, ids)
            if seconds is not None and not any(r["case"] == case for r in ROWS):
                ROWS.append(row(case, "dense", "prefill_s", round(seconds, 3), "seconds"))
                print(f"{case} prefill {seconds:.2f} s", flush=True)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        try:
            if method.startswith("transformers"):
                found = theirs(model, method, cache, ids, min(tokens, PEER_TOKENS))
                cache = None
            else:
                found = ours(model, method, cache, ids, trained, tokens, options.profile)
        except (RuntimeError, ValueError) as error:
            print(f"{case} {method}: {type(error).__name__} {str(error).splitlines()[0]}", flush=True)
            cache = None
            gc.collect()
            continue
        if device == "cuda":
            found["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        units = {"ms": "milliseconds a token", "s": "seconds", "gb": "GB"}
        ROWS.extend(row(case, method, name, round(value, 3), units[name.rpartition("_")[2]])
                    for name, value in found.items())
        print(case, method, {k: round(v, 3) for k, v in found.items()}, flush=True)
        add_rows("generate", ROWS, options.output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[c for c in CASES if not c.startswith("tiny")])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--tokens", type=int, default=TOKENS, help="generated tokens of each run of ours [tokens]")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--profile", action="store_true", help="print the kernels of a step of every method of ours")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, shape = None, None
    for case in options.cases:
        if CASES[case][0] != shape:
            model, shape = None, CASES[case][0]
            gc.collect()
            model = make_model(shape, device)
        measure(case, options, device, model)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    print(add_rows("generate", ROWS, options.output))


if __name__ == "__main__":
    main()
