"""What a model carries while it is attached to: hooks, our attention and mask function, wrapped `forward` and
`generate`; how they come and how they go.

What the model was like is noted before anything is changed, and giving it back may run at any moment and twice: an
interrupt while entering or leaving leaves it unchanged.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, flash_attention_mask
from transformers.modeling_outputs import CausalLMOutputWithPast

from sparsekv.artifacts.hub.models import decoder
from sparsekv.artifacts.hub.rotary import border_of
from sparsekv.core.rope import LayerRope, find_layout
from sparsekv.runtime.hf.cache import GrowingRope, SparseCache, SparseLayer
from sparsekv.runtime.hf.generate_hook import with_cache
from sparsekv.runtime.hf.model_pass import PLANNED, Layers
from sparsekv.runtime.hf.prompts import check_cache_rows
from sparsekv.runtime.hf.supported import check_attentions, check_cache, check_uncompiled, holders
from sparsekv.runtime.process import NOW, known, seat_for, seats, usual_defaults
from sparsekv.util.errors import SparseKVError

NAME = "sparsekv"
STEP_OPTIONS = frozenset({"input_ids", "attention_mask", "position_ids", "past_key_values", "use_cache", "return_dict",
                          "logits_to_keep",
                          # of a prompt's images, of which a step has none
                          "mm_token_type_ids", "image_grid_thw", "video_grid_thw", "second_per_grid_ts"})
BATCHED = ("generate_batch", "init_continuous_batching", "continuous_batching_context_manager")
"""Methods of continuous batching, whose cache of pages is transformers' own."""
CHECKPOINTS = ("gradient checkpointing in training drops the cache, and steps would see no text before them; call "
               "model.eval() or model.gradient_checkpointing_disable() before decoding")
_ABSENT = object()
_ENTERED: ContextVar[tuple[weakref.ref[Any], ...]] = ContextVar("sparsekv_entered", default=())
"""Attachments that were entered by this coroutine, or by what started it."""


@dataclass
class Answer:
    """What `model.generate` writes: prompt `[B, N]`, and the ids of its passes."""

    model: Any
    prompt: Tensor
    cache: SparseCache
    passes: list[Tensor] = field(default_factory=list)


