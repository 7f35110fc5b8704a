"""`sparsekv.attach`: make a transformers model decode sparsely for as long as a `with` block lasts.

Together with `capture/tap.py` the only file that knows transformers' internals: the attention interface, the mask
interface, what reaches an attention module, and how `generate` gets its cache.
"""

from __future__ import annotations

import functools
import threading
import time
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask
from transformers.modeling_outputs import CausalLMOutputWithPast

from sparsekv.artifacts.fingerprint import model_fingerprint
from sparsekv.core.cost import read_shares
from sparsekv.core.estimators import Estimator
from sparsekv.core.layer import LayerView, Queries
from sparsekv.core.prefill import prefill_chunks
from sparsekv.core.regions import Regions
from sparsekv.core.rope import LayerRope, find_layout
from sparsekv.core.selectors import Selector
from sparsekv.core.step import LayerState
from sparsekv.foundation.errors import SparseKVError, first_line
from sparsekv.kernels import dense_attention
from sparsekv.runtime.cache import GrowingRope, HostLayer, SparseCache, SparseLayer
from sparsekv.runtime.counters import Counters
from sparsekv.runtime.decoding import Decoding, make_decoding
from sparsekv.runtime.loop import decode_loop
from sparsekv.runtime.offload import HostView
from sparsekv.runtime.prefix import load_prefix, save_prefix
from sparsekv.runtime.replay import Layers, Replay, why_not
from sparsekv.runtime.settings import beside, load_settings
from sparsekv.runtime.supported import check_cache, check_model, load_artifacts
from sparsekv.sources.hub import attention_modules, decoder

NAME = "sparsekv"
QUERY_BLOCK = 64
MOST_NEW = 4096
STEP_OPTIONS = frozenset({"input_ids", "attention_mask", "position_ids", "past_key_values", "use_cache", "return_dict",
                          "logits_to_keep"})
_SEATS: weakref.WeakKeyDictionary[nn.Module, Seat] = weakref.WeakKeyDictionary()
_SEATING = threading.Lock()


