"""Run by test_restart.py in a process of its own, which is killed or joined with others: one tiny capture.

Arguments: output, number of documents, devices and, to be refused first, a folder of something else; or `kill`, folder,
number of documents, kills. Where the variable FULL_AT names a document, the disk is full when it is written."""

import hashlib
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from test_families import FAMILIES, SIZES, Words
from transformers import AutoModelForCausalLM

from sparsekv.capture.run import CaptureConfig, run_capture
from sparsekv.capture.store.shard import ShardWriter
from sparsekv.util.errors import SparseKVError


def tiny():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config, extra = FAMILIES["llama"]
    return AutoModelForCausalLM.from_config(config(**{**SIZES, **extra})).eval()


def capture(model, output: str, documents: int, devices: int = 1) -> None:
    run_capture(CaptureConfig(
        model="tiny", corpus="embedded", output=output, context_length=400, num_documents=documents,
        queries_per_document=40, chunk_size=150, device="cpu", devices=devices),
        model=model, tokenizer=Words())


def bytes_of(folder: Path) -> dict[str, str]:
    return {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest()
            for f in sorted(folder.rglob("*")) if f.is_file()}


def run_forked(make: Callable[[Path], Any], out: Path, kill_after: float | None) -> tuple[bool, float]:
    """Make something in a fork (imports and threads stay behind); whether it came to its end, and how long it took."""
    began = time.perf_counter()
    child = os.fork()
    if child == 0:
        try:
            quiet = os.open(out.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            make(out)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status) and status:
        sys.exit(f"{out.name}: {out.with_suffix('.log').read_text()[-1500:]}")
    return not os.WIFSIGNALED(status), time.perf_counter() - began


def kill(folder: Path, documents: int, kills: int) -> None:
    model, draw, killed = tiny(), random.Random(0), 0

    def make(output: Path) -> None:
        capture(model, str(output), documents)

    run_forked(lambda output: capture(model, str(output), 1), folder / "warm", None)
    _, took = run_forked(make, folder / "one", None)
    rounds = 0
    while killed < kills:
        rounds += 1
        output = folder / f"cut{rounds}"
        ended = False
        while not ended:
            ended, _ = run_forked(make, output, draw.uniform(0, 0.6 * took) if killed < kills else None)
            killed += not ended
            if (output / "manifest.json").exists() and '"complete": true' in (output / "manifest.json").read_text():
                break
        assert bytes_of(output) == bytes_of(folder / "one"), f"{output} differs"
    print(f"ok: {killed} kills in {rounds} stores")


def main() -> None:
    if sys.argv[1] == "kill":
        return kill(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    if full := os.environ.get("FULL_AT"):
        original = ShardWriter.write

        def write(shard: ShardWriter, *args: object, **kwargs: object) -> None:
            if full in str(shard.file):
                raise OSError(28, "No space left on device")
            original(shard, *args, **kwargs)

        ShardWriter.write = write
    output, documents, devices, *refused = sys.argv[1:]
    for folder in refused:
        try:
            capture(tiny(), folder, int(documents), int(devices))
        except SparseKVError as error:
            print(f"refused: {error}", flush=True)
    capture(tiny(), output, int(documents), int(devices))


if __name__ == "__main__":
    main()
