"""`model.generate` of an attached model: it gets a cache of ours, with room for what it will write."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from sparsekv.artifacts.hub.rotary import border_of
from sparsekv.runtime.hf.cache import SparseCache
from sparsekv.runtime.hf.forward import CHECKPOINTS, check_unchanged, drops_cache
from sparsekv.runtime.hf.prompts import check_ids, check_mask, vocabulary_of
from sparsekv.runtime.hf.supported import check_attentions, check_cache
from sparsekv.runtime.process import NOW
from sparsekv.util.errors import SparseKVError
from sparsekv.util.memory import free_host_memory, free_memory

MOST_NEW = 4096
FREE_SHARE = 0.8
"""Of the GPU's free memory, what `kv_memory="auto"` gives keys and values: prompts and steps take the rest."""


@dataclass
class Answer:
    """The answer that `model.generate` writes: prompt `[B, N]`, and the ids of its passes."""

    model: Any
    prompt: Tensor
    cache: SparseCache
    passes: list[Tensor] = field(default_factory=list)


def generate(attached: Any, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `model.generate`, own, with a cache of ours. attached: the model (`AttachedModel`). Raises SparseKVError for
    a call that cannot be decoded as attached."""
    with attached.lock:
        attachment = attached.current()
        if attachment is not None:
            check_unchanged(attached)
            if drops_cache(attached):
                raise SparseKVError(CHECKPOINTS)
            check_attentions(kwargs, attached.model.config, args[1] if len(args) > 1 else kwargs.get(
                "generation_config"), attached.model.generation_config)
            kwargs = with_cache(attachment, args, kwargs)
    ids = kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None))
    cache = kwargs.get("past_key_values")
    before, NOW.answer = NOW.answer, None
    try:
        if isinstance(ids, Tensor) and isinstance(cache, SparseCache):
            NOW.answer = Answer(attached.model, ids, cache)
        return own(*args, **kwargs)
    finally:
        NOW.answer = before


def generate_batch(attached: Any, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuse continuous batching while attached: raises SparseKVError."""
    with attached.lock:
        if attached.current() is not None:
            raise SparseKVError("continuous batching keeps keys and values in pages of transformers' own, which "
                                "have no sparse index; use model.generate, or serve the model by vLLM")
    return own(*args, **kwargs)


def with_cache(attachment: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keywords of a call of `model.generate`, with a cache of the attachment's. A cache that the checkpoint's own
    generation_config names gives way to it. Raises SparseKVError for caches and settings of the call that cannot be
    decoded sparsely."""
    own, given = attachment.model.generation_config, args[1] if len(args) > 1 else kwargs.get("generation_config")

    def asked(name: str, *configs: Any) -> Any:
        """A setting of the call, or where it has none of these configurations; one that is None is not set."""
        values = (kwargs.get(name), *(getattr(config, name, None) for config in configs))
        return next((value for value in values if value is not None), None)

    kind = asked("cache_implementation", None if given is own else given)
    if kind not in (None, "dynamic"):
        raise SparseKVError(f"cache_implementation={kind!r} has no sparse index; leave it out of the call and of its "
                            "generation_config, and sparsekv brings its own cache")
    if asked("use_cache", given, own) is False:
        raise SparseKVError("sparse decoding needs a cache; remove use_cache=False")
    assisted = asked("assistant_model") is not None or bool(asked("prompt_lookup_num_tokens", given, own))
    _check_assistant(attachment, asked("assistant_early_exit", given, own), assisted)
    ids, mask = kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None)), kwargs.get("attention_mask")
    if isinstance(ids, Tensor) and ids.dim() == 2 and kwargs.get("inputs_embeds") is None:
        check_ids(ids, vocabulary_of(attachment.model))
        if mask is not None:
            check_mask(mask, *ids.shape)
    rows, prompt, new = _room_of(ids, asked, given, own)
    border = border_of(attachment.model.config)
    if border is not None and 0 < prompt <= border < prompt + new and (asked("num_beams", given, own) or 1) > 1:
        raise SparseKVError(f"beams would cross the length of {border} tokens, past which the model rotates otherwise "
                            "and reads all of them again (longrope); use num_beams=1, or a shorter answer")
    if any(config is not None and config.cache_implementation is not None for config in (given, own)):
        kwargs = kwargs | {"cache_implementation": None}
    else:
        kwargs = {name: value for name, value in kwargs.items() if name != "cache_implementation"}
    cache = kwargs.get("past_key_values")
    if cache is None:
        cache = roomy_cache(attachment, rows, prompt, new)
    else:
        check_cache(cache)
        held, embeds = cache.get_seq_length(), kwargs.get("inputs_embeds")
        if isinstance(embeds, Tensor) and embeds.dim() == 3:
            prompt = embeds.shape[1]
        if 0 < prompt <= held:
            raise SparseKVError(f"the cache holds {held} tokens and the prompt has {prompt}; give all tokens so "
                                "far and new ones, or a fork of the cache (cache.fork()) for every answer")
        if assisted and held:  # transformers reads the whole prompt with the first candidates
            cache.reset()
    cache.prompt = prompt
    return kwargs | {"past_key_values": cache}


def _check_assistant(attachment: Any, early_exit: Any, assisted: bool) -> None:
    """Raises SparseKVError for drafts by a part of the model, whose layers' caches differ in length; says once that
    candidates are read as a prompt is."""
    if early_exit is not None:
        raise SparseKVError("assistant_early_exit drafts by some of the layers, whose caches would be longer than the "
                            "others'; use assistant_model or prompt_lookup_num_tokens")
    if assisted and not attachment.runner.run.sparse_chunks and attachment.decoding.first_sparse is not None:
        warnings.warn("an assistant's candidates are checked several at a time, which are read as prompts are, with "
                      "full attention; attach with run=RunOptions(sparse_chunks=True) to decode them sparsely",
                      stacklevel=4)


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
    if decoding.kv_memory is not None and not away:
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


def _room_of(ids: Any, asked: Callable[..., Any], *configs: Any) -> tuple[int, int, int]:
    """Rows, tokens of the prompt and new ones that a call of `generate` asks for, as far as its arguments say."""
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        return 1, 0, 0
    new, longest = (asked(name, *configs) for name in ("max_new_tokens", "max_length"))
    copies = max(asked(name, *configs) or 1 for name in ("num_beams", "num_return_sequences"))
    if new is None:
        new = 0 if longest is None else max(0, longest - ids.shape[1])
    return ids.shape[0] * copies, ids.shape[1], new
