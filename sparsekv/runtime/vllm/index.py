"""What a served layer keeps beside its pages: codes of keys by slot, and in buffers of fixed size the index of every
request that decodes sparsely, and its summary (`summaries.py`). The index is made, grown and asked by the selectors of
the core (`core/index.py`), of which a request is one row, its layers made together as those of `attach` are. Nothing
waits for the host but `build_seat` and `extend_seat`."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparsekv.artifacts.phi import PhiLayer
from sparsekv.artifacts.router import RouterLayer
from sparsekv.core.estimators import PhiEstimator
from sparsekv.core.index import Buckets, Index, TrainedBuckets, chosen_tokens, one_bucket
from sparsekv.core.layer import LayerView
from sparsekv.core.prefill import SparsePrompts
from sparsekv.core.regions import Regions
from sparsekv.core.rope import RopeTable
from sparsekv.core.selectors.router import Router
from sparsekv.core.stacked import STACKED_BYTES, bytes_of, in_pieces
from sparsekv.core.step import build_layers, grow
from sparsekv.core.streams import beside
from sparsekv.kernels import CompletionQuery, Pages, QueryModel, Sketch, attend_tokens, encode_keys
from sparsekv.runtime.vllm.pages import by_slot, taken
from sparsekv.runtime.vllm.request import RequestKeys
from sparsekv.runtime.vllm.summaries import Summaries, bytes_in
from sparsekv.util.memory import memory_of

LATER = 64
"""New keys of a step up to which their codes wait."""
KEYS_AT_ONCE, WARM = 8192, 64
MEMORY_PART = 128
"""A request's layers have as many bytes of keys side by side as a device has memory, over this; what is made of them
takes as much again, and half."""


class Lanes(NamedTuple):
    """A decode step's rows as the layers need them. sparse `[R]`: who decodes sparsely; seat `[R]`: with which index,
    for the others nobody's; anchors `[R, A]`: slots of sink and tail, the first `anchored [R]`, -1 behind them; places
    `[R]`: position of the query; rest `[R]` int32: lengths of the rows that are attended to fully, 0 for the others."""

    sparse: Tensor
    seat: Tensor
    anchors: Tensor
    places: Tensor
    rest: Tensor
    anchored: Tensor


class Room(NamedTuple):
    """Sizes of the fixed buffers: requests that decode sparsely at once, the longest of them [tokens]."""

    seats: int
    longest: int


def heads_of(router: RouterLayer, first: int, last: int) -> RouterLayer:
    """The router of some KV heads: those that a tensor-parallel rank holds."""
    weights = None if router.weights is None else QueryModel(*(w[first:last] for w in router.weights))
    sketch = None if router.sketch is None else Sketch(*(x[first:last] for x in router.sketch))
    return router._replace(centroids=router.centroids[first:last], weights=weights, sketch=sketch)


class Unsorted:
    """Slots whose keys have no code yet, the same in all layers of a group of pages: `at [slots + 1]`, the last
    nobody's. A step notes its new slots once, so that a decode step's layers need not; now: whether this step's layers
    make codes of their keys."""

    def __init__(self, slots: int, device: torch.device):
        self.at = torch.ones(slots + 1, dtype=torch.bool, device=device)
        self.now = False

    def note(self, slots: Tensor, *, decode: bool) -> None:
        """The new keys of a step go to slots `[n]`, -1 = none. A few keys, and those of decode steps, wait: they are in
        a tail, and get their codes with the index that takes them in. One launch: -1 is the last slot, nobody's."""
        self.now = not decode and slots.shape[0] > LATER
        self.at.index_fill_(0, slots.long(), not self.now)

    def renew(self) -> None:
        """Nothing in the pages is known."""
        self.at.fill_(True)


class Scales(NamedTuple):
    """What numbers of the pages are multiplied by: those of a float8 cache are keys and values over these."""

    key: float = 1.0
    value: float = 1.0


