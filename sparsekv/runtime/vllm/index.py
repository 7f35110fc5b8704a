"""What a served layer keeps beside its pages: in buffers of fixed size the index and the summary of every request that
decodes sparsely. A row of the core's selector and estimator is a request's seat: built and grown for one request at a
time, all layers together as those of `attach` are, and asked for a batch (`core/step.py`). Nothing waits for the host
but `build_seat` and `extend_seat`."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsekv.artifacts.phi import PhiLayer
from sparsekv.core.estimators import Estimator, PhiEstimator
from sparsekv.core.index import Buckets, RouterLayer, Untrained, list_whole
from sparsekv.core.layer import LayerView, Queries
from sparsekv.core.prefill import SparsePrompts
from sparsekv.core.regions import Regions
from sparsekv.core.rope import RopeTable
from sparsekv.core.selectors.router import Router
from sparsekv.core.stacked import STACKED_BYTES, in_pieces, key_bytes
from sparsekv.core.step import build_layers, grow, sparse_step
from sparsekv.kernels import QueryModel, Sketch
from sparsekv.runtime.vllm.paged import DecodeMetadata, LayerPages, PagedView, Scales, UncodedSlots
from sparsekv.runtime.vllm.summaries import Copied, OwnMeans, bytes_in, empty_request, put_row, put_summary, seated
from sparsekv.util.memory import memory_of

WARM = 64
MEMORY_PART = 128
"""A request's layers have as many bytes of keys side by side as a device has memory, over this; what is made of them
takes as much again, and half."""


class Room(NamedTuple):
    """Sizes of the fixed buffers: requests that decode sparsely at once, the longest of them [tokens]."""

    seats: int
    longest: int


def heads_of(router: RouterLayer, first: int, last: int) -> RouterLayer:
    """The router of some KV heads: those that a tensor-parallel rank holds."""
    weights = None if router.weights is None else QueryModel(*(w[first:last] for w in router.weights))
    sketch = None if router.sketch is None else Sketch(*(x[first:last] for x in router.sketch))
    return router._replace(centroids=router.centroids[first:last], weights=weights, sketch=sketch)


class LayerIndex:
    """A layer's pages, and the selector and the estimator that decode over them, of which a row is a seat; the lists of
    buckets lie one after another, `[1, Hkv, seats · longest]`. Seat `seats` is nobody's: its buckets are empty.

    selector: of this layer, with the artifact's part that these heads need; maps: these heads' feature maps, or bucket
    means, None: what is not read is not estimated. kind and scales: of a float8 cache (`paged.LayerPages`)."""

    def __init__(self, selector: Router, pool: Tensor, room: Room, uncoded: UncodedSlots, *, scale: float,
                 rope: RopeTable | None = None, maps: PhiLayer | OwnMeans | None = None,
                 kind: torch.dtype | None = None, scales: Scales | None = None):
        self.pages = pages = LayerPages(pool, uncoded, kind, scales)
        self.room, self.scale, self.rope, device = room, scale, rope, pool.device
        self.selector = copy.copy(selector)
        # rows come and go between steps, and codes are written with their keys
        self.selector.alone, self.selector.fit = False, "fixed"  # type: ignore[attr-defined]
        self.selector.layer = trained = _placed(selector.trained, device, pages.kind)
        self.requests: list[tuple[Router | None, Estimator | None]] = [(None, None)] * room.seats
        nowhere = torch.zeros(1, dtype=torch.int64, device=device)
        self.none = Regions(nowhere, nowhere, 0, 0)
        self.spent = torch.zeros(2, room.seats + 1, dtype=torch.int64, device=device)
        self.by_seat = whole = self._by_seat(trained)
        self.fresh = self.completes = None
        if maps is not None:
            self.fresh = empty_request(maps, pages.keys.shape, pages.kind, device)
            self.completes = seated(self.fresh, room, pages.scales.key)
        self.turns = whole.weights is not None and trained.key_space == "pre"

    def _by_seat(self, trained: RouterLayer) -> Any:
        """The selector whose rows are the seats, all empty; it may read as much as the longest request."""
        whole: Any = copy.copy(self.selector)
        ends, longest, pages = self.none.starts, self.room.longest, self.pages
        whole.prepare(self.request(None, Regions(ends, ends + longest, longest, 0)))
        whole.weights = whole.query_model(self.request(None, self.none))
        whole.widest_pool = min(longest, whole.most_candidates)
        shapes = _shapes(trained, self.room, pages.kind, by_means=whole.weights is None)
        whole.buckets = Buckets(**{name: torch.zeros(shape, dtype=dtype, device=ends.device)
                                   for name, (shape, dtype) in shapes.items()})
        whole.budget, whole.pool = self.spent
        whole.codes = whole.basis = whole.side = whole.first = None
        if whole.reads_codes:
            assert trained.sketch is not None
            whole.codes = self._room_for_codes(trained.sketch, trained.sketch_bytes)
            whole.side = trained.sketch.queries.new_zeros(self.room.seats + 1, *trained.sketch.queries.shape)
        return whole

    def _room_for_codes(self, sketch: Sketch, width: int) -> Tensor | None:
        """The codes that steps read: those of all slots."""
        self.pages.keep_codes(sketch, width)
        return self.pages.codes

    @property
    def nbytes(self) -> int:
        """Bytes that the layer keeps beside its pages."""
        kept = None if self.completes is None else tuple(
            getattr(self.completes, name) for name in self.completes.row_state)
        if isinstance(self.completes, PhiEstimator):
            kept = kept, self.completes.layer.offset, self.completes.key_map, self.completes.weights
        return bytes_in((self.by_seat.buckets, self.spent, self.by_seat.codes, self.by_seat.side, kept))

    def step(self, q: Tensor, metadata: DecodeMetadata, table: Tensor, out: Tensor) -> Tensor:
        """A decode step of one query a row, q `[R, Hq, d]` with RoPE, into out `[R, Hq, d]`: over the row's anchors and
        what its selector chooses, completed if asked for, or over all it has in its pages, table `[R, blocks]`."""
        columns = metadata.positions
        if self.turns and self.rope is not None:
            columns = columns.clamp(0, self.rope.tables()[0].shape[1] - 1)
        # one row of R queries; what each of them sees the metadata say
        queries = Queries(q.transpose(0, 1)[None], metadata.anchored, self.rope, metadata.seat, columns)
        view = self._view(regions=self.none, num_query_heads=q.shape[1], metadata=metadata, table=table, out=out)
        sparse_step(view, queries, self.by_seat, self.completes)
        return out

    def read(self, q: Tensor, slots: Tensor, reads: SparsePrompts) -> Tensor:
        """Attention of a piece of a prompt, q `[T, Hq, d]` with RoPE, whose request's tokens lie in slots `[N]`, those
        of the piece last -> as q. Keys and values of the request are side by side while it lasts."""
        start = torch.zeros(1, dtype=torch.int64, device=q.device)
        view = LayerView(self.pages.keys_in(slots)[None], self.pages.values_in(slots)[None],
                         regions=Regions.of_equal_rows(start, slots.shape[0], 0, 0), scale=self.scale,
                         num_query_heads=q.shape[1])
        out = reads.read(view, q.transpose(0, 1)[None])[0].transpose(0, 1)
        return out if self.pages.scales.value == 1 else out * self.pages.scales.value

    def request(self, slots: Tensor | None, regions: Regions, seat: int = 0) -> PagedView:
        """The request of a seat, whose tokens up to the mid region's end lie in `slots [N]`."""
        return self._view(seat, regions=regions, num_query_heads=self.pages.keys.shape[0], slots=slots)

    def _view(self, seat: int = 0, **given: Any) -> PagedView:
        return PagedView(pages=self.pages, scale=self.scale, rope=self.rope, **given)

    def put(self, seat: int, selector: Any, summary: Estimator | None, view: PagedView) -> list[Copied]:
        """A request's index has its seat's rows from now on, and its summary likewise: what is to be copied there."""
        whole, copied, first = self.by_seat, [], seat * self.room.longest
        listed = selector.buckets
        if listed is None:
            order = whole.buckets.order[:, :, :view.regions.edges[3] - view.regions.edges[0]]
            empty = Buckets._make(None if x is None else torch.zeros_like(x[:1])
                                  for x in whole.buckets._replace(order=order))
            listed = list_whole(empty, view, torch.ones_like(view.regions.starts, dtype=torch.bool))
        listed_to = whole.buckets.order[:, :, first:first + listed.order.shape[2]]
        copied.append((listed_to[0], listed.order[0]))
        torch.add(listed.offsets[0], first, out=whole.buckets.offsets[seat])
        rows = put_row(whole.buckets._replace(order=None, offsets=None), seat,
                       listed._replace(order=None, offsets=None), copied)
        if selector.buckets is not None:
            selector.buckets = rows._replace(order=listed_to, offsets=listed.offsets)
        copied.append((self.spent[0, seat], selector.budget[0]))
        if whole.codes is not None:
            self._put_codes(seat, selector, view, copied)
            copied += [(whole.side[seat], selector.sketch.queries[0]), (self.spent[1, seat], selector.pool[0])]
        if self.completes is not None and summary is not None:
            put_summary(self.completes, seat, summary, first, copied)
        self.requests[seat] = selector, summary
        return copied

    def _put_codes(self, seat: int, selector: Any, view: PagedView, copied: list[Copied]) -> None:
        """Those of a request's keys lie by slot already."""
        selector.codes = self.by_seat.codes


