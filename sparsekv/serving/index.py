"""What a served layer keeps beside its pages: codes of keys by slot, and in buffers of fixed size the index of every
request that decodes sparsely, and its summary (`summaries.py`). The index is made, grown and asked by the selectors of
the core (`core/index.py`), of which a request is one row. Nothing waits for the host but `build` and `extend`."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sparsekv.artifacts.phi import PhiLayer
from sparsekv.artifacts.router import RouterLayer
from sparsekv.core.estimators import PhiEstimator
from sparsekv.core.index import Buckets, Index, TrainedBuckets, chosen_tokens, one_bucket
from sparsekv.core.layer import LayerView
from sparsekv.core.regions import Regions
from sparsekv.core.rope import RopeTable
from sparsekv.core.selectors.router import Router
from sparsekv.core.step import build, grow
from sparsekv.core.streams import beside
from sparsekv.kernels import CompletionQuery, Pages, QueryModel, Sketch, attend_tokens, encode_keys
from sparsekv.serving.pages import by_slot, taken
from sparsekv.serving.summaries import Summaries, bytes_in

LATER = 64
"""New keys of a step up to which their codes wait."""
KEYS_AT_ONCE, WARM = 8192, 64


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
        """The new keys of a step go to slots `[n]`, negative = none. A few keys, and those of decode steps, wait: they
        are in a tail, and get their codes with the index that takes them in."""
        self.now = not decode and slots.shape[0] > LATER
        self.at.index_fill_(0, torch.where(slots < 0, self.at.shape[0] - 1, slots).long(), not self.now)

    def renew(self) -> None:
        """Nothing in the pages is known."""
        self.at.fill_(True)


class Scales(NamedTuple):
    """What numbers of the pages are multiplied by: those of a float8 cache are keys and values over these."""

    key: float = 1.0
    value: float = 1.0


@dataclass
class RequestKeys(LayerView):
    """The keys of one request in pages, as `core/index.py: Keys`: keys and values `[1, Hkv, slots, d]` by slot, slots
    `[N]` of its first tokens, the mid region's last among them; codes by slot in `store`. Keys are given as they are,
    values as the pages have them."""

    slots: Tensor | None = None
    store: LayerIndex | None = None

    def keys_at(self, first: int, last: int, step: int = 1) -> Tensor:
        assert self.slots is not None and self.store is not None
        return self.store.keys_in(self.slots[first:last:step])[None]

    def values_at(self, first: int, last: int) -> Tensor:
        assert self.slots is not None and self.store is not None
        return taken(self.store.values, self.slots[first:last]).to(self.store.kind)[None]

    def keys_pre(self, first: int, last: int) -> Tensor:
        places = torch.arange(first, last, device=self.keys.device)
        assert self.rope is not None
        return self.rope.unrotate(self.keys_at(first, last), places)

    def numbers(self, first: int, last: int) -> Tensor:
        assert self.slots is not None
        return self.slots[None, first:last]

    def encoded(self, known: Tensor | None, sketch: Sketch, width: int, last: int) -> Tensor:
        """Codes of all slots, `[1, Hkv, slots + 1, w]`; those depend on the key alone, and are there for most."""
        assert self.slots is not None and self.store is not None and self.store.codes is not None
        self.store.complete(self.slots[:last])
        return self.store.codes

    def codes_at(self, codes: Tensor, first: int, last: int, step: int) -> Tensor:
        assert self.slots is not None
        return codes[:, :, self.slots[first:last:step]]


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
        probe.prepare(self._request(torch.zeros(0), Regions(ends, ends + room.longest, room.longest, 0)))
        self.weights = probe.query_model(self._request(torch.zeros(0), Regions(ends, ends, 0, 0)))
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

    def warm(self, sink_size: int) -> None:
        """Run once what prompts and new requests launch, for lengths that 16 divides, odd ones and others (strides that
        16 divides are compiled for), so that no request waits until it is compiled. Leaves nothing that is read: no
        seat is taken, and no slot is known."""
        for count in (WARM, WARM - 1, WARM - 2):
            slots = torch.arange(min(count, self.slots, self.room.longest), device=self.keys.device)
            if self.codes is not None:
                self._encode(self.keys_in(slots).transpose(0, 1), slots)
            ends = torch.full((1,), slots.shape[0])
            self.build(0, slots, Regions(torch.zeros_like(ends), ends, int(ends), min(sink_size, int(ends) // 2)),
                       routed=True)

    def write(self, keys: Tensor, slots: Tensor) -> None:
        """Codes of new keys `[n, Hkv, d]` with RoPE into their slots `[n]`; a negative slot is none. Nothing where this
        step's keys wait. A graph of many tokens is for prefills too: it makes them always."""
        if self.codes is not None and (self.unsorted.now or (
                keys.is_cuda and keys.shape[0] > LATER and torch.cuda.is_current_stream_capturing())):
            self._encode(keys, torch.where(slots < 0, self.slots, slots).long())

    def complete(self, slots: Tensor) -> None:
        """Codes of those of the slots `[n]` that have none, from the pages."""
        missing = slots[self.unsorted.at[slots]]
        for at in missing.split(KEYS_AT_ONCE):
            self._encode(self.keys_in(at).transpose(0, 1), at)

    def keys_in(self, slots: Tensor) -> Tensor:
        """The keys in slots `[n]`, `[Hkv, n, d]`."""
        found = taken(self.keys, slots).to(self.kind)
        return found if self.scales.key == 1 else found * self.scales.key

    def _like(self) -> Tensor:
        """Shape, precision and device of all keys `[1, Hkv, slots, d]`, which are not read through it."""
        return torch.empty((), dtype=self.kind, device=self.keys.device).expand(1, *self.keys.shape)

    def _encode(self, keys: Tensor, at: Tensor) -> None:
        trained = self.selector.trained
        assert self.codes is not None and trained.sketch is not None
        self.codes.index_copy_(2, at, encode_keys(keys.transpose(0, 1)[None], trained.sketch, trained.sketch_bytes))

    def build(self, seat: int, slots: Tensor, regions: Regions, *, routed: bool = False) -> None:
        """The index of the request in a seat, whose tokens up to the mid region's end lie in `slots [N]`. routed: by
        buckets, however short it is."""
        made, keys = copy.copy(self.selector), self._request(slots, regions)
        if routed and made.reads_codes:
            made.candidates = 0.5  # type: ignore[attr-defined]
        summary = None if self.summaries is None else self.summaries.fresh()
        build(keys, made, summary)
        self._put(seat, made, summary, keys)

    def extend(self, seat: int, slots: Tensor, old: Regions, regions: Regions) -> None:
        """The mid region of the request in a seat has grown from `old`."""
        (made, summary), keys = self.made[seat], self._request(slots, regions)
        assert made is not None
        grow(keys, _placed_regions(old, self.keys.device), made, summary)
        self._put(seat, made, summary, keys)

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

    def _request(self, slots: Tensor, regions: Regions) -> RequestKeys:
        return RequestKeys(self._like(), self._like(), _placed_regions(regions, self.keys.device), self.scale,
                           self.keys.shape[0], rope=self.rope, slots=slots, store=self)

    def _put(self, seat: int, made: Router, summary: PhiEstimator | None, keys: RequestKeys) -> None:
        """A request's index into its seat's rows, which its selector has from then on, and its summary likewise."""
        found = one_bucket(keys, self.buckets) if made.buckets is None else made.buckets
        first, count = seat * self.room.longest, found.order.shape[2]
        self.buckets.order[0, :, first:first + count] = found.order[0]
        self.buckets.offsets[seat] = found.offsets[0] + first
        kept = {"order": self.buckets.order[:, :, first:first + count], "offsets": found.offsets}
        for name, rows in self.buckets._asdict().items():
            if name not in kept and rows is not None:
                rows[seat] = getattr(found, name)[0]
                kept[name] = rows[seat:seat + 1]
        if made.buckets is not None:
            made.buckets = Buckets(**kept)
        index = made.index
        if index.sketch is not None and self.index.sketch is not None:
            self.index.sketch.queries[seat] = index.sketch.queries[0]
        self.spent[0, seat : seat + 1] = index.budget
        self.spent[1, seat : seat + 1] = index.pool if made.buckets is not None else keys.regions.mid_sizes
        if self.summaries is not None and summary is not None:
            self.summaries.put(seat, summary)
        self.made[seat] = made, summary


def _placed(trained: TrainedBuckets, device: torch.device, kind: torch.dtype) -> RouterLayer:
    """The artifact's part on the device; the sketch in float32 at least."""
    kind = torch.promote_types(kind, torch.float32)
    weights = None if trained.weights is None else QueryModel(*(w.to(device) for w in trained.weights))
    sketch = None if trained.sketch is None else Sketch(*(x.to(device, kind) for x in trained.sketch))
    return RouterLayer(trained.centroids.to(device), weights, trained.key_space, trained.scores, sketch,
                       trained.sketch_bytes)


def _placed_regions(regions: Regions, device: torch.device) -> Regions:
    return Regions(regions.starts.to(device), regions.tail_starts.to(device), regions.length, regions.sink_size)


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
