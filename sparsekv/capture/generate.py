"""Text that the frozen model writes itself, for windows unlike the corpus (data-free calibration: LLM-QAT, Liu et al.
2023, §3.1; ours starts from any token of the vocabulary and keeps all of the distribution)."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from sparsekv.capture.corpus import GENERATED, TokenWindow
from sparsekv.util.progress import progress

ROWS, LENGTH = 256, 512
Generator = Callable[[Any, int], AbstractContextManager[Callable[[torch.Tensor], torch.Tensor]]]
"""What makes a model write. It is called with the model and with the tokens to make room for. For the time of a `with`
block it gives a function from the next tokens `[B, n]` to logits `[B, 1, V]` of what follows all tokens so far."""


def generated_windows(
    model: Any, tokenizer: Any, generator: Generator, *, length: int, count: int, seed: int = 0, rows: int = ROWS,
    row_length: int = LENGTH,
) -> list[TokenWindow]:
    """`count` windows of `length` tokens sampled from `model` at temperature 1, the same for the same seed, model and
    kind of device.

    `rows` rows of `row_length` tokens are written side by side and packed into windows one after another. A row begins
    with a token drawn evenly from the vocabulary; where the model ends a text, the next begins the same way.
    """
    prefix = list(tokenizer("")["input_ids"])
    body = length - len(prefix)
    row_length = min(row_length, body)
    wanted = math.ceil(count * body / row_length)
    draws = torch.Generator(device=model.get_input_embeddings().weight.device).manual_seed(seed)
    tokens: list[int] = []
    with progress("generate", wanted * row_length, "tokens") as advance:
        for first in range(0, wanted, rows):
            written = _write(model, tokenizer, generator, prefix, min(rows, wanted - first), row_length, draws, advance)
            tokens += written.flatten().tolist()
    return [TokenWindow(prefix + tokens[i * body:(i + 1) * body], (GENERATED,)) for i in range(count)]


@torch.no_grad()
def _write(
    model: Any, tokenizer: Any, generator: Generator, prefix: list[int], rows: int, length: int,
    draws: torch.Generator, advance: Any,
) -> torch.Tensor:
    """`[rows, length]` token ids, none of them special; the model saw `prefix` before each row."""
    device = draws.device
    special = torch.tensor(sorted(set(tokenizer.all_special_ids)), dtype=torch.long, device=device)
    vocabulary = torch.arange(min(len(tokenizer), model.get_input_embeddings().num_embeddings), device=device)
    vocabulary = vocabulary[~torch.isin(vocabulary, special)]

    def begin() -> torch.Tensor:
        return vocabulary[torch.randint(len(vocabulary), (rows, 1), generator=draws, device=device)]

    found = [begin()]
    inputs = torch.cat([torch.tensor(prefix, dtype=torch.long, device=device).expand(rows, -1), found[0]], 1)
    advance(rows)
    with generator(model, inputs.shape[1] + length) as step:
        for _ in range(length - 1):
            logits = step(inputs)[:, -1]
            # columns past the tokenizer's are no tokens
            chance = logits[:, :len(tokenizer)].float().softmax(-1).to(device)
            inputs = torch.multinomial(chance, 1, generator=draws)
            inputs = torch.where(torch.isin(inputs, special), begin(), inputs)
            found.append(inputs)
            advance(rows)
    return torch.cat(found, 1)
