"""A prefix that is read once and asked again: seconds to the first token of a question over it.

    python benchmarks/prefix.py [--cases coder-128k 8b-128k] [--model FOLDER] [--artifacts DIR] [--folder DIR]

The question is read sparsely, by the index. `held`: the prefix is in GPU memory, with its index, and forked; `loaded`:
it comes from a file of `save_prefix`, whose pages the system may hold; `read`: the prompt is read anew, and the index
made. Each ends with the first token of the answer.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sparsekv
from benchmarks._rows import RESULTS, add_rows, row
from benchmarks.generate import artifacts, by_model, prompts, timed
from sparsekv.artifacts.fingerprint import model_fingerprint
from sparsekv.artifacts.phi import PhiArtifact
from sparsekv.artifacts.router import RouterArtifact
from sparsekv.runtime.hf.plan import RunOptions

CASES = {"coder-32k": ("coder", 32_768), "coder-128k": ("coder", 131_072), "8b-128k": ("8b", 131_072),
         "tiny-4k": ("tiny", 4096)}
QUESTION, RUNS, CHUNK = 64, 5, 32_768
ROWS: list[dict[str, Any]] = []


def measure(case: str, model: Any, options: argparse.Namespace) -> None:
    length = CASES[case][1]
    ids = prompts(model, None, 1, length + QUESTION, str(model.device))
    if options.artifacts is not None:
        router, phi = RouterArtifact.load(options.artifacts / "router"), PhiArtifact.load(options.artifacts / "phi")
    else:
        router, phi = artifacts(model_fingerprint(model))
    question = ids[:, length:]
    for name, completion in (("sketch", "none"), ("sketch+phi", "phi")):
        with (tempfile.TemporaryDirectory(dir=options.folder) as folder,
              sparsekv.attach(model, router=router, phi=phi, completion=completion, selector="sketch",
                              token_budget=0.01, dense_below=0, run=RunOptions(sparse_chunks=True)) as attachment):
            file = Path(folder) / "prefix.safetensors"
            prefix = attachment.prefill(ids[:, :length], chunk_size=CHUNK)
            attachment.save_prefix(prefix, file)
            del prefix
            held = attachment.load_prefix(file)

            def first(cache: Any) -> torch.Tensor:
                return attachment.generate(question, cache=cache, max_new_tokens=1)

            works: dict[str, tuple[Callable[[], Any], int]] = {
                "held": (lambda: first(held.fork()), RUNS),  # noqa: B023
                "loaded": (lambda: first(attachment.load_prefix(file)), 2),  # noqa: B023
                "read": (lambda: first(attachment.prefill(ids[:, :length], chunk_size=CHUNK)), 2)}
            ROWS.append(row(case, name, "file_gb", round(file.stat().st_size / 1e9, 3), "GB"))
            for how, (work, runs) in works.items():
                work()
                seconds = statistics.median(timed(work, ids) for _ in range(runs))
                ROWS.append(row(case, name, f"first_token_{how}_s", round(seconds, 4), "seconds"))
                print(f"{case} {name} {how}: first token after {seconds:.3f} s", flush=True)
        add_rows("prefix", ROWS, options.output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["coder-128k"])
    parser.add_argument("--model", help="the model of the cases coder-*: a folder or a GGUF file")
    parser.add_argument("--artifacts", type=Path, help="a folder of router/ and phi/; without it random ones")
    parser.add_argument("--folder", help="where the file of the prefix is written, best in memory")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    by_model(options.cases, CASES, options.model, device, lambda case, model, _: measure(case, model, options))


if __name__ == "__main__":
    main()
