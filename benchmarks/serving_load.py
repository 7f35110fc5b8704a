"""A served model under load: vLLM with FlashAttention 3 and with sparsekv's backend, the same requests.

    python benchmarks/serving_load.py [--rates 0.08 0.15 0.3 0.6] [--count 16] [--methods vllm_fa3 ...] [--side-by-side]

Requests arrive as a Poisson process of every rate [requests a second], one rate after another; prompts of 16k to 128k
and answers of 512 to 4,096 tokens, both even in the logarithm. Model, artifacts and settings are those of
`benchmarks/serving.py`; vLLM divides the memory by itself, so that a backend that keeps more beside the pages has fewer
of them. All methods get the same requests at the same times. On a CPU a tiny model gets short requests: a trial.

- `tokens_per_second`: all tokens of answers over the time from the first arrival to the last token.
- `between_p50_ms`, `between_p99_ms`: between a request's tokens; `first_p50_s`, `first_p99_s`: from its arrival to its
  first, waiting included.
- `sparse_share`: of the tokens after the first, those whose step was sparse in that row.
- `sparse_steps`: of the steps in which a row decodes, those in which one decodes sparsely.
- `waiting`: most requests at once that had no token yet, which grows with `--count` beyond saturation.
- `page_tokens`: tokens that the pages hold; `page_wait_s`: how long the next request had more tokens than the free
  pages, so that it waited until another one ended; `preempted`: how often pages of a request were taken back.
- `index_s`: making one request's index, summary and means in all layers, the median.
- `peak_gb`: most memory of the device.

On one H100, expected: 90 s to start, then 4, 2.5, 2 and 2 minutes for the four rates.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._rows import RESULTS, add_rows, row
from benchmarks.generate import SHAPES
from benchmarks.serving import (
    FOUND,
    METHODS,
    UNITS,
    IndexTimes,
    environment,
    lacks,
    make_engine,
    settings_for,
    write_model,
)
from sparsekv.runtime.vllm.settings import VARIABLE


class Traffic(NamedTuple):
    """A shape, the shortest and longest prompt and answer [tokens], most requests at once."""

    shape: str
    prompt: tuple[int, int]
    answer: tuple[int, int]
    rows: int


TRAFFIC = {"8b": Traffic("8b", (16_384, 131_072), (512, 4096), 32), "tiny": Traffic("tiny", (200, 700), (16, 48), 4)}
RATES = {"8b": (0.08, 0.15, 0.3, 0.6), "tiny": (0.5, 4.0)}


class Arrival(NamedTuple):
    """When a request comes [s], its prompt and its answer [tokens]."""

    at: float
    prompt: int
    answer: int


def arrivals(traffic: Traffic, rate: float, count: int) -> list[Arrival]:
    """The same for all methods; the rates differ by the times between requests alone."""
    g = torch.Generator().manual_seed(0)
    between = torch.empty(count).exponential_(generator=g) / rate
    lengths = [torch.exp(torch.empty(count).uniform_(*torch.tensor(span).double().log().tolist(), generator=g)).long()
               for span in (traffic.prompt, traffic.answer)]
    times = between.cumsum(0) - between[0]
    return [Arrival(*x) for x in zip(times.tolist(), *(n.tolist() for n in lengths), strict=True)]


class SparseRows:
    """Counts, on the device, the rows of decode steps that are sparse, and the steps that have one; times indices."""

    def __init__(self, method: str):
        self.indices = IndexTimes()
        self.rows = self.steps = torch.zeros((), dtype=torch.int64)
        if method == "vllm_sparsekv":
            from sparsekv.runtime.vllm.metadata import SparseBuilder

            build = SparseBuilder.build

            def counted(builder: Any, *args: Any, **kwargs: Any) -> Any:
                found = build(builder, *args, **kwargs)
                if found.decode is not None:
                    sparse = found.decode.sparse.sum()
                    self.rows, self.steps = self.rows.to(sparse.device) + sparse, self.steps.to(sparse.device) + (
                        sparse > 0)
                return found

            SparseBuilder.build = counted  # type: ignore[method-assign]


class Queue:
    """Why requests wait, by the scheduler of an engine in this process."""

    def __init__(self, engine: Any):
        self.scheduler = engine.llm_engine.engine_core.engine_core.scheduler
        self.page = self.scheduler.block_size
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.taken_back: dict[str, int] = {}

    @property
    def page_tokens(self) -> int:
        """What all pages hold, of which one is nobody's."""
        return (self.pool.num_gpu_blocks - 1) * self.page

    def short(self) -> bool:
        """Whether the next request has more tokens than the free pages: it waits until another one ends."""
        waiting = self.scheduler.waiting
        return bool(waiting) and waiting.peek_request().num_tokens > self.pool.get_num_free_blocks() * self.page

    def note(self) -> None:
        """After a step: how often pages of those that run were taken back."""
        self.taken_back |= {r.request_id: r.num_preemptions for r in self.scheduler.running}


