"""The lean decoding loop: the host launches the next step before it looks at the last one's token."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from sparsekv.artifacts.checks import brief
from sparsekv.runtime.hf.prompts import positions_of
from sparsekv.util.config import whole
from sparsekv.util.errors import SparseKVError

LIKELIEST = 1e-4
"""Up to this temperature the likeliest token is taken: logits divided by less overflow."""


class Streamer(Protocol):
    """Receiver of an answer while it is made, as transformers' TextStreamer: the prompt's ids come first."""

    def put(self, value: Tensor, /) -> None: ...

    def end(self) -> None: ...


def decode_loop(
    prefill: Callable[..., Tensor], step: Callable[..., Tensor], cache: Any, ids: Tensor, mask: Tensor | None, *,
    max_new_tokens: int, temperature: float, eos: list[int], fill: int, seed: int | None, streamer: Any,
) -> Tensor:
    """Prompt and answer `[B, N + n]`: ids `[B, N]` after what the cache holds, mask `[B, M + N]` of all. eos: what ends
    a row, which then has `fill`. prefill and step take ids, mask, positions `[B, n]` (None: those of the cache) and the
    cache, and give logits `[B, 1, V]`; those of a step may be overwritten by the next."""
    if not isinstance(temperature, int | float) or not 0 <= temperature < math.inf:
        raise SparseKVError(f"temperature must be a finite number from 0 on, found {brief(temperature)}")
    if seed is not None:
        whole("seed", seed, most=2**64 - 1)
    if streamer is not None and not all(callable(getattr(streamer, name, None)) for name in ("put", "end")):
        raise SparseKVError(f"a streamer has `put` and `end`, as transformers' TextStreamer; found "
                            f"{type(streamer).__name__}")
    rows, device = ids.shape[0], ids.device
    ends = torch.tensor(eos, dtype=torch.long, device=device)
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    positions = None if mask is None else positions_of(mask)[:, -ids.shape[1]:]
    if streamer is not None:
        streamer.put(ids.cpu())
    logits = prefill(ids, mask, positions, cache)
    position = None if positions is None else positions[:, -1:] + 1
    ended = torch.zeros(rows, 1, dtype=torch.bool, device=device)
    tokens: list[Tensor] = []
    reader = AsyncTokenReader(device)
    while True:
        token = choose(logits[:, -1], temperature, generator)
        token = torch.where(ended, fill, token)
        tokens.append(token)
        ended = ended | torch.isin(token, ends)
        stop = reader.read(token, ended, streamer)
        if stop or len(tokens) == max_new_tokens:
            break
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(rows, 1)], dim=1)
        logits = step(token, mask, position, cache)
        position = None if position is None else position + 1
    length = reader.finish(streamer)
    if length < len(tokens):
        cache.crop(cache.get_seq_length() - (len(tokens) - length))
    return torch.cat([ids, *tokens[:length]], dim=1)


def step_across(
    border: int, step: Callable[..., Tensor], read: Callable[..., Tensor], ids: Tensor, cache: Any, new: int,
) -> Callable[..., Tensor]:
    """Return the step of an answer that may cross the length past which the model rotates by other factors (longrope):
    there all tokens so far are read anew, as transformers does.

    Args:
        border: that length [tokens].
        step, read: of the attachment, for one token and for several.
        ids: `[B, N]`, the prompt after what the cache holds.
        new: the longest answer [tokens].

    Raises:
        SparseKVError: the tokens of an earlier turn would be read anew and are not known.
    """
    held, parts = cache.get_seq_length(), [ids]
    if 0 < held <= border < held + ids.shape[1] + new - 1:
        raise SparseKVError(f"the cache holds {held} tokens rotated as of a text of up to {border}, and with "
                            f"{ids.shape[1]} more and an answer of {new} the model rotates otherwise (longrope); "
                            "give the whole text in a new cache, or a shorter max_new_tokens")

    def across(token: Tensor, mask: Tensor | None, position: Tensor | None, cache: Any) -> Tensor:
        parts.append(token)
        if held or cache.get_seq_length() != border:
            return step(token, mask, position, cache)
        cache.reset()
        cache.prompt = border + 1
        return read(torch.cat(parts, dim=1), mask, None if mask is None else positions_of(mask), cache)

    return across


def choose(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    """One token of every row, `[B, 1]`: logits `[B, V]`."""
    if temperature <= LIKELIEST:
        return logits.argmax(-1, keepdim=True)
    return torch.multinomial((logits.float() / temperature).softmax(-1), 1, generator=generator)


class AsyncTokenReader:
    """Copies tokens to the host one step behind: on a CUDA device each but the first is read when the next has been
    launched; the first is given out at once."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.waiting: list[tuple[Tensor, Any]] = []
        self.count = 0
        self.all_ended = False

    def read(self, token: Tensor, ended: Tensor, streamer: Any) -> bool:
        """Hand over a step's tokens `[B, 1]` and which rows have ended; whether every row had with a step before (on a
        CPU: with this one)."""
        both, event = torch.cat([token, ended.long()], dim=1), None
        if self.cuda:
            host = torch.empty(both.shape, dtype=both.dtype, pin_memory=True)
            both, event = host.copy_(both, non_blocking=True), torch.cuda.Event()
            event.record()
        self.waiting.append((both, event))
        if not self.cuda or len(self.waiting) > 1 or not self.count:
            self._read(streamer)
        return self.all_ended

    def finish(self, streamer: Any) -> int:
        """The number of tokens of the answer."""
        while self.waiting:
            self._read(streamer)
        if streamer is not None:
            streamer.end()
        return self.count

    def _read(self, streamer: Any) -> None:
        both, event = self.waiting.pop(0)
        if event is not None:
            event.synchronize()
        if self.all_ended:
            return
        self.count += 1
        if streamer is not None:
            streamer.put(both[:, 0])
        self.all_ended = bool(both[:, 1].all())