def build_seat(
    indices: Sequence[LayerIndex], seat: int, slots: Tensor, regions: Regions, *, routed: bool = False,
) -> None:
    """The index of the request in a seat in all these layers, whose tokens up to the mid region's end lie in
    `slots [N]`; regions `[1]` on the device. As many layers at once as there is room for. routed: by buckets, however
    short it is."""
    if not indices:
        return
    _encode_missing(indices, slots)
    views = [index.request(slots, regions, seat) for index in indices]
    for some in in_pieces(list(zip(indices, views, strict=True)), max(map(key_bytes, views)), at_once(slots.device)):
        selectors = [copy.copy(index.selector) for index, _ in some]
        for selector in selectors:
            if routed and selector.reads_codes:
                selector.candidates = 0.5
        summaries = [None if index.fresh is None else index.fresh.fork() for index, _ in some]
        build_layers([view for _, view in some], selectors, summaries)
        copy_all([pair for (index, view), selector, summary in zip(some, selectors, summaries, strict=True)
                  for pair in index.put(seat, selector, summary, view)])


def extend_seat(indices: Sequence[LayerIndex], seat: int, slots: Tensor, old: Regions, regions: Regions) -> None:
    """The mid region of the request in a seat has grown from `old`, in all these layers."""
    copied: list[Copied] = []
    _encode_missing(indices, slots)
    for index in indices:
        (selector, summary), view = index.requests[seat], index.request(slots, regions, seat)
        assert selector is not None
        grow(view, old, selector, summary)
        copied += index.put(seat, selector, summary, view)
    copy_all(copied)


