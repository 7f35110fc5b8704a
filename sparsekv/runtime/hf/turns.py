"""Turns of a batch that differ in length: the padding before a row's turn comes to lie on the left of all it has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparsekv.util.errors import SparseKVError

PADDED = ("sparse decoding needs left padding, found padding after or between real tokens; set "
          "tokenizer.padding_side = 'left'")
Moves = Sequence[int]
"""By how many places the older tokens of every row of a batch move to the right; empty: none does."""


def is_left(mask: Tensor) -> bool:
    """Return whether the padding of a mask `[B, N]` is all on the left of every row."""
    real = mask.bool()
    return not bool((real[:, :-1] & ~real[:, 1:]).any())


def left_padded(mask: Tensor) -> Tensor:
    """Make a mask `[B, N]` of as many real tokens in every row, its padding on the left."""
    places = torch.arange(mask.shape[1], device=mask.device)
    return (places >= mask.shape[1] - mask.sum(-1, keepdim=True, dtype=torch.long)).to(mask.dtype)


class Turn(NamedTuple):
    """mask `[B, N]` of what the cache holds and the turn, with all of a row's padding on its left; order `[B, n]`: of
    the turn's tokens, padding first, where it is not."""

    mask: Tensor
    moves: Moves = ()
    order: Tensor | None = None


def turn_of(mask: Tensor, held: int, moved: bool) -> Turn:
    """Find the turn after `held` tokens, mask `[B, N]` of both as transformers has it. moved: the cache has moved rows.
    Raises SparseKVError for padding at the end of a row, or between tokens that the cache holds."""
    if not moved and is_left(mask):
        return Turn(mask)
    before, turn = mask[:, :held], mask[:, held:].bool()
    if not bool((turn[:, -1] | ~turn.any(-1)).all()) or not (moved or is_left(before)):
        raise SparseKVError(PADDED)
    padding: list[int] = (~turn).sum(-1).tolist()
    return Turn(left_padded(mask), padding if any(padding) else (),
                None if is_left(turn) else turn.int().argsort(dim=1, stable=True))


def move(x: Tensor, moves: Moves, new: int) -> None:
    """Move the tokens of every row `[B, ..., N, d]` but the last `new`; what is left behind is padding."""
    held = x.shape[-2] - new
    for row, by in enumerate(moves):
        if by:
            x[row, ..., by:held + by, :] = x[row, ..., :held, :].clone()
