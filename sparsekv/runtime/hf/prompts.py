"""What token ids, padding and the end of an answer may be: checked once a call, before anything runs on a device, which
a token out of range would take down."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparsekv.artifacts.checks import brief
from sparsekv.runtime.hf.cache import SparseCache
from sparsekv.runtime.hf.turns import PADDED, is_left
from sparsekv.util.errors import SparseKVError

INTEGERS = (torch.int64, torch.int32)


def vocabulary_of(model: Any) -> int:
    """Tokens that a model embeds."""
    embeds = model.get_input_embeddings()
    return int(getattr(embeds, "num_embeddings", None) or model.config.get_text_config().vocab_size)


def check_ids(ids: Any, vocabulary: int) -> None:
    """Raises SparseKVError for anything but rows of tokens `[B, N]` that the model has; waits for the device."""
    _rows("input_ids", ids)
    if not ids.numel():
        raise SparseKVError(f"the prompt is empty: input_ids are {list(ids.shape)}; give at least one token of every "
                            "row")
    if ids.dtype not in INTEGERS:
        raise SparseKVError(f"input_ids must be whole numbers (torch.long), found {ids.dtype}; give the tokenizer's "
                            "ids as they are")
    low, high = torch.stack(ids.aminmax()).tolist()
    if low < 0 or high >= vocabulary:
        raise SparseKVError(f"input_ids go from {low} to {high}, and the model has tokens 0 to {vocabulary - 1}; use "
                            "the model's own tokenizer")


def check_mask(mask: Any, rows: int, tokens: int, *, held: int = 0, ends: bool = False) -> None:
    """Raises SparseKVError for anything but a mask `[B, held + tokens]`, 1 for a token and 0 for padding. ends: every
    row ends with a token, and without held ones its padding is on the left."""
    _rows("attention_mask", mask)
    tokens += held
    if list(mask.shape) != [rows, tokens]:
        raise SparseKVError(f"attention_mask is {list(mask.shape)}, expected {[rows, tokens]}: one number for every "
                            "token of every row, those in the cache included")
    if mask.is_complex() or not bool(((mask == 0) | (mask == 1)).all()):
        raise SparseKVError("attention_mask has other numbers than 0 and 1; give 1 for a token and 0 for padding")
    if ends and mask.numel() and not (bool(mask[:, -1].all()) and (held or is_left(mask))):
        raise SparseKVError(PADDED)


def positions_of(mask: Tensor) -> Tensor:
    """Positions of tokens by a mask `[B, tokens]`, int64: a padded row counts from its first real token on."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def check_chunk(size: Any) -> None:
    """Raises SparseKVError for anything but a number of tokens, or None."""
    if size is not None and (type(size) is not int or size < 1):
        raise SparseKVError(f"chunk_size must be a whole number of tokens from 1 on, found {brief(size)}; leave it out "
                            "for the prompt at once")


def check_cache_rows(cache: SparseCache, rows: int) -> None:
    """Raises SparseKVError for a cache that holds another number of rows."""
    keys = None if cache.first is None else cache.first.keys
    if isinstance(keys, Tensor) and keys.dim() == 4 and keys.shape[0] != rows:
        raise SparseKVError(f"the cache holds {keys.shape[0]} rows and input_ids have {rows}; give every row of the "
                            "cache its next tokens, or repeat rows by batch_repeat_interleave")


def end_tokens(eos: int | Sequence[int] | Tensor | None) -> list[int]:
    """The tokens that end an answer. Raises SparseKVError."""
    given: Any = eos.flatten().tolist() if isinstance(eos, Tensor) else eos
    listed = [] if given is None else list(given) if isinstance(given, Sequence | set | frozenset) else [given]
    if isinstance(given, str) or any(type(x) is not int or abs(x) >= 2**63 for x in listed):
        raise SparseKVError(f"eos_token_id must be a token's number or a list of some, found {brief(eos)}; give [] for "
                            "an answer that only max_new_tokens ends")
    return listed


def pad_token(pad: Any, rows: int, vocabulary: int) -> int:
    """Check the token that rows are filled with that have ended. Raises SparseKVError."""
    if type(pad) is not int or (rows > 1 and not 0 <= pad < vocabulary):
        raise SparseKVError(f"pad_token_id is {brief(pad)}, and the model has tokens 0 to {vocabulary - 1}; give one "
                            "of them for the rows that end first")
    return pad


def _rows(name: str, x: Any) -> None:
    if not isinstance(x, Tensor) or x.dim() != 2:
        given = f"{list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise SparseKVError(f"{name} must be a tensor of rows and tokens, found {given}")
