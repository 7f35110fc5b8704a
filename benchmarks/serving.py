"""Tokens a second of a served model: vLLM with FlashAttention 3, and with sparsekv's backend as it is by default.

    python benchmarks/serving.py [--cases 8b-128k-b1 ...] [--methods vllm_fa3 vllm_sparsekv] [--side-by-side]

Needs vLLM (docs/serve.md). Prompts are random, and weights are random of a size that scores of a query with its keys
have the standard deviation SPREAD, which is a trained model's. sparsekv reads 1 % by sketches and completes by feature
maps, with artifacts of the form that `sparsekv train` makes, random; `vllm_sparse_prompts` and `…_tenth`, where
they are named, also read prompts sparsely. A method's cases of one `ENGINES` entry share an engine, a process of its
own that is warmed up with one request; every row of a case has its own prompt, prefix caching is off, and the decode
steps run in vLLM's full CUDA graphs. Rows are written after every case. 80 GB do not hold four rows of 128k, sixteen of
32k or one of 512k beside the weights: name `8b-128k-b3` and `8b-32k-b12` there, which run only where they are named. On
a CPU `vllm_fa3` is vLLM's CPU attention and the cases are `tiny-*`: a trial of the script.

- `token_ms`: median of the last steps in which all rows decode; `tokens_per_second`: rows over that.
- `first_s`: from the request to the first token of the last row; `second_s`: the step after it. Index, summary and
  means are made in the step that vLLM prepares before it gives out the first token, and count in `first_s`; without
  asynchronous scheduling in `second_s`.
- `index_s`: making one request's index, summary and means in all layers, the median of the case's rows, where the
  engine has one device. There is none where no row decodes sparsely.
- `peak_gb`: most memory of the first device held so far, the pages that all methods get included; `beside_gb`: what
  sparsekv keeps beside them, where the engine has one device.
- `same_tokens`: of a case of two devices (`tp2-…`) by how many tokens its first row begins as on one, where the run
  or the file `--said` has both. Of sparsekv's cases it is printed by how many they begin as vLLM's own do: all of them
  where requests are too short to be decoded sparsely.

One H100, expected: an engine starts in 60 to 90 s; 8k takes 2 s, 32k 4 s, 128k 16 s, three rows of 128k 45 s, 512k
165 s, nearly all of it prefill. With two devices `--side-by-side` runs the methods at the same time, a device each.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._profile import print_kernels
from benchmarks._rows import RESULTS, add_rows, row
from benchmarks.generate import SHAPES, artifacts
from sparsekv.kernels import Sketch
from sparsekv.runtime.vllm.settings import VARIABLE


class Case(NamedTuple):
    """A shape, tokens of a prompt, rows, the cache's precision, devices."""

    shape: str
    length: int
    rows: int
    cache: str = "auto"
    ranks: int = 1


CASES = {
    "8b-8k-b1": Case("8b", 8192, 1), "8b-32k-b1": Case("8b", 32_768, 1), "8b-32k-b16": Case("8b", 32_768, 16),
    "8b-128k-b1": Case("8b", 131_072, 1), "8b-128k-b4": Case("8b", 131_072, 4), "8b-512k-b1": Case("8b", 524_288, 1),
    "8b-128k-b3": Case("8b", 131_072, 3), "8b-32k-b12": Case("8b", 32_768, 12),
    "8b-128k-b4-fp8": Case("8b", 131_072, 4, "fp8"), "tp2-8b-128k-b1": Case("8b", 131_072, 1, ranks=2),
    "tp2-32b-128k-b1": Case("32b", 131_072, 1, ranks=2),
    "tiny-256-b1": Case("tiny", 256, 1), "tiny-512-b2": Case("tiny", 512, 2),
}
ENGINES = (("8b-8k-b1", "8b-32k-b1", "8b-128k-b1", "8b-128k-b4", "8b-128k-b3", "8b-32k-b12"), ("8b-32k-b16",),
           ("8b-512k-b1",), ("8b-128k-b4-fp8",), ("tp2-8b-128k-b1",), ("tp2-32b-128k-b1",),
           ("tiny-256-b1", "tiny-512-b2"))
