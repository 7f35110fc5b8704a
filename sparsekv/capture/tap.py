"""The tap: an attention implementation that computes what the model's own does and shows every call to a listener.

What touches transformers elsewhere: docs/architecture.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from sparsekv.artifacts.hub.families import check_family, unsupported
from sparsekv.artifacts.hub.models import attention_modules, decoder
from sparsekv.core.rope import LayerRope, find_layout, unrotate
from sparsekv.kernels import dense_attention
from sparsekv.util.errors import SparseKVError

NAME = "sparsekv_capture"


@dataclass(frozen=True)
class AttentionCall:
    """One call of one layer: `query [1, Hq, q, d]`, `key, value [1, Hkv, k, d]`, RoPE applied; the queries are the last
    q of the k positions. `cos, sin [q, width]` as the model passed them, `scale` its softmax scaling, sinks `[Hq]` its
    learned sinks."""

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    cos: Tensor | None
    sin: Tensor | None
    scale: float
    sliding_window: int | None
    softcap: float | None
    module: nn.Module
    sinks: Tensor | None = None


class StopForward(Exception):
    """Raised by a listener that has seen all it wants."""


@contextmanager
def tap(model: Any, listener: Callable[[AttentionCall], None]) -> Iterator[None]:
    """Route the model's attention through the tap; on exit the model is unchanged."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    tables: dict[int, tuple[Tensor, Tensor]] = {}
    layer_of = {id(module): layer for layer, module in attention_modules(model).items()}

    def see_tables(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found = kwargs.get("position_embeddings")
        if isinstance(found, tuple) and len(found) == 2:  # else no table of cosines and one of sines
            tables[id(module)] = found

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
        s_aux: Tensor | None = None, **_: Any,
    ) -> tuple[Tensor, None]:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        cos, sin = tables.get(id(module), (None, None))
        if attention_mask is not None:
            raise SparseKVError("capture runs one unpadded window at a time, found an attention mask")
        listener(AttentionCall(layer_of[id(module)], query, key, value, None if cos is None else cos[0],
                               None if sin is None else sin[0], scale, sliding_window, softcap, module, s_aux))
        out = dense_attention(query, key, value, scale=scale, window=sliding_window, softcap=softcap,
                              sinks=s_aux)
        return out.transpose(1, 2).contiguous(), None

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


def probe(model: Any) -> tuple[dict[int, LayerRope], dict[int, str]]:
    """Look at every layer on eight tokens: how it rotates, and which layers cannot be captured and why.

    The layout is the one whose rotation equals the model's own function, and the keys that reach the attention must
    come back as the keys that went into that function; nothing is inferred from the model's name. Raises SparseKVError
    for a model in which a rotated layer does not pass, or with no layer that can be captured.
    """
    seen: dict[int, tuple[AttentionCall, Tensor | None]] = {}
    unrotated: list[Tensor] = []

    def remember(call: AttentionCall) -> None:
        seen.setdefault(call.layer, (call, unrotated.pop() if unrotated else None))
        unrotated.clear()

    name = type(model).__name__
    check_family(model)
    modules = attention_modules(model)
    ids = torch.arange(3, 11, device=model.get_input_embeddings().weight.device)[None]
    with torch.inference_mode(), tap(model, remember), _see_rotation(list(modules.values()), unrotated):
        decoder(model)(input_ids=ids, use_cache=False)
    ropes: dict[int, LayerRope] = {}
    skipped: dict[int, str] = {}
    text = model.config.get_text_config()
    kinds = getattr(text, "layer_types", None) or []
    for layer in range(text.num_hidden_layers):
        if layer not in seen:
            kind = f" (its type is {kinds[layer]})" if layer < len(kinds) else ""
            skipped[layer] = f"no softmax attention through transformers' attention interface{kind}"
            continue
        call, before = seen[layer]
        reason = _why_not(call, before)
        if reason is not None:
            skipped[layer] = reason
            continue
        assert call.cos is not None and call.sin is not None and before is not None
        rope = find_layout(call.module, call.cos, call.sin, call.query.shape[-1])
        if rope is None or not _comes_back(call, before, rope):
            raise SparseKVError(f"{name} is not supported: the rotary embedding of layer {layer} does not survive the "
                                "round-trip check (its keys without RoPE could not be recovered)")
        ropes[layer] = rope
    if not ropes:
        reasons = "; ".join(sorted(set(skipped.values()))) or "no layers"
        raise unsupported(model, reasons)
    return ropes, skipped


def _why_not(call: AttentionCall, before: Tensor | None) -> str | None:
    if call.sliding_window is not None:
        return f"sliding-window attention over {call.sliding_window} tokens"
    if call.softcap is not None:
        return "soft-capped scores"
    if call.sinks is not None:
        return "learned attention sinks, which the store's statistics do not know"
    if call.key.shape[-1] != call.value.shape[-1]:
        return "keys and values of different sizes"
    if call.cos is None or call.sin is None or before is None:
        return "no rotary position embedding"
    return None


def _comes_back(call: AttentionCall, before: Tensor, rope: LayerRope) -> bool:
    """Do the keys of the attention, RoPE removed, equal the keys that went into the model's rotation?"""
    assert call.cos is not None and call.sin is not None
    back = unrotate(call.key.float(), rope.table(call.cos), rope.table(call.sin), rope.layout)[..., : before.shape[-1]]
    tolerance = 1e-4 if call.key.dtype == torch.float32 else 3e-2
    return back.shape == before.shape and bool((back - before.float()).abs().max() <= tolerance * before.abs().max())


@contextmanager
def _see_rotation(modules: list[nn.Module], keys: list[Tensor]) -> Iterator[None]:
    """Collect the keys that enter `apply_rotary_pos_emb` of the models' own files; on exit these are as they were."""
    def watch(original: Callable[..., Any]) -> Callable[..., Any]:
        def apply(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> Any:
            keys.append(k)
            return original(q, k, *args, **kwargs)
        return apply

    with ExitStack() as stack:
        for file in {sys.modules[type(m).__module__] for m in modules}:
            if "apply_rotary_pos_emb" in vars(file):
                stack.enter_context(patch.object(file, "apply_rotary_pos_emb", watch(file.apply_rotary_pos_emb)))
        yield