def serve(engine: Any, work: list[Arrival], vocabulary: int, counter: SparseRows) -> dict[str, float]:
    """What came of the requests of one rate."""
    from vllm import SamplingParams

    inner, g = engine.llm_engine, torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, vocabulary, (a.prompt,), generator=g).tolist() for a in work]
    rows, steps = counter.rows.clone(), counter.steps.clone()
    stamps: dict[str, list[float]] = {str(i): [] for i in range(len(work))}
    due, waiting, decoding, tokens, short_s = list(range(len(work))), 0, 0, 0, 0.0
    queue = Queue(engine)
    counter.indices.clear()  # of the rate before
    began = time.perf_counter()
    while due or inner.has_unfinished_requests():
        now = time.perf_counter() - began
        while due and work[due[0]].at <= now:
            i = due.pop(0)
            params = SamplingParams(temperature=0, max_tokens=work[i].answer, ignore_eos=True, detokenize=False)
            inner.add_request(str(i), {"prompt_token_ids": prompts[i]}, params)
        if not inner.has_unfinished_requests():
            time.sleep(max(0.0, work[due[0]].at - now))
            continue
        short, before = queue.short(), now
        outs = inner.step()
        now = time.perf_counter() - began
        short_s += (now - before) * short
        queue.note()
        later = 0
        for out in outs:
            times, new = stamps[out.request_id], len(out.outputs[0].token_ids)
            later += bool(times)
            times += [now] * (new - len(times))
        decoding, tokens = decoding + bool(later), tokens + later
        arrived = sum(a.at <= now for a in work)
        waiting = max(waiting, arrived - sum(bool(t) for t in stamps.values()))
    between = torch.tensor([b - a for t in stamps.values() for a, b in pairwise(t)])
    first = torch.tensor([stamps[str(i)][0] - a.at for i, a in enumerate(work)])
    found = {"tokens_per_second": sum(map(len, stamps.values())) / now, "waiting": float(waiting),
             "page_tokens": float(queue.page_tokens), "page_wait_s": short_s,
             "preempted": float(sum(queue.taken_back.values()))}
    if made := counter.indices.seconds():
        found["index_s"] = statistics.median(made)
    for name, values, unit in (("between", 1e3 * between, "ms"), ("first", first, "s")):
        for share in (50, 99):
            found[f"{name}_p{share}_{unit}"] = float(values.double().quantile(share / 100))
    found["sparse_share"] = int(counter.rows - rows.to(counter.rows.device)) / max(1, tokens)
    found["sparse_steps"] = int(counter.steps - steps.to(counter.steps.device)) / max(1, decoding)
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        found["peak_gb"] = max(torch.cuda.max_memory_reserved(), total - free) / 1e9
    return found


def measure(method: str, folder: Path, options: argparse.Namespace) -> None:
    """One engine, in this process: says what it finds, a line a rate."""
    traffic = TRAFFIC[options.shape]
    counter = SparseRows(method)
    sizes = [n for n in (1, 2, 4, 8, 12, 16, 24, 32) if n <= traffic.rows]
    engine = make_engine(folder, method, longest=traffic.prompt[1] + traffic.answer[1] + 64, rows=traffic.rows,
                         memory=options.memory, graphs="FULL_AND_PIECEWISE", sizes=sizes)
    vocabulary = SHAPES[traffic.shape]["vocab_size"]
    serve(engine, [Arrival(0.0, traffic.prompt[0], 16)], vocabulary, counter)
    for rate in options.rates:
        found = serve(engine, arrivals(traffic, rate, options.count), vocabulary, counter)
        print(FOUND + json.dumps({"rate": rate, "found": found}), flush=True)


def main() -> None:
    shape = "8b" if torch.cuda.is_available() else "tiny"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES[shape]), help="requests a second")
    parser.add_argument("--count", type=int, default=16 if shape == "8b" else 4, help="requests of a rate")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--memory", type=float, default=0.85, help="share of the device that vLLM may take")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--side-by-side", action="store_true", help="the methods at the same time, a device each")
    parser.add_argument("--engine", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.shape = shape
    if options.engine is not None:
        measure(options.methods[0], options.engine, options)
        return
    if options.side_by_side and torch.cuda.device_count() < len(options.methods):
        parser.error(f"--side-by-side needs {len(options.methods)} CUDA devices; there are "
                     f"{torch.cuda.device_count()}")
    with ThreadPoolExecutor(len(options.methods) if options.side_by_side else 1) as pool:
        list(pool.map(lambda x: _in_a_process(x[1], x[0] if options.side_by_side else None, options),
                      enumerate(options.methods)))
    print(options.output)


def _in_a_process(method: str, device: int | None, options: argparse.Namespace) -> None:
    lacking = lacks(method)
    if lacking is not None:
        print(lacking, flush=True)
        return
    env = environment(method) | ({} if device is None else {"CUDA_VISIBLE_DEVICES": str(device)})
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_model(options.shape, folder, 1 << 18, trained=method == "vllm_sparsekv")
        if method == "vllm_sparsekv":
            env[VARIABLE] = str(settings_for(folder, options.shape))
        process = subprocess.Popen(
            [sys.executable, __file__, "--rates", *map(str, options.rates), "--count", str(options.count), "--methods",
             method, "--memory", str(options.memory), "--engine", str(folder)],
            env=env, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith(FOUND):
                print(line, end="", flush=True)
                continue
            message = json.loads(line.removeprefix(FOUND))
            case = f"{options.shape}-load-{message['rate']:g}"
            print(case, method, {k: round(v, 3) for k, v in message["found"].items()}, flush=True)
            add_rows("serving", [row(case, method, name, round(value, 4), UNITS[name.rpartition("_")[2]],
                                     count=options.count) for name, value in message["found"].items()], options.output)
        if process.wait():
            print(f"{method}: the engine stopped with {process.returncode}", flush=True)


if __name__ == "__main__":
    main()
