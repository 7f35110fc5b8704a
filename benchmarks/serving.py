"""Tokens a second of a served model: vLLM with FlashAttention 3 and with sparsekv's backend, in one run.

    python benchmarks/serving.py [--cases 8b-128k-b1 ...] [--methods vllm_fa3 vllm_sparsekv] [--side-by-side]

Needs vLLM (docs/serving.md). Weights and prompts are random. A method's cases of one `ENGINES` entry share an engine,
a process of its own that is warmed up with one request; every row of a case has its own prompt, prefix caching is off,
and the decode steps run in vLLM's full CUDA graphs. Rows are written after every case. On a CPU `vllm_fa3` is vLLM's
CPU attention and the cases are `tiny-*`: a trial of the script.

- `token_ms`: median of the last steps in which all rows decode; `tokens_per_second`: rows over that.
- `first_s`: from the request to the first token of the last row; `second_s`: the step after it. Index and means are
  made in the step that vLLM prepares before it gives out the first token, and count in `first_s`; without asynchronous
  scheduling in `second_s`.
- `peak_gb`: most memory held so far, the pages that both methods get included; `beside_gb`: what sparsekv keeps beside
  them.

One H200, expected: an engine starts in 60 to 90 s; 8k takes 2 s, 32k 4 s, 128k 16 s, four rows of 128k 60 s, 512k
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._profile import print_kernels
from benchmarks._rows import RESULTS, add_rows, row
from benchmarks.generate import SHAPES
from sparsekv.artifacts.router import RouterArtifact, RouterArtifactConfig
from sparsekv.core.sketch import fit_sketch
from sparsekv.kernels import Sketch
from sparsekv.serving.settings import VARIABLE

CASES = {
    "8b-8k-b1": ("8b", 8192, 1), "8b-32k-b1": ("8b", 32_768, 1), "8b-128k-b1": ("8b", 131_072, 1),
    "8b-128k-b4": ("8b", 131_072, 4), "8b-512k-b1": ("8b", 524_288, 1),
    "tiny-256-b1": ("tiny", 256, 1), "tiny-512-b2": ("tiny", 512, 2),
}
"""A shape, tokens of a prompt, rows."""
ENGINES = ("8b-8k-b1", "8b-32k-b1", "8b-128k-b1", "8b-128k-b4"), ("8b-512k-b1",), ("tiny-256-b1", "tiny-512-b2")
"""Cases of one engine, whose longest request and most rows are theirs, whichever of them run."""
METHODS = ("vllm_fa3", "vllm_sparsekv")
BUCKETS, BYTES, WIDE, SINK, WINDOW = 1024, 24, 3, 4, 64
SETTINGS = {"router": "router", "token_budget": 0.01, "candidates": 0.1, "decode_window": 1024, "dense_layers": [0]}
SMALL = {"tiny": {"dense_below": 400}}
"""What a trial has beside them: one case short, one long."""
TOKENS, LAST, CHUNK, WARM, PROFILED = 200, 100, 8192, 32_768, 4
FOUND = "found "
"""What an engine's process says before a case's numbers."""
UNITS = {"ms": "milliseconds", "s": "seconds", "gb": "GB", "second": "tokens a second"}


def write_model(shape: str, folder: Path, longest: int) -> None:
    """A configuration without weights, and a router of the trained shape for it."""
    known = {"head_dim": 32} | SHAPES[shape] if shape != "tiny" else {**SHAPES[shape], "head_dim": 32}
    theta = known.pop("rope_theta", 1e4)
    half = "bfloat16" if torch.cuda.is_available() else "float32"
    folder.mkdir(parents=True, exist_ok=True)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": longest,
              "hidden_act": "silu", "rms_norm_eps": 1e-5, "torch_dtype": half, "bos_token_id": 1, "eos_token_id": 2,
              "rope_parameters": {"rope_type": "default", "rope_theta": theta}, **known}
    (folder / "config.json").write_text(json.dumps(config))
    layers, heads, dim = known["num_hidden_layers"], known["num_key_value_heads"], known["head_dim"]
    buckets, width = (BUCKETS, BYTES) if shape != "tiny" else (32, 8)
    record = {"architecture": "LlamaForCausalLM", "num_layers": layers, "num_query_heads": known["num_attention_heads"],
              "num_kv_heads": heads, "head_dim": dim, "rope": {}, "weights": "none"}
    torch.manual_seed(0)
    eye = torch.eye(dim).expand(layers, heads, dim, dim)
    sketch = Sketch(*(x.contiguous() for x in fit_sketch(eye, torch.zeros(layers, heads, dim), eye, width, WIDE)))
    RouterArtifact(
        RouterArtifactConfig(model=record, layers=list(range(layers)), num_buckets=buckets, key_space="rot",
                             scores="mean_key", sink_size=SINK, window_size=WINDOW, sketch_bytes=width,
                             sketch_wide=WIDE),
        torch.nn.functional.normalize(torch.randn(layers, heads, buckets, dim), dim=-1), None, sketch=sketch,
    ).save(folder / "router")


def backend_of(method: str) -> dict[str, Any]:
    """vLLM's attention_config."""
    return {"backend": "CUSTOM"} if method == "vllm_sparsekv" else {"backend": "FLASH_ATTN", "flash_attn_version": 3}


