"""The distance to full attention, token by token: every method is led along the same tokens of one prompt, one decode
step each, and `KL(full ‖ method)` of the next token is averaged."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparsekv.evaluation.batch import AnswerBatch, next_logits
from sparsekv.runtime.hf.attach import Attachment

TOKENS = 64
"""Tokens of an answer that methods are led along, at most."""


class Reference(NamedTuple):
    """tokens: what methods are led along: full attention's answer, or the text. logs `[T, V]` float32: full attention's
    log-probabilities of the next token where each of them stands."""

    tokens: list[int]
    logs: Tensor


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


def distance(logs: Tensor, others: Tensor) -> Distance:
    """The distance of one prompt, from log-probabilities `[T, V]`."""
    far, equal = distances(logs, others)
    return Distance(float(far.double().mean()), float(equal.double().mean()), len(far))


def reference(attachment: Attachment, batch: AnswerBatch, tokens: list[int]) -> Reference:
    """Full attention, attached as `dense`, led along `tokens`, at least one. The batch, of one prompt, stays as it
    is."""
    return Reference(tokens, _follow(attachment, batch, tokens, keeps=False))


def lead(attachment: Attachment, batch: AnswerBatch, along: Reference, keeps: bool = False) -> Distance:
    """The distance of what is attached to full attention, decode step by decode step. The batch, of one prompt, stays
    as it is, but that it `keeps` what was built over the prompt for the same attachment with another budget."""
    return distance(along.logs, _follow(attachment, batch, along.tokens, keeps))


@torch.inference_mode()
def _follow(attachment: Attachment, batch: AnswerBatch, tokens: list[int], keeps: bool) -> Tensor:
    """Log-probabilities `[T, V]` float32, one step a token."""
    width = batch.width
    fed = torch.cat([batch.last, batch.last.new_tensor([tokens[:-1]])], dim=1)
    mask = fed.new_ones(1, width + len(tokens))
    made: list[Tensor] = []
    part = batch.begin()
    try:
        for step in range(len(tokens)):
            logits = next_logits(attachment.model, part, fed[:, step:step + 1], mask[:, :width + step + 1], step)
            made.append(logits[0].float().log_softmax(-1))
    finally:
        batch.restore(width, keeps)
    return torch.stack(made)
