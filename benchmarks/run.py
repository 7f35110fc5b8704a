"""All measurements that need a GPU, side by side on the GPUs there are, within a time; run again, it goes on.

    python benchmarks/run.py --output DIR --model MODEL --text TEXT --prompts FILE [--minutes 25] [--only decode ...]
    python benchmarks/run.py --output DIR --collect

MODEL is the long-context model (`examples/train_long_model.py`), TEXT a long text to train on, which has nothing to do
with the tasks, FILE the prompts of `quality.py --make-prompts`. Each job runs alone on a GPU where it times something,
else beside others, and writes into a folder of its own in DIR with a log; DIR/jobs.json says what ended how. After
--minutes nothing is begun and what runs is stopped as by Ctrl-C. --collect puts the rows of all jobs into docs/results,
in place of those of the same case, method, metric and machine; `pages.py` draws the pages.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._rows import RESULTS, SUFFIX, add_rows, read_rows

ROOT = RESULTS.parents[1]
SHARDS = 6
GRACE = 20
"""Seconds that a job has after it was asked to stop."""


@dataclass(frozen=True)
class Job:
    """A command of this Python: `{out}` is its folder, `{dir}` all jobs' folder, the rest is asked of the user.

    share: of a GPU; what times something takes all of it. after: jobs that must have ended well.
    """

    name: str
    command: str
    share: float = 1.0
    after: tuple[str, ...] = ()

    @property
    def asks(self) -> set[str]:
        """What the user must give for it."""
        return {name for name in ("model", "text", "prompts") if f"{{{name}}}" in self.command}


def quality(name: str, length: int, methods: str, more: str = "") -> list[Job]:
    """A table of RULER at a length, in shards that share GPUs; all lengths of a name are one folder of cells."""
    return [Job(f"{name}-{length}-{i}", "benchmarks/quality.py --model {model} --prompts {prompts} "
                f"--router {{dir}}/train/router --phi {{dir}}/train/phi --batch-tokens 200000 --resume "
                f"--lengths {length} --output {{dir}}/{name} --shard {i}/{SHARDS} --methods {methods} {more}",
                1 / SHARDS, ("train",)) for i in range(SHARDS)]


OURS = "full,topk,topk+phi,router,router+phi,sketch,sketch+phi"
GENERATE = ("8b-128k-b1", "8b-512k-b1", "8b-128k-b4", "8b-8k-b1", "8b-32k-b1", "smollm2-8k-b1")


def all_jobs() -> list[Job]:
    """In the order in which they are begun: first what wants a GPU for itself."""
    return [
        Job("decode-steps", "benchmarks/decode.py --profile --output {out}"),
        *[Job(f"serving-{method}-{name}", f"benchmarks/serving.py --methods vllm_{method} --cases {cases} --output "
              "{dir}/serving")
          for name, cases in (("128k", "8b-8k-b1 8b-32k-b1 8b-128k-b1 8b-128k-b4"), ("512k", "8b-512k-b1"),
                              ("b16", "8b-32k-b16"), ("fp8", "8b-128k-b4-fp8"))
          for method in ("sparsekv", "fa3")],
        *[Job(f"generate-{case}", f"benchmarks/generate.py --cases {case} --output {{out}}") for case in GENERATE],
        Job("tests", "-m pytest -m gpu -vv -n 3 --dist worksteal -rf tests", 0.4),
        Job("train", "-m sparsekv train {model} {text} --context-length 32768 --num-documents 24 "
                     "--output {dir}/train", 0.6),
        Job("served-quality", "benchmarks/served_quality.py --model {model} --artifacts {dir}/train --name yardstick "
                              "--prompts {prompts} --lengths 16384 --samples 24 --output {out}", 0.2, ("train",)),
        *quality("quality", 16_384, OURS),
        *quality("quality", 32_768, OURS), *quality("quality", 4096, OURS),
        *quality("worst", 16_384, "full,topk,topk+phi,sketch,sketch+phi",
                 "--samples 8 --accounting worst_case --budgets 0.01,0.02,0.03,0.04,0.05,0.1"),
    ]


@dataclass
class Runner:
    """Runs jobs on GPUs until a time."""

    jobs: Sequence[Job]
    folder: Path
    gpus: Sequence[str]
    values: dict[str, str]
    until: float = math.inf
    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    running: dict[str, tuple[Any, str, float]] = field(default_factory=dict)

    @property
    def notes(self) -> Path:
        return self.folder / "jobs.json"

    def run(self) -> None:
        if self.notes.is_file():
            self.state = json.loads(self.notes.read_text(encoding="utf-8"))
        try:
            while (self.begin() or self.running) and time.monotonic() < self.until:
                time.sleep(0.2)
                self.reap()
        finally:
            self.stop()

    def begin(self) -> bool:
        """Start what there is room for; whether anything is left to start."""
        left = False
        for job in self.jobs:
            if job.name in self.running or self.ended(job.name):
                continue
            if any(self.state.get(a, {}).get("code", 0) != 0 for a in job.after):
                continue
            left = True
            gpu = next((g for g in self.gpus if self.free(g) >= job.share - 1e-9), None)
            if gpu is not None and all(self.ended(a) for a in job.after):
                self.start(job, gpu)
        return left

    def ended(self, name: str) -> bool:
        return self.state.get(name, {}).get("code") is not None

    def free(self, gpu: str) -> float:
        shares = {job.name: job.share for job in self.jobs}
        return 1 - sum(shares[name] for name, (_, on, _) in self.running.items() if on == gpu)

    def start(self, job: Job, gpu: str) -> None:
        out = self.folder / job.name
        out.mkdir(parents=True, exist_ok=True)
        values = {**self.values, "out": str(out), "dir": str(self.folder)}
        threads = max(1, math.floor((os.cpu_count() or 1) / len(self.gpus) * job.share))
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu, "OMP_NUM_THREADS": str(threads),
                       "PYTHONUNBUFFERED": "1", "SPARSEKV_LONG_MODEL": values.get("model", "")}
        with (self.folder / f"{job.name}.log").open("a", encoding="utf-8") as log:
            process = subprocess.Popen([sys.executable, *(w.format(**values) for w in job.command.split())], cwd=ROOT,
                                       env=environment, stdout=log, stderr=log, start_new_session=True)
        self.running[job.name] = process, gpu, time.monotonic()
        print(f"{job.name}: begun on GPU {gpu}", flush=True)

    def reap(self) -> None:
        """Write down what has ended."""
        for name, (process, _, began) in list(self.running.items()):
            if process.poll() is not None:
                del self.running[name]
                self.state[name] = {"code": process.returncode, "seconds": round(time.monotonic() - began)}
                print(f"{name}: {'done' if process.returncode == 0 else f'failed ({process.returncode})'} after "
                      f"{self.state[name]['seconds']} s", flush=True)
                self.notes.write_text(json.dumps(self.state, indent=1) + "\n", encoding="utf-8")

    def stop(self) -> None:
        """Stop what runs, gently first; none of it counts as ended."""
        for sign, patience in ((signal.SIGINT, GRACE), (signal.SIGKILL, 5)):
            for process, _, _ in self.running.values():
                if process.poll() is None:
                    os.killpg(process.pid, sign)
            end = time.monotonic() + patience
            while time.monotonic() < end and any(p.poll() is None for p, _, _ in self.running.values()):
                time.sleep(0.1)
        for name in self.running:
            print(f"{name}: stopped, the next run goes on with it", flush=True)
        self.running.clear()


def collect(folder: Path, results: Path = RESULTS) -> None:
    """The rows of all jobs into the files of their names."""
    for found in sorted(folder.glob(f"*/*{SUFFIX}")):
        print(add_rows(found.name.removesuffix(SUFFIX), read_rows(found), results))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--model", help="folder of the long-context model")
    parser.add_argument("--text", help="text file to train on")
    parser.add_argument("--prompts", help="file of prompts")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin nothing after this time [minutes]")
    parser.add_argument("--only", nargs="+", help="jobs whose names begin so, and what they come after")
    parser.add_argument("--again", nargs="+", default=[], help="jobs whose names begin so though they have ended")
    parser.add_argument("--gpus", help="numbers of the GPUs, with commas; all without it")
    parser.add_argument("--collect", action="store_true", help="only put the rows into docs/results")
    options = parser.parse_args()
    if options.collect:
        return collect(options.output)
    values = {name: str(Path(value).resolve()) for name in ("model", "text", "prompts")
              if (value := getattr(options, name)) is not None}
    jobs = [j for j in all_jobs() if j.asks <= set(values)]
    if options.only:
        chosen = {j.name for j in jobs if j.name.startswith(tuple(options.only))}
        jobs = [j for j in jobs if j.name in chosen | {a for k in jobs if k.name in chosen for a in k.after}]
    if options.gpus is None:
        import torch

        options.gpus = ",".join(map(str, range(torch.cuda.device_count())))
    if not jobs or not options.gpus:
        raise SystemExit(f"{len(jobs)} jobs and GPUs {options.gpus or 'none'}: expected at least one of each; give "
                         "--model, --text and --prompts on a machine with a GPU")
    options.output.mkdir(parents=True, exist_ok=True)
    runner = Runner(jobs, options.output.resolve(), options.gpus.split(","), values,
                    time.monotonic() + 60 * options.minutes)
    if options.again and runner.notes.is_file():
        kept = {n: s for n, s in json.loads(runner.notes.read_text(encoding="utf-8")).items()
                if not n.startswith(tuple(options.again))}
        runner.notes.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    runner.run()
    return None


if __name__ == "__main__":
    main()
