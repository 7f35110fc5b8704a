"""RULER answered by a served model: vLLM's own attention, sparsekv's backend as it is by default, `sparsekv.attach`.

    python benchmarks/served_quality.py --model FOLDER --artifacts FOLDER --prompts FILE --name coder-1.5b
        [--lengths 16384 30000] [--budgets 0.01 0.02] [--samples 25] [--side-by-side] [--minutes 4]

Needs vLLM (docs/serve.md) and prompts of `benchmarks/quality.py --make-prompts`. Served and attached are given the
artifacts of one `sparsekv train`, a budget, and that no context is too short, since a small model's 16k would be
attended to fully; all else is what both have by default. A method with a budget is a process of its own and answers one
prompt after another, greedily, the first of every task before the second. vLLM's own attention has no budget and
answers once. With two devices `--side-by-side` runs two methods at the same time, a device each. `--minutes` ends a
process early. What counts are rounds in which every task was answered, and what is compared those that both have.
With `--answers` a run goes on where an earlier one with that folder stopped, and with `--minutes 0` only counts.

Scores go to the rows of `served_quality`, in points, cases `NAME:TASK@LENGTH` and their mean `NAME:ruler@LENGTH`,
with by how much the backend is above attach and above vLLM's own, with the 95 % interval paired by prompt; and of every
method and length the median time of a step, `token_ms`, of these very answers. On one H100, expected: a minute to
start, then 0.5 s a prompt of 16k and 1 s of 30k: of 325 prompts 4 and 8 minutes a method and budget.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._rows import RESULTS, add_rows, row
from benchmarks.generate import Clock
from benchmarks.serving import backend_of, environment
from sparsekv.evaluation.requests import SUITES, Question, first_of_each, load_requests, score
from sparsekv.evaluation.scores import bootstrap
from sparsekv.runtime.vllm.settings import VARIABLE

METHODS = ("vllm_fa3", "vllm_sparsekv", "attach")
Answer = Callable[[list[int], int], tuple[list[int], list[float]]]
"""From a prompt and the most tokens: those of the answer, and when each was there [s]."""


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """Both served and attached."""
    return {"token_budget": options.budget, "dense_below": 0}


def by_vllm(options: argparse.Namespace) -> Answer:
    from vllm import LLM, SamplingParams

    longest = max(options.lengths) + 192
    more: dict[str, Any] = {"dtype": "float32", "enforce_eager": True}
    if torch.cuda.is_available():
        more = {"dtype": "bfloat16", "attention_config": backend_of(options.method), "gpu_memory_utilization": 0.15,
                "compilation_config": {"cudagraph_capture_sizes": [1]}}
    engine = LLM(model=str(options.model), skip_tokenizer_init=True, max_model_len=longest, max_num_seqs=1,
                 max_num_batched_tokens=longest, num_gpu_blocks_override=-(-longest // 16) + 16, block_size=16,
                 enable_prefix_caching=False, seed=0, **more)

    def answer(prompt: list[int], limit: int) -> tuple[list[int], list[float]]:
        params = SamplingParams(temperature=0, max_tokens=limit, detokenize=False, stop_token_ids=[options.end])
        inner, said, times = engine.llm_engine, [], []
        inner.add_request("0", {"prompt_token_ids": prompt}, params)
        while inner.has_unfinished_requests():
            for out in inner.step():
                said = list(out.outputs[0].token_ids)
            times += [time.perf_counter()] * (len(said) - len(times))
        return said, times

    return answer


def by_attach(options: argparse.Namespace) -> Answer:
    from transformers import AutoModelForCausalLM

    import sparsekv

    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).to(device).eval()
    attachment = sparsekv.attach(model, artifacts=str(options.artifacts), **settings_of(options)).__enter__()

    def answer(prompt: list[int], limit: int) -> tuple[list[int], list[float]]:
        ids, clock = torch.tensor([prompt], device=device), Clock(streams=True)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, do_sample=False,
                             eos_token_id=options.end, pad_token_id=options.end, streamer=clock)
        attachment.check_in_force("the method")
        return out[0, len(prompt):].tolist(), clock.times

    return answer


def asked(options: argparse.Namespace) -> list[tuple[int, Question]]:
    """The prompts with their rounds, the first of every task and length before the second."""
    chosen = first_of_each(load_requests(options.prompts), options.samples, options.lengths, options.tasks)
    counts: dict[str, int] = {}
    rounds = []
    for request in chosen:
        counts[request.case] = counts.get(request.case, 0) + 1
        rounds.append((counts[request.case], request))
    return sorted(rounds, key=lambda x: (x[0], x[1].length))


def answers_file(options: argparse.Namespace, method: str, budget: float) -> Path:
    """Where a method's answers are kept, a line each."""
    return options.answers / f"{options.name}-{method}-{budget:g}.jsonl"


