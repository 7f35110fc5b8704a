"""What a model carries while it is attached to: hooks, our attention and mask function, wrapped `forward` and
`generate`; how they come and how they go.

What the model was like is noted before anything is changed, and giving it back may run at any moment and twice: an
interrupt while entering or leaving leaves it unchanged.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

from sparsekv.core.rope import LayerRope
from sparsekv.runtime import process
from sparsekv.runtime.hf import attention
from sparsekv.runtime.hf.cache import SparseCache
from sparsekv.runtime.hf.forward import forward
from sparsekv.runtime.hf.generate_hook import generate, generate_batch
from sparsekv.runtime.hf.model_pass import Layers
from sparsekv.runtime.hf.supported import holders
from sparsekv.runtime.process import NOW
from sparsekv.util.errors import SparseKVError

BATCHED = ("generate_batch", "init_continuous_batching", "continuous_batching_context_manager")
"""Methods of continuous batching, whose cache of pages is transformers' own."""
_ABSENT = object()
_ENTERED: ContextVar[tuple[weakref.ref[Any], ...]] = ContextVar("sparsekv_entered", default=())
"""Attachments that were entered by this coroutine, or by what started it."""


class AttachedModel:
    """A model that is attached to. The last attachment that entered and has not left decodes; when none is left the
    model is unchanged, whatever the order. Attachments of several threads or coroutines would decode with each other's
    settings: a model has those of one. A pass holds `lock`, so that none comes or goes in the middle of it."""

    def __init__(self, model: Any, modules: dict[int, Any]):
        self.model, self.modules = model, modules
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
        self.names = [(config, config._attn_implementation) for config in configs]
        self._own = {name: model.__dict__.get(name, _ABSENT) for name in ("forward", "generate", *BATCHED)}

    def __reduce_ex__(self, _: Any) -> Any:
        raise SparseKVError("a model cannot be copied or pickled while it is attached; do it outside the `with` block")

    @property
    def attachments(self) -> list[Any]:
        """The attachments that have entered and not left, and are held by somebody."""
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
        held = self.attachments
        if not held and self.entered:  # forgotten by all, and the collector has not told us
            self.entered = []
            self._give_back()
            process.detached(self.model, self)
        return held[-1] if held else None

    def _take(self) -> None:
        attention.register()
        self.layers.fused.enter()
        self._wrap("forward", forward)
        handles = [m.register_forward_pre_hook(self._see, with_kwargs=True) for m in self.modules.values()]
        handles += [d.register_forward_pre_hook(self._see_tables, with_kwargs=True)
                    for d in self.layers.first_of_kind]
        self.hooks = frozenset(h.id for h in handles)
        if hasattr(self.model, "generate"):
            self._wrap("generate", generate)
        for name in BATCHED:
            if hasattr(self.model, name):
                self._wrap(name, generate_batch)
        for config, _ in self.names:
            config._attn_implementation = attention.NAME

    def _give_back(self) -> None:
        """Undo every change to the model."""
        self.layers.restore()
        self.layers.fused.leave()
        for config, name in self.names:
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
        """Return whether what this thread runs decodes as attached. A pass that another thread began before does not:
        mask and layers of a pass must come from the same attention function."""
        return bool(self.attachments) and (NOW.passing is self or self.thread == threading.get_ident())

    def own_name(self, config: Any) -> str | None:
        """The attention function that a configuration of the model named before; None for another's."""
        return next((name for mine, name in self.names if mine is config), None)

    def _wrap(self, name: str, call: Callable[..., Any]) -> None:
        """Let `model.name` be `call(self, own, args, kwargs)`."""
        own = getattr(self.model, name)

        @functools.wraps(own)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return call(self, own, args, kwargs)

        # inside somebody's torch.compile too, the pass runs as it is
        self.model.__dict__[name] = torch.compiler.disable(wrapped)

    def elsewhere(self, cache: Any) -> None:
        """Judge a pass of another thread that did not come by the model's forward: raises SparseKVError for one with a
        cache of an attachment that has not left; of others says once that they are not decoded sparsely."""
        if isinstance(cache, SparseCache) and cache.attachment is not None and cache.attachment() in self.attachments:
            raise SparseKVError("another thread than the one that attached called the decoder by itself; call the "
                                "model, or attachment.prefill and attachment.step")
        if not self.warned:
            self.warned = True
            warnings.warn("a pass of another thread runs with the model's own attention and not sparsely: it began "
                          "before the model was attached to, or calls the decoder by itself; call the model",
                          stacklevel=2)

    def _see(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        attention.see(self, module, kwargs)

    def _see_tables(self, decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A plan's rotary tables, before the first layer of a kind."""
        if NOW.plan is not None and kwargs.get("position_embeddings") is not None:
            NOW.plan.write_tables(self.layers.first_of_kind[decoder], kwargs["position_embeddings"])


def enter(attachment: Any) -> None:
    """Attach: the model is changed, or was. Raises SparseKVError where another thread has."""
    model = attachment.model
    while True:
        attached = process.attached(model, lambda: AttachedModel(model, attachment.modules))
        with attached.lock:
            if process.attached(model) is attached:  # else all have left it meanwhile
                attached.enter(attachment)
                return


def leave(attachment: Any) -> None:
    """Undo every change to the model, unless others are still attached. Any number of times."""
    attached = process.attached(attachment.model)
    if attached is not None:
        with attached.lock:
            attached.leave(attachment)
            if not attached.entered:
                process.detached(attachment.model, attached)


def model_of(attachment: Any) -> AttachedModel:
    """The model of an attachment that has entered. Raises SparseKVError for one that has not."""
    attached: AttachedModel | None = process.attached(attachment.model)
    if attached is None or attachment not in attached.attachments:
        raise SparseKVError("this attachment is not in use: enter it first, `with sparsekv.attach(...) as "
                            "attachment:`")
    return attached
