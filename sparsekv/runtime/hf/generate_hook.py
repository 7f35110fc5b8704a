"""How `model.generate` gets a cache of ours, with room for what it will write."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sparsekv.runtime.hf.cache import SparseCache
from sparsekv.runtime.hf.prompts import check_ids, check_mask, vocabulary_of
from sparsekv.runtime.hf.supported import check_cache
from sparsekv.util.errors import SparseKVError
from sparsekv.util.memory import free_host_memory, free_memory

MOST_NEW = 4096
FREE_SHARE = 0.8
"""Of the GPU's free memory, what `kv_memory="auto"` gives keys and values: prompts and steps take the rest."""


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
    later, in steps of an eighth. It lies in CPU memory where the placement says so, or it takes more of the GPU than
    `kv_memory`. Raises SparseKVError where there is too little memory, before any is taken."""
    tokens = prompt + min(new, max(MOST_NEW, prompt // 8))
    parameter, decoding = next(attachment.model.parameters()), attachment.decoding
    sizes = {i: 2 * rows * tokens * (getattr(m.config, "num_key_value_heads", None) or m.config.num_attention_heads)
             * m.head_dim * parameter.element_size() for i, m in attachment.modules.items()}
    whole, away = sum(sizes.values()), decoding.placement != "gpu"
    free = free_memory(parameter.device) if parameter.is_cuda else free_host_memory()
    if decoding.kv_memory is not None:
        given = free * FREE_SHARE if decoding.kv_memory == "auto" else 1e9 * decoding.kv_memory
        away = whole > given
    on_host = sum(size for i, size in sizes.items() if away and i not in decoding.dense_layers)
    what = f"keys and values of {rows} x {tokens} tokens take"
    if parameter.is_cuda and whole - on_host > free:
        other = "fewer dense_layers" if away else "placement='offload', or kv_memory='auto'"
        raise SparseKVError(f"{what} {(whole - on_host) / 1e9:.1f} GB and the device has {free / 1e9:.1f} GB left; "
                            f"shorten prompt or answer, or use {other}")
    left = free_host_memory()
    if on_host > left:
        raise SparseKVError(f"{what} {on_host / 1e9:.3g} GB of CPU memory, of which {left / 1e9:.3g} GB are free; "
                            "shorten prompt or answer, or free memory")
    attachment.kv_places = {"gpu_bytes": whole - on_host, "host_bytes": on_host}
    return attachment.cache(tokens, away)


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