def _encode_missing(indices: Sequence[LayerIndex], slots: Tensor) -> None:
    """Codes of the keys in slots `[N]` that have none: few, and the same slots in all layers of a group of pages."""
    coded = [index.pages for index in indices if index.pages.codes is not None]
    if coded:
        missing = slots[coded[0].uncoded.at[slots]]
        for pages in coded:
            pages.encode_in(missing)


def warm(indices: Sequence[LayerIndex], sink_size: int) -> None:
    """Run once what prompts and new requests launch in these layers, all at once and one by itself, so that no request
    waits until it is compiled or loaded. Of lengths that 16 divides, odd ones, and others whose sum over the heads 16
    divides: strides are compiled for that. Leaves nothing that is read: no seat is taken, and no slot is known."""
    one = max(indices, key=lambda index: index.completes is not None)
    device = one.pages.keys.device
    for count in (WARM, WARM - 1, WARM - 8):
        slots = torch.arange(min(count, one.pages.slots, one.room.longest), device=device)
        if one.pages.codes is not None:
            one.pages.encode_in(slots)
        sink = min(sink_size, slots.shape[0] // 2)
        for some in (indices, [one]):
            regions = Regions.of_equal_rows(torch.zeros(1, dtype=torch.int64, device=device), slots.shape[0], sink, 0)
            build_seat(some, 0, slots, regions, routed=True)


def at_once(device: torch.device) -> int:
    """Bytes of keys that a request's layers have side by side: vLLM has taken most of the memory."""
    return min(STACKED_BYTES, memory_of(str(device)) // MEMORY_PART)


def copy_all(pairs: Sequence[Copied]) -> None:
    """Write what was found where it belongs: one call for all numbers of a kind."""
    kinds: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in pairs:
        targets, sources = kinds.setdefault(target.dtype, ([], []))
        targets.append(target)
        sources.append(source)
    for targets, sources in kinds.values():
        torch._foreach_copy_(targets, sources)


def _placed(trained: RouterLayer, device: torch.device, kind: torch.dtype) -> RouterLayer:
    """The artifact's part on the device; the sketch in float32 at least."""
    kind = torch.promote_types(kind, torch.float32)
    weights = None if trained.weights is None else QueryModel(*(w.to(device) for w in trained.weights))
    sketch = None if trained.sketch is None else Sketch(*(x.to(device, kind) for x in trained.sketch))
    return trained._replace(centroids=trained.centroids.to(device), weights=weights, sketch=sketch)


def _shapes(
    trained: RouterLayer, room: Room, dtype: torch.dtype, *, by_means: bool,
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and kind of the fields of the seats' `Buckets`."""
    (heads, buckets, dim), seats = trained.centroids.shape, room.seats + 1
    wide = torch.promote_types(dtype, torch.float32)
    row = seats, heads, buckets
    shapes = {"centroids": ((*row, dim), dtype), "order": ((1, heads, room.seats * room.longest), torch.int32),
             "offsets": ((seats, heads, buckets + 1), torch.int32)}
    if by_means:
        shapes |= {"sums": ((*row, dim), wide), "squares": (row, wide), "means": ((*row, dim), torch.int8),
                  "steps": (row, torch.float32), "spread": (row, wide)}
    return shapes


def bytes_by_slot(selector: Router) -> int:
    """Bytes that a layer keeps beside a slot of its pages: the slot's code. Where nothing was trained codes lie by
    seat."""
    trained = selector.trained
    if not selector.reads_codes or trained.sketch is None or isinstance(trained, Untrained):
        return 0
    return trained.centroids.shape[0] * trained.sketch_bytes


def bytes_by_seat(selector: Router, room: Room, dtype: torch.dtype) -> int:
    """Bytes of all indices of a layer with keys of `dtype`."""
    trained = selector.trained
    heads, _, dim = trained.centroids.shape
    shapes = _shapes(trained, room, dtype, by_means=(selector.scores or trained.scores) == "mean_key")
    total = sum(math.prod(shape) * kind.itemsize for shape, kind in shapes.values())
    if isinstance(trained, Untrained):
        total += (heads * trained.sketch_bytes + 4) * room.seats * room.longest + 4
    if selector.reads_codes and trained.sketch is not None:
        total += torch.promote_types(dtype, torch.float32).itemsize * (room.seats + 1) * heads * dim * (
            trained.sketch.rank)
    return total