class Seat:
    """The last attachment that entered and has not left decodes; when none is left the model is unchanged, whatever the
    order. Attachments of several threads or coroutines would decode with each other's settings: a model has those of
    one. A pass holds `lock`, so that none comes or goes in the middle of it."""

    def __init__(self, model: Any, modules: dict[int, Any]):
        self.model, self.modules, self.decoder = model, modules, decoder(model)
        self.entered: list[weakref.ref[Any]] = []
        """Attachments, which others hold: one that nobody holds has left."""
        self.holders = holders(model, modules)
        self.lock = threading.RLock()
        self.thread = 0
        self.warned = False
        """Whether it was said that passes run elsewhere."""
        self.ropes: dict[Any, LayerRope | None] = {}
        """How the model's rotary tables become ours, by kind of layer."""
        self.layers = Layers(model, modules)
        self.hooks: frozenset[int] = frozenset()
        configs = {id(m.config): m.config for m in modules.values()}.values()
        self._names = [(config, config._attn_implementation) for config in configs]
        self._own = {name: model.__dict__.get(name, _ABSENT) for name in ("forward", "generate", *BATCHED)}

    def __reduce_ex__(self, _: Any) -> Any:
        raise SparseKVError("a model cannot be copied or pickled while it is attached; do it outside the `with` block")

    @property
    def attachments(self) -> list[Any]:
        """Those that have entered and not left, and are held by somebody."""
        return [one for ref in self.entered if (one := ref()) is not None]

    def enter(self, attachment: Any) -> None:
        others = self.attachments
        if others and self.thread != threading.get_ident():
            raise SparseKVError("this model is attached in another thread; share that attachment, or load the model "
                                "once a thread")
        if others and others[-1].ref not in _ENTERED.get():
            raise SparseKVError("this model is attached in another coroutine of this thread; share that attachment, or "
                                "load the model once a coroutine")
        self.thread = threading.get_ident()
        first = not self.entered
        self.entered = [*(one.ref for one in others), attachment.ref]
        _ENTERED.set((*(ref for ref in _ENTERED.get() if ref() is not None), attachment.ref))
        attachment.runner.fused = self.layers.fused
        if first:
            self._take()

    def leave(self, attachment: Any) -> None:
        """Any number of times, also of one that has not entered."""
        self.entered = [ref for ref in self.entered if ref is not attachment.ref and ref() is not None]
        if not self.entered:
            self._give_back()

    def current(self) -> Any:
        """The attachment that decodes; None where all have left."""
        found = self.attachments
        if not found and self.entered:  # forgotten by all, and the collector has not told us
            self.entered = []
            self._give_back()
            known(self.model).seat = None
        return found[-1] if found else None

    def _take(self) -> None:
        for name in (NAME, PLANNED):
            AttentionInterface.register(name, _attention)
        AttentionMaskInterface.register(NAME, _mask)
        self.layers.fused.enter()
        self._wrap("forward", self._forward)
        handles = [m.register_forward_pre_hook(self._see, with_kwargs=True) for m in self.modules.values()]
        handles += [d.register_forward_pre_hook(self._see_tables, with_kwargs=True)
                    for d in self.layers.first_of_kind]
        self.hooks = frozenset(h.id for h in handles)
        if hasattr(self.model, "generate"):
            self._wrap("generate", self._generate)
        for name in BATCHED:
            if hasattr(self.model, name):
                self._wrap(name, self._batched)
        for config, _ in self._names:
            config._attn_implementation = NAME

    def _give_back(self) -> None:
        """Undo every change to the model."""
        self.layers.restore()
        self.layers.fused.leave()
        for config, name in self._names:
            config._attn_implementation = name
        for name, own in self._own.items():
            if own is _ABSENT:
                self.model.__dict__.pop(name, None)
            else:
                self.model.__dict__[name] = own
        for module in (*self.modules.values(), *self.layers.first_of_kind):
            for key, hook in list(module._forward_pre_hooks.items()):
                if getattr(hook, "__self__", None) is self:
                    module._forward_pre_hooks_with_kwargs.pop(key, None)
                    module._forward_pre_hooks.pop(key, None)
        NOW.seen = NOW.passing = None

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """A pass of this thread that decodes as attached, none other beside it."""
        with self.lock:
            before, NOW.passing = NOW.passing, self
            try:
                yield
            finally:
                NOW.passing = before

    def is_ours(self) -> bool:
        """Whether what this thread runs decodes as attached. A pass that another thread began before does not: mask and
        layers of a pass must come from the same attention function."""
        return bool(self.attachments) and (NOW.passing is self or self.thread == threading.get_ident())

    def own_name(self, config: Any) -> str | None:
        """The attention function that a configuration of the model named before; None for another's."""
        return next((name for mine, name in self._names if mine is config), None)

    def _wrap(self, name: str, call: Any) -> None:
        """Let `model.name` be `call(own, args, kwargs)`."""
        own = getattr(self.model, name)

        @functools.wraps(own)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return call(own, args, kwargs)

        # inside somebody's torch.compile too, the pass runs as it is
        self.model.__dict__[name] = torch.compiler.disable(wrapped)

    def _generate(self, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`model.generate` with a cache of ours."""
        with self.lock:
            attachment = self.current()
            if attachment is not None:
                self._check_unchanged()
                if self._checkpoints:
                    raise SparseKVError(CHECKPOINTS)
                check_attentions(kwargs, self.model.config, args[1] if len(args) > 1 else kwargs.get(
                    "generation_config"), self.model.generation_config)
                kwargs = with_cache(attachment, args, kwargs)
        ids = kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None))
        cache = kwargs.get("past_key_values")
        before, NOW.answer = NOW.answer, None
        try:
            if isinstance(ids, Tensor) and isinstance(cache, SparseCache):
                NOW.answer = Answer(self.model, ids, cache)
            return own(*args, **kwargs)
        finally:
            NOW.answer = before

    def _batched(self, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Continuous batching: not while attached."""
        with self.lock:
            if self.current() is not None:
                raise SparseKVError("continuous batching keeps keys and values in pages of transformers' own, which "
                                    "have no sparse index; use model.generate, or serve the model by vLLM")
        return own(*args, **kwargs)

    def _forward(self, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's forward: a step of one token planned where it can be, anything else as it is."""
        with self.lock, usual_defaults():
            NOW.plan = None
            attachment = self.current()
            if attachment is None:  # they left while this call waited
                return own(*args, **kwargs)
            args, kwargs = _by_name(own, args, kwargs)
            cache = kwargs.get("past_key_values")
            if cache is not None and not isinstance(cache, SparseCache) and self.thread != threading.get_ident():
                return own(*args, **kwargs)  # begun by another thread before the model was attached to
            check_attentions(kwargs, self.model.config)
            kwargs = self._read_anew(kwargs)
            step = _is_step(args, kwargs)
            self._check_unchanged()
            kwargs = self._with_cache(attachment, args, kwargs)
            cache = kwargs.get("past_key_values")
            if cache is not None and step:
                logits = attachment.runner.step(self, cache, kwargs["input_ids"], kwargs.get("attention_mask"),
                                                kwargs.get("position_ids"))
                if logits is not None:
                    return CausalLMOutputWithPast(logits=logits.clone(), past_key_values=cache)
            NOW.reached = 0
            with self.passing():
                out = own(*args, **kwargs)
            if cache is not None and NOW.reached < len(self.modules):
                raise SparseKVError(f"the attention of {len(self.modules) - NOW.reached} of {len(self.modules)} layers "
                                    "was not sparsekv's in this pass: something has replaced it, or skips layers; "
                                    "attach to the model as transformers made it")
            if cache is not None:
                attachment.runner.prompt_ended(cache, kwargs.get("attention_mask"))
                cache.settle()
            return out

    def _check_unchanged(self) -> None:
        """Raises SparseKVError where attention would not be sparsekv's."""
        for config, _ in self._names:
            _check_named(config)
        check_uncompiled(self.holders)

    @property
    def _checkpoints(self) -> bool:
        """Whether the model's layers drop the cache they are given."""
        return any(getattr(layer, "gradient_checkpointing", False) and layer.training for layer in self.layers.decoders)

    def _with_cache(self, attachment: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Give a forward pass without a cache one of ours; refuse foreign ones, and rows that it does not hold."""
        cache = kwargs.get("past_key_values")
        ids = kwargs.get("input_ids", args[0] if args else None)
        if isinstance(ids, Tensor) and ids.numel() == 0:
            raise SparseKVError(f"the prompt is empty: input_ids are {list(ids.shape)}; give at least one token of "
                                "every row")
        use_cache = kwargs.get("use_cache", getattr(self.model.config, "use_cache", True))
        counters = attachment.counters
        counters.passes += 1
        if cache is None and (use_cache is False or self._checkpoints):
            counters.uncached += 1
        elif cache is None:
            return kwargs | {"past_key_values": attachment.cache()}
        else:
            check_cache(cache)
            cache.belongs_to(self.model)
            if self._checkpoints:
                raise SparseKVError(CHECKPOINTS)
            given = ids if isinstance(ids, Tensor) else kwargs.get("inputs_embeds")
            if isinstance(given, Tensor):
                check_cache_rows(cache, given.shape[0])
                counters.chunks += given.shape[1] > 1 and cache.get_seq_length() > 0
                mask = kwargs.get("attention_mask")
                if mask is None or (isinstance(mask, Tensor) and mask.dim() == 2):
                    # of a pass of `generate`, which wants the last logits, the tokens may have another order
                    places = kwargs.get("position_ids")
                    mask, order = cache.masked(mask, given.shape[1], NOW.answer is not None and isinstance(
                        ids, Tensor) and isinstance(places, Tensor) and places.shape == ids.shape)
                    kwargs = kwargs if mask is None else kwargs | {"attention_mask": mask}
                    if order is not None and places is not None:
                        kwargs = kwargs | {"input_ids": given.gather(1, order), "position_ids": places.gather(1, order)}
        return kwargs

    def _read_anew(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a pass of the answer that is written. Past a length the model rotates otherwise (longrope):
        there transformers drops the cache, and all tokens so far are read again."""
        answer, ids, border = NOW.answer, kwargs.get("input_ids"), border_of(self.model.config)
        if border is None or answer is None or answer.model is not self.model or not isinstance(ids, Tensor):
            return kwargs
        first, held = not answer.passes, answer.cache.get_seq_length()
        answer.passes.append(answer.prompt.repeat_interleave(len(ids) // len(answer.prompt), 0) if first else ids)
        if kwargs.get("past_key_values") is not None or not 0 < held <= border:
            return kwargs
        whole, mask = torch.cat(answer.passes, dim=1), kwargs.get("attention_mask")
        answer.cache.reset()
        answer.cache.prompt = whole.shape[1]
        places = None if mask is None else (mask.long().cumsum(-1) - 1).clamp(min=0)
        return kwargs | {"input_ids": whole, "past_key_values": answer.cache, "position_ids": places}

    def _see(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the cache, and in it the rotary tables: neither reaches the attention function."""
        if NOW.plan is not None:
            return
        cache, tables = kwargs.get("past_key_values"), kwargs.get("position_embeddings")
        NOW.seen = module, self, cache
        if self.is_ours():
            _check_named(module.config)
            if cache is not None:
                check_cache(cache)
        elif self.attachments:
            self._elsewhere(cache)
        if isinstance(cache, SparseCache) and tables is not None:
            layer = cache.layers[module.layer_idx] if module.layer_idx < len(cache.layers) else None
            if isinstance(layer, SparseLayer):
                key = getattr(module, "layer_type", None)
                if key not in self.ropes:
                    self.ropes[key] = find_layout(module, tables[0][0], tables[1][0], module.head_dim)
                rope = self.ropes[key]
                if rope is not None:
                    table = cache.rope.setdefault(key, GrowingRope(rope.layout, cache.reserve))
                    table.append(rope.table(tables[0]), rope.table(tables[1]), layer.get_seq_length(), cache.moves)

    def _elsewhere(self, cache: Any) -> None:
        """A pass of another thread that did not come by the model's forward. Raises SparseKVError for one with a cache
        of ours; of others says once that they are not decoded sparsely."""
        if isinstance(cache, SparseCache):
            raise SparseKVError("another thread than the one that attached called the decoder by itself; call the "
                                "model, or attachment.prefill and attachment.step")
        if not self.warned:
            self.warned = True
            warnings.warn("a pass of another thread runs with the model's own attention and not sparsely: it began "
                          "before the model was attached to, or calls the decoder by itself; call the model",
                          stacklevel=2)

    def _see_tables(self, decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A plan's rotary tables, before the first layer of a kind."""
        if NOW.plan is not None and kwargs.get("position_embeddings") is not None:
            NOW.plan.write_tables(self.layers.first_of_kind[decoder], kwargs["position_embeddings"])


def enter(attachment: Any) -> None:
    """Attach: the model is changed, or was. Raises SparseKVError where another thread has."""
    about = known(attachment.model)
    while True:
        seat = seat_for(attachment.model, lambda: Seat(attachment.model, attachment.modules))
        with seat.lock:
            if about.seat is seat:  # else all have left it meanwhile
                seat.enter(attachment)
                return


def leave(attachment: Any) -> None:
    """Undo every change to the model, unless others are still attached. Any number of times."""
    about = known(attachment.model)
    seat = about.seat
    if seat is not None:
        with seat.lock:
            seat.leave(attachment)
            if not seat.entered and about.seat is seat:
                about.seat = None


def seat_of(attachment: Any) -> Seat:
    """Where an attachment that has entered sits. Raises SparseKVError for one that has not."""
    seat = known(attachment.model).seat
    if seat is None or attachment not in seat.attachments:
        raise SparseKVError("this attachment is not in use: enter it first, `with sparsekv.attach(...) as "
                            "attachment:`")
    return seat


def _check_named(config: Any) -> None:
    """Raises SparseKVError where a configuration of an attached model names another attention."""
    name = config._attn_implementation
    if name not in (NAME, PLANNED):
        raise SparseKVError(f"the attention implementation was set to {name!r} while the model is attached, which "
                            "would decode without sparsekv; set it before attach, which has its own")


def _by_name(own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call of `own`, all by name; as they are where they do not fit, or names are not known."""
    if not args:
        return args, kwargs
    try:
        bound = inspect.signature(own).bind_partial(*args, **kwargs)
    except (TypeError, ValueError):
        return args, kwargs
    found = dict(bound.arguments)
    for parameter in bound.signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            found |= found.pop(parameter.name, {})
        elif parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            return args, kwargs
    return (), found


def _is_step(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call is one token of every row after a cache, and asks for logits alone."""
    ids = kwargs.get("input_ids")
    return (not args and isinstance(ids, Tensor) and ids.dim() == 2 and ids.shape[1] == 1
            and all(name in STEP_OPTIONS or value is None or value is False for name, value in kwargs.items())
            and kwargs.get("return_dict") is not False and kwargs.get("use_cache") is not False)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float | None = None,
    dropout: float = 0.0, sliding_window: int | None = None, softcap: float | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls while a model is attached: a layer of the plan that runs, or a layer by itself."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    sinks = kwargs.get("s_aux")
    if NOW.plan is not None:
        return NOW.plan.layer(query, key, value, scale, sinks), None
    seen, NOW.seen = NOW.seen, None
    foreign = attention_mask is not None and attention_mask.dim() != 2
    ours = seen is not None and seen[0] is module and seen[1].is_ours()
    attachment = seen[1].current() if seen is not None and ours else None
    if seen is None or attachment is None or (foreign and not isinstance(seen[2], SparseCache)):
        return _own_attention(module)(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout,
                                      sliding_window=sliding_window, softcap=softcap, **kwargs)
    if sinks is not None and softcap is not None:
        raise SparseKVError(f"{type(module).__name__} has learned attention sinks and caps its scores, which sparsekv "
                            "does not support together")
    NOW.reached += 1
    own = None
    if getattr(attention_mask, "sees_ahead", False):
        own = functools.partial(_own_attention(module), module, attention_mask=attention_mask, scaling=scaling,
                                dropout=dropout, sliding_window=sliding_window, softcap=softcap, **kwargs)
    out = attachment.runner.attention(
        module, seen[2], query, key, value, attention_mask, scale, sliding_window, softcap, sinks, own)
    return out.transpose(1, 2).contiguous(), None


def _mask(*args: Any, config: Any, **kwargs: Any) -> Any:
    """The mask of a pass: as FlashAttention takes it, 2-D or none; the model's own for one that is not ours, and for a
    prompt with spans that see both ways (an image's)."""
    seat = next((seat for seat in seats() if seat.own_name(config) is not None), None)
    ours = seat is None or seat.is_ours()
    if seat is None or (ours and not _sees_ahead(**kwargs)):
        return flash_attention_mask(*args, **kwargs)
    make = AttentionMaskInterface().get(seat.own_name(config), flash_attention_mask)
    found: Any = make(*args, config=config, **kwargs)
    if ours and found is not None:
        found.sees_ahead = True
    return found


def _sees_ahead(*, batch_size: int, q_length: int, q_offset: Any = 0, mask_function: Any = causal_mask_function,
                device: Any = None, **_: Any) -> bool:
    """Whether a token of a pass sees the one after it."""
    if q_length < 2 or mask_function is causal_mask_function:
        return False
    rows = torch.arange(batch_size, device=device)[:, None]
    tokens = torch.arange(q_length - 1, device=device) + q_offset
    return bool(mask_function(rows, torch.zeros_like(rows), tokens, tokens + 1).any())


def _own_attention(module: Any) -> Any:
    """The attention function that a module had before its model was attached to. Raises SparseKVError for a module of
    no such model."""
    name = module.config._attn_implementation
    if name in (NAME, PLANNED):
        name = next((own for seat in seats() if (own := seat.own_name(module.config)) is not None), None)
        if name is None:
            raise SparseKVError("attention was called on a module that is not attached; attach the whole model")
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return AttentionInterface().get(name, eager)
