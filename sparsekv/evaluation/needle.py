"""Needle in a haystack: a seven-digit number somewhere in a long text, asked for at its end."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

NEEDLE = "\n\nThe secret number of the lighthouse keeper is {number}. Remember it.\n\n"
QUESTION = "\n\nThe secret number of the lighthouse keeper is"


@dataclass(frozen=True)
class Needle:
    """A prompt of token ids and the number that answers it; `depth` is where it was hidden, from 0 (start) to 1."""

    tokens: list[int]
    number: str
    depth: float


def make_needles(
    tokenizer: Any, filler: list[int], *, length: int, count: int, seed: int = 0,
    depths: Sequence[float] | None = None,
) -> list[Needle]:
    """`count` prompts of `length` tokens, the needle at evenly spread depths of the filler (token ids of any text);
    with `depths`, `count` prompts at each of them."""
    rng = random.Random(seed)
    prompts = []
    spread = [(i + 0.5) / count for i in range(count)] if depths is None else [d for d in depths for _ in range(count)]
    for depth in spread:
        number = str(rng.randrange(1_000_000, 10_000_000))
        needle, question = (tokenizer(t, add_special_tokens=False)["input_ids"]
                            for t in (NEEDLE.format(number=number), QUESTION))
        body = length - len(needle) - len(question)
        offset = rng.randrange(max(1, len(filler) - body + 1))
        hay = (filler[offset:offset + body] + filler)[:body]
        cut = int(depth * body)
        prompts.append(Needle(hay[:cut] + needle + hay[cut:] + question, number, depth))
    return prompts


def found(needle: Needle, answer: str) -> bool:
    """Whether the answer's first run of digits is the number."""
    digits = re.search(r"\d+", answer)
    return digits is not None and digits.group() == needle.number
