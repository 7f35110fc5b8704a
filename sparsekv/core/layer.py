"""What a step sees of one layer: its keys and values, wherever they lie, its regions, the queries, and what was
selected for them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from sparsekv.core.regions import Regions
from sparsekv.core.rope import RopeTable
from sparsekv.kernels import (
    Anchored,
    CompletionQuery,
    Sketch,
    anchor_indices,
    attend_anchors,
    attend_buckets,
    attend_gathered,
    attend_tokens,
    bucket_counts,
    bucket_tokens,
    encode_keys,
    gather_rows,
)
from sparsekv.util.errors import SparseKVError

OBSERVED = 64
"""Last queries of a prefill that are kept."""


@dataclass
class Queries:
    """T queries of every row. `rot [B, Hq, T, d]` with RoPE; `lengths [B·T]`: tokens each of them sees, itself
    included, all queries of row 0 first and the same columns of the cache in every row. `Q = B·T` below.

    seats `[Q]` int64: rows of the selector's and the estimator's state that are the queries', where requests come and
    go between steps (a server's batch is one row of Q queries); None: row b of the state has the queries of row b.
    columns `[T]`: the queries' columns of the rotary table, lengths − 1 where not given.
    """

    rot: Tensor
    lengths: Tensor
    rope: RopeTable | None = None
    seats: Tensor | None = None
    columns: Tensor | None = None

    @classmethod
    def last(cls, rot: Tensor, length: int, rope: RopeTable | None = None) -> Queries:
        """The queries of the last T tokens of a cache of `length`."""
        batch, _, count, _ = rot.shape
        ends = torch.arange(length - count + 1, length + 1, device=rot.device)
        return cls(rot, ends.repeat(batch), rope)

    @property
    def count(self) -> int:
        """T."""
        return self.rot.shape[2]

    @cached_property
    def pre(self) -> Tensor:
        """The queries with RoPE removed, `[B, Hq, T, d]`. Raises SparseKVError where the model's rotation is
        unknown."""
        columns = self.lengths[:self.count] - 1 if self.columns is None else self.columns
        return needed(self.rope).unrotate(self.rot, columns)

    @property
    def folded(self) -> Tensor:
        """`[Q, Hq, d]`."""
        return fold_heads(self.rot)

    @property
    def folded_pre(self) -> Tensor:
        """`[Q, Hq, d]`, RoPE removed."""
        return fold_heads(self.pre)

    def per_query(self, x: Tensor) -> Tensor:
        """`[B, …] -> [Q, …]`: every row once a query; a view where B = 1 or T = 1. By seat, x as it is."""
        if self.count == 1 or self.seats is not None:
            return x
        if x.shape[0] == 1:
            return x.expand(self.count, *x.shape[1:])
        return x.repeat_interleave(self.count, dim=0)


def fold_heads(x: Tensor) -> Tensor:
    """`[B, H, T, d] -> [B·T, H, d]`."""
    return x.transpose(1, 2).flatten(0, 1)


@dataclass
class Selection:
    """The mid tokens to read exactly for each query: a list of tokens, or buckets of an index.

    tokens `[Q, H, K]`, `H` = Hkv (shared by the group) or Hq; -1 = none, no token twice, all in the mid region.
    buckets `[Q, Hkv, L]` with `order [B, Hkv, M]`, `offsets [B, Hkv, C + 1]`, the CSR of the index.
    log_weights `[Q, H, K]`: added to the scores of `tokens` (MagicPIG).
    rest: the selector's own stand-in for what it does not read, `(out [Q, Hq, d], lse [Q, Hq])`, used where nothing
    completes (LFPS).
    contiguous: the keys that are read get contiguous positions (TokenSelect's length extrapolation).
    """

    tokens: Tensor | None = None
    buckets: Tensor | None = None
    order: Tensor | None = None
    offsets: Tensor | None = None
    log_weights: Tensor | None = None
    rest: tuple[Tensor, Tensor] | None = None
    contiguous: bool = False

    def as_tokens(self) -> Tensor:
        """The tokens read, `[Q, H, K]`."""
        if self.tokens is not None:
            return self.tokens
        assert self.order is not None and self.offsets is not None and self.buckets is not None
        return bucket_tokens(self.order, self.offsets, self.buckets)

    def counts(self) -> Tensor:
        """Tokens read per query and head, `[Q, H]` int64."""
        if self.buckets is not None and self.offsets is not None:
            return bucket_counts(self.offsets, self.buckets)
        return (self.as_tokens() >= 0).sum(-1)


@dataclass(kw_only=True, eq=False)
class CacheLayer:
    """One layer of a cache: keys and values of B requests, wherever they lie, as selectors, estimators and the step ask
    for them. Tokens `first … last − 1` are places in a row, padding included.

    A storage adds what it keeps them in, and implements `shape`, `dtype`, `keys_at`, `values_at` and `gather`. It
    overrides `attend` (and `anchors`) where it attends by kernels of its own, and `numbers`, `encoded` and `codes_at`
    where it keeps codes beside its keys.

    recent_queries `[B, Hq, w, d]`: the last queries of the prefill, w up to 64; recent_end: the position after them.
    completion_tokens: what the estimator's cache costs, in tokens. sinks `[Hq]`: the model's learned sinks, one more
    term of the normalisation.
    """

    regions: Regions
    scale: float
    num_query_heads: int
    layer_idx: int = 0
    num_layers: int = 1
    rope: RopeTable | None = None
    recent_queries: Tensor | None = None
    recent_end: int = 0
    completion_tokens: float = 0.0
    sinks: Tensor | None = None

    in_place: ClassVar[bool] = False
    """Whether kernels read any key where it lies: a completion is then part of `attend`."""
    keeps_codes: ClassVar[bool] = False
    """Whether the storage keeps codes of keys beside them."""
    side_by_side: ClassVar[int] = 1
    """Layers of the model whose heads these are."""

    def described(self) -> dict[str, Any]:
        """The fields that every storage has, by name."""
        return {f.name: getattr(self, f.name) for f in fields(CacheLayer)}

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Rows, KV heads, tokens that `keys_at` gives, and head dimension."""
        raise NotImplementedError

    @property
    def dtype(self) -> torch.dtype:
        """The precision of keys and values as they are given."""
        raise NotImplementedError

    def keys_at(self, first: int, last: int, step: int = 1) -> Tensor:
        """Keys with RoPE of every `step`-th token of `first … last − 1`, `[B, Hkv, n, d]`."""
        raise NotImplementedError

    def values_at(self, first: int, last: int) -> Tensor:
        """Values of tokens `first … last − 1`, `[B, Hkv, n, d]`."""
        raise NotImplementedError

    def gather(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of listed tokens `[Q, H, K]`, each `[Q, H, K, d]`; of any token where the list has -1."""
        raise NotImplementedError

    def numbers(self, first: int, last: int) -> Tensor | None:
        """Return the numbers by which tokens are listed and read, `[B, n]` int; None: their places."""
        return None

    def encoded(self, known: Tensor | None, sketch: Sketch, width: int, last: int) -> Tensor | None:
        """Codes of `width` bytes by number, `[B or 1, Hkv, N, w]`, with those of all tokens before `last`; None of
        layers side by side whose storage keeps them. known: what was given last for the same sketch."""
        new = encode_keys(self.keys_at(0 if known is None else known.shape[2], last), sketch, width)
        return new if known is None else torch.cat([known, new], dim=2)

    def codes_at(self, codes: Tensor | None, first: int, last: int, step: int) -> Tensor:
        """Codes of every `step`-th token of `first … last − 1`, `[B, Hkv, n, w]`; codes: of `encoded`."""
        assert codes is not None
        return codes[:, :, first:last:step]

    def anchors(self, queries: Queries, sizes: tuple[int, int] | None) -> Anchored | None:
        """Attention over the anchors, for an `attend` that a map of keys of these units and features completes; None
        where `attend` reads them itself."""
        return None

    def attend(
        self, queries: Queries, selection: Selection, completion: CompletionQuery | None = None,
        anchored: Anchored | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Exact attention over anchors and selection, completed if asked for: `(out [Q, Hq, d], lse [Q, Hq])`."""
        assert completion is None and anchored is None, "an estimate of gathered keys is a part of its own"
        tokens, used, weights = self._with_anchors(queries, selection)
        keys, values = self.gather(tokens)
        return attend_gathered(queries.folded, keys, values, used, self.scale, weights)

    @property
    def device(self) -> torch.device:
        """The device that decodes."""
        return self.regions.starts.device

    @property
    def num_kv_heads(self) -> int:
        return self.shape[1]

    @property
    def stored(self) -> int:
        """Tokens whose keys `keys_at` gives."""
        return self.shape[2]

    @property
    def head_dim(self) -> int:
        return self.shape[3]

    @property
    def group(self) -> int:
        return self.num_query_heads // self.num_kv_heads

    @property
    def length(self) -> int:
        return self.regions.length

    def keys_pre(self, first: int, last: int) -> Tensor:
        """Keys `first … last − 1` with RoPE removed, `[B, Hkv, n, d]`. Raises SparseKVError where the model's rotation
        is unknown."""
        keys = self.keys_at(first, last)
        return needed(self.rope).unrotate(keys, torch.arange(first, last, device=keys.device))

    def bounds(self, queries: Queries) -> dict[str, Any]:
        """Scale and anchors of every query, as the kernels take them."""
        return {"scale": self.scale, "sink_size": self.regions.sinks, "lengths": queries.lengths,
                "starts": queries.per_query(self.regions.starts),
                "tail_starts": queries.per_query(self.regions.tail_starts)}

    def listed(self, selection: Selection) -> Tensor:
        """The tokens read, `[Q, H, K]`, at least one list a KV head: a list that all heads share is that of each."""
        tokens = selection.as_tokens()
        return tokens.expand(-1, self.num_kv_heads, -1) if tokens.shape[1] == 1 else tokens

    def by_head(self, tokens: Tensor) -> Tensor:
        """Join the lists `[Q, H, K]` of a KV head, `[Q, Hkv, H / Hkv · K]`; 0 where a list has -1."""
        count, heads, width = tokens.shape
        return tokens.clamp(min=0).reshape(count, self.num_kv_heads, heads // self.num_kv_heads * width)

    def moved(self) -> None:
        """The mid region has grown: let go of what was kept of the tokens that joined it."""

    def crop(self, length: int) -> None:
        """The cache was cut to `length` tokens, none of them in the mid region."""
        self.regions = self.regions.grown(length)

    def take_rows(self, index: Tensor) -> None:
        """Keep the chosen rows of the batch, in that order; keys and values follow at the next step."""
        self.regions = self.regions.take_rows(index)
        if self.recent_queries is not None:
            self.recent_queries = self.recent_queries[index]

    def fork(self) -> Self:
        """An independent copy that shares tensors."""
        return copy.copy(self)

    def _with_anchors(self, queries: Queries, selection: Selection) -> tuple[Tensor, Tensor, Tensor | None]:
        """Selection and anchors as one list `[Q, H, K + A]`, which of it counts, and the selection's weights."""
        bounds, tokens, weights = self.bounds(queries), self.listed(selection), selection.log_weights
        anchors = anchor_indices(bounds["starts"], bounds["sink_size"], bounds["tail_starts"], bounds["lengths"])
        if weights is not None:
            weights = torch.nn.functional.pad(weights.expand(tokens.shape), (0, anchors.shape[1]))
        both = torch.cat([tokens, anchors[:, None].expand(-1, tokens.shape[1], -1).to(tokens.dtype)], dim=-1)
        return both, both >= 0, weights


@dataclass(eq=False)
class LayerView(CacheLayer):
    """A layer whose keys and values lie in a tensor each, `[B, Hkv, N, d]`, keys with RoPE; made once and grown with
    its cache."""

    keys: Tensor
    values: Tensor

    in_place: ClassVar[bool] = True

    @property
    def shape(self) -> tuple[int, int, int, int]:
        rows, heads, stored, dim = self.keys.shape
        return rows, heads, stored, dim

    @property
    def dtype(self) -> torch.dtype:
        return self.keys.dtype

    def keys_at(self, first: int, last: int, step: int = 1) -> Tensor:
        return self.keys[:, :, first:last:step]

    def values_at(self, first: int, last: int) -> Tensor:
        return self.values[:, :, first:last]

    def gather(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        index = self.by_head(tokens)
        return tuple(gather_rows(x, index).reshape(*tokens.shape, x.shape[-1])  # type: ignore[return-value]
                     for x in (self.keys, self.values))

    def anchors(self, queries: Queries, sizes: tuple[int, int] | None) -> Anchored | None:
        return attend_anchors(queries.folded, self.keys, self.values, sizes=sizes, **self.bounds(queries))

    def attend(
        self, queries: Queries, selection: Selection, completion: CompletionQuery | None = None,
        anchored: Anchored | None = None,
    ) -> tuple[Tensor, Tensor]:
        if selection.contiguous:
            assert completion is None, "an estimate is of keys at their own positions"
            return self._attend_contiguous(queries, selection)
        given: dict[str, Any] = {**self.bounds(queries), "completion": completion, "anchored": anchored}
        if selection.buckets is not None:
            assert selection.order is not None and selection.offsets is not None
            return attend_buckets(queries.folded, self.keys, self.values, selection.order, selection.offsets,
                                  selection.buckets, **given)
        return attend_tokens(queries.folded, self.keys, self.values, selection.as_tokens(),
                             log_weights=selection.log_weights, **given)

    def _attend_contiguous(self, queries: Queries, selection: Selection) -> tuple[Tensor, Tensor]:
        """Attend with the keys that are read, in order, at positions 0, 1, 2, … and the query at the last of them
        (TokenSelect, length extrapolation): no distance exceeds the number of keys read."""
        q, rope = queries.folded, needed(self.rope)
        tokens, used, _ = self._with_anchors(queries, selection)
        tokens = torch.where(used, tokens, self.length).sort(dim=-1).values
        used = tokens < self.length
        tokens = tokens.clamp(max=self.length - 1)
        keys, values = self.gather(tokens)
        # lists with more places than tokens end in ones that are not used
        new = torch.arange(tokens.shape[-1], device=q.device).clamp(max=self.length - 1).expand_as(tokens)
        heads_q = q.shape[1]
        here, there = queries.lengths[:, None] - 1, used[:, 0].sum(-1, keepdim=True) - 1
        q = rope.turn(q, here.expand(-1, heads_q), there.expand(-1, heads_q))
        return attend_gathered(q, rope.turn(keys, tokens, new), values, used, self.scale)


def needed(rope: RopeTable | None) -> RopeTable:
    """The rotary tables. Raises SparseKVError where the model rotates in a way that could not be found out."""
    if rope is None:
        raise SparseKVError("this model rotates in a way sparsekv cannot undo; use a selector that reads rotated keys "
                            "only: topk, or a router trained with --key-space rot")
    return rope


def mapped(call: Callable[..., Any], *values: Any) -> Any:
    """Call a function with the tensors of values of one structure: tensors, or named tuples of tensors and tuples. What
    is no tensor, None say, is the first's."""
    first = values[0]
    if isinstance(first, tuple):
        return type(first)(*(mapped(call, *parts) for parts in zip(*values, strict=True)))
    return call(*values) if isinstance(first, Tensor) else first


def choose_rows(rows: Tensor, new: Any, old: Any) -> Any:
    """Row-wise select, of tensors and named tuples of them: `new` where `rows [B]`, else `old`."""
    return mapped(lambda a, b: torch.where(rows.to(a.device).reshape(-1, *[1] * (a.dim() - 1)), a, b), new, old)


def take_rows(value: Any, index: Tensor) -> Any:
    """The chosen rows of a tensor or of a named tuple of tensors and tuples."""
    return mapped(lambda x: x[index.to(x.device)], value)


class RowState:
    """State of a batch that is replaced and never changed in place, so that `fork` is a shallow copy. A view is a
    `CacheLayer`, and a `LayerView` for methods that read `keys` as a tensor."""

    row_state: ClassVar[tuple[str, ...]] = ()
    """Attributes whose tensors, or tuples of tensors, have the batch as first dimension, and KV heads, if they have
    any, as the second."""

    restorable: ClassVar[bool] = False
    """Whether `row_state`, and what `restore` makes beside it, is all that `build` leaves."""

    def restore(self, view: Any, state: dict[str, Any]) -> None:
        """Be as `build` over `view` left it, from its `row_state` by name."""
        self.__dict__.update(state)

    def fork(self) -> Self:
        """An independent copy that shares tensors."""
        return copy.copy(self)

    def take_rows(self, index: Tensor) -> None:
        """Keep the chosen rows of the batch, in that order."""
        for name in self.row_state:
            setattr(self, name, take_rows(getattr(self, name), index))

    def remake(self, rows: Tensor, names: Sequence[str], make: Callable[[], None]) -> None:
        """Make the state of these attributes anew in the rows `[B]` alone: rows are independent of the batch."""
        kept = {name: getattr(self, name) for name in names}
        make()
        if not bool(rows.all()):
            for name, value in kept.items():
                setattr(self, name, choose_rows(rows, getattr(self, name), value))

    def prepare(self, view: Any) -> None:
        """Called before `build` and `extend`."""

    def build(self, view: Any) -> None:
        """Prepare for the mid region of `view`, at the end of the prefill."""

    def stacks_by(self, view: Any) -> Hashable | None:
        """Return what layers have in common that are built at once, as heads of one layer (`core/stacked.py`); None
        where a layer is built by itself."""
        return None

    def of_heads(self, others: Sequence[Any], views: Sequence[CacheLayer]) -> Self:
        """A fresh one of all heads of layers that stack: this one's, the first, then those of `others`."""
        raise NotImplementedError

    def take_heads(self, whole: Self, state: dict[str, Any]) -> None:
        """Take this layer's part of `whole`, built of several layers' heads: `state`, its part of `row_state`."""
        self.__dict__.update(state)


def heads_joined(values: Sequence[Any]) -> Any:
    """Join the heads of several layers: tensors `[H, ...]`, or named tuples of them."""
    return mapped(lambda *parts: torch.cat(parts), *values)


def heads_apart(value: Any, count: int) -> list[Any]:
    """Split a tensor `[B, count·H, ...]`, or a named tuple of them, into the parts `[B, H, ...]` of every layer; what
    has no heads, `[B]`, is that of every layer. A part that does not begin at a multiple of 16 bytes is copied, since
    kernels are compiled again for such."""
    def layers_first(x: Tensor) -> Tensor:
        return x.expand(count, -1) if x.dim() < 2 else x.unflatten(1, (count, -1)).transpose(0, 1).contiguous()

    def part(x: Tensor, i: int) -> Tensor:
        return x[i].clone() if x[i].storage_offset() * x.element_size() % 16 else x[i]

    whole = mapped(layers_first, value)
    return [mapped(partial(part, i=i), whole) for i in range(count)]
