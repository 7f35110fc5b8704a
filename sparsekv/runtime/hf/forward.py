"""The forward of an attached model: a step of one token by a plan, anything else as the model's own pass."""

from __future__ import annotations

import inspect
import threading
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from sparsekv.artifacts.hub.rotary import border_of
from sparsekv.runtime.hf.attention import check_named
from sparsekv.runtime.hf.cache import SparseCache
from sparsekv.runtime.hf.prompts import check_cache_rows, positions_of
from sparsekv.runtime.hf.supported import check_attentions, check_cache, check_uncompiled
from sparsekv.runtime.process import NOW, usual_defaults
from sparsekv.util.errors import SparseKVError

STEP_OPTIONS = frozenset({"input_ids", "attention_mask", "position_ids", "past_key_values", "use_cache", "return_dict",
                          "logits_to_keep",
                          # of a prompt's images, of which a step has none
                          "mm_token_type_ids", "image_grid_thw", "video_grid_thw", "second_per_grid_ts"})
CHECKPOINTS = ("gradient checkpointing in training drops the cache, and steps would see no text before them; call "
               "model.eval() or model.gradient_checkpointing_disable() before decoding")


def forward(attached: Any, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the model's forward `own`, or take a step in its place. attached: the model (`AttachedModel`). Raises
    SparseKVError for a call that cannot be decoded as attached."""
    with attached.lock, usual_defaults():
        NOW.plan = None
        attachment = attached.current()
        if attachment is None:  # they left while this call waited
            return own(*args, **kwargs)
        args, kwargs = _by_name(own, args, kwargs)
        cache = kwargs.get("past_key_values")
        if cache is not None and not isinstance(cache, SparseCache) and attached.thread != threading.get_ident():
            return own(*args, **kwargs)  # begun by another thread before the model was attached to
        check_attentions(kwargs, attached.model.config)
        kwargs = _read_anew(attached, kwargs)
        step = _is_step(args, kwargs)
        check_unchanged(attached)
        kwargs = _with_cache(attached, attachment, args, kwargs)
        cache = kwargs.get("past_key_values")
        if cache is not None and step:
            logits = attachment.runner.step(attached, cache, kwargs["input_ids"], kwargs.get("attention_mask"),
                                            kwargs.get("position_ids"))
            if logits is not None:
                return CausalLMOutputWithPast(logits=logits.clone(), past_key_values=cache)
        NOW.reached = 0
        with attached.passing():
            out = own(*args, **kwargs)
        layers = len(attached.modules)
        if cache is not None and NOW.reached < layers:
            raise SparseKVError(f"the attention of {layers - NOW.reached} of {layers} layers was not sparsekv's in "
                                "this pass: something has replaced it, or skips layers; attach to the model as "
                                "transformers made it")
        if cache is not None:
            attachment.runner.prompt_ended(cache, kwargs.get("attention_mask"))
            cache.settle()
        return out


def check_unchanged(attached: Any) -> None:
    """Raises SparseKVError where attention would not be sparsekv's."""
    for config, _ in attached.names:
        check_named(config)
    check_uncompiled(attached.holders)


def drops_cache(attached: Any) -> bool:
    """Return whether the model's layers drop the cache they are given."""
    return any(getattr(layer, "gradient_checkpointing", False) and layer.training
               for layer in attached.layers.decoders)


def _with_cache(
    attached: Any, attachment: Any, args: tuple[Any, ...], kwargs: dict[str, Any],
) -> dict[str, Any]:
    """Give a forward pass without a cache one of ours; refuse foreign ones, and rows that it does not hold."""
    cache = kwargs.get("past_key_values")
    ids = kwargs.get("input_ids", args[0] if args else None)
    if isinstance(ids, Tensor) and ids.numel() == 0:
        raise SparseKVError(f"the prompt is empty: input_ids are {list(ids.shape)}; give at least one token of "
                            "every row")
    use_cache = kwargs.get("use_cache", getattr(attached.model.config, "use_cache", True))
    counters = attachment.counters
    counters.passes += 1
    if cache is None and (use_cache is False or drops_cache(attached)):
        counters.uncached += 1
    elif cache is None:
        return kwargs | {"past_key_values": attachment.cache()}
    else:
        check_cache(cache)
        cache.belongs_to(attached.model)
        if drops_cache(attached):
            raise SparseKVError(CHECKPOINTS)
        given = ids if isinstance(ids, Tensor) else kwargs.get("inputs_embeds")
        if isinstance(given, Tensor):
            check_cache_rows(cache, given.shape[0])
            counters.chunks += given.shape[1] > 1 and cache.get_seq_length() > 0
            mask = kwargs.get("attention_mask")
            if mask is None or (isinstance(mask, Tensor) and mask.dim() == 2):
                # of a pass of `generate`, which wants the last logits, the tokens may have another order
                positions = kwargs.get("position_ids")
                mask, order = cache.masked(mask, given.shape[1], NOW.answer is not None and isinstance(
                    ids, Tensor) and isinstance(positions, Tensor) and positions.shape == ids.shape)
                kwargs = kwargs if mask is None else kwargs | {"attention_mask": mask}
                if order is not None and positions is not None:
                    kwargs = kwargs | {"input_ids": given.gather(1, order),
                                       "position_ids": positions.gather(1, order)}
    return kwargs


def _read_anew(attached: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a pass of the answer that is written. Past a length the model rotates otherwise (longrope):
    there transformers drops the cache, and all tokens so far are read again."""
    answer, ids, border = NOW.answer, kwargs.get("input_ids"), border_of(attached.model.config)
    if border is None or answer is None or answer.model is not attached.model or not isinstance(ids, Tensor):
        return kwargs
    first, held = not answer.passes, answer.cache.get_seq_length()
    answer.passes.append(answer.prompt.repeat_interleave(len(ids) // len(answer.prompt), 0) if first else ids)
    if kwargs.get("past_key_values") is not None or not 0 < held <= border:
        return kwargs
    whole, mask = torch.cat(answer.passes, dim=1), kwargs.get("attention_mask")
    answer.cache.reset()
    answer.cache.prompt = whole.shape[1]
    positions = None if mask is None else positions_of(mask)
    return kwargs | {"input_ids": whole, "past_key_values": answer.cache, "position_ids": positions}


def _by_name(own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call of `own`, all by name; as they are where they do not fit, or names are not known."""
    if not args:
        return args, kwargs
    try:
        bound = inspect.signature(own).bind_partial(*args, **kwargs)
    except (TypeError, ValueError):
        return args, kwargs
    arguments = dict(bound.arguments)
    for parameter in bound.signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments |= arguments.pop(parameter.name, {})
        elif parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            return args, kwargs
    return (), arguments


def _is_step(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call is one token of every row after a cache, and asks for logits alone."""
    ids = kwargs.get("input_ids")
    return (not args and isinstance(ids, Tensor) and ids.dim() == 2 and ids.shape[1] == 1
            and all(name in STEP_OPTIONS or value is None or value is False for name, value in kwargs.items())
            and kwargs.get("return_dict") is not False and kwargs.get("use_cache") is not False)
