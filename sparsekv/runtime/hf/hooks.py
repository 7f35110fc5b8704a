"""What a model carries while it is attached to: hooks, our attention and mask function, wrapped `forward` and
`generate`; how they come and how they go.

What the model was like is noted before anything is changed, and giving it back may run at any moment and twice: an
interrupt while entering or leaving leaves it unchanged.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask
from transformers.modeling_outputs import CausalLMOutputWithPast

from sparsekv.artifacts.hub.models import decoder
from sparsekv.core.rope import LayerRope, find_layout
from sparsekv.runtime.hf.cache import GrowingRope, SparseCache, SparseLayer
from sparsekv.runtime.hf.generate_hook import with_cache
from sparsekv.runtime.hf.model_pass import PLANNED, Layers
from sparsekv.runtime.hf.supported import check_cache
from sparsekv.runtime.process import NOW, known, seat_for, seats
from sparsekv.util.errors import SparseKVError

NAME = "sparsekv"
STEP_OPTIONS = frozenset({"input_ids", "attention_mask", "position_ids", "past_key_values", "use_cache", "return_dict",
                          "logits_to_keep"})
_ABSENT = object()


class Seat:
    """The last attachment that entered and has not left decodes; when none is left the model is unchanged, whatever the
    order. Attachments of several threads would decode with each other's settings: a model has those of one. A pass
    holds `lock`, so that none comes or goes in the middle of it."""

    def __init__(self, model: Any, modules: dict[int, Any]):
        self.model, self.modules, self.decoder = model, modules, decoder(model)
        self.attachments: list[Any] = []
        self.lock = threading.RLock()
        self.thread = 0
        self.ropes: dict[Any, LayerRope | None] = {}
        """How the model's rotary tables become ours, by kind of layer."""
        self.layers = Layers(model, modules)
        self.hooks: frozenset[int] = frozenset()
        configs = {id(m.config): m.config for m in modules.values()}.values()
        self._names = [(config, config._attn_implementation) for config in configs]
        self._own = {name: model.__dict__.get(name, _ABSENT) for name in ("forward", "generate")}

    def __reduce_ex__(self, _: Any) -> Any:
        raise SparseKVError("a model cannot be copied or pickled while it is attached; do it outside the `with` block")

    def enter(self, attachment: Any) -> None:
        if self.attachments and self.thread != threading.get_ident():
            raise SparseKVError("this model is attached in another thread; share that attachment, or load the model "
                                "once a thread")
        self.thread = threading.get_ident()
        first = not self.attachments
        self.attachments.append(attachment)
        attachment.runner.fused = self.layers.fused
        if first:
            self._take()

    def leave(self, attachment: Any) -> None:
        """Any number of times, also of one that has not entered."""
        if attachment in self.attachments:
            self.attachments.remove(attachment)
        if not self.attachments:
            self._give_back()

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

        self.model.__dict__[name] = wrapped

    def _generate(self, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`model.generate` with a cache of ours."""
        with self.lock:
            if self.attachments:
                kwargs = with_cache(self.attachments[-1], args, kwargs)
        return own(*args, **kwargs)

    def _forward(self, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's forward: a step of one token planned where it can be, anything else as it is."""
        with self.lock:
            NOW.plan = None
            if not self.attachments:  # they left while this call waited
                return own(*args, **kwargs)
            attachment = self.attachments[-1]
            cache = kwargs.get("past_key_values")
            if cache is not None and not isinstance(cache, SparseCache) and self.thread != threading.get_ident():
                return own(*args, **kwargs)  # begun by another thread before the model was attached to
            kwargs = self._with_cache(attachment, args, kwargs)
            cache = kwargs.get("past_key_values")
            if cache is None:
                with self.passing():
                    return own(*args, **kwargs)
            if _is_step(args, kwargs):
                logits = attachment.runner.step(self, cache, kwargs["input_ids"], kwargs.get("attention_mask"),
                                                kwargs.get("position_ids"))
                if logits is not None:
                    return CausalLMOutputWithPast(logits=logits.clone(), past_key_values=cache)
            with self.passing():
                out = own(*args, **kwargs)
            if isinstance(cache, SparseCache):
                attachment.runner.prompt_ended(cache, kwargs.get("attention_mask"))
            cache.settle()
            return out

    def _with_cache(self, attachment: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Give a forward pass without a cache one of ours; refuse foreign ones."""
        cache = kwargs.get("past_key_values")
        use_cache = kwargs.get("use_cache", getattr(self.model.config, "use_cache", True))
        if cache is None and use_cache is not False:
            kwargs = kwargs | {"past_key_values": attachment.cache()}
        elif cache is not None:
            check_cache(cache)
            cache.belongs_to(self.model)
        ids = kwargs.get("input_ids", args[0] if args else None)
        if isinstance(ids, Tensor) and ids.numel() == 0:
            raise SparseKVError(f"the prompt is empty: input_ids are {list(ids.shape)}; give at least one token of "
                                "every row")
        return kwargs

    def _see(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the cache, and in it the rotary tables: neither reaches the attention function."""
        if NOW.plan is not None:
            return
        cache, tables = kwargs.get("past_key_values"), kwargs.get("position_embeddings")
        NOW.seen = module, self, cache
        if isinstance(cache, SparseCache) and tables is not None:
            layer = cache.layers[module.layer_idx] if module.layer_idx < len(cache.layers) else None
            if isinstance(layer, SparseLayer):
                key = getattr(module, "layer_type", None)
                if key not in self.ropes:
                    self.ropes[key] = find_layout(module, tables[0][0], tables[1][0], module.head_dim)
                rope = self.ropes[key]
                if rope is not None:
                    table = cache.rope.setdefault(key, GrowingRope(rope.layout, cache.reserve))
                    table.append(rope.table(tables[0]), rope.table(tables[1]), layer.get_seq_length())

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
            if not seat.attachments and about.seat is seat:
                about.seat = None


def seat_of(attachment: Any) -> Seat:
    """Where an attachment that has entered sits. Raises SparseKVError for one that has not."""
    seat = known(attachment.model).seat
    if seat is None or attachment not in seat.attachments:
        raise SparseKVError("this attachment is not in use: enter it first, `with sparsekv.attach(...) as "
                            "attachment:`")
    return seat


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
    if seen is None or seen[0] is not module or not seen[1].is_ours() or (
            foreign and not isinstance(seen[2], SparseCache)):
        return _own_attention(module)(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout,
                                      sliding_window=sliding_window, softcap=softcap, **kwargs)
    if sinks is not None and softcap is not None:
        raise SparseKVError(f"{type(module).__name__} has learned attention sinks and caps its scores, which sparsekv "
                            "does not support together")
    out = seen[1].attachments[-1].runner.attention(
        module, seen[2], query, key, value, attention_mask, scale, sliding_window, softcap, sinks)
    return out.transpose(1, 2).contiguous(), None


def _mask(*args: Any, config: Any, **kwargs: Any) -> Any:
    """The mask of a pass: as FlashAttention takes it, 2-D or none; the model's own for one that is not ours."""
    seat = next((seat for seat in seats() if seat.own_name(config) is not None), None)
    if seat is None or seat.is_ours():
        return flash_attention_mask(*args, **kwargs)
    make = AttentionMaskInterface().get(seat.own_name(config), flash_attention_mask)
    return make(*args, config=config, **kwargs)


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
