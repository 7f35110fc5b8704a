"""How `model.generate` gets a cache of ours, with room for what it will write."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sparsekv.runtime.hf.cache import SparseCache
from sparsekv.runtime.hf.prompts import check_ids, check_mask, vocabulary_of
from sparsekv.runtime.hf.supported import check_cache
from sparsekv.util.errors import SparseKVError
from sparsekv.util.memory import free_memory

MOST_NEW = 4096


def with_cache(attachment: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keywords of a call of `model.generate`, with a cache of the attachment's. Raises SparseKVError for caches and
    settings that cannot be decoded sparsely."""
    given = args[1] if len(args) > 1 else kwargs.get("generation_config")
    config = given or attachment.model.generation_config
    kind = kwargs.get("cache_implementation", getattr(config, "cache_implementation", None))
    if kind not in (None, "dynamic"):
        raise SparseKVError(f"cache_implementation {kind!r} has no sparse index; leave it out, and sparsekv "
                            "brings its own cache")
    if not kwargs.get("use_cache", getattr(config, "use_cache", True)):
        raise SparseKVError("sparse decoding needs a cache; remove use_cache=False")
    ids, mask = kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None)), kwargs.get("attention_mask")
    if isinstance(ids, Tensor) and ids.dim() == 2 and kwargs.get("inputs_embeds") is None:
        check_ids(ids, vocabulary_of(attachment.model))
        if mask is not None:
            check_mask(mask, *ids.shape)
    if kwargs.get("past_key_values") is not None:
        check_cache(kwargs["past_key_values"])
        held = kwargs["past_key_values"].get_seq_length()
        if isinstance(ids, Tensor) and ids.dim() == 2 and 0 < ids.shape[1] <= held:
            raise SparseKVError(f"the cache holds {held} tokens and the prompt has {ids.shape[1]}; give all tokens so "
                                "far and new ones, or a fork of the cache (cache.fork()) for every answer")
        kwargs["past_key_values"].prompt = _room_of(args, kwargs, config)[1]
        return kwargs
    kwargs = {name: value for name, value in kwargs.items() if name != "cache_implementation"}
    cache = roomy_cache(attachment, *(room := _room_of(args, kwargs, config)))
    cache.prompt = room[1]
    return kwargs | {"past_key_values": cache}


def roomy_cache(attachment: Any, rows: int, prompt: int, new: int) -> SparseCache:
    """An empty cache with room for prompts and answers of so many tokens at once; an answer that may be long grows
    later, in steps of an eighth. Raises SparseKVError where the device has not."""
    tokens = prompt + min(new, max(MOST_NEW, prompt // 8))
    parameter = next(attachment.model.parameters())
    if parameter.is_cuda and attachment.decoding.placement == "gpu":
        modules = list(attachment.modules.values())
        heads = sum(getattr(m.config, "num_key_value_heads", None) or m.config.num_attention_heads for m in modules)
        needed = 2 * rows * tokens * heads * modules[0].head_dim * parameter.element_size()
        free = free_memory(parameter.device)
        if needed > free:
            raise SparseKVError(
                f"keys and values of {rows} x {tokens} tokens take {needed / 1e9:.1f} GB and the device has "
                f"{free / 1e9:.1f} GB left; shorten prompt or answer, or use placement='offload'")
    return attachment.cache(tokens)


def _room_of(args: tuple[Any, ...], kwargs: dict[str, Any], config: Any) -> tuple[int, int, int]:
    """Rows, tokens of the prompt and new ones that a call of `generate` asks for, as far as its arguments say."""
    ids = kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None))
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        return 1, 0, 0
    new, longest = (kwargs.get(n, getattr(config, n, None)) for n in ("max_new_tokens", "max_length"))
    copies = max(kwargs.get(n, getattr(config, n, None)) or 1 for n in ("num_beams", "num_return_sequences"))
    if new is None:
        new = 0 if longest is None else max(0, longest - ids.shape[1])
    return ids.shape[0] * copies, ids.shape[1], new
