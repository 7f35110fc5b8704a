"""Many prompts at once: each prefilled once, all kept as one left-padded cache, answered by method after method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsekv.runtime.hf.attach import Attachment
from sparsekv.runtime.hf.cache import SparseCache, SparseLayer
from sparsekv.runtime.hf.padded import allocate, own, put
from sparsekv.util.errors import SparseKVError

CHECK_EVERY = 8


def all_sparse(cache: SparseCache) -> bool:
    """Return whether every layer has full attention: only such caches are padded together and cropped back."""
    return all(isinstance(layer, SparseLayer) for layer in cache.layers)


@dataclass
class AnswerBatch:
    """Prompts but for their last token in a cache of B left-padded rows; `last [B, 1]` is that token.

    Decoding begins with the last prompt token, so that every token of an answer comes from sparse attention. The cache
    is cropped back afterwards, so nothing of the prefill is ever copied (that of a model with sliding-window layers,
    which cannot be cropped, is forked).
    """

    cache: SparseCache
    last: Tensor
    lengths: Tensor
    """Tokens of every prompt in the cache, `[B]`."""

    @property
    def width(self) -> int:
        return self.cache.get_seq_length()

    def begin(self) -> AnswerBatch:
        """Return what a method decodes with; `restore` follows."""
        return self if all_sparse(self.cache) else AnswerBatch(self.cache.fork(), self.last, self.lengths)

    def rows(self, index: Tensor) -> AnswerBatch:
        """A copy of the chosen rows."""
        cache = self.cache.fork()
        cache.batch_select_indices(index)
        own(self.cache)
        return AnswerBatch(cache, self.last[index], self.lengths[index])

    def restore(self, width: int, keeps: bool = False) -> None:
        """Go back to the prefill's end: forget what was decoded and, unless it `keeps` that, what a method built."""
        if all_sparse(self.cache):
            self.cache.crop(width)
            if not keeps:
                self.drop_states()

    def drop_states(self) -> None:
        """Free what a method built, and the graph that holds on to it."""
        self.cache.plan = None
        for layer in self.cache.layers:
            layer.state = None  # type: ignore[union-attr]


@torch.inference_mode()
def prefill_batch(attachment: Attachment, prompts: Sequence[Sequence[int]], *, room: int) -> AnswerBatch:
    """Prefill prompts (token ids, at least two each) one by one, without padding, into one batch with space for `room`
    more tokens a row. Raises SparseKVError for several prompts and a model with sliding-window layers."""
    device = next(attachment.model.parameters()).device
    lengths = [len(p) - 1 for p in prompts]
    if min(lengths, default=0) < 1:
        raise SparseKVError("a prompt needs at least two tokens")
    width = max(lengths)
    batch = attachment.cache()
    if len(prompts) > 1 and not all_sparse(batch):
        raise SparseKVError("answering in batches needs full attention in every layer; prefill one prompt at a time")
    for row, prompt in enumerate(prompts):
        one = attachment.prefill(torch.tensor(prompt[:-1], device=device)[None])
        if len(prompts) == 1:
            batch = one
        else:
            if row == 0:
                allocate(batch, one, len(prompts), width, room, min(lengths))
            put(batch, one, row, width)
    last = torch.tensor([[p[-1]] for p in prompts], device=device)
    return AnswerBatch(batch, last, torch.tensor(lengths, device=device))


class Continued(NamedTuple):
    """The tokens of a text that followed a prompt: their losses [nats], the likeliest token in the place of each, and
    logits `[T, V]` on the device."""

    losses: list[float]
    likeliest: list[int]
    logits: Tensor


@torch.inference_mode()
def continue_text(
    attachment: Attachment, batch: AnswerBatch, following: Sequence[int], keeps: bool = False,
) -> Continued:
    """The tokens that follow the batch's one prompt, in one chunk in which every query selects for itself (the
    attachment runs `sparse_chunks`). The batch is as before afterwards, but that it `keeps` what was built over its
    prompt for the same attachment with another budget."""
    width, part = batch.width, batch.begin()
    right = torch.tensor(following, device=batch.last.device)
    given = torch.cat([batch.last, right[None, :-1]], dim=1)
    try:
        logits = attachment.model(given, past_key_values=part.cache, use_cache=True).logits
    finally:
        batch.restore(width, keeps)
    losses = torch.nn.functional.cross_entropy(logits[0].float(), right, reduction="none")
    return Continued(losses.tolist(), logits[0].argmax(-1).tolist(), logits[0])


@torch.inference_mode()
def answer_batch(
    attachment: Attachment, batch: AnswerBatch, limits: Sequence[int], finished: Callable[[int, list[int]], bool],
    keeps: bool = False,
) -> list[list[int]]:
    """Greedy answers of all rows, each of at most `limits[row]` tokens (how many are made beyond `finished` is left
    open). `finished(row, tokens)` is called every few steps, and only then is the device waited for; rows that are
    finished leave the batch when half of it is, unless its step is planned: a graph is made for one batch, and takes
    longer to make than the rows that would leave.

    The batch is as before afterwards, whatever happens, but that it `keeps` what was built over its prompts for the
    same attachment with another budget.
    """
    width, device, longest = batch.width, batch.last.device, max(limits)
    answers: list[list[int]] = [[] for _ in limits]
    active, part = list(range(len(limits))), batch.begin()
    token, done = batch.last, [False] * len(limits)
    mask = (torch.arange(width + longest, device=device) >= width - batch.lengths[:, None]).long()
    made: list[Tensor] = []
    try:
        for step in range(longest):
            logits = next_logits(attachment.model, part, token, mask[:, :width + step + 1], step)
            token = logits.argmax(-1, keepdim=True)
            made.append(token)
            if (step + 1) % CHECK_EVERY and step + 1 not in limits:
                continue
            for row, tokens in zip(active, torch.cat(made, dim=1).tolist(), strict=True):
                answers[row] += tokens[:limits[row] - len(answers[row])]
                done[row] = done[row] or len(answers[row]) >= limits[row] or finished(row, answers[row])
            made, going = [], [i for i, row in enumerate(active) if not done[row]]
            if not going:
                break
            if len(going) <= len(active) // 2 and part.cache.plan is None:
                index, old = torch.tensor(going, device=device), part
                part = old.rows(index)
                old.drop_states()
                token, mask, active = token[index], mask[index], [active[i] for i in going]
    finally:
        batch.restore(width, keeps)
    return answers


def next_logits(model: Any, batch: AnswerBatch, token: Tensor, mask: Tensor, step: int) -> Tensor:
    """One decode step: the `step`-th token `[B, 1]` after the prompts -> logits of the next `[B, V]`. mask
    `[B, width + step + 1]`: 0 where a row is padded."""
    return model(input_ids=token, attention_mask=mask, position_ids=(batch.lengths + step)[:, None],
                 past_key_values=batch.cache, use_cache=True).logits[:, -1]
