"""Checks of models and caches before anything is changed, and the layers that may decode sparsely."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from sparsekv.artifacts.hub.families import check_family
from sparsekv.artifacts.hub.models import attention_modules
from sparsekv.runtime.hf.cache import SparseCache, SparseLayer
from sparsekv.util.errors import SparseKVError


def model_within(model: Any) -> Any:
    """The transformers model in a wrapper such as PEFT's or DataParallel's, whose passes all go through it; a model
    that is none itself. Raises SparseKVError for what cannot be attached to."""
    if not isinstance(model, nn.Module):
        raise SparseKVError(f"attach expects a transformers model, found {type(model).__name__}")
    check_uncompiled(holders(model, attention_modules(model)))
    if not isinstance(model, PreTrainedModel):
        inner = next((m for m in model.modules() if isinstance(m, PreTrainedModel) and m.can_generate()), None)
        model = model if inner is None else inner
    check_model(model)
    return model


def holders(model: nn.Module, modules: dict[int, Any]) -> list[tuple[Any, str, Any]]:
    """The model, its attention modules and all in between, each with what holds it and by which name."""
    inside = set(modules.values())
    held: dict[str, tuple[Any, str, Any]] = {"": (None, "", model)}
    for path, module in model.named_modules():
        if module in inside:
            parts = path.split(".")
            for n in range(len(parts)):
                parent = model.get_submodule(".".join(parts[:n]))
                held[".".join(parts[:n + 1])] = parent, parts[n], parent._modules[parts[n]]
    return list(held.values())


def check_uncompiled(holders: Iterable[tuple[Any, str, nn.Module]]) -> None:
    """Raises SparseKVError for a module whose pass is compiled, since compiled code calls no attention of sparsekv's,
    and for one that another has replaced."""
    for parent, name, module in holders:
        forward = module.__dict__.get("forward")
        if parent is not None and parent._modules.get(name) is not module:
            raise SparseKVError(f"{type(parent).__name__}.{name} was replaced while the model is attached"
                                f"{', by one compiled by torch.compile' if _wraps(parent._modules.get(name)) else ''}; "
                                "change models before attach")
        if (_wraps(module) or getattr(module, "_compiled_call_impl", None) is not None
                or (hasattr(forward, "_torchdynamo_orig_callable")
                    and not hasattr(forward, "_torchdynamo_disable"))):
            raise SparseKVError(f"attach works on the model itself, found a {type(module).__name__} compiled by "
                                "torch.compile, which would decode without sparsekv; use the uncompiled model "
                                "(model._orig_mod, or load it again)")


def _wraps(module: Any) -> bool:
    """Return whether it is what torch.compile makes of a module."""
    return "_orig_mod" in getattr(module, "_modules", ())


def check_model(model: nn.Module) -> None:
    """Raises SparseKVError for a model that cannot be attached to, before anything is changed."""
    if not hasattr(model, "config"):
        raise SparseKVError(f"attach expects a transformers model with a config, found {type(model).__name__}")
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise SparseKVError(f"{type(model).__name__} has no weights in memory ({name} is on the meta device); load "
                                "them, on a device or on devices that they fit on")
    if getattr(model.config, "is_encoder_decoder", False):
        raise SparseKVError(f"{type(model).__name__} is an encoder-decoder model; sparsekv works on decoder-only "
                            "models")
    check_family(model)


def eligible_layers(model: Any, modules: dict[int, Any]) -> set[int]:
    """Find the layers with full softmax attention over the whole cache; `check_model` has seen some."""
    layers = SparseCache(model.config).layers
    return {i for i, m in modules.items() if i < len(layers) and isinstance(layers[i], SparseLayer)
            and getattr(m, "attn_logit_softcapping", None) is None}


def check_attentions(arguments: dict[str, Any], *configs: Any) -> None:
    """Raises SparseKVError where a call, or else one of the configurations, asks for the attention's weights."""
    asked = arguments.get("output_attentions")
    if asked or (asked is None and any(getattr(config, "output_attentions", None) for config in configs)):
        raise SparseKVError("output_attentions=True asks for attentions of all tokens, which are never computed while "
                            "a model is attached; ask outside the block, with attn_implementation='eager'")


def check_cache(cache: Any) -> None:
    if not isinstance(cache, SparseCache):
        raise SparseKVError(f"a {type(cache).__name__} has no sparse index; leave past_key_values out, or pass the "
                            "SparseCache of attachment.cache() or attachment.prefill()")
