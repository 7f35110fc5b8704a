"""RULER answered by a served model: vLLM's own attention, sparsekv's backend, `sparsekv.attach` with equal settings.

    python benchmarks/served_quality.py --model FOLDER --router FOLDER --prompts FILE [--length 16384] [--samples 8]

Needs vLLM (docs/serving.md) and prompts of `benchmarks/quality.py --make-prompts`. A method is a process of its own and
answers one prompt after another, greedily: a step in a batch with a prefill would be full attention. Scores go to
docs/results/served_quality.json, in points, a case a task and their mean, and by how much the backend is above attach,
with the 95 % interval paired by prompt. On one H200 that it shared, with the long-context SmolLM2 and 48 prompts of
16k: 80 s a method, 50 of them vLLM's start.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._rows import RESULTS, add_rows, row
from benchmarks.serving import backend_of, environment
from sparsekv.evaluation.requests import first_of_each, load_requests, score
from sparsekv.evaluation.scores import bootstrap
from sparsekv.serving.settings import VARIABLE

METHODS = ("vllm_fa3", "vllm_sparsekv", "attach")
Answer = Callable[[list[int], int], list[int]]


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """Both served and attached; a small model's 16k would be dense without dense_below."""
    return {"router": str(options.router.resolve()), "token_budget": options.budget, "candidates": options.candidates,
            "dense_layers": [0], "dense_below": 0}


def by_vllm(options: argparse.Namespace) -> Answer:
    from vllm import LLM, SamplingParams

    longest = options.length + 192
    more: dict[str, Any] = {"dtype": "float32", "enforce_eager": True}
    if torch.cuda.is_available():
        more = {"dtype": "bfloat16", "attention_config": backend_of(options.method), "gpu_memory_utilization": 0.15,
                "compilation_config": {"cudagraph_capture_sizes": [1]}}
    engine = LLM(model=str(options.model), skip_tokenizer_init=True, max_model_len=longest, max_num_seqs=1,
                 max_num_batched_tokens=longest, num_gpu_blocks_override=-(-longest // 16) + 16, block_size=16,
                 enable_prefix_caching=False, seed=0, **more)

    def answer(prompt: list[int], limit: int) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=limit, detokenize=False, stop_token_ids=[options.end])
        return list(engine.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0].outputs[0].token_ids)

    return answer


def by_attach(options: argparse.Namespace) -> Answer:
    from transformers import AutoModelForCausalLM

    import sparsekv

    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).to(device).eval()
    sparsekv.attach(model, **settings_of(options)).__enter__()

    def answer(prompt: list[int], limit: int) -> list[int]:
        ids = torch.tensor([prompt], device=device)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, do_sample=False,
                             eos_token_id=options.end, pad_token_id=options.end)
        return out[0, len(prompt):].tolist()

    return answer


def measure(options: argparse.Namespace) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    options.end = tokenizer.eos_token_id
    answer = (by_attach if options.method == "attach" else by_vllm)(options)
    found: dict[str, list[float]] = {}
    every = load_requests(options.prompts)
    for request in first_of_each(every, options.samples, [options.length], options.tasks or ()):
        text = tokenizer.decode(answer(request.tokens(tokenizer), request.answer_tokens), skip_special_tokens=True)
        found.setdefault(request.task, []).append(100 * score(request, text))
    options.found.write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--router", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--length", type=int, default=16_384)
    parser.add_argument("--samples", type=int, default=8, help="prompts of every task")
    parser.add_argument("--tasks", type=lambda text: text.split(","), help="only these")
    parser.add_argument("--budget", type=float, default=0.02)
    parser.add_argument("--candidates", type=float, default=0.1)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--method", help=argparse.SUPPRESS)
    parser.add_argument("--found", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.method is not None:
        measure(options)
        return
    every: dict[str, dict[str, list[float]]] = {}
    for method in options.methods:
        with tempfile.TemporaryDirectory() as place:
            found, settings = Path(place) / "found.json", Path(place) / "settings.json"
            settings.write_text(json.dumps(settings_of(options)))
            env = environment()
            if method == "vllm_sparsekv":
                env[VARIABLE] = str(settings)
            done = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--method", method, "--found", str(found)],
                                  env=env, check=False)
            if done.returncode:
                print(f"{method}: the process stopped with {done.returncode}", flush=True)
                continue
            every[method] = scores = json.loads(found.read_text())
        means = {f"{task}@{options.length}": statistics.mean(s) for task, s in scores.items()}
        means[f"ruler@{options.length}"] = statistics.mean(means.values())
        print(method, {case: round(mean, 1) for case, mean in means.items()}, flush=True)
        add_rows("served_quality", [
            row(case, method, "score", round(mean, 2), "points", budget=options.budget, samples=options.samples)
            for case, mean in means.items()], options.output)
    method, other = "vllm_sparsekv", "attach"
    if {method, other} <= set(every):
        pairs = [[a - b for a, b in zip(scores, every[other][task], strict=True)]
                 for task, scores in every[method].items()]
        low, high = bootstrap(pairs)
        mean = statistics.mean(statistics.mean(task) for task in pairs)
        print(f"{method} above {other}: {mean:.2f} points, {low:.2f} to {high:.2f}", flush=True)
        add_rows("served_quality", [row(f"ruler@{options.length}", method, "difference", round(mean, 2), "points",
                                        against=other, budget=options.budget, low=round(low, 2),
                                        high=round(high, 2), samples=options.samples)], options.output)


if __name__ == "__main__":
    main()
