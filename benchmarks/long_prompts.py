"""Prompts whose keys do not fit on the GPU: reading them, and the answer, beside keys on the GPU.

    python benchmarks/long_prompts.py [--cases 8b-128k ...] [--places gpu offload] [--chunk 8192] [--limit GB]
                                      [--tokens 32] [--minutes 10] [--output FOLDER]

The 8B shape of `generate.py` with random weights reads drawn tokens in chunks (`attachment.prefill`) and answers by
sketch + φ at 1 %. `prompt_s`: the prompt; `index_s`: index and summary; `ms`: a token of the answer; `gpu_gb`: most GPU
memory of all that. --limit: torch may take so much of the GPU [GB], as on a smaller card; the method is then
`offload@24`, say. Keys in CPU memory are to be read at 0.8 of the speed of keys on the GPU, at least.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sparsekv
from benchmarks._rows import RESULTS, add_rows, row
from benchmarks.generate import BUDGET, artifacts, make_model, make_room, prompts, timed
from benchmarks.offload import steps
from sparsekv.artifacts.fingerprint import model_fingerprint
from sparsekv.util.errors import SparseKVError

CASES = {"8b-32k": ("8b", 32_768), "8b-128k": ("8b", 131_072), "8b-256k": ("8b", 262_144), "tiny-4k": ("tiny", 4096)}
UNITS = {"prompt_s": "seconds", "index_s": "seconds", "ms": "milliseconds", "gpu_gb": "GB"}
WARM = 8


def measure(model: Any, trained: Any, place: str, ids: torch.Tensor, chunk: int, tokens: int) -> dict[str, float]:
    """One prompt and its answer."""
    with sparsekv.attach(model, router=trained[0], phi=trained[1], selector="sketch", token_budget=BUDGET,
                         dense_below=0, placement=place) as attachment:
        cache = attachment.cache(ids.shape[1] + tokens + WARM + 64)
        found = {"prompt_s": timed(lambda: attachment.prefill(ids[:, :-1], chunk_size=chunk, cache=cache), ids)}
        found["ms"], _ = steps(lambda token: attachment.step(token, cache), ids[:, -1:], tokens, WARM,
                               drawn=model.config.vocab_size)
        report = attachment.report()
        print(f"    {place}: {report['replayed_steps']} steps planned, hit rate {report['hit_rate']}, "
              f"{report['not_replayed']}", flush=True)
        found["index_s"] = report["index_seconds"]
    if ids.is_cuda:
        found["gpu_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["8b-128k"])
    parser.add_argument("--places", nargs="+", choices=("gpu", "offload"), default=["gpu", "offload"])
    parser.add_argument("--chunk", type=int, default=8192, help="tokens of a prompt that are read at once [tokens]")
    parser.add_argument("--limit", type=float, help="what torch may take of the GPU [GB]")
    parser.add_argument("--tokens", type=int, default=32, help="steps that are timed [tokens]")
    parser.add_argument("--minutes", type=float, default=60.0, help="no measurement is begun after that [min]")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    until = time.monotonic() + 60 * options.minutes
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.limit and device == "cuda":
        torch.cuda.set_per_process_memory_fraction(
            min(1.0, 1e9 * options.limit / torch.cuda.get_device_properties(0).total_memory))
    shape, model, trained = None, None, None
    for case in options.cases:
        if CASES[case][0] != shape:
            shape = CASES[case][0]
            model = make_model(shape, device, None)[0]
            trained = artifacts(model_fingerprint(model))
        ids = prompts(model, None, 1, CASES[case][1], device)
        for place in options.places:
            if time.monotonic() > until:
                print(f"{case} {place}: not begun, the time is over", flush=True)
                continue
            make_room(device)
            method = f"{place}@{options.limit:g}" if options.limit else place
            try:
                found = measure(model, trained, place, ids, options.chunk, options.tokens)
            except (RuntimeError, SparseKVError) as error:
                print(f"{case} {method}: {type(error).__name__} {str(error).splitlines()[0]}", flush=True)
                continue
            add_rows("long_prompts", [row(case, method, name, round(value, 4), UNITS[name], chunk=options.chunk)
                                      for name, value in found.items()], options.output)
            print(case, method, {name: round(value, 3) for name, value in found.items()}, flush=True)


if __name__ == "__main__":
    main()