def answered(path: Path) -> list[dict[str, Any]]:
    """Of every answer case, round, score and times of steps [ms]; a line that was cut is none."""
    lines = path.read_text().split("\n") if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def whole(answers: list[dict[str, Any]], tasks: set[str]) -> dict[str, dict[int, float]]:
    """Scores by case and round, of the rounds that all tasks of that length have."""
    scores: dict[str, dict[int, float]] = {case: {} for case in sorted(tasks)}
    for found in answers:
        if found["case"] in tasks:
            scores[found["case"]][found["round"]] = found["score"]
    full: dict[str, dict[int, float]] = {}
    for case in scores:
        beside = [set(rounds) for other, rounds in scores.items() if other.partition("@")[2] == case.partition("@")[2]]
        full[case] = {i: scores[case][i] for i in sorted(set.intersection(*beside))}
    return {case: rounds for case, rounds in full.items() if rounds}


def measure(options: argparse.Namespace) -> None:
    """One method, in this process: a line an answer."""
    from transformers import AutoTokenizer

    path = answers_file(options, options.method, options.budget)
    known = {(x["case"], x["round"]) for x in answered(path)}
    requests = [(i, request) for i, request in asked(options) if (request.case, i) not in known]
    if not requests:
        return
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    options.end = tokenizer.eos_token_id
    answer = (by_attach if options.method == "attach" else by_vllm)(options)
    began, last = time.monotonic(), (0, 0)
    with path.open("a", encoding="utf-8") as file:
        for i, request in requests:
            if last != (i, request.length) and time.monotonic() - began > 60 * options.minutes:
                print(f"{options.method}: ends after {options.minutes:g} minutes", flush=True)
                break
            last = i, request.length
            said, times = answer(request.tokens(tokenizer), request.answer_tokens)
            text = tokenizer.decode(said, skip_special_tokens=True)
            steps = [round(1e3 * (b - a), 3) for a, b in pairwise(times[1:])]
            print(json.dumps({"case": request.case, "round": i, "score": 100 * score(request, text), "steps": steps}),
                  file=file, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--artifacts", type=Path, required=True, help="folder of `sparsekv train`")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--name", required=True, help="what the model is called in the rows")
    parser.add_argument("--lengths", nargs="+", type=int, default=[16_384, 30_000])
    parser.add_argument("--samples", type=int, default=25, help="prompts of every task")
    parser.add_argument("--tasks", type=lambda text: text.split(","), default=SUITES["ruler"], help="only these")
    parser.add_argument("--minutes", type=float, default=60.0, help="of answers, for every method and budget")
    parser.add_argument("--answers", type=Path, help="a folder that keeps the answers, so that another run goes on")
    parser.add_argument("--side-by-side", action="store_true", help="two methods at the same time, a device each")
    parser.add_argument("--budgets", nargs="+", type=float, default=[0.01, 0.02])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--method", help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.method is not None:
        measure(options)
        return
    with tempfile.TemporaryDirectory() as place:
        options.answers = options.answers or Path(place)
        options.answers.mkdir(parents=True, exist_ok=True)
        _run(options)


