"""The tap: an attention implementation that computes what the model's own does and shows every call to a listener.

This file and `runtime/attach.py` are the only ones that know transformers' internals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparsekv.capture.rope import LayerRope, find_layout
from sparsekv.errors import SparseKVError
from sparsekv.kernels.dense import causal_attention

NAME = "sparsekv_capture"


@dataclass(frozen=True)
class AttentionCall:
    """One call of one layer: `query [1, Hq, q, d]`, `key, value [1, Hkv, k, d]`, RoPE applied; the queries are the last
    q of the k positions. `cos, sin [q, width]` as the model passed them, `scale` its softmax scaling."""

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    cos: Tensor | None
    sin: Tensor | None
    scale: float
    sliding_window: int | None
    softcap: float | None


class StopForward(Exception):
    """Raised by a listener that has seen all it wants."""


@contextmanager
def tap(model: Any, listener: Callable[[AttentionCall], None]) -> Iterator[None]:
    """Route the model's attention through the tap; on exit the model is as it was."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    tables: dict[int, tuple[Tensor, Tensor]] = {}
    layer_of = {id(module): layer for layer, module in attention_modules(model).items()}

    def see_tables(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs.get("position_embeddings") is not None:
            tables[id(module)] = kwargs["position_embeddings"]

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None, **_: Any,
    ) -> tuple[Tensor, None]:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        cos, sin = tables.get(id(module), (None, None))
        if attention_mask is not None:
            raise SparseKVError("capture runs one unpadded window at a time, found an attention mask")
        listener(AttentionCall(layer_of[id(module)], query, key, value, None if cos is None else cos[0],
                               None if sin is None else sin[0], scale, sliding_window, softcap))
        return causal_attention(query, key, value, scale, window=sliding_window).transpose(1, 2).contiguous(), None

    before = model.config._attn_implementation
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, flash_attention_mask)
    hooks = [m.register_forward_pre_hook(see_tables, with_kwargs=True) for m in attention_modules(model).values()]
    try:
        model.set_attn_implementation(NAME)
        yield
    finally:
        for hook in hooks:
            hook.remove()
        model.set_attn_implementation(before)
        AttentionInterface._global_mapping.pop(NAME, None)
        AttentionMaskInterface._global_mapping.pop(NAME, None)


def attention_modules(model: nn.Module) -> dict[int, nn.Module]:
    """The self-attention module of every layer, by layer index."""
    return {m.layer_idx: m for name, m in model.named_modules()  # type: ignore[misc]
            if hasattr(m, "layer_idx") and "attention" in type(m).__name__.lower() and "cross" not in name}


def probe(model: Any) -> tuple[dict[int, LayerRope], dict[int, str]]:
    """Look at every layer on eight tokens: how it rotates, and which layers cannot be captured and why.

    The layout is the one whose rotation equals the model's own function; nothing is inferred from the model's name.
    Raises SparseKVError for a model with no layer that can be captured.
    """
    calls: dict[int, AttentionCall] = {}

    def remember(call: AttentionCall) -> None:
        calls.setdefault(call.layer, call)

    device = next(model.parameters()).device
    with torch.inference_mode(), tap(model, remember):
        decoder(model)(input_ids=torch.arange(3, 11, device=device)[None], use_cache=False)
    modules = attention_modules(model)
    ropes, skipped = {}, {}
    for layer in range(model.config.get_text_config().num_hidden_layers):
        call = calls.get(layer)
        if call is None:
            skipped[layer] = "no softmax attention through transformers' attention interface"
        elif call.sliding_window is not None:
            skipped[layer] = f"sliding-window attention over {call.sliding_window} tokens"
        elif call.softcap is not None:
            skipped[layer] = "soft-capped scores"
        elif call.cos is None or call.sin is None:
            skipped[layer] = "no rotary position embedding"
        else:
            rope = find_layout(modules[layer], call.cos, call.sin, call.query.shape[-1])
            if rope is None:
                skipped[layer] = "its rotary embedding does not survive the round-trip check"
            else:
                ropes[layer] = rope
    if not ropes:
        reasons = "; ".join(sorted(set(skipped.values()))) or "no layers"
        raise SparseKVError(f"{type(model).__name__} is not supported: {reasons}. Expected a decoder with rotary "
                            "softmax attention, such as Llama, Qwen, Mistral, Phi-3, Gemma 3 or GLM-4.")
    return ropes, skipped


def decoder(model: Any) -> Any:
    """The model without its language-model head."""
    return model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