"""Cases that share an engine, whose longest request, most rows and pages are of those that run."""
NAMED = ("8b-128k-b3", "8b-32k-b12")
"""Cases that run only where they are named."""
METHODS = ("vllm_fa3", "vllm_sparsekv")
OURS: dict[str, Any] = {"vllm_sparsekv": "dense", "vllm_sparse_prompts": "sparse",
                        "vllm_sparse_prompts_tenth": {"share": 0.1, "shortest": 8192}}
"""sparsekv's backend by how it reads prompts: as it does by default, sparsely, and so from 8192 tokens on with a
third of the share."""
BUDGET, SPREAD = 0.01, 2.3
"""Share of the context that is read; standard deviation of a query's scores over its keys, the median of the heads and
layers of SmolLM2-135M on a page of documentation."""
SETTINGS: dict[str, Any] = {"artifacts": "trained", "token_budget": BUDGET}
SMALL: dict[str, dict[str, Any]] = {"tiny": {"dense_below": 400}}
"""What a trial has beside them: one case short, one long."""
FORMS: dict[str, dict[str, int]] = {"tiny": {"buckets": 32, "sink": 4, "window": 64}}
"""What its artifacts have of their own."""
TOKENS, LAST, CHUNK, WARM, PROFILED = 200, 100, 8192, 49_152, 4
FOUND = "found "
"""What an engine's process says before a case's numbers."""
UNITS = {"ms": "milliseconds", "s": "seconds", "gb": "GB", "second": "tokens a second"}


def write_model(shape: str, folder: Path, longest: int, *, trained: bool = True) -> None:
    """A configuration without weights, and with `trained` artifacts of the trained form for it, those of one layer for
    all: to draw a large model's takes a minute."""
    known = dict(SHAPES[shape]) | ({"head_dim": 32} if shape == "tiny" else {})
    theta = known.pop("rope_theta", 1e4)
    half = "bfloat16" if torch.cuda.is_available() else "float32"
    folder.mkdir(parents=True, exist_ok=True)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": longest,
              "hidden_act": "silu", "rms_norm_eps": 1e-5, "torch_dtype": half, "bos_token_id": 1, "eos_token_id": 2,
              "rope_parameters": {"rope_type": "default", "rope_theta": theta}, **known}
    (folder / "config.json").write_text(json.dumps(config))
    if not trained:
        return
    layers = known["num_hidden_layers"]
    mark = {"architecture": "LlamaForCausalLM", "num_layers": 1, "num_query_heads": known["num_attention_heads"],
            "num_kv_heads": known["num_key_value_heads"], "head_dim": known["head_dim"], "rope": {}, "weights": "none"}
    torch.manual_seed(0)
    router, phi = artifacts(mark, **FORMS.get(shape, {}))

    def of_all(one: torch.Tensor) -> torch.Tensor:
        return one.expand(layers, *one.shape[1:]).contiguous()

    router.centroids, router.sketch = of_all(router.centroids), Sketch(*map(of_all, router.sketch))
    phi.maps, phi.shift, phi.gate = phi.maps.map(of_all), of_all(phi.shift), of_all(phi.gate)
    for name, made in (("router", router), ("phi", phi)):
        made.config = replace(made.config, model={**mark, "num_layers": layers}, layers=list(range(layers)))
        made.save(folder / "trained" / name)