def attach(
    model: Any, artifacts: Any = None, *, router: Any = None, phi: Any = None,
    selector: str | Selector | None = None, token_budget: int | float | None = None,
    completion: str | Estimator | None = None,
    sink_size: int | None = None, window_size: int | None = None, decode_window: int = 1024,
    dense_layers: Sequence[int] | None = None, dense_below: int | None = None, placement: str = "gpu",
    settings: Any = None, **options: Any,
) -> Attachment:
    """Attach sparse decoding to a causal language model; use as `with sparsekv.attach(model, ...) as attachment:`.

    artifacts: what one training made, a folder with `router/`, `phi/` or both, or one artifact; or its name on the
    Hugging Face hub, as `user/name` or `user/name@revision`, where nothing lies at that path. router, phi: artifacts,
    their folders or names, for these two. selector: a name of `sparsekv.core.selectors.SELECTORS` or a Selector;
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
        if artifacts is None:
            router, phi = router or beside(settings.router), phi or beside(settings.phi)
        selector, completion, layers = settings.selector, settings.completion, settings.layers
        sink_size, window_size, dense_layers = settings.sink_size, settings.window_size, ()
    router, phi = load_artifacts(artifacts, router, phi)
    decoding = make_decoding(
        model, modules, router=router, phi=phi, selector=selector, token_budget=token_budget, completion=completion,
        sink_size=sink_size, window_size=window_size, decode_window=decode_window,
        dense_layers=(0,) if dense_layers is None else dense_layers, placement=placement,
        dense_below=dense_below, options=options, layers=layers)
    return Attachment(model, modules, decoding)


class Attachment:
    """A model that decodes sparsely inside the `with` block and is exactly as before after it."""

    sparse_chunks = False
    """Chunks of several tokens after the prefill are decoded sparsely too, each query on its own (evaluation)."""
    compares = False
    """Full attention is computed beside every sparse step, and `report` has the relative error (evaluation)."""

    replays = True
    """Single-token steps are planned once for some hundred tokens, on a CUDA device as a graph that is replayed
    (`runtime/replay.py`)."""
    compiles = True
    """A model that has decoded for a while gets its layers compiled, for every batch size anew: not for evaluation,
    where many batches of many sizes are answered."""

    def __init__(self, model: Any, modules: dict[int, Any], decoding: Decoding):
        self.model, self.modules, self.decoding = model, modules, decoding
        self.counters = Counters(max(modules) + 1)
        self._entered = self._was_entered = False
        self._seen: dict[nn.Module, Any] = {}
        self._ropes: dict[Any, LayerRope | None] = {}
        self._mask: tuple[Any, Tensor] | None = None
        self._prefilling = False

    def __enter__(self) -> Attachment:
        if self._entered:
            raise SparseKVError("this attachment is in use already; call attach again for another")
        with _SEATING:
            seat = _SEATS.get(self.model)
            if seat is None:
                seat = _SEATS[self.model] = Seat(self.model, self.modules)
            seat.enter(self)
        self._entered = self._was_entered = True
        return self

    def __del__(self) -> None:
        if not self.__dict__.get("_was_entered", True):
            warnings.warn("an attachment was never entered, so nothing decoded sparsely; write `with "
                          "sparsekv.attach(...):` around generate", stacklevel=2)

    def __exit__(self, *_: Any) -> None:
        with _SEATING:
            self._seat.leave(self)
        self._entered = False
        self._seen.clear()
        self._mask = None

    @property
    def _seat(self) -> Seat:
        seat = _SEATS.get(self.model) if self._entered else None
        if seat is None:
            raise SparseKVError("this attachment is not in use: enter it first, `with sparsekv.attach(...) as "
                                "attachment:`")
        return seat

    def report(self) -> dict[str, Any]:
        """sparse_calls and dense_calls (layer steps), selectivity (mean share of the cache read over rows, layers and
        steps, dense layers included; selectivity_sparse without them), bytes_share (all that a step of a sparse layer
        reads over the bytes of its keys and values), rel_err (mean relative L2 error of the sparse layers' attention
        output; None unless it `compares`), the same per layer, and the selectors' own numbers.
        index_seconds: building index and estimates, after the prefill and before the second token [s]. replayed_steps,
        captures and capture_seconds [s]: steps of CUDA graphs; not_replayed: why the last step that was not could not
        be, or None."""
        return self.counters.report()

    def spend(self, token_budget: int | float, cache: SparseCache) -> None:
        """Decode with another budget from here on. What was built over the prompt in the cache stays where it does not
        depend on the budget (router, sketch, topk, quest), and the report begins anew. Raises SparseKVError for a
        budget that is none, and where a settings file gives every layer its own."""
        self.decoding.spend(token_budget)
        self.counters, cache.replay = Counters(self.counters.layers), None
        for layer in cache.layers:
            if isinstance(layer, SparseLayer) and layer.state is not None and layer.state.owner is self.decoding:
                layer.state = layer.state.spend(token_budget)

    def cache(self, reserve: int = 0) -> SparseCache:
        """An empty cache for this model, with room for `reserve` tokens from the first on."""
        host = set() if self.decoding.placement == "gpu" else set(self.modules) - self.decoding.dense_layers
        return SparseCache(self.model.config, host_layers=host, reserve=reserve)

    @torch.no_grad()
    def prefill(self, input_ids: Tensor, attention_mask: Tensor | None = None, *, chunk_size: int | None = None,
                cache: SparseCache | None = None) -> SparseCache:
        """Run the prompt, the last token included, in chunks of `chunk_size` tokens, and return its cache. It is read
        densely, but by a selector that reads prompts sparsely (`Selector.chunk`)."""
        cache = self.cache() if cache is None else cache
        with self._seat.lock:
            return self._prefill(input_ids, attention_mask, chunk_size, cache)

    def _prefill(self, input_ids: Tensor, attention_mask: Tensor | None, chunk_size: int | None, cache: SparseCache,
                 ) -> SparseCache:
        cache.belongs_to(self.model)
        run = decoder(self.model)
        self._prefilling = True
        try:
            past = cache.get_seq_length()
            for part in input_ids.split(chunk_size or max(input_ids.shape[1], 1), dim=1):
                past += part.shape[1]
                mask = None if attention_mask is None else attention_mask[:, :past]
                # a padded row counts from its first real token on, as `generate` does
                place = None if mask is None else (mask.cumsum(-1) - 1).clamp(min=0)[:, -part.shape[1]:]
                run(input_ids=part, attention_mask=mask, position_ids=place, past_key_values=cache, use_cache=True)
        finally:
            self._prefilling = False
        return cache

    @torch.no_grad()
    def generate(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, *, max_new_tokens: int = 128,
        temperature: float = 0.0, eos_token_id: int | Sequence[int] | None = None, pad_token_id: int | None = None,
        seed: int | None = None, streamer: Any = None, cache: SparseCache | None = None,
    ) -> Tensor:
        """Prompt and answer, `[B, N + n]`, as `model.generate` gives them, by a loop that costs the host next to
        nothing a token.

        temperature: 0 takes the likeliest token, above it samples, by `seed` if given. eos_token_id, pad_token_id:
        without them the model's; rows that have ended are padded. streamer: as transformers' (`put`, `end`). cache: of
        an earlier turn (input_ids are then the tokens after it, attention_mask covers both). Raises SparseKVError where
        the device has too little memory for prompt and answer.
        """
        if cache is None:
            cache = self._roomy(input_ids.shape[0], roomy(input_ids.shape[1], max_new_tokens))
        config = self.model.generation_config
        eos = config.eos_token_id if eos_token_id is None else eos_token_id
        pad = config.pad_token_id if pad_token_id is None else pad_token_id
        return decode_loop(self._logits, self._step, cache, input_ids, attention_mask, max_new_tokens=max_new_tokens,
                           temperature=temperature, eos=eos, pad=pad, seed=seed, streamer=streamer)

    def step(self, ids: Tensor, cache: SparseCache) -> Tensor:
        """Logits `[B, 1, V]` of what follows ids `[B, n]`, which join the cache's tokens; overwritten by the next step.
        For loops of one's own, without padding."""
        return self._step(ids, None, None, cache) if ids.shape[1] == 1 else self._logits(ids, None, None, cache)

    def _logits(self, ids: Tensor, mask: Tensor | None, places: Tensor | None, cache: SparseCache) -> Tensor:
        return self.model(input_ids=ids, attention_mask=mask, position_ids=places, past_key_values=cache,
                          use_cache=True, logits_to_keep=1).logits

    def _step(self, token: Tensor, mask: Tensor | None, place: Tensor | None, cache: SparseCache) -> Tensor:
        """Logits `[B, 1, V]` after one more token of every row, overwritten by the next step."""
        with self._seat.lock:
            logits = self._replayed(token, mask, place, cache)
            return self._logits(token, mask, place, cache) if logits is None else logits

    def _replayed(self, token: Tensor, mask: Tensor | None, place: Tensor | None, cache: SparseCache) -> Tensor | None:
        """The same by a replayed step, or None where there is none."""
        replay = self._replay_of(cache, mask)
        if replay is None:
            return None
        try:
            return replay.step(token, place)
        except Exception as error:  # whatever the model, the compiler or the driver raises
            reason = f"its step failed: {first_line(error)}"
            cache.replay, self._seat.layers.failed = None, reason
            warnings.warn(f"{type(self.model).__name__} decodes layer by layer, {reason}", stacklevel=2)
            return None

    def save_prefix(self, cache: SparseCache, path: str | Path) -> None:
        """Write a prefilled cache to one safetensors file. Raises SparseKVError for a model with sliding-window
        layers."""
        save_prefix(cache, path, model_fingerprint(self.model))

    def load_prefix(self, path: str | Path) -> SparseCache:
        """A cache from `save_prefix`, on the model's device. Raises SparseKVError for another model's."""
        device = next(self.model.parameters()).device
        return load_prefix(self.cache(), path, model_fingerprint(self.model), device)

    def see(self, module: Any, kwargs: dict[str, Any]) -> None:
        """Note the cache, and in it the rotary tables: neither reaches the attention function."""
        cache, tables = kwargs.get("past_key_values"), kwargs.get("position_embeddings")
        self._seen[module] = cache
        if isinstance(cache, SparseCache) and tables is not None:
            layer = cache.layers[module.layer_idx] if module.layer_idx < len(cache.layers) else None
            if isinstance(layer, SparseLayer):
                key = getattr(module, "layer_type", None)
                if key not in self._ropes:
                    self._ropes[key] = find_layout(module, tables[0][0], tables[1][0], module.head_dim)
                rope = self._ropes[key]
                if rope is not None:
                    table = cache.rope.setdefault(key, GrowingRope(rope.layout, cache.reserve))
                    table.append(rope.table(tables[0]), rope.table(tables[1]), layer.get_seq_length())

    def give_cache(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give a forward pass without a cache one of ours; refuse foreign ones."""
        cache = kwargs.get("past_key_values")
        use_cache = kwargs.get("use_cache", getattr(module.config, "use_cache", True))
        if cache is None and use_cache is not False:
            kwargs["past_key_values"] = self.cache()
        elif cache is not None:
            check_cache(cache)
            cache.belongs_to(self.model)
        ids = kwargs.get("input_ids", args[0] if args else None)
        if isinstance(ids, Tensor) and ids.numel() == 0:
            raise SparseKVError(f"the prompt is empty: input_ids are {list(ids.shape)}; give at least one token of "
                                "every row")
        return args, kwargs

    def forward(self, inner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's forward: a step of one token replayed where it can be, anything else as it is."""
        cache = kwargs.get("past_key_values")
        if not isinstance(cache, SparseCache):
            return inner(*args, **kwargs)
        if self._is_step(args, kwargs):
            logits = self._replayed(kwargs["input_ids"], kwargs.get("attention_mask"), kwargs.get("position_ids"),
                                    cache)
            if logits is not None:
                return CausalLMOutputWithPast(
                    logits=logits.clone(), past_key_values=cache)  # type: ignore[arg-type]
        out = inner(*args, **kwargs)
        first = cache.layers[0]
        if isinstance(first, SparseLayer) and first.get_seq_length():
            cache.settled = first.whole[0], first.get_seq_length()
        return out

    def _is_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call is one token of every row after a cache, and asks for logits alone."""
        ids = kwargs.get("input_ids")
        return (not args and isinstance(ids, Tensor) and ids.dim() == 2 and ids.shape[1] == 1
                and all(name in STEP_OPTIONS or value is None or value is False for name, value in kwargs.items())
                and kwargs.get("return_dict") is not False and kwargs.get("use_cache") is not False)

    def _replay_of(self, cache: SparseCache, mask: Tensor | None) -> Replay | None:
        """The step of this cache, captured or about to be; None where this one is taken as it is."""
        seat = self._seat
        first: Any = cache.layers[0]
        if not self.replays or first.keys is None or self.compares or self._prefilling or torch.is_grad_enabled():
            return None
        reason = why_not(cache, seat.layers, self.model, seat.hooks)
        if reason is not None:
            self.counters.not_replayed = reason
            return None
        held, length = cache.replay, first.get_seq_length()
        ours = held is not None and held.owner is self
        if ours and held.fits(cache):
            return held
        cache.replay = None
        steady = (ours and held.data is first.whole[0] and held.length == length) or (
            cache.settled is not None and cache.settled[0] is first.whole[0] and cache.settled[1] == length)
        if not steady or length >= first.room:
            return None
        states = self._states(cache, length)
        if states is None:
            return None
        for state in states:
            if state is not None and not state.replayable:
                self.counters.not_replayed = f"{state.selector.name} or its completion decides on the host"
                return None
        for layer, state in zip(cache.layers, states, strict=True):
            if state is not None:
                advance(state, layer, length, length + 1)
        starts = next((s.view.regions.starts for s in states if s is not None), None)
        if starts is None:
            starts = self._starts(mask, first.keys.shape[0], first.keys.device)
        until = None if all(s is not None or i in self.decoding.dense_layers for i, s in enumerate(states)) else (
            self.decoding.short_until(first.keys))
        ropes = {key: (table, how) for key, table in cache.rope.items()
                 if table.length == length and (how := self._ropes.get(key)) is not None}
        cache.replay = Replay(seat.forward, seat.layers, cache, states, starts, self.counters, ropes, until, self,
                              self.compiles)
        return cache.replay if cache.replay.fits(cache) else None

    def _states(self, cache: SparseCache, length: int) -> list[LayerState | None] | None:
        """What every layer decodes with, None: full attention. None for all where decoding has not begun."""
        states: list[LayerState | None] = []
        layers: list[Any] = cache.layers
        for index, layer in enumerate(layers):
            short = length + 1 < self.decoding.short_until(layer.keys)
            if index in self.decoding.dense_layers or short:
                states.append(None)
                continue
            state = layer.state
            if state is None or state.owner is not self.decoding:
                return None
            states.append(state)
        return states

    def _roomy(self, rows: int, tokens: int) -> SparseCache:
        """A cache with room for so many tokens. Raises SparseKVError where the device has not."""
        parameter = next(self.model.parameters())
        if parameter.is_cuda and self.decoding.placement == "gpu":
            heads = sum(getattr(m.config, "num_key_value_heads", None) or m.config.num_attention_heads
                        for m in self.modules.values())
            size = next(iter(self.modules.values())).head_dim * parameter.element_size()
            needed = 2 * rows * tokens * heads * size
            device = parameter.device
            free = torch.cuda.mem_get_info(device)[0] + (
                torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
            if needed > free:
                raise SparseKVError(
                    f"keys and values of {rows} x {tokens} tokens take {needed / 1e9:.1f} GB and the device has "
                    f"{free / 1e9:.1f} GB left; shorten prompt or answer, or use placement='offload'")
        return self.cache(tokens)

    def wrap_generate(self, inner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`model.generate` with a cache of ours."""
        given = args[1] if len(args) > 1 else kwargs.get("generation_config")
        config = given or self.model.generation_config
        kind = kwargs.get("cache_implementation", getattr(config, "cache_implementation", None))
        if kind not in (None, "dynamic"):
            raise SparseKVError(f"cache_implementation {kind!r} has no sparse index; leave it out, and sparsekv "
                                "brings its own cache")
        if not kwargs.get("use_cache", getattr(config, "use_cache", True)):
            raise SparseKVError("sparse decoding needs a cache; remove use_cache=False")
        if kwargs.get("past_key_values") is None:
            kwargs.pop("cache_implementation", None)
            kwargs["past_key_values"] = self._roomy(*room_of(args, kwargs, config))
        else:
            check_cache(kwargs["past_key_values"])
        return inner(*args, **kwargs)

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
        cache: Any = self._seen.get(module)
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
            if self.decoding.reads_prompts and index not in self.decoding.dense_layers and softcap is None:
                return self._prefill_sparsely(module, cache, query, key, value, mask, scale)
            return dense()
        short = key.shape[2] < self.decoding.short_until(key)
        if index in self.decoding.dense_layers or softcap is not None or short:
            self.counters.dense(index, count)
            return dense()
        with torch.no_grad():
            if layer.state is None or layer.state.owner is not self.decoding:
                layer.state = self._begin(module, layer, cache, query, mask, scale, past)
            out = self._decode(layer, query, past)
            if self.compares:
                self.counters.compare(index, out, dense())
        return WithoutGradient.apply(query, out) if query.requires_grad else out

    def _prefill_sparsely(self, module: Any, cache: SparseCache, query: Tensor, key: Tensor, value: Tensor,
                          mask: Tensor | None, scale: float) -> Tensor:
        """A prompt, or a part of one, by a selector that reads prompts in chunks."""
        index, device = module.layer_idx, query.device
        regions = Regions.at_prefill_end(self._starts(mask, query.shape[0], device), key.shape[2],
                                         self.decoding.sink_size, self.decoding.window_size)
        view = LayerView(key.to(device), value.to(device), regions, scale, query.shape[1], index, len(cache.layers),
                         cache.rope.get(getattr(module, "layer_type", None)))
        return prefill_chunks(view, query, self.decoding.reader_of(index, device), self.decoding.window_size)

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
        began = _now(device)
        view = kind(keys[:, :, :past], values[:, :, :past], regions, scale, query.shape[1], index, len(cache.layers),
                    cache.rope.get(getattr(module, "layer_type", None)), recent.to(device), layer.recent_end)
        state = LayerState(
            view, self.decoding.selector_of(index, device), self.decoding.estimator_of(index, device),
            window_size=self.decoding.window_size, decode_window=self.decoding.decode_window, owner=self.decoding)
        if isinstance(view, HostView):
            view.keep_anchors(keys, values)
        self.counters.index_seconds += _now(device) - began
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
            advance(state, layer, past + first, end)
            queries = Queries.last(block, end, view.rope)
            step = state.step(queries)
            self.counters.sparse(view.layer_idx, read_shares(
                view, queries, step.selection, state.selector, state.estimator))
            parts.append(step.out.to(query.device))
        self.counters.statistics[view.layer_idx] = state.selector.statistics()
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def advance(state: LayerState, layer: Any, past: int, length: int) -> None:
    """Bring a state to the first `length` tokens of its layer, of which `past` may join the mid region; where that
    grows, over keys and values on the device."""
    view, held = state.view, (layer.keys[:, :, :length], layer.values[:, :, :length])
    away = not view.keys_on_device and state.outgrown(past)
    view.keys, view.values = (x.to(view.device) for x in held) if away else held
    state.advance(past, length)
    view.keys, view.values = held


class WithoutGradient(torch.autograd.Function):
    """The output of a sparse step, through which no gradient goes."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, out: Tensor) -> Tensor:
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise SparseKVError("a sparse step has no gradient; train with full attention (selector='dense', or without "
                            "attach)")


class Seat:
    """What a model carries while attached: hooks, our attention function, wrapped `forward` and `generate`. The last
    attachment that entered and has not left decodes; when none is left the model is as it was, whatever the order.
    Attachments of several threads would decode with each other's settings: a model has those of one."""

    def __init__(self, model: Any, modules: dict[int, Any]):
        self.model, self.modules = model, modules
        self.attachments: list[Attachment] = []
        self.lock = threading.RLock()
        self.thread = 0
        self.hooks: frozenset[int] = frozenset()
        self.layers = Layers(model, modules)
        self.forward: Any = model.forward
        """The model's own."""
        self._undo: list[Any] = []

    def enter(self, attachment: Attachment) -> None:
        with self.lock:
            if self.attachments and self.thread != threading.get_ident():
                raise SparseKVError("this model is attached in another thread; share that attachment, or load the "
                                    "model once a thread")
            if not self.attachments:
                self.thread = threading.get_ident()
                try:
                    self._take()
                except BaseException:
                    self._give_back()
                    raise
            self.attachments.append(attachment)

    def leave(self, attachment: Attachment) -> None:
        with self.lock:
            self.attachments.remove(attachment)
            if not self.attachments:
                self._give_back()

    def _give_back(self) -> None:
        """The model as it was."""
        while self._undo:
            self._undo.pop()()
        _SEATS.pop(self.model, None)

    def _take(self) -> None:
        model = self.model
        AttentionInterface.register(NAME, _attention)
        AttentionMaskInterface.register(NAME, flash_attention_mask)
        self.forward = model.forward
        handles = [m.register_forward_pre_hook(self._see, with_kwargs=True) for m in self.modules.values()]
        handles.append(model.register_forward_pre_hook(self._give_cache, with_kwargs=True))
        self.hooks = frozenset(h.id for h in handles)
        self._undo += [h.remove for h in handles]
        for module in self.modules.values():
            _OF_MODULE[module] = self
            self._undo.append(functools.partial(_OF_MODULE.pop, module, None))
        for config in {id(m.config): m.config for m in self.modules.values()}.values():
            self._undo.append(functools.partial(setattr, config, "_attn_implementation", config._attn_implementation))
            config._attn_implementation = NAME
        self._replace("forward", self._forward)
        if hasattr(model, "generate"):
            self._replace("generate", self._generate)

    def _replace(self, name: str, call: Any) -> None:
        """Let `model.name` be `call(own, args, kwargs)`, and the model's own again afterwards."""
        own, instance = getattr(self.model, name), self.model.__dict__
        before = instance.get(name)

        @functools.wraps(own)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return call(own, args, kwargs)

        instance[name] = wrapped
        self._undo.append(functools.partial(instance.pop, name, None) if before is None
                          else functools.partial(instance.__setitem__, name, before))

    def _forward(self, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self.lock:  # a step that is captured changes the model for its time
            return self.attachments[-1].forward(own, args, kwargs)

    def _generate(self, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.attachments[-1].wrap_generate(own, args, kwargs)

    def _see(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.attachments[-1].see(module, kwargs)

    def _give_cache(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.attachments[-1].give_cache(module, args, kwargs)


_OF_MODULE: weakref.WeakKeyDictionary[nn.Module, Seat] = weakref.WeakKeyDictionary()


def roomy(prompt: int, new: int) -> int:
    """Tokens to make room for at once: an answer that may be long grows later, in steps of an eighth."""
    return prompt + min(new, max(MOST_NEW, prompt // 8))


def room_of(args: tuple[Any, ...], kwargs: dict[str, Any], config: Any) -> tuple[int, int]:
    """Rows and tokens that a call of `generate` asks for, as far as its arguments say."""
    ids = kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None))
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        return 1, 0
    new, longest = (kwargs.get(n, getattr(config, n, None)) for n in ("max_new_tokens", "max_length"))
    copies = max(kwargs.get(n, getattr(config, n, None)) or 1 for n in ("num_beams", "num_return_sequences"))
    if new is None:
        new = 0 if longest is None else max(0, longest - ids.shape[1])
    return ids.shape[0] * copies, roomy(ids.shape[1], new)


def _now(device: torch.device) -> float:
    """The time, when the device has done all it was given [s]."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float | None = None,
    dropout: float = 0.0, sliding_window: int | None = None, softcap: float | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls while a model is attached."""
    seat = _OF_MODULE.get(module)
    if seat is None or not seat.attachments:
        raise SparseKVError("attention was called on a module that is not attached; attach the whole model")
    if kwargs.get("s_aux") is not None:
        raise SparseKVError(f"{type(module).__name__} has learned attention sinks, which sparsekv does not support")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = seat.attachments[-1].attention(module, query, key, value, attention_mask, scale, sliding_window, softcap)
    return out.transpose(1, 2).contiguous(), None
