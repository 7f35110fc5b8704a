"""Log-likelihoods of given answers by sparse steps: how multiple choice is judged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch


@torch.inference_mode()
def likelihoods(model: Any, cache: Any, last: int, answers: Iterable[Sequence[int]]) -> Iterator[tuple[float, bool]]:
    """Judge continuations of a context, all tokens of one in a pass, each over a copy of the cache.

    Args:
        model: with sparse decoding attached, `RunOptions(sparse_chunks=True)`; without it the passes are dense.
        cache: of the context without its last token.
        last: the context's last token.
        answers: token ids, at least one each.

    Yields:
        The log-likelihood of every answer [nats], and whether it is the greedy one.
    """
    for answer in answers:
        ids = torch.tensor([[last, *answer[:-1]]], device=model.device)
        logits = model(ids, past_key_values=cache.fork()).logits[0].float().log_softmax(-1)
        wanted = torch.tensor(answer, device=logits.device)
        greedy = bool((logits.argmax(-1) == wanted).all())
        yield float(logits.gather(1, wanted[:, None]).sum()), greedy