def environment() -> dict[str, str]:
    """Of an engine's process: the engine in it, nothing fetched, no settings yet."""
    env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
           "VLLM_HOST_IP": os.environ.get("VLLM_HOST_IP", "127.0.0.1"),
           "VLLM_USE_FLASHINFER_SAMPLER": os.environ.get("VLLM_USE_FLASHINFER_SAMPLER", "0"),
           "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"), "VLLM_CPU_KVCACHE_SPACE": "1"}
    env.pop(VARIABLE, None)
    return env


def engine_of(group: tuple[str, ...], method: str, folder: Path, options: argparse.Namespace) -> Any:
    from vllm import LLM

    cases = [CASES[case] for case in group]
    rows, cuda = max(c[2] for c in cases), torch.cuda.is_available()
    longest = max(c[1] for c in cases) + options.tokens + 64
    more: dict[str, Any] = {"enforce_eager": True}
    if cuda:
        sizes = sorted({c[2] for c in cases})
        more = {"attention_config": backend_of(method), "gpu_memory_utilization": options.memory,
                "max_num_batched_tokens": CHUNK,
                "compilation_config": {"cudagraph_mode": options.graphs, "cudagraph_capture_sizes": sizes}}
    # both methods get the same pages, and no more than they need
    blocks = max(c[2] * -(-(c[1] + options.tokens + 64) // 16) for c in cases) + 64
    return LLM(model=str(folder), load_format="dummy", skip_tokenizer_init=True, max_model_len=longest,
               max_num_seqs=max(rows, 2), block_size=16, num_gpu_blocks_override=blocks, enable_prefix_caching=False,
               seed=0, **more)


def run(
    engine: Any, length: int, rows: int, tokens: int, seed: int, profiled: bool = False,
) -> tuple[float, list[float]]:
    """Seconds to the first token of the last row, and of every step in which all rows decode; `profiled` prints the
    kernels of some."""
    from vllm import SamplingParams

    generator = torch.Generator().manual_seed(seed)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    inner = engine.llm_engine
    began, started, steps = time.perf_counter(), {}, []
    for i in range(rows):
        prompt = torch.randint(3, 97, (length,), generator=generator).tolist()
        inner.add_request(f"{length}-{rows}-{seed}-{i}", {"prompt_token_ids": prompt}, params)
    last, all_run = began, True
    while inner.has_unfinished_requests():
        for out in inner.step():
            started.setdefault(out.request_id, time.perf_counter())
            all_run &= not out.finished
        now = time.perf_counter()
        if len(started) == rows and all_run:
            steps.append(now - last)
        if profiled and len(steps) == tokens // 4:
            print_kernels(inner.step, PROFILED)
            now = time.perf_counter()
        last = now
    return max(started.values()) - began, steps[1:]


def measure(method: str, folder: Path, options: argparse.Namespace) -> None:
    """One engine, in this process: says what it finds, a line a case."""
    began = time.perf_counter()
    engine = engine_of(group_of(options.cases[0]), method, folder, options)
    started = time.perf_counter()
    shapes = [CASES[case] for case in options.cases]
    run(engine, min(WARM, max(length for _, length, _ in shapes)), 1, 16, seed=1)
    print(f"{method}: started in {started - began:.0f} s, warm in {time.perf_counter() - started:.0f} s", flush=True)
    for case in options.cases:
        _, length, rows = CASES[case]
        first, steps = run(engine, length, rows, options.tokens, seed=0, profiled=options.profile)
        step = statistics.median(steps[-min(LAST, len(steps) // 2):])
        found = {"token_ms": 1e3 * step, "tokens_per_second": rows / step, "first_s": first, "second_s": steps[0]}
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            found["peak_gb"] = max(torch.cuda.max_memory_reserved(), total - free) / 1e9
            found["beside_gb"] = beside(engine) / 1e9
        print(FOUND + json.dumps({"case": case, "found": found}), flush=True)


def group_of(case: str) -> tuple[str, ...]:
    return next(group for group in ENGINES if case in group)


def beside(engine: Any) -> int:
    """Bytes of all indices, 0 for another backend. By the layers: vLLM freezes the collector's list of objects."""
    layers = engine.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    homes = [home for layer in layers if (home := getattr(getattr(layer, "impl", None), "home", None)) is not None]
    return sum(t.numel() * t.element_size() for home in homes if home.index is not None
               for n, t in vars(home.index).items() if isinstance(t, torch.Tensor) and n not in ("keys", "values"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = [c for c in CASES if c.startswith("tiny") != torch.cuda.is_available()]
    parser.add_argument("--cases", nargs="+", choices=CASES, default=here)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--tokens", type=int, default=TOKENS, help="generated tokens of a row [tokens]")
    parser.add_argument("--memory", type=float, default=0.85, help="share of the device that vLLM may take")
    parser.add_argument("--graphs", default="FULL_AND_PIECEWISE", help="vLLM's cudagraph_mode, for both methods")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--profile", action="store_true", help="print the kernels of a step of every case")
    parser.add_argument("--side-by-side", action="store_true", help="the methods at the same time, a device each")
    parser.add_argument("--engine", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine is not None:
        measure(options.methods[0], options.engine, options)
        return
    if importlib.util.find_spec("vllm") is None:
        print("vLLM is not installed: nothing is measured (docs/serving.md says how)")
        return
    devices = torch.cuda.device_count()
    if options.side_by_side and devices < len(options.methods):
        parser.error(f"--side-by-side needs {len(options.methods)} CUDA devices; there are {devices}")

    def serve(method: str, device: int | None) -> None:
        for group in ENGINES:
            cases = [case for case in group if case in options.cases]
            if cases:
                _in_a_process(cases, method, device, options)

    with ThreadPoolExecutor(len(options.methods) if options.side_by_side else 1) as pool:
        list(pool.map(serve, options.methods, range(devices) if options.side_by_side else [None] * len(METHODS)))
    print(options.output / "serving.json")


def _in_a_process(cases: list[str], method: str, device: int | None, options: argparse.Namespace) -> None:
    env = environment()
    if device is not None:
        env["CUDA_VISIBLE_DEVICES"] = str(device)
    with tempfile.TemporaryDirectory() as place:
        folder, (shape, *_) = Path(place), CASES[cases[0]]
        write_model(shape, folder, 1 << 20)
        requests = max(CASES[case][2] for case in group_of(cases[0]))
        (folder / "settings.json").write_text(json.dumps({**SETTINGS, **SMALL.get(shape, {}), "requests": requests}))
        if method == "vllm_sparsekv":
            env[VARIABLE] = str(folder / "settings.json")
        process = subprocess.Popen(
            [sys.executable, __file__, "--cases", *cases, "--methods", method, "--tokens", str(options.tokens),
             "--memory", str(options.memory), "--graphs", options.graphs, "--engine", str(folder),
             *(["--profile"] if options.profile else [])],
            env=env, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith(FOUND):
                print(line, end="", flush=True)
                continue
            said = json.loads(line.removeprefix(FOUND))
            print(said["case"], method, {k: round(v, 3) for k, v in said["found"].items()}, flush=True)
            add_rows("serving", [row(said["case"], method, name, round(value, 3), UNITS[name.rpartition("_")[2]])
                                 for name, value in said["found"].items()], options.output)
        if process.wait():
            print(f"{' '.join(cases)} {method}: the engine stopped with {process.returncode}", flush=True)


if __name__ == "__main__":
    main()
