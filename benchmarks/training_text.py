"""A text to train artifacts on: prose, program text and records of random identifiers, in turn; nothing of any task.

    python3 benchmarks/training_text.py PROSE OUTPUT [--characters 6000000]

PROSE is any long text (the rows of `quality`: the State of the Union addresses). Program text is Python's own
standard library, records are lines of JSON, CSV and logs with random UUIDs, hashes, numbers and words. Half of the
text is prose, a quarter each of the others. What a router, a sketch or a feature map has never seen keys of it tells
apart badly: text of one kind leaves identifiers out.
"""

from __future__ import annotations

import argparse
import json
import random
import sysconfig
import uuid
from collections.abc import Iterator
from pathlib import Path

PIECE = 6000
"""Characters of a piece of one kind, about."""


def program_text(generator: random.Random) -> str:
    """Python's standard library, its modules in a random order."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    generator.shuffle(files)
    return "\n\n".join(f.read_text(encoding="utf-8", errors="replace") for f in files)


def records(words: list[str], generator: random.Random) -> Iterator[str]:
    """Tables without end, of random kinds and lengths."""
    values = [
        lambda: str(uuid.UUID(int=generator.getrandbits(128), version=4)),
        lambda: f"{generator.getrandbits(64):016x}",
        lambda: str(generator.randrange(10 ** generator.randint(2, 9))),
        lambda: f"{generator.uniform(-1e3, 1e3):.{generator.randint(1, 6)}f}",
        lambda: generator.choice(words),
        lambda: " ".join(generator.choices(words, k=generator.randint(2, 8))),
    ]
    while True:
        names = generator.sample(words, generator.randint(2, 5))
        kinds = generator.choices(values, k=len(names))
        style = generator.choice(["json", "csv", "log"])
        lines = []
        for number in range(generator.randint(5, 60)):
            row = [kind() for kind in kinds]
            if style == "json":
                lines.append(json.dumps(dict(zip(names, row, strict=True))))
            elif style == "csv":
                lines.append(",".join(row))
            else:
                lines.append(f"[{number:05d}] " + " ".join(f"{n}={v}" for n, v in zip(names, row, strict=True)))
        yield "\n".join(lines) + "\n\n"


def mixed_text(prose: str, characters: int) -> str:
    """So many characters of the three kinds in turn."""
    generator = random.Random(0)
    code = program_text(generator)
    words = sorted({w for w in prose.split() if w.isalpha() and w.islower() and len(w) > 3})
    tables = records(words, generator)
    pieces, size = [], 0
    while size < characters:
        table = ""
        while len(table) < PIECE:
            table += next(tables)
        parts = [table]
        for text, count in ((prose, 2), (code, 1)):
            parts += [text[at:at + PIECE] for at in (generator.randrange(max(1, len(text) - PIECE))
                                                     for _ in range(count))]
        generator.shuffle(parts)
        pieces += parts
        size += sum(map(len, parts))
    return "\n\n".join(pieces)[:characters]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prose", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--characters", type=int, default=6_000_000)
    options = parser.parse_args()
    options.output.write_text(mixed_text(options.prose.read_text(encoding="utf-8"), options.characters),
                              encoding="utf-8")
    print(options.output)
