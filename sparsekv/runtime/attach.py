"""`sparsekv.attach`: make a transformers model decode sparsely for as long as a `with` block lasts.

Together with `capture/tap.py` the only file that knows transformers' internals: the attention interface, the mask
interface, what reaches an attention module, and how `generate` gets its cache.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask

from sparsekv.artifacts.fingerprint import model_fingerprint
from sparsekv.core.cost import bytes_share
from sparsekv.core.estimators import Estimator
from sparsekv.core.layer import LayerView, Queries
from sparsekv.core.regions import Regions
from sparsekv.core.rope import LayerRope, find_layout
from sparsekv.core.selectors import Selector
from sparsekv.core.step import LayerState
from sparsekv.errors import SparseKVError
from sparsekv.hub import attention_modules
from sparsekv.kernels import dense_attention
from sparsekv.runtime.cache import GrowingRope, HostLayer, SparseCache, SparseLayer
from sparsekv.runtime.counters import Counters
from sparsekv.runtime.decoding import Decoding, make_decoding
from sparsekv.runtime.offload import HostView
from sparsekv.runtime.prefix import load_prefix, save_prefix
from sparsekv.runtime.settings import load_settings
from sparsekv.runtime.supported import check_cache, check_model, load_artifact

NAME = "sparsekv"
QUERY_BLOCK = 64
_BOUND: weakref.WeakKeyDictionary[nn.Module, Attachment] = weakref.WeakKeyDictionary()


def attach(
    model: Any, *, router: Any = None, phi: Any = None, selector: str | Selector | None = None,
    token_budget: int | float | None = None, completion: str | Estimator | None = None,
    sink_size: int | None = None, window_size: int | None = None, decode_window: int = 1024,
    dense_layers: Sequence[int] | None = None, dense_below: int | None = None, placement: str = "gpu",
    settings: Any = None, **options: Any,
) -> Attachment:
    """Attach sparse decoding to a causal language model; use as `with sparsekv.attach(model, ...) as attachment:`.

    router, phi: artifacts or their folders. selector: a name of `sparsekv.core.selectors.SELECTORS` or a Selector;
    without it `sketch` if a router is given (`router` if it has none, or with probes), else `dense`; `options` are the
    selector's own. token_budget: int = tokens,
    float = share of the context, per query and KV head. completion: phi, centroid or none, or an Estimator; without it
    phi if one is given. sink_size, window_size: without them the artifact's, else 4 and 16. decode_window: generated
    tokens stay exact until there are more than this, then the older half joins the mid region. dense_layers decode with
    full attention, layer 0 unless told otherwise. dense_below: caches shorter than this are decoded with full attention
    [tokens]; without it, with placement gpu, where full attention was measured to be the faster one
    (`decoding.DENSE_BYTES`); 0 always decodes sparsely. placement of keys and values: gpu (the model's device), offload
    (CPU memory; index, anchors and decode window on the device, what is read is copied over) or cpu (CPU memory, and
    the sparse layers' attention is computed there). settings: a file of `sparsekv eval recommend` (or a `Settings`):
    selector, completion, budget of every layer and gate of every head, and the artifacts' folders unless router and phi
    are given.

    Raises SparseKVError for a model, artifact or option that cannot work, before anything is changed.
    """
    check_model(model)
    modules = attention_modules(model)
    layers = None
    if settings is not None:
        given = {"selector": selector, "token_budget": token_budget, "completion": completion, "sink_size": sink_size,
                 "window_size": window_size, "dense_layers": dense_layers, **options}
        settings = load_settings(settings, model, [k for k, v in given.items() if v is not None])
        router, phi = router or settings.router, phi or settings.phi
        selector, completion, layers = settings.selector, settings.completion, settings.layers
        sink_size, window_size, dense_layers = settings.sink_size, settings.window_size, ()
    decoding = make_decoding(
        model, modules, router=load_artifact(router, "router"), phi=load_artifact(phi, "phi"), selector=selector,
        token_budget=token_budget, completion=completion, sink_size=sink_size, window_size=window_size,
        decode_window=decode_window, dense_layers=(0,) if dense_layers is None else dense_layers, placement=placement,
        dense_below=dense_below, options=options, layers=layers)
    return Attachment(model, modules, decoding)


class Attachment:
    """A model that decodes sparsely inside the `with` block and is exactly as before after it."""

    sparse_chunks = False
    """Chunks of several tokens after the prefill are decoded sparsely too, each query on its own (evaluation)."""
    compares = False
    """Full attention is computed beside every sparse step, and `report` has the relative error (evaluation)."""

    def __init__(self, model: Any, modules: dict[int, Any], decoding: Decoding):
        self.model, self.modules, self.decoding = model, modules, decoding
        self.counters = Counters()
        self._undo: list[Any] = []
        self._seen: dict[nn.Module, tuple[Any, Any]] = {}
        self._ropes: dict[Any, LayerRope | None] = {}
        self._mask: tuple[Any, Tensor] | None = None
        self._prefilling = False

    def __enter__(self) -> Attachment:
        if self._undo:
            raise SparseKVError("this attachment is in use already; call attach again for another")
        AttentionInterface.register(NAME, _attention)
        AttentionMaskInterface.register(NAME, flash_attention_mask)
        for module in self.modules.values():
            before = _BOUND.get(module)
            _BOUND[module] = self
            self._undo.append(lambda m=module, b=before: _BOUND.pop(m, None) if b is None else _BOUND.__setitem__(m, b))
            self._undo.append(module.register_forward_pre_hook(self._see, with_kwargs=True).remove)
        for config in {id(m.config): m.config for m in self.modules.values()}.values():
            self._undo.append(lambda c=config, n=config._attn_implementation: setattr(c, "_attn_implementation", n))
            config._attn_implementation = NAME
        self._undo.append(self.model.register_forward_pre_hook(self._give_cache, with_kwargs=True).remove)
        if hasattr(self.model, "generate"):
            held = self.model.__dict__.get("generate")
            self._undo.append(lambda: self.model.__dict__.pop("generate", None) if held is None
                              else self.model.__dict__.__setitem__("generate", held))
            self.model.__dict__["generate"] = self._wrap_generate(self.model.generate)
        return self

    def __exit__(self, *_: Any) -> None:
        while self._undo:
            self._undo.pop()()
        self._seen.clear()
        self._mask = None

    def report(self) -> dict[str, Any]:
        """sparse_calls and dense_calls (layer steps), selectivity (mean share of the cache read over rows, layers and
        steps, dense layers included; selectivity_sparse without them), bytes_share (all that a step of a sparse layer
        reads over the bytes of its keys and values), rel_err (mean relative L2 error of the sparse layers' attention
        output; None unless it `compares`), the same per layer, and the selectors' own numbers."""
        return self.counters.report()

    def cache(self) -> SparseCache:
        """An empty cache for this model."""
        host = set() if self.decoding.placement == "gpu" else set(self.modules) - self.decoding.dense_layers
        return SparseCache(self.model.config, host_layers=host)

    @torch.no_grad()
    def prefill(self, input_ids: Tensor, attention_mask: Tensor | None = None, *, chunk_size: int | None = None,
                cache: SparseCache | None = None) -> SparseCache:
        """Run the prompt densely, in chunks of `chunk_size` tokens, and return its cache; the last token included."""
        cache = self.cache() if cache is None else cache
        decoder = self.model.get_decoder() if hasattr(self.model, "get_decoder") else self.model
        self._prefilling = True
        try:
            past = cache.get_seq_length()
            for part in input_ids.split(chunk_size or max(input_ids.shape[1], 1), dim=1):
                past += part.shape[1]
                mask = None if attention_mask is None else attention_mask[:, :past]
                # a padded row counts from its first real token on, as `generate` does
                place = None if mask is None else (mask.cumsum(-1) - 1).clamp(min=0)[:, -part.shape[1]:]
                decoder(input_ids=part, attention_mask=mask, position_ids=place, past_key_values=cache, use_cache=True)
        finally:
            self._prefilling = False
        return cache

    def save_prefix(self, cache: SparseCache, path: str | Path) -> None:
        """Write a prefilled cache to one safetensors file. Raises SparseKVError for a model with sliding-window
        layers."""
        save_prefix(cache, path, model_fingerprint(self.model))

    def load_prefix(self, path: str | Path) -> SparseCache:
        """A cache from `save_prefix`, on the model's device. Raises SparseKVError for another model's."""
        device = next(self.model.parameters()).device
        return load_prefix(self.cache(), path, model_fingerprint(self.model), device)

    def _see(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the cache and the rotary tables, which do not reach the attention function."""
        cache, tables = kwargs.get("past_key_values"), kwargs.get("position_embeddings")
        self._seen[module] = (cache, tables)
        if isinstance(cache, SparseCache) and tables is not None:
            layer = cache.layers[module.layer_idx] if module.layer_idx < len(cache.layers) else None
            if isinstance(layer, SparseLayer):
                key = getattr(module, "layer_type", None)
                if key not in self._ropes:
                    self._ropes[key] = find_layout(module, tables[0][0], tables[1][0], module.head_dim)
                rope = self._ropes[key]
                if rope is not None:
                    table = cache.rope.setdefault(key, GrowingRope(rope.layout))
                    table.append(rope.table(tables[0]), rope.table(tables[1]), layer.get_seq_length())

    def _give_cache(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give a forward pass without a cache one of ours; refuse foreign ones."""
        cache = kwargs.get("past_key_values")
        use_cache = kwargs.get("use_cache", getattr(module.config, "use_cache", True))
        if cache is None and use_cache is not False:
            kwargs["past_key_values"] = self.cache()
        elif cache is not None:
            check_cache(cache)
        return args, kwargs

    def _wrap_generate(self, inner: Any) -> Any:
        def generate(*args: Any, **kwargs: Any) -> Any:
            config = kwargs.get("generation_config") or self.model.generation_config
            kind = kwargs.get("cache_implementation", getattr(config, "cache_implementation", None))
            if kind not in (None, "dynamic"):
                raise SparseKVError(f"cache_implementation {kind!r} has no sparse index; leave it out, and sparsekv "
                                    "brings its own cache")
            if not kwargs.get("use_cache", getattr(config, "use_cache", True)):
                raise SparseKVError("sparse decoding needs a cache; remove use_cache=False")
            if kwargs.get("past_key_values") is None:
                kwargs.pop("cache_implementation", None)
                kwargs["past_key_values"] = self.cache()
            else:
                check_cache(kwargs["past_key_values"])
            return inner(*args, **kwargs)

        return generate

    def _starts(self, mask: Tensor | None, batch: int, device: Any) -> Tensor:
        """First real token of every row, from the 2-D mask of a left-padded batch; checked once a mask."""
        if mask is None:
            return torch.zeros(batch, dtype=torch.long, device=device)
        if self._mask is None or self._mask[0] is not mask:
            real = mask.bool()
            if bool((real[:, :-1] & ~real[:, 1:]).any()):
                raise SparseKVError("sparse decoding needs left padding, found padding after or between real tokens; "
                                    "set tokenizer.padding_side = 'left'")
            self._mask = (mask, (~real).sum(-1).to(device))
        return self._mask[1]

    def attention(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float,
                  window: int | None, softcap: float | None) -> Tensor:
        """Dense or sparse, `[B, Hq, T, d]`."""
        index = module.layer_idx
        cache, _ = self._seen.get(module, (None, None))
        layers = cache.layers if isinstance(cache, SparseCache) else ()
        layer = layers[index] if index < len(layers) else None
        count, past = query.shape[2], key.shape[2] - query.shape[2]
        decoding = past > 0 and not self._prefilling and (count == 1 or self.sparse_chunks)
        if mask is not None and mask.dim() != 2:
            raise SparseKVError(f"sparsekv reads 2-D attention masks (batch, tokens), found {mask.dim()} dimensions")

        def dense(q: Tensor = query) -> Tensor:
            k, v = key.to(q.device), value.to(q.device)
            return dense_attention(q, k, v, scale=scale, key_mask=mask, window=window, softcap=softcap)

        if not isinstance(layer, SparseLayer) or layer.keys.shape[2] != key.shape[2]:
            return dense()
        if not decoding:
            layer.remember_queries(query, key.shape[2])
            return dense()
        if index in self.decoding.dense_layers or softcap is not None or self.decoding.is_short(key):
            self.counters.dense(index, count)
            return dense()
        if layer.state is None or layer.state.owner is not self.decoding:
            layer.state = self._begin(module, layer, cache, query, mask, scale, past)
        out = self._decode(layer, query, past)
        if self.compares:
            self.counters.compare(index, out, dense())
        return out

    def _begin(self, module: Any, layer: SparseLayer, cache: SparseCache, query: Tensor, mask: Tensor | None,
               scale: float, past: int) -> LayerState:
        """Selector and estimator of a layer over what was prefilled, `past` tokens: decoding begins."""
        index, keys, values = module.layer_idx, layer.keys, layer.values
        on_host = isinstance(layer, HostLayer) and self.decoding.placement == "offload"
        device = query.device if on_host else keys.device
        keys, values = keys.to(device), values.to(device)
        recent = layer.recent
        if recent is None:
            recent = query[:, :, :0]
        regions = Regions.at_prefill_end(self._starts(mask, query.shape[0], device), past, self.decoding.sink_size,
                                         self.decoding.window_size)
        kind = HostView if on_host else LayerView
        view = kind(keys[:, :, :past], values[:, :, :past], regions, scale, query.shape[1], index, len(cache.layers),
                    cache.rope.get(getattr(module, "layer_type", None)), recent.to(device), layer.recent_end)
        state = LayerState(
            view, self.decoding.selector_of(index, device), self.decoding.estimator_of(index, device),
            window_size=self.decoding.window_size, decode_window=self.decoding.decode_window, owner=self.decoding)
        if isinstance(view, HostView):
            view.keep_anchors(keys, values)
        return state

    def _decode(self, layer: SparseLayer, query: Tensor, past: int) -> Tensor:
        """Steps of the last tokens of a cache, `[B, Hq, T, d]`, some queries at a time."""
        state, parts = layer.state, []
        assert state is not None
        view = state.view
        q = query.to(view.device)
        for first in range(0, q.shape[2], QUERY_BLOCK):
            block = q[:, :, first:first + QUERY_BLOCK]
            end = past + first + block.shape[2]
            view.keys, view.values = layer.keys[:, :, :end], layer.values[:, :, :end]
            if not view.keys_on_device and state.outgrown(past + first):
                view.keys, view.values = view.keys.to(view.device), view.values.to(view.device)
            state.advance(past + first, end)
            view.keys, view.values = layer.keys[:, :, :end], layer.values[:, :, :end]
            queries = Queries.last(block, end, view.rope)
            step = state.step(queries)
            self.counters.sparse(view.layer_idx, step.read(view, queries), bytes_share(
                view, queries, step.selection, state.selector, state.estimator))
            parts.append(step.out.to(query.device))
        self.counters.statistics[view.layer_idx] = state.selector.statistics()
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float | None = None,
    dropout: float = 0.0, sliding_window: int | None = None, softcap: float | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls while a model is attached."""
    attachment = _BOUND.get(module)
    if attachment is None:
        raise SparseKVError("attention was called on a module that is not attached; attach the whole model")
    if kwargs.get("s_aux") is not None:
        raise SparseKVError(f"{type(module).__name__} has learned attention sinks, which sparsekv does not support")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = attachment.attention(module, query, key, value, attention_mask, scale, sliding_window, softcap)
    return out.transpose(1, 2).contiguous(), None