def drawn(config: Any, device: Any, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and weights of a model, the same for any number of devices: every token is another direction, and scores
    have the standard deviation SPREAD."""
    hidden, heads, kv = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    dim, wide, words = config.head_dim, config.intermediate_size, config.vocab_size
    asks = (SPREAD / hidden) ** 0.5
    layer = {"self_attn.q_proj": (heads * dim, hidden, asks), "self_attn.k_proj": (kv * dim, hidden, asks),
             "self_attn.v_proj": (kv * dim, hidden, asks), "self_attn.o_proj": (hidden, heads * dim, 0.02),
             "mlp.gate_proj": (wide, hidden, 0.02), "mlp.up_proj": (wide, hidden, 0.02),
             "mlp.down_proj": (hidden, wide, 0.02), "input_layernorm": (hidden, 0, 0),
             "post_attention_layernorm": (hidden, 0, 0)}
    whole = {f"model.layers.{i}.{name}": size for i in range(config.num_hidden_layers) for name, size in layer.items()}
    whole |= {"model.embed_tokens": (words, hidden, 1.0), "model.norm": (hidden, 0, 0),
              "lm_head": (words, hidden, 0.02)}
    for name, (rows, columns, size) in whole.items():
        if columns:
            generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
            weight = torch.empty(rows, columns, device=device, dtype=dtype).normal_(std=size, generator=generator)
        else:
            weight = torch.ones(rows, device=device, dtype=dtype)
        yield f"{name}.weight", weight


def give_weights(model: Any) -> None:
    """`drawn` for a model of vLLM that has none. A CPU's are packed by then, and stay what they are."""
    like = next(model.parameters())
    if like.is_cuda:
        model.load_weights(drawn(model.config, like.device, like.dtype))


def backend_of(method: str) -> dict[str, Any]:
    """vLLM's attention_config."""
    return {"backend": "CUSTOM"} if method in OURS else {"backend": "FLASH_ATTN", "flash_attn_version": 3}


def environment() -> dict[str, str]:
    """Of an engine's process: the engine in it, nothing fetched, no settings yet."""
    env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
           "VLLM_HOST_IP": os.environ.get("VLLM_HOST_IP", "127.0.0.1"),
           "VLLM_USE_FLASHINFER_SAMPLER": os.environ.get("VLLM_USE_FLASHINFER_SAMPLER", "0"),
           "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # a rank of its own process is given `give_weights`
           "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
           "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"), "VLLM_CPU_KVCACHE_SPACE": "1"}
    env.pop(VARIABLE, None)
    return env