def _run(options: argparse.Namespace) -> None:
    """All methods, then the differences."""
    jobs = [("vllm_fa3", 1.0)] if "vllm_fa3" in options.methods else []
    jobs += [(method, budget) for budget in options.budgets for method in options.methods if method != "vllm_fa3"]
    devices: SimpleQueue[int | None] = SimpleQueue()
    places = list(range(torch.cuda.device_count())) if options.side_by_side else [None]
    for place in places:
        devices.put(place)
    with ThreadPoolExecutor(len(places)) as pool:
        found: dict[tuple[str, float], Future[Any]] = {
            job: pool.submit(_in_a_process, *job, options, devices) for job in jobs}
        for budget in options.budgets:
            served = found.get(("vllm_sparsekv", budget))
            for other in (("attach", budget), ("vllm_fa3", 1.0)):
                if served is not None and other in found and served.result() and found[other].result():
                    _compare(served.result(), found[other].result(), other[0], budget, options)


def _in_a_process(
    method: str, budget: float, options: argparse.Namespace, devices: SimpleQueue[int | None],
) -> dict[str, dict[int, float]]:
    """Scores by `TASK@LENGTH` and round, whose rows are written; of what it answered, if the process stopped."""
    device = devices.get()
    with tempfile.TemporaryDirectory() as place:
        settings = Path(place) / "settings.json"
        settings.write_text(json.dumps({"artifacts": str(options.artifacts.resolve()), "token_budget": budget,
                                        "dense_below": 0}))
        env = environment(method)
        if method == "vllm_sparsekv":
            env[VARIABLE] = str(settings)
        if device is not None:
            env["CUDA_VISIBLE_DEVICES"] = str(device)
        if options.minutes:
            done = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--method", method, "--budget",
                                   str(budget), "--answers", str(options.answers)], env=env, check=False)
            if done.returncode:
                print(f"{method}: the process stopped with {done.returncode}", flush=True)
        devices.put(device)
    answers = answered(answers_file(options, method, budget))
    scores = whole(answers, {request.case for _, request in asked(options)})
    rows = []
    for length in options.lengths:
        own = {case: list(s.values()) for case, s in scores.items() if case.endswith(f"@{length}")}
        if not own:
            continue
        more = {"samples": min(map(len, own.values()))} | ({} if method == "vllm_fa3" else {"budget": budget})
        means = {case: statistics.mean(s) for case, s in own.items()}
        means[f"ruler@{length}"] = statistics.mean(means.values())
        print(method, budget, {case: round(mean, 1) for case, mean in means.items()}, flush=True)
        rows += [row(f"{options.name}:{case}", method, "score", round(mean, 2), "points", **more)
                 for case, mean in means.items()]
        steps = [x for found in answers if found["round"] in scores.get(found["case"], ())
                 and found["case"].endswith(f"@{length}") for x in found["steps"]]
        if steps:
            rows.append(row(f"{options.name}:ruler@{length}", method, "token_ms", round(statistics.median(steps), 3),
                            "milliseconds", **more))
    add_rows("served_quality", rows, options.output)
    return scores


def _compare(
    served: dict[str, dict[int, float]], scores: dict[str, dict[int, float]], other: str, budget: float,
    options: argparse.Namespace,
) -> None:
    """By how much the backend is above another method, paired by prompt."""
    for length in options.lengths:
        # `--minutes` may have ended one of the two earlier
        pairs = [[mine[i] - scores[case][i] for i in mine if i in scores[case]] for case, mine in served.items()
                 if case.endswith(f"@{length}") and case in scores]
        if not pairs or not all(pairs):
            continue
        low, high = bootstrap(pairs)
        mean = statistics.mean(statistics.mean(task) for task in pairs)
        print(f"{budget:g} of {length}: vllm_sparsekv above {other}: {mean:.2f} points, {low:.2f} to {high:.2f}",
              flush=True)
        add_rows("served_quality", [row(
            f"{options.name}:ruler@{length}", "vllm_sparsekv", f"above_{other}", round(mean, 2), "points",
            budget=budget, low=round(low, 2), high=round(high, 2), samples=min(map(len, pairs)))], options.output)


if __name__ == "__main__":
    main()