class LayerIndex:
    """pool `[blocks, Hkv, page, 2d]`: the layer's pages. By slot: codes `[1, Hkv, slots + 1, w]`; what has no slot goes
    to the last. By seat: a row of the core's `Index`, whose lists of slots lie one after another, and the selector that
    made it. Seat `seats` is nobody's: its buckets are empty.

    selector: of this layer, with the artifact's part that these heads need; maps: these heads' feature maps, None: what
    is not read is not estimated. Of a float8 cache, kind: the precision of the queries; scales: the layer's. The
    kernels read the pages as they are: the key's scale is in that of the scores and in the map of keys, and the
    value's, by which summaries and attention are short alike, multiplies the output."""

    def __init__(self, selector: Router, pool: Tensor, room: Room, unsorted: Unsorted, *, scale: float,
                 rope: RopeTable | None = None, maps: PhiLayer | None = None, kind: torch.dtype | None = None,
                 scales: Scales | None = None):
        self.unsorted, self.room, self.scale, self.rope = unsorted, room, scale, rope
        self.keys, self.values = by_slot(pool)
        self.kind, self.scales = kind or pool.dtype, scales or Scales()
        self.slots, self.page = self.keys.shape[1], pool.shape[2]
        self.selector = copy.copy(selector)
        self.selector.layer = trained = _placed(selector.trained, pool.device, self.kind)
        device, seats, heads = pool.device, room.seats, self.keys.shape[0]
        # what the longest request may read
        ends = torch.zeros(1, dtype=torch.int64, device=device)
        probe = copy.copy(self.selector)
        probe.prepare(self.request(torch.zeros(0), Regions(ends, ends + room.longest, room.longest, 0)))
        self.weights = probe.query_model(self.request(torch.zeros(0), Regions(ends, ends, 0, 0)))
        self.made: list[tuple[Router | None, PhiEstimator | None]] = [(None, None)] * seats
        shapes = _shapes(trained, room, self.kind, by_means=self.weights is None)
        self.buckets = Buckets(**{name: torch.zeros(shape, dtype=kind, device=device)
                                  for name, (shape, kind) in shapes.items()})
        self.spent = torch.zeros(2, seats + 1, dtype=torch.int64, device=device)
        self.codes: Tensor | None = None
        side = None
        if probe.reads_codes:
            assert trained.sketch is not None
            self.codes = torch.zeros(1, heads, self.slots + 1, trained.sketch_bytes, dtype=torch.int8, device=device)
            side = trained.sketch._replace(queries=torch.zeros(
                seats + 1, *trained.sketch.queries.shape, dtype=trained.sketch.queries.dtype, device=device))
        self.index = Index(self.buckets, self.weights, self.codes, side, self.spent[0], self.spent[1], probe.widest,
                           min(room.longest, probe.most_candidates))
        self.summaries = None if maps is None else Summaries(maps, self._like(), seats, self.scales.key)

    @property
    def nbytes(self) -> int:
        """Bytes that the layer keeps beside its pages."""
        side = None if self.index.sketch is None else self.index.sketch.queries
        kept = None if self.summaries is None else self.summaries.held
        return bytes_in((self.buckets, self.spent, self.codes, side, kept))

    def write(self, keys: Tensor, slots: Tensor) -> None:
        """Codes of new keys `[n, Hkv, d]` with RoPE into their slots `[n]`; a negative slot is none. Nothing where this
        step's keys wait. A graph of many tokens is for prefills too: it makes them always."""
        if self.codes is not None and (self.unsorted.now or (
                keys.is_cuda and keys.shape[0] > LATER and torch.cuda.is_current_stream_capturing())):
            self._encode(keys, torch.where(slots < 0, self.slots, slots).long())

    def without_code(self, slots: Tensor) -> Tensor:
        return slots[self.unsorted.at[slots]]

    def encode_in(self, slots: Tensor) -> None:
        for at in slots.split(KEYS_AT_ONCE):
            self._encode(self.keys_in(at).transpose(0, 1), at)

    def keys_in(self, slots: Tensor) -> Tensor:
        found = taken(self.keys, slots).to(self.kind)
        return found if self.scales.key == 1 else found * self.scales.key

    def values_in(self, slots: Tensor) -> Tensor:
        return taken(self.values, slots).to(self.kind)

    def _like(self) -> Tensor:
        """Shape, precision and device of all keys `[1, Hkv, slots, d]`, which are not read through it."""
        return torch.empty((), dtype=self.kind, device=self.keys.device).expand(1, *self.keys.shape)

    def _encode(self, keys: Tensor, at: Tensor) -> None:
        trained = self.selector.trained
        assert self.codes is not None and trained.sketch is not None
        self.codes.index_copy_(2, at, encode_keys(keys.transpose(0, 1)[None], trained.sketch, trained.sketch_bytes))

    def step(self, q: Tensor, lanes: Lanes, table: Tensor, out: Tensor) -> Tensor:
        """A decode step of one query a row, q `[R, Hq, d]` with RoPE, into out `[R, Hq, d]`."""
        if self.summaries is None:
            return self.attend(q, self.choose(q, lanes), lanes, table, out)
        with beside(q.device) as join:
            completion = self.summaries.asked(q, lanes.seat)
        tokens = self.choose(q, lanes)
        join()
        return self.attend(q, tokens, lanes, table, out, completion)

    def choose(self, q: Tensor, lanes: Lanes) -> Tensor:
        """The slots that the budget buys, of one query a row, q `[R, Hq, d]` with RoPE: `[R, Hkv, n]`, padded with
        -1, as are all of a row that does not decode sparsely."""
        asking = q
        if self.weights is not None and self.selector.trained.key_space == "pre":
            assert self.rope is not None
            places = lanes.places.clamp(0, self.rope.tables()[0].shape[1] - 1)
            asking = self.rope.unrotate(q.transpose(0, 1)[None], places)[0].transpose(0, 1)
        return chosen_tokens(self.index, q, asking, self.scale, budget=self.spent[0], pool=self.spent[1],
                             seats=lanes.seat)

    def attend(
        self, q: Tensor, tokens: Tensor, lanes: Lanes, table: Tensor, out: Tensor,
        completion: CompletionQuery | None = None,
    ) -> Tensor:
        """Attention of one query a row, q `[R, Hq, d]` with RoPE, into out `[R, Hq, d]`: over the row's anchors and
        tokens `[R, Hkv, n]`, completed if asked for, or over all it has in its pages, table `[R, blocks]`."""
        keys, values = (x[None].expand(q.shape[0], -1, -1, -1) for x in (self.keys, self.values))
        used = lanes.anchored
        out = attend_tokens(q, keys, values, tokens, scale=self.scale * self.scales.key, starts=used, sink_size=0,
                            tail_starts=used, lengths=used, completion=completion,
                            pages=Pages(lanes.anchors, lanes.rest, table, self.page), out=out)[0]
        return out if self.scales.value == 1 else out.mul_(self.scales.value)

    def read(self, q: Tensor, slots: Tensor, reads: SparsePrompts) -> Tensor:
        """Attention of a piece of a prompt, q `[T, Hq, d]` with RoPE, whose request's tokens lie in slots `[N]`, those
        of the piece last -> as q. Keys and values of the request are side by side while it lasts."""
        start = torch.zeros(1, dtype=torch.int64, device=q.device)
        view = LayerView(self.keys_in(slots)[None], self.values_in(slots)[None],
                         Regions.of_equal_rows(start, slots.shape[0], 0, 0), self.scale, q.shape[1])
        out = reads.read(view, q.transpose(0, 1)[None])[0].transpose(0, 1)
        return out if self.scales.value == 1 else out * self.scales.value

    def request(self, slots: Tensor, regions: Regions) -> RequestKeys:
        """The keys of a request whose tokens up to the mid region's end lie in `slots [N]`."""
        return RequestKeys(self._like(), self._like(), regions, self.scale, self.keys.shape[0], rope=self.rope,
                           slots=slots, pages=self)

    def put(self, seat: int, made: Router, summary: PhiEstimator | None, keys: RequestKeys) -> list[Copied]:
        """A request's index has its seat's rows from now on, and its summary likewise: what is to be copied there."""
        found = one_bucket(keys, self.buckets) if made.buckets is None else made.buckets
        first, count = seat * self.room.longest, found.order.shape[2]
        copied = [(self.buckets.order[0, :, first:first + count], found.order[0])]
        torch.add(found.offsets[0], first, out=self.buckets.offsets[seat])
        kept = {"order": self.buckets.order[:, :, first:first + count], "offsets": found.offsets}
        for name, rows in self.buckets._asdict().items():
            if name not in kept and rows is not None:
                copied.append((rows[seat], getattr(found, name)[0]))
                kept[name] = rows[seat:seat + 1]
        if made.buckets is not None:
            made.buckets = Buckets(**kept)
        index = made.index
        if index.sketch is not None and self.index.sketch is not None:
            copied.append((self.index.sketch.queries[seat], index.sketch.queries[0]))
        pool = index.pool if made.buckets is not None else keys.regions.mid_sizes
        copied += [(self.spent[0, seat], index.budget[0]), (self.spent[1, seat], pool[0])]
        if self.codes is not None:
            made.codes = self.codes  # type: ignore[attr-defined]
        if self.summaries is not None and summary is not None:
            copied += self.summaries.put(seat, summary)
        self.made[seat] = made, summary
        return copied


