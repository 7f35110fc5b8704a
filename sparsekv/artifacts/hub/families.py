"""Which models can be decoded sparsely and captured, and why another cannot: read from the attention modules and the
config, never from a model's name, before anything is changed."""

from __future__ import annotations

import inspect
import sys
from typing import Any

from sparsekv.artifacts.hub.models import attention_modules
from sparsekv.util.errors import SparseKVError

SUPPORTED = "a decoder with rotary softmax attention, such as Llama, Qwen, Mistral, Phi-3, Gemma 3 or GLM-4"
LATENT = "multi-head latent attention (keys and values are rebuilt from a latent vector)"
OTHER_WAY = "its attention does not go through transformers' attention interface"


def check_family(model: Any) -> None:
    """Refuse a model none of whose layers can be decoded sparsely or captured, or one of whose layers attends in a way
    that would be computed wrongly. Raises SparseKVError, one sentence with the reasons."""
    modules = attention_modules(model)
    reason = _of_model(model, modules)
    if reason is None:
        config = model.config.get_text_config()
        found = {layer: why_dense(module, config, layer) for layer, module in modules.items()}
        if all(why is not None for why in found.values()):
            reason = "; ".join(sorted({why for why in found.values() if why is not None}))
    if reason is not None:
        raise unsupported(model, reason)


def unsupported(model: Any, reason: str) -> SparseKVError:
    return SparseKVError(f"{type(model).__name__} is not supported: {reason}. Expected {SUPPORTED}.")


def _of_model(model: Any, modules: dict[int, Any]) -> str | None:
    """What makes every layer impossible, where one has it."""
    if not modules:
        return OTHER_WAY
    for module in modules.values():
        if not any(hasattr(sys.modules.get(c.__module__), "ALL_ATTENTION_FUNCTIONS") for c in type(module).__mro__):
            return OTHER_WAY
        if hasattr(module, "kv_lora_rank"):
            return LATENT
        if "past_key_values" not in inspect.signature(type(module).forward).parameters:
            return "its attention does not get its cache as past_key_values"
    config = model.config.get_text_config()
    others = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"})
    return f"layers of {' and '.join(others)}, which sparsekv's cache does not hold" if others else None


def why_dense(module: Any, config: Any, layer: int) -> str | None:
    """Why a layer keeps its own attention: it does not look at the whole cache, or not by a plain softmax."""
    if (window := window_of(module, config, layer)) is not None:
        return f"sliding-window attention over {window} tokens"
    if getattr(module, "attn_logit_softcapping", None) is not None:
        return "soft-capped scores"
    return None


def window_of(module: Any, config: Any, layer: int) -> int | None:
    """The sliding window of a layer [tokens]; None where it has none that a context of the model reaches."""
    kinds, longest = getattr(config, "layer_types", None), getattr(config, "max_position_embeddings", None)
    if kinds is not None and layer < len(kinds):
        slides = kinds[layer] == "sliding_attention"
    else:
        slides = getattr(module, "is_sliding", getattr(config, "use_sliding_window", True))
    if not slides:
        return None
    window = getattr(module, "sliding_window", None) or getattr(config, "sliding_window", None)
    return None if window is None or (longest and window >= longest) else int(window)
