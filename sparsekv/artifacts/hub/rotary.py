"""Rotary tables that depend on how long a text is: RoPE types dynamic and longrope."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from sparsekv.artifacts.hub.models import decoder


def _parameters(config: Any) -> list[dict[str, Any]]:
    """The rotary parameters of a model's configuration; where layers differ in kind (Gemma 3), of each kind too."""
    found = getattr(config.get_text_config(), "rope_parameters", None) or {}
    return [found, *(part for part in found.values() if isinstance(part, dict))]


def depends_on_length(config: Any) -> bool:
    """Return whether the model's rotary tables change with the tokens seen so far."""
    return any(part.get("rope_type") in ("dynamic", "longrope") for part in _parameters(config))


def border_of(config: Any) -> int | None:
    """The length up to which a model rotates by the factors of short texts, and past which all of its keys are to be
    computed anew (longrope) [tokens]; None for a model without."""
    for part in _parameters(config):
        if part.get("rope_type") == "longrope":
            text = config.get_text_config()
            return part.get("original_max_position_embeddings") or getattr(
                text, "original_max_position_embeddings", None)
    return None


def beyond_positions(config: Any, tokens: int) -> str | None:
    """One line for a text longer than the positions that a model was made for; None for one that fits, and where the
    rotation grows with the text (dynamic).

    config: of a transformers model. tokens: of prompt and answer.
    """
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not longest or tokens <= longest or any(part.get("rope_type") == "dynamic" for part in _parameters(config)):
        return None
    return (f"prompt and answer have up to {tokens} tokens and the model was made for {longest}; what it writes past "
            "them is seldom sense: shorten them, or give --rope-scaling")


@contextmanager
def tables_of_length(model: Any, length: int) -> Iterator[None]:
    """Rotary tables as a prefill of `length` tokens in one piece has them, cut out by position: the first chunks of a
    text would else be rotated by the angles of a shorter one. On exit the model is unchanged."""
    def cut(original: Callable[..., Any]) -> Callable[..., Any]:
        known: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}

        def forward(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            kind = (*args, *kwargs.values())
            if kind not in known:
                known[kind] = original(x, torch.arange(length, device=position_ids.device)[None], *args, **kwargs)
            cos, sin = known[kind]
            return cos[0][position_ids], sin[0][position_ids]
        return forward

    with ExitStack() as stack:
        for module in decoder(model).modules():
            if type(module).__name__.endswith("RotaryEmbedding"):
                stack.enter_context(patch.object(module, "forward", cut(module.forward)))
        yield
