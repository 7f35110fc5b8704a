"""SparseCache: a transformers Cache whose full-attention layers carry what sparse decoding needs."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from sparsekv.core.layer import OBSERVED, take_rows
from sparsekv.core.step import LayerState
from sparsekv.runtime.hf.ahead import Ahead
from sparsekv.runtime.hf.offload import HostView
from sparsekv.runtime.hf.sliding import SlidingLayer
from sparsekv.runtime.hf.storage import Growing, GrowingRope, StoredLayer
from sparsekv.runtime.hf.turns import PADDED, Moves, Turn, left_padded, move, turn_of
from sparsekv.util.errors import SparseKVError


class SparseLayer(StoredLayer, DynamicLayer):
    """Keys and values `[B, Hkv, N, d]` of a full-attention layer, the last queries of its prefill, and the state of the
    attachment that decodes with it (index, completion cache, regions)."""

    def __init__(self, reserve: int = 0) -> None:
        self.stores = Growing(reserve), Growing(reserve)
        super().__init__()
        self.state: LayerState | None = None
        self.recent: Tensor | None = None
        self.recent_end = 0

    def grown_to(self, length: int) -> None:
        """Tokens up to `length` were written into the storage."""
        for store in self.stores:
            store.length = length

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        held = self.keys.shape[0] if self.get_seq_length() else key_states.shape[0]
        if held != key_states.shape[0]:
            raise SparseKVError(f"this cache holds {held} sequences and was given {key_states.shape[0]}; use a new "
                                "cache, or batch_repeat_interleave or batch_select_indices on this one")
        return self.append(key_states, value_states)

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store new tokens `[B, Hkv, n, d]`; returns all keys and all values."""
        return self.stores[0].append(keys), self.stores[1].append(values)

    def get_seq_length(self) -> int:
        return self.stores[0].length

    def remember_queries(self, query: Tensor, end: int, moves: Moves = ()) -> None:
        """Keep the last queries of the prefill: query `[B, Hq, T, d]` with RoPE, the last at position `end − 1`. moves:
        of the rows, those of `SparseCache.moves`."""
        new, count = query.detach(), query.shape[2]
        if self.recent is not None and self.recent_end == end - count and (count < OBSERVED or moves):
            new = torch.cat([self.recent, new], dim=2)
        elif moves:
            new = new.clone()
        move(new, moves, count)
        for row, padding in enumerate(moves):
            new[row, :, :padding] = 0.0  # no query is like a key, and the moments of queries are those of real ones
        self.recent, self.recent_end = new[:, :, -OBSERVED:].clone(), end

    def crop(self, tokens_to_remove: int) -> None:
        length = self.get_seq_length()
        keep = min(length, tokens_to_remove) if tokens_to_remove > 0 else max(0, length + tokens_to_remove)
        if keep == length:
            return
        for store in self.stores:
            store.crop(keep)
        if self.state is not None:
            self.state = self.state.cropped(keep)
        if self.recent is not None and self.recent_end > keep:
            cut = self.recent.shape[2] - (self.recent_end - keep)
            self.recent, self.recent_end = (self.recent[:, :, :cut], keep) if cut > 0 else (None, 0)

    def reset(self) -> None:
        """Forget everything; the object can be used for another request."""
        for store in self.stores:
            store.clear()
        self.state = self.recent = None
        self.recent_end = 0
        self.is_initialized = False

    def take_rows(self, index: Tensor) -> None:
        """Keep the chosen rows of the batch, in that order."""
        if self.get_seq_length() == 0:
            return
        for store in self.stores:
            store.take_rows(index)
        self.recent = take_rows(self.recent, index)
        if self.state is not None:
            self.state.take_rows(index)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.take_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.get_seq_length():
            self.take_rows(torch.arange(self.keys.shape[0], device=self.device).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.take_rows(_row_numbers(indices))

    def fork(self) -> SparseLayer:
        other = type(self)()
        other.__dict__.update(self.__dict__)
        other.stores = tuple(store.fork() for store in self.stores)
        other.state = None if self.state is None else self.state.fork()
        return other


class HostLayer(SparseLayer):
    """A layer whose keys and values lie in CPU memory, those of a token side by side, page-locked where there is a GPU.

    The first chunk of a prefill is returned as it came, on the device; afterwards `update` returns the host tensors.
    """

    def __init__(self, reserve: int = 0) -> None:
        super().__init__()
        self.stores = (Growing(reserve, on_host=True),)

    @property
    def both(self) -> Tensor:
        """Keys and values of the tokens so far, `[B, Hkv, n, 2d]`."""
        return self.stores[0].view

    def split(self, tensors: Sequence[Any]) -> Sequence[Any]:
        return tensors[0].chunk(2, dim=-1)

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        past, new = self.get_seq_length(), torch.cat([keys, values], dim=-1)
        self.stores[0].append(new)
        if self.state is not None and isinstance(self.state.view, HostView):
            self.state.view.near.append(new, past)
        return (self.keys, self.values) if past else (keys, values)


class Built(NamedTuple):
    """The states that decoding had built over the first `past` tokens of a cache whose rows begin at `starts`: states
    of selector and estimator (`core/step.py: restore`), by layer."""

    past: int
    starts: list[int]
    layers: dict[int, dict[str, dict[str, Any]]]

    def serves(self, which: Sequence[int], starts: list[int], on_host: Sequence[bool]) -> bool:
        """Return whether these layers can begin with it, of which some have keys in CPU memory."""
        return set(which) <= set(self.layers) and starts == self.starts and not any(on_host)


class SparseCache(Cache):
    """A cache for `model.generate` or `model(...)` under `sparsekv.attach`; the attachment makes it by itself.

    Full-attention layers are `SparseLayer`s, sliding-window layers `SlidingLayer`s; others are transformers' own.
    """

    def __init__(
        self, config: Any, host_layers: Collection[int] = (), reserve: int = 0, attachment: Any = None,
    ):
        """`host_layers` keep their keys and values in CPU memory. reserve: tokens to make room for at once. attachment:
        who makes it."""
        layers = DynamicCache(config=config.get_text_config(decoder=True)).layers
        super().__init__(layers=[
            SlidingLayer(layer.sliding_window) if type(layer) is DynamicSlidingWindowLayer else
            layer if type(layer) is not DynamicLayer else (HostLayer if i in host_layers else SparseLayer)(reserve)
            for i, layer in enumerate(layers)])
        self.rope: dict[Any, GrowingRope] = {}
        self.ahead = Ahead()
        self.reserve = reserve
        self.plan: Any = None
        """The plan of this cache's steps (`runtime/hf/plan.py`)."""
        self.prompt = 0
        """The length at which decoding begins, where that is known; 0: not."""
        self.attachment = None if attachment is None else weakref.ref(attachment)
        self.built: Built | None = None
        """Of a loaded prefix, until its first tokens are others."""
        self.moves: Moves = ()
        """Of the pass that runs."""
        self.moved = False
        """Whether rows were moved by a pass before: their masks have padding between turns, and the cache has not."""
        self._model: weakref.ref[Any] | None = None
        self._settled: tuple[Any, int] | None = None

    def belongs_to(self, model: Any) -> None:
        """Keys and values are one model's. Raises SparseKVError for a cache that another model has filled."""
        if self._model is None or not self._length():
            self._model = weakref.ref(model)
        elif self._model() is not model:
            raise SparseKVError("this cache holds keys and values of another model; use a new one, attachment.cache()")

    @property
    def first(self) -> SparseLayer | None:
        """The first layer with full attention, which stands for all of them."""
        return next((layer for layer in self.layers if isinstance(layer, SparseLayer)), None)

    def masked(self, mask: Tensor | None, new: int, reorders: bool = False) -> tuple[Tensor | None, Tensor | None]:
        """The mask of the next pass, `[B, N]` of what the cache holds and `new` tokens, with all of a row's padding on
        its left, and the order `[B, new]` of the pass's tokens if it is another: the pass moves rows whose turn has
        padding. reorders: another order may be. Raises SparseKVError for other padding, and for no mask of rows that
        were moved."""
        held, self.moves = self._length(), ()
        if mask is None:
            if self.moved:
                raise SparseKVError("rows of this cache have padding; give the attention_mask of all tokens so far")
            return None, None
        turn = turn_of(mask, held, self.moved) if new > 1 and held else Turn(left_padded(mask) if self.moved else mask)
        if turn.order is not None and not reorders:
            raise SparseKVError(PADDED)
        self.moves = turn.moves
        if self.moves:
            self.moved, self.plan, self.built = True, None, None
            for layer in self.layers:
                if isinstance(layer, SparseLayer):
                    layer.state = None
        return turn.mask, turn.order

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
               ) -> tuple[Tensor, Tensor]:
        seen = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        for store in seen if self.moves else ():
            move(store, self.moves, key_states.shape[-2])
        return seen

    def settle(self) -> None:
        """A pass ends here."""
        first = self.first
        if first is not None and first.get_seq_length():
            self._settled = first.data, first.get_seq_length()

    @property
    def settled(self) -> bool:
        """True where nothing was moved since the last pass: a step of what is moved in between is not worth
        capturing."""
        first: Any = self.first
        return self._settled is not None and self._settled[0] is first.data and (
            self._settled[1] == first.get_seq_length())

    def fork(self) -> SparseCache:
        """An independent copy that shares the tensors of the prefill: several continuations of one prompt."""
        other = copy.copy(self)
        other.plan = other._settled = None
        other.ahead = Ahead()
        # transformers' own layers replace their tensors and never write into them: a shallow copy is independent
        other.layers = [x.fork() if isinstance(x, SparseLayer | SlidingLayer) else copy.copy(x) for x in self.layers]
        other.rope = {key: table.fork() for key, table in self.rope.items()}
        for layer in other.layers:
            if isinstance(layer, SparseLayer) and layer.state is not None:
                view = layer.state.view
                view.rope = next((other.rope[k] for k, table in self.rope.items() if table is view.rope), view.rope)
        return other

    def crop(self, tokens_to_remove: int) -> None:
        """Keep the first so many tokens of every row; negative: take so many off its end [tokens]."""
        super().crop(tokens_to_remove)
        self.ahead.stop()
        length = self._length()
        if self.built is not None and length < self.built.past:
            self.built = None
        for table in self.rope.values():
            table.cos.crop(length)
            table.sin.crop(length)

    def reset(self) -> None:
        """Forget everything; the object can be used for another request."""
        for index, layer in enumerate(self.layers):
            if isinstance(layer, DynamicSlidingWindowLayer):
                self.layers[index] = type(layer)(sliding_window=layer.sliding_window)
            else:
                layer.reset()
        self.ahead.stop()
        self.rope, self.plan, self._settled, self.built = {}, None, None, None
        self.moves, self.moved = (), False

    def reorder_cache(self, beam_idx: Any) -> None:
        super().reorder_cache(beam_idx)
        self._take_rope_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        rows = self.rows
        super().batch_repeat_interleave(repeats)
        self._take_rope_rows(torch.arange(rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._take_rope_rows(_row_numbers(indices))

    @property
    def rows(self) -> int:
        """Sequences in the cache; 0 before the first."""
        held = (getattr(layer, "keys", None) for layer in self.layers)
        return next((keys.shape[0] for keys in held if keys is not None), 0)

    def _length(self) -> int:
        return self.get_seq_length() if self.first is None else self.first.get_seq_length()

    def _take_rope_rows(self, index: Tensor) -> None:
        self.ahead.stop()
        self.built = None
        for table in self.rope.values():
            table.take_rows(index)


def _row_numbers(indices: Tensor) -> Tensor:
    """Row numbers from row numbers or a mask."""
    indices = torch.as_tensor(indices)
    return indices.nonzero().squeeze(-1) if indices.dtype == torch.bool else indices.reshape(-1)