Copied = tuple[Tensor, Tensor]
"""A place, and what is written there."""


def build_seat(
    indices: Sequence[LayerIndex], seat: int, slots: Tensor, regions: Regions, *, routed: bool = False,
) -> None:
    """The index of the request in a seat in all these layers, whose tokens up to the mid region's end lie in
    `slots [N]`; regions `[1]` on the device. As many layers at once as there is room for. routed: by buckets, however
    short it is."""
    if not indices:
        return
    views = [index.request(slots, regions) for index in indices]
    for some in in_pieces(list(zip(indices, views, strict=True)), max(map(bytes_of, views)), at_once(slots.device)):
        selectors = [copy.copy(index.selector) for index, _ in some]
        for made in selectors:
            if routed and made.reads_codes:
                made.candidates = 0.5
        summaries = [None if index.summaries is None else index.summaries.fresh() for index, _ in some]
        build_layers([view for _, view in some], selectors, summaries)
        copy_all([pair for (index, view), made, summary in zip(some, selectors, summaries, strict=True)
                  for pair in index.put(seat, made, summary, view)])


def extend_seat(indices: Sequence[LayerIndex], seat: int, slots: Tensor, old: Regions, regions: Regions) -> None:
    """The mid region of the request in a seat has grown from `old`, in all these layers."""
    copied: list[Copied] = []
    for index in indices:
        (made, summary), keys = index.made[seat], index.request(slots, regions)
        assert made is not None
        grow(keys, old, made, summary)
        copied += index.put(seat, made, summary, keys)
    copy_all(copied)


