"""What transformers calls in an attached model: its attention and mask function, and hooks that show both what
transformers keeps from them."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, flash_attention_mask

from sparsekv.core.rope import find_layout
from sparsekv.runtime.hf.cache import SparseCache, SparseLayer
from sparsekv.runtime.hf.model_pass import PLANNED
from sparsekv.runtime.hf.storage import GrowingRope
from sparsekv.runtime.hf.supported import check_cache
from sparsekv.runtime.process import NOW, attached_models
from sparsekv.util.errors import SparseKVError

NAME = "sparsekv"


def register() -> None:
    """Make both functions known to transformers by the names that an attached model's configuration has."""
    for name in (NAME, PLANNED):
        AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(NAME, mask)


def see(attached: Any, module: Any, kwargs: dict[str, Any]) -> None:
    """Note the cache that an attention module is called with, and in it the rotary tables: neither reaches the
    attention function."""
    if NOW.plan is not None:
        return
    cache, tables = kwargs.get("past_key_values"), kwargs.get("position_embeddings")
    NOW.seen = module, attached, cache
    if attached.is_ours():
        check_named(module.config)
        if cache is not None:
            check_cache(cache)
    elif attached.attachments:
        attached.elsewhere(cache)
    if isinstance(cache, SparseCache) and tables is not None:
        layer = cache.layers[module.layer_idx] if module.layer_idx < len(cache.layers) else None
        if isinstance(layer, SparseLayer):
            key = getattr(module, "layer_type", None)
            if key not in attached.ropes:
                attached.ropes[key] = find_layout(module, tables[0][0], tables[1][0], module.head_dim)
            rope = attached.ropes[key]
            if rope is not None:
                table = cache.rope.setdefault(key, GrowingRope(rope.layout, cache.reserve))
                table.append(rope.table(tables[0]), rope.table(tables[1]), layer.get_seq_length(), cache.moves)


def check_named(config: Any) -> None:
    """Raises SparseKVError where a configuration of an attached model names another attention."""
    name = config._attn_implementation
    if name not in (NAME, PLANNED):
        raise SparseKVError(f"the attention implementation was set to {name!r} while the model is attached, which "
                            "would decode without sparsekv; set it before attach, which has its own")


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float | None = None,
    dropout: float = 0.0, sliding_window: int | None = None, softcap: float | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend in an attached model: a layer of the plan that runs, or a layer by itself."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    sinks = kwargs.get("s_aux")
    if NOW.plan is not None:
        return NOW.plan.layer(query, key, value, scale, sinks), None
    seen, NOW.seen = NOW.seen, None
    foreign = attention_mask is not None and attention_mask.dim() != 2
    ours = seen is not None and seen[0] is module and seen[1].is_ours()
    attachment = seen[1].current() if seen is not None and ours else None
    if seen is None or attachment is None or (foreign and not isinstance(seen[2], SparseCache)):
        return own_attention(module)(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout,
                                     sliding_window=sliding_window, softcap=softcap, **kwargs)
    if sinks is not None and softcap is not None:
        raise SparseKVError(f"{type(module).__name__} has learned attention sinks and caps its scores, which sparsekv "
                            "does not support together")
    NOW.reached += 1
    own = None
    if getattr(attention_mask, "sees_ahead", False):
        own = functools.partial(own_attention(module), module, attention_mask=attention_mask, scaling=scaling,
                                dropout=dropout, sliding_window=sliding_window, softcap=softcap, **kwargs)
    out = attachment.runner.attention(
        module, seen[2], query, key, value, attention_mask, scale, sliding_window, softcap, sinks, own)
    return out.transpose(1, 2).contiguous(), None


def mask(*args: Any, config: Any, **kwargs: Any) -> Any:
    """Make the mask of a pass: as FlashAttention takes it, 2-D or none; the model's own for one that is not ours, and
    for a prompt with spans that see both ways (an image's)."""
    attached = attached_with(config)
    ours = attached is None or attached.is_ours()
    if attached is None or (ours and not sees_ahead(**kwargs)):
        return flash_attention_mask(*args, **kwargs)
    make = AttentionMaskInterface().get(attached.own_name(config), flash_attention_mask)
    own: Any = make(*args, config=config, **kwargs)
    if ours and own is not None:
        own.sees_ahead = True
    return own


def sees_ahead(*, batch_size: int, q_length: int, q_offset: Any = 0, mask_function: Any = causal_mask_function,
               device: Any = None, **_: Any) -> bool:
    """Return whether a token of a pass sees the one after it."""
    if q_length < 2 or mask_function is causal_mask_function:
        return False
    rows = torch.arange(batch_size, device=device)[:, None]
    tokens = torch.arange(q_length - 1, device=device) + q_offset
    return bool(mask_function(rows, torch.zeros_like(rows), tokens, tokens + 1).any())


def own_attention(module: Any) -> Any:
    """The attention function that a module had before its model was attached to. Raises SparseKVError for a module of
    no such model."""
    name = module.config._attn_implementation
    if name in (NAME, PLANNED):
        attached = attached_with(module.config)
        if attached is None:
            raise SparseKVError("attention was called on a module that is not attached; attach the whole model")
        name = attached.own_name(module.config)
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return AttentionInterface().get(name, eager)


def attached_with(config: Any) -> Any:
    """The attached model that has this configuration; None where there is none."""
    return next((one for one in attached_models() if one.own_name(config) is not None), None)
