"""The attacks of tests/reliability in their long forms: rows of `reliability`, cases and passed by group.

`python benchmarks/reliability.py [GROUP ...]`; without groups all but the soak, an hour on one core. Rows of groups
that are not run stay as they are."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")
sys.path += [str(Path(__file__).resolve().parent.parent / room) for room in (
    "", "tests/reliability", "tests/capture", "tests/trainers", "tests/runtime")]

import attacks
import families
import hostile
import ways

from benchmarks._rows import row, take_over

GROUPS: dict[str, Callable[[Path], attacks.Outcome]] = {
    "flipped bits, every format": lambda folder: attacks.flip_bits(folder, 1100),
    "records with a fitting checksum": lambda folder: attacks.change_records(folder, 6000),
    "safetensors headers": lambda folder: attacks.change_headers(folder, 1500),
    "arguments of attach": lambda folder: attacks.attach_with_anything(1500),
    "families": lambda folder: attacks.Outcome(len(families.FAMILIES), [
        word for name in families.FAMILIES if (word := families.wrong(name))]),
    "ways of running": lambda folder: attacks.Outcome(len(ways.WAYS), [
        word for one in ways.WAYS if (word := ways.wrong(one))]),
    "hostile model files": lambda folder: attacks.Outcome(300, hostile.drawn(
        hostile.sound_model(folder / "sound"), folder, 300, first=1000)),
    "padded batches against unpadded": lambda folder: attacks.pad(1000),
    "interrupts at random moments": lambda folder: attacks.interrupt(2000),
    "sizes beyond all memory": lambda folder: attacks.ask_for_too_much(folder),
    "sizes of commands beyond all memory": lambda folder: attacks.ask_commands_for_too_much(
        folder, (10**9, 2**31 - 1, 10**12, 10**30)),
    "command lines": lambda folder: attacks.type_anything(folder, 800),
    "numbers": lambda folder: attacks.decode_hard_numbers(400),
    "kills at random moments": lambda folder: attacks.kill(folder, 60),
}


def main() -> None:
    for name in sys.argv[1:] or GROUPS:
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            found = GROUPS[name](Path(folder))
        for problem in found.failed:
            print(f"{name}: {problem[:300]}")
        seconds = round(time.perf_counter() - began)
        take_over("reliability", [
            row(name, "attacked", "cases", found.cases, "cases", seed=0, seconds=seconds),
            row(name, "passed", "cases", found.cases - len(found.failed), "cases", seed=0, seconds=seconds)])
        print(f"{name}: {found.cases - len(found.failed)} of {found.cases} passed, {seconds} s", flush=True)


if __name__ == "__main__":
    main()