def engine_of(names: list[str], method: str, folder: Path, options: argparse.Namespace) -> Any:
    """vLLM over a model without weights, which get some."""
    from vllm import LLM

    cases = [CASES[case] for case in names]
    rows, longest = max(c.rows for c in cases), max(c.length for c in cases) + options.tokens + 64
    # all methods get the same pages, and no more than they need
    blocks = max(c.rows * -(-(c.length + options.tokens + 64) // 16) for c in cases) + 64
    given: dict[str, Any] = {"enforce_eager": True}
    if torch.cuda.is_available():
        given = {"attention_config": backend_of(method), "gpu_memory_utilization": options.memory,
                 "max_num_batched_tokens": CHUNK, "tensor_parallel_size": cases[0].ranks,
                 "kv_cache_dtype": cases[0].cache, "compilation_config": {
                     "cudagraph_mode": options.graphs, "cudagraph_capture_sizes": sorted({c.rows for c in cases})}}
        if options.uncompiled:
            given["compilation_config"] |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    engine = LLM(model=str(folder), load_format="dummy", skip_tokenizer_init=True, max_model_len=longest,
                 max_num_seqs=max(rows, 2), block_size=16, enable_prefix_caching=False, seed=0,
                 num_gpu_blocks_override=blocks, **given)
    engine.apply_model(give_weights)
    return engine


def run(
    engine: Any, length: int, rows: int, tokens: int, seed: int, vocabulary: int, profiled: bool = False,
) -> tuple[float, list[float], list[int]]:
    """Seconds to the first token of the last row, and of every step in which all rows decode, and the first row's
    tokens; `profiled` prints the kernels of some steps."""
    from vllm import SamplingParams

    generator = torch.Generator().manual_seed(seed)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    inner = engine.llm_engine
    began, started, steps, said = time.perf_counter(), {}, [], []
    for i in range(rows):
        prompt = torch.randint(3, vocabulary, (length,), generator=generator).tolist()
        inner.add_request(f"{length}-{rows}-{seed}-{i}", {"prompt_token_ids": prompt}, params)
    last, all_run = began, True
    while inner.has_unfinished_requests():
        for out in inner.step():
            started.setdefault(out.request_id, time.perf_counter())
            all_run &= not out.finished
            if out.request_id.endswith("-0"):
                said = list(out.outputs[0].token_ids)
        now = time.perf_counter()
        if len(started) == rows and all_run:
            steps.append(now - last)
        if profiled and len(steps) == tokens // 4:
            print_kernels(inner.step, PROFILED)
            now = time.perf_counter()
        last = now
    return max(started.values()) - began, steps[1:], said


def measure(method: str, folder: Path, options: argparse.Namespace) -> None:
    """One engine, in this process: says what it finds, a line a case."""
    began, indices = time.perf_counter(), IndexTimes()
    engine = engine_of(options.cases, method, folder, options)
    started = time.perf_counter()
    cases = [CASES[case] for case in options.cases]
    vocabulary = SHAPES[cases[0].shape]["vocab_size"]
    # a device's part of a token's keys and values is half as large with twice the devices or half the precision
    warm = WARM * cases[0].ranks * (2 if cases[0].cache == "fp8" else 1)
    run(engine, min(warm, max(case.length for case in cases)), 1, 16, 1, vocabulary)
    print(f"{method}: started in {started - began:.0f} s, warm in {time.perf_counter() - started:.0f} s", flush=True)
    for name, case in zip(options.cases, cases, strict=True):
        rows = case.rows
        indices.clear()  # of the requests before this case
        first, steps, said = run(engine, case.length, rows, options.tokens, 0, vocabulary, options.profile)
        step = statistics.median(steps[-min(LAST, len(steps) // 2):])
        found = {"token_ms": 1e3 * step, "tokens_per_second": rows / step, "first_s": first, "second_s": steps[0]}
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            found["peak_gb"] = max(torch.cuda.max_memory_reserved(), total - free) / 1e9
            if case.ranks == 1:
                found["beside_gb"] = beside(engine) / 1e9
        if made := indices.seconds():
            found["index_s"] = statistics.median(made)
        print(FOUND + json.dumps({"case": name, "found": found, "tokens": said}), flush=True)


def same(tokens: list[int], others: list[int]) -> int:
    """By how many tokens both begin alike."""
    return next((i for i, (a, b) in enumerate(zip(tokens, others, strict=True)) if a != b), len(others))


def beside(engine: Any) -> int:
    """Bytes of all indices and summaries, 0 for another backend. By the layers: vLLM freezes the collector's list of
    objects."""
    layers = engine.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    homes = [getattr(getattr(layer, "impl", None), "served", None) for layer in layers]
    return sum(home.index.nbytes for home in homes if home is not None and home.index is not None)


class IndexTimes:
    """How long requests' indices take in an engine of this process, without a wait: on a CUDA device between two
    events, by group of layers; none for another backend."""

    def __init__(self) -> None:
        from sparsekv.runtime.vllm import seats

        self.groups: dict[int, list[tuple[Any, Any]]] = {}
        build = seats.build_seat

        def timed(indices: Any, seat: int, slots: torch.Tensor, regions: Any) -> None:
            began = self.now(slots.device)
            build(indices, seat, slots, regions)
            self.groups.setdefault(id(indices[0]), []).append((began, self.now(slots.device)))

        seats.build_seat = timed

    @staticmethod
    def now(device: torch.device) -> Any:
        if device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def clear(self) -> None:
        self.groups.clear()

    def seconds(self) -> list[float]:
        """Of each request [s], in all groups of layers. Waits for the device."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return [sum(b - a if isinstance(a, float) else a.elapsed_time(b) / 1e3 for a, b in times)
                for times in zip(*self.groups.values(), strict=False)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = [c for c in CASES if c.startswith("tiny") != torch.cuda.is_available() and c not in NAMED]
    parser.add_argument("--cases", nargs="+", choices=CASES, default=here)
    parser.add_argument("--methods", nargs="+", choices=dict.fromkeys((*METHODS, *OURS)), default=list(METHODS))
    parser.add_argument("--tokens", type=int, default=TOKENS, help="generated tokens of a row [tokens]")
    parser.add_argument("--memory", type=float, default=0.85, help="share of the device that vLLM may take")
    parser.add_argument("--graphs", default="FULL_AND_PIECEWISE", help="vLLM's cudagraph_mode, for both methods")
    parser.add_argument("--uncompiled", action="store_true",
                        help="without torch.compile, decode steps in full graphs: starts 30 to 60 s earlier")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--profile", action="store_true", help="print the kernels of a step of every case")
    parser.add_argument("--side-by-side", action="store_true", help="the methods at the same time, a device each")
    parser.add_argument("--said", type=Path, help="a file that keeps what was said, to compare another run's with")
    parser.add_argument("--engine", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine is not None:
        measure(options.methods[0], options.engine, options)
        return
    if importlib.util.find_spec("vllm") is None:
        sys.exit("vLLM is not installed: nothing is measured (docs/serve.md says how)")
    devices = torch.cuda.device_count()
    if options.side_by_side and devices < len(options.methods):
        parser.error(f"--side-by-side needs {len(options.methods)} CUDA devices; there are {devices}")

    answers: dict[str, dict[str, list[int]]] = {method: {} for method in options.methods}
    if options.said is not None and options.said.exists():
        answers |= json.loads(options.said.read_text())

    def serve(method: str, device: int | None) -> None:
        for group in ENGINES:
            cases = [case for case in group if case in options.cases]
            ranks = CASES[group[0]].ranks
            if cases and ranks > (1 if device is not None else max(devices, 1)):
                print(f"{' '.join(cases)} {method}: left out, {ranks} devices are needed for one engine", flush=True)
            elif cases:
                answers[method] |= _in_a_process(cases, method, device, options)

    with ThreadPoolExecutor(len(options.methods) if options.side_by_side else 1) as pool:
        list(pool.map(serve, options.methods,
                      range(devices) if options.side_by_side else [None] * len(options.methods)))
    if options.said is not None:
        options.said.write_text(json.dumps(answers))
    for case in options.cases:
        ours, own = (answers.get(method, {}).get(case) for method in ("vllm_sparsekv", "vllm_fa3"))
        if ours and own:
            print(f"{case}: vllm_sparsekv begins as vllm_fa3 for {same(ours, own)} of {len(own)} tokens", flush=True)
        for method in options.methods:
            two, one = answers[method].get(case), answers[method].get(case.removeprefix("tp2-"))
            if case.startswith("tp2-") and two and one:
                add_rows("serving", [row(case, method, "same_tokens", same(two, one), "tokens", of=len(one))],
                         options.output)
    print(options.output)


def settings_for(folder: Path, shape: str, method: str = "vllm_sparsekv") -> Path:
    """The settings file, what is not in it by default."""
    settings = {**SETTINGS, **SMALL.get(shape, {}), "prefill": OURS[method]}
    (folder / "settings.json").write_text(json.dumps(settings))
    return folder / "settings.json"


def _in_a_process(
    cases: list[str], method: str, device: int | None, options: argparse.Namespace,
) -> dict[str, list[int]]:
    """Measures cases of one engine, and gives the tokens that it said of each."""
    env, said = environment(), {}
    if device is not None:
        env["CUDA_VISIBLE_DEVICES"] = str(device)
    with tempfile.TemporaryDirectory() as place:
        folder, shape = Path(place), CASES[cases[0]].shape
        write_model(shape, folder, 1 << 20, trained=method in OURS)
        if method in OURS:
            env[VARIABLE] = str(settings_for(folder, shape, method))
        process = subprocess.Popen(
            [sys.executable, __file__, "--cases", *cases, "--methods", method, "--tokens", str(options.tokens),
             "--memory", str(options.memory), "--graphs", options.graphs, "--engine", str(folder),
             *(["--profile"] if options.profile else []), *(["--uncompiled"] if options.uncompiled else [])],
            env=env, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith(FOUND):
                print(line, end="", flush=True)
                continue
            message = json.loads(line.removeprefix(FOUND))
            said[message["case"]] = message["tokens"]
            print(message["case"], method, {k: round(v, 3) for k, v in message["found"].items()}, flush=True)
            add_rows("serving", [row(message["case"], method, name, round(value, 3), UNITS[name.rpartition("_")[2]])
                                 for name, value in message["found"].items()], options.output)
        if process.wait():
            print(f"{' '.join(cases)} {method}: the engine stopped with {process.returncode}", flush=True)
    return said


if __name__ == "__main__":
    main()
