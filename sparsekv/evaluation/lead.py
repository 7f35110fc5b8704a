"""The distance to full attention, token by token: every method is led along the same tokens, one decode step each, and
`KL(full ‖ method)` of the next token is averaged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsekv.evaluation.batch import AnswerBatch, next_logits
from sparsekv.runtime.hf.attach import Attachment

TOKENS = 64
"""Tokens of an answer that methods are led along, at most."""


class Reference(NamedTuple):
    """tokens: by row, what methods are led along: full attention's answer, or the text. logs `[B, T, V]` float32: full
    attention's log-probabilities of the next token where each of them stands."""

    tokens: list[list[int]]
    logs: Tensor

    def rows(self, index: Sequence[int]) -> Reference:
        """Those of the chosen rows."""
        whole = list(index) == list(range(len(self.tokens)))
        return self if whole else Reference([self.tokens[i] for i in index], self.logs[list(index)])


class Distance(NamedTuple):
    """One prompt's mean KL to full attention [nats a token], share of its tokens at which the likeliest is full
    attention's, and number of tokens."""

    kl: float
    same: float
    tokens: int


def distances(logs: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """`KL(p ‖ q)` [nats] and whether the likeliest token is the same, from log-probabilities `[..., V]`: `[...]` each.
    A token that p excludes adds nothing."""
    terms = (logs.exp() * (logs - others)).masked_fill(logs == -torch.inf, 0.0)
    return terms.sum(-1), logs.argmax(-1) == others.argmax(-1)


def reference(attachment: Attachment, batch: AnswerBatch, tokens: list[list[int]]) -> Reference:
    """Full attention, attached as `dense`, led along `tokens` (by row, at least one each). The batch stays as it is."""
    made: list[Tensor] = []
    _follow(attachment, batch, tokens, lambda step, logs: made.append(logs), keeps=False)
    return Reference(tokens, torch.stack(made, dim=1))


def lead(attachment: Attachment, batch: AnswerBatch, along: Reference, keeps: bool = False) -> list[Distance]:
    """The distance of what is attached to full attention by row, decode step by decode step, every row given the same
    tokens as full attention. The batch stays as it is, but that it `keeps` what was built over its prompts for the same
    attachment with another budget."""
    kl: list[Tensor] = []
    same: list[Tensor] = []

    def compare(step: int, logs: Tensor) -> None:
        far, equal = distances(along.logs[:, step], logs)
        kl.append(far)
        same.append(equal)

    _follow(attachment, batch, along.tokens, compare, keeps)
    far, equal = torch.stack(kl, dim=1).double().cpu(), torch.stack(same, dim=1).double().cpu()
    return [Distance(float(far[row, :len(t)].mean()), float(equal[row, :len(t)].mean()), len(t))
            for row, t in enumerate(along.tokens)]


def distance_of(logs: Tensor, logits: Tensor) -> Distance:
    """Measure one text whose tokens were read in one chunk, by log-probabilities and logits `[T, V]`."""
    far, equal = distances(logs, logits.float().log_softmax(-1))
    return Distance(float(far.double().mean()), float(equal.double().mean()), len(far))


@torch.inference_mode()
def _follow(
    attachment: Attachment, batch: AnswerBatch, tokens: Sequence[Sequence[int]], each: Callable[[int, Tensor], None],
    keeps: bool,
) -> None:
    """One step a token of the longest row: `each(step, log-probabilities [B, V] float32)`. A row that has ended goes on
    with its last token."""
    width, longest, device = batch.width, max(map(len, tokens)), batch.last.device
    given = torch.tensor([[*t, *[t[-1]] * (longest - len(t))] for t in tokens], device=device)
    fed: Any = torch.cat([batch.last, given[:, :-1]], dim=1)
    mask = (torch.arange(width + longest, device=device) >= width - batch.lengths[:, None]).long()
    part = batch.begin()
    try:
        for step in range(longest):
            logits = next_logits(attachment.model, part, fed[:, step:step + 1], mask[:, :width + step + 1], step)
            each(step, logits.float().log_softmax(-1))
    finally:
        batch.restore(width, keeps)