def warm(indices: Sequence[LayerIndex], sink_size: int) -> None:
    """Run once what prompts and new requests launch in these layers, all at once and one by itself, so that no request
    waits until it is compiled or loaded. Of lengths that 16 divides, odd ones, and others whose sum over the heads 16
    divides: strides are compiled for that. Leaves nothing that is read: no seat is taken, and no slot is known."""
    one = max(indices, key=lambda index: index.summaries is not None)
    device = one.keys.device
    for count in (WARM, WARM - 1, WARM - 8):
        slots = torch.arange(min(count, one.slots, one.room.longest), device=device)
        if one.codes is not None:
            one.encode_in(slots)
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
    for place, found in pairs:
        places, all_found = kinds.setdefault(place.dtype, ([], []))
        places.append(place)
        all_found.append(found)
    for places, all_found in kinds.values():
        torch._foreach_copy_(places, all_found)


def _placed(trained: TrainedBuckets, device: torch.device, kind: torch.dtype) -> RouterLayer:
    """The artifact's part on the device; the sketch in float32 at least."""
    kind = torch.promote_types(kind, torch.float32)
    weights = None if trained.weights is None else QueryModel(*(w.to(device) for w in trained.weights))
    sketch = None if trained.sketch is None else Sketch(*(x.to(device, kind) for x in trained.sketch))
    return RouterLayer(trained.centroids.to(device), weights, trained.key_space, trained.scores, sketch,
                       trained.sketch_bytes)


def _shapes(
    trained: TrainedBuckets, room: Room, dtype: torch.dtype, *, by_means: bool,
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and kind of the fields of the seats' `Buckets`."""
    (heads, buckets, dim), seats = trained.centroids.shape, room.seats + 1
    wide = torch.promote_types(dtype, torch.float32)
    row = seats, heads, buckets
    found = {"centroids": ((*row, dim), dtype), "order": ((1, heads, room.seats * room.longest), torch.int32),
             "offsets": ((seats, heads, buckets + 1), torch.int32)}
    if by_means:
        found |= {"sums": ((*row, dim), wide), "squares": (row, wide), "means": ((*row, dim), torch.int8),
                  "steps": (row, torch.float32), "spread": (row, wide)}
    return found


def bytes_by_slot(selector: Router) -> int:
    """Bytes that a layer keeps beside a slot of its pages: the slot's code."""
    trained = selector.trained
    if not selector.reads_codes or trained.sketch is None:
        return 0
    return trained.centroids.shape[0] * trained.sketch_bytes


def bytes_by_seat(selector: Router, room: Room, dtype: torch.dtype) -> int:
    """Bytes of all indices of a layer with keys of `dtype`."""
    trained = selector.trained
    heads, _, dim = trained.centroids.shape
    shapes = _shapes(trained, room, dtype, by_means=(selector.scores or trained.scores) == "mean_key")
    found = sum(math.prod(shape) * kind.itemsize for shape, kind in shapes.values())
    if bytes_by_slot(selector) and trained.sketch is not None:
        found += torch.promote_types(dtype, torch.float32).itemsize * (room.seats + 1) * heads * dim * (
            trained.sketch.rank)
    return found
