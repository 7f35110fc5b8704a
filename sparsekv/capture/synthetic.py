"""Synthetic windows: records, tables, logs, lists of terms, repeated passages and shuffled ones, whose words are
the corpus's own. Feature maps that have only seen running text estimate attention in such contexts badly (ours, not in
the papers; docs/log/maps.md has the errors)."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from sparsekv.capture.corpus import SYNTHETIC, TokenWindow

SAMPLED = 8
"""Windows of the corpus whose words are used."""


def synthetic_windows(
    tokenizer: Any, corpus: Sequence[TokenWindow], *, length: int, count: int, seed: int = 0,
) -> list[TokenWindow]:
    """`count` windows of `length` tokens, the same for the same seed, corpus and tokenizer."""
    made = []
    for index in range(count):
        write = _Writer(tokenizer, corpus[:SAMPLED], random.Random(f"{seed} {index}"))
        tokens = list(tokenizer("")["input_ids"])
        while len(tokens) < length:
            tokens += tokenizer(write.section(), add_special_tokens=False)["input_ids"]
        made.append(TokenWindow(tokens[:length], (SYNTHETIC,)))
    return made


class _Writer:
    """Sections of text of every kind in turn, of words and passages drawn from windows."""

    def __init__(self, tokenizer: Any, windows: Sequence[TokenWindow], draws: random.Random):
        self.tokenizer, self.windows, self.draws = tokenizer, windows, draws
        self.kinds: list[Callable[[], str]] = []

    def section(self) -> str:
        if not self.kinds:
            self.kinds = [self.records, self.table, self.log, self.terms, self.repeated, self.shuffled]
            self.draws.shuffle(self.kinds)
        return self.kinds.pop()() + "\n\n"

    def phrase(self, tokens: int) -> str:
        """So many tokens of the corpus in a row, on one line."""
        window = self.draws.choice(self.windows).tokens
        at = self.draws.randrange(max(1, len(window) - tokens))
        return " ".join(self.tokenizer.decode(window[at:at + tokens], skip_special_tokens=True).split())

    def value(self) -> Any:
        draws = self.draws
        return draws.choice((draws.randrange(10 ** draws.randint(1, 9)), f"{draws.getrandbits(64):x}",
                             round(draws.random(), 4), self.phrase(3)))

    def lines(self, line: Callable[[], str]) -> str:
        return "\n".join(line() for _ in range(self.draws.randint(15, 60)))

    def records(self) -> str:
        names = [self.phrase(2) for _ in range(5)]
        return self.lines(lambda: json.dumps({n: self.value() for n in names}, ensure_ascii=False))

    def table(self) -> str:
        width = self.draws.randint(3, 6)
        head = ",".join(self.phrase(2) for _ in range(width))
        return head + "\n" + self.lines(lambda: ",".join(str(self.value()) for _ in range(width)))

    def log(self) -> str:
        time = self.draws.randrange(10 ** 9)

        def line() -> str:
            nonlocal time
            time += self.draws.randint(1, 90)
            return (f"[{time}] {self.draws.choice(('INFO', 'WARN', 'DEBUG'))} {self.phrase(2)}: {self.phrase(6)} "
                    f"id={self.draws.getrandbits(48):x} in {self.draws.randint(1, 900)} ms")

        return self.lines(line)

    def terms(self) -> str:
        return self.lines(lambda: f"{self.phrase(3)}: {self.draws.choice((self.value(), self.phrase(15)))}")

    def repeated(self) -> str:
        """One passage again and again, another between them now and then."""
        passage = self.phrase(self.draws.randint(20, 80))
        return self.lines(lambda: passage if self.draws.random() < 0.85 else self.phrase(25))

    def shuffled(self) -> str:
        return self.lines(lambda: self.phrase(self.draws.randint(10, 40)))
