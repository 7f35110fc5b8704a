"""The two tasks that need no lm-eval, made from any text: a number hidden in it, and windows to be continued."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

from sparsekv.capture.corpus import make_windows, read_documents
from sparsekv.evaluation.requests import Question
from sparsekv.util.errors import SparseKVError
from sparsekv.util.memory import check_memory

NEEDLE = "\n\nThe secret number of the lighthouse keeper is {number}. Remember it.\n\n"
QUESTION = "\n\nThe secret number of the lighthouse keeper is"
ANSWER_TOKENS = 10
CONTINUATION = 64
"""Tokens at the end of a window that are scored given all before."""
SPARE_TOKENS = 8192
"""How much longer than a prompt the text is that needles are hidden in."""


def check_prompts(lengths: Sequence[int], samples: int) -> None:
    """Raises SparseKVError for prompts that the machine could not hold, even as one number a token."""
    tokens = samples * sum(lengths)
    check_memory(8 * tokens, "cpu", f"{samples} prompts of every length ({', '.join(map(str, lengths))} tokens)",
                 "ask for fewer or shorter ones")


def own_requests(
    tasks: Iterable[str], tokenizer: Any, *, corpus: str, split: str, lengths: Sequence[int], samples: int,
    depths: Sequence[float] | None, seed: int,
) -> list[Question]:
    """`samples` needles (with `depths` at each of them) and windows of every length. Raises SparseKVError for a corpus
    that cannot be read or is too short for the windows."""
    made: list[Question] = []
    if "needle" in tasks:
        text = _tokens(corpus, split, tokenizer, max(lengths) + SPARE_TOKENS)
        for length in lengths:
            made += make_needles(tokenizer, text, length=length, count=samples, depths=depths, seed=seed)
    if "perplexity" in tasks:
        for length in lengths:
            windows = make_windows(read_documents(corpus, split=split), tokenizer, length=length, count=samples,
                                   seed=seed, remedy="smaller --lengths or --samples")
            made += continuations([w.tokens for w in windows])
    return made


def continuations(
    windows: Sequence[Sequence[int]], *, task: str = "perplexity", tail: int = CONTINUATION,
) -> list[Question]:
    """A request a window of token ids: perplexity, attention error and selectivity over its last `tail` tokens. A task
    of another name begins with `perplexity_`."""
    return [Question(task, len(tokens), index, list(tokens), [], "continuation", min(tail, len(tokens) // 2), [])
            for index, tokens in enumerate(windows)]


def spread_windows(tokens: Sequence[int], length: int, count: int) -> list[list[int]]:
    """`count` windows of `length` tokens, evenly spread over a text. Raises SparseKVError for one that is too short."""
    if len(tokens) < length:
        raise SparseKVError(f"the text has {len(tokens)} tokens; expected at least {length}, those of a window")
    step = (len(tokens) - length) / max(count - 1, 1)
    return [list(tokens[first:first + length]) for first in (round(i * step) for i in range(count))]


def make_needles(
    tokenizer: Any, text: Sequence[int], *, length: int, count: int, seed: int = 0,
    depths: Sequence[float] | None = None,
) -> list[Question]:
    """`count` prompts of `length` tokens, a seven-digit number hidden at evenly spread depths of a stretch of the text
    (token ids) and asked for at the end; with `depths`, `count` prompts at each of them."""
    rng = random.Random(seed)
    prefix = list(tokenizer("")["input_ids"])
    made = []
    spread = [(i + 0.5) / count for i in range(count)] if depths is None else [d for d in depths for _ in range(count)]
    for index, depth in enumerate(spread):
        number = str(rng.randrange(1_000_000, 10_000_000))
        needle, question = (list(tokenizer(t, add_special_tokens=False)["input_ids"])
                            for t in (NEEDLE.format(number=number), QUESTION))
        body = length - len(prefix) - len(needle) - len(question)
        first = rng.randrange(max(1, len(text) - body + 1))
        stretch = list(text[first:first + body])
        while len(stretch) < body:
            stretch += text[:body - len(stretch)]
        cut = int(depth * body)
        made.append(Question("needle", length, index, prefix + stretch[:cut] + needle + stretch[cut:] + question,
                            [number], "first_number", ANSWER_TOKENS, [], depth=round(depth, 3)))
    return made


def _tokens(corpus: str, split: str, tokenizer: Any, count: int) -> list[int]:
    """The first tokens of a corpus, at most `count`."""
    found: list[int] = []
    for document in read_documents(corpus, split=split):
        for ids in document.tokens(tokenizer, "\n\n"):
            found += ids
            if len(found) >= count:
                return found[:count]
    return found
