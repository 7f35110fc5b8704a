"""What a served layer keeps beside its pages: bucket and code of every key by slot, and an index for every request that
decodes sparsely, in buffers of fixed size. Nothing waits for the host but `build` and `extend`."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sparsekv.artifacts.router import RouterLayer
from sparsekv.core.regions import Regions, tokens_of_budget
from sparsekv.core.rope import Layout, unrotate
from sparsekv.core.selectors.sketch import FITTED_KEYS, LEAST_CANDIDATES
from sparsekv.core.sketch import fit_queries
from sparsekv.kernels import (
    BucketMeans,
    Candidates,
    Pages,
    QueryModel,
    RouterScores,
    Sketch,
    assign_buckets,
    attend_tokens,
    bucket_sums,
    build_index,
    encode_keys,
    extend_index,
    half_variance,
    round_means,
    route_tokens,
    sketch_tokens,
    square_sums,
)
from sparsekv.serving.pages import by_slot

LATER = 64
"""New keys of a step up to which their buckets and codes wait."""
KEYS_AT_ONCE, SUMMED_AT_ONCE, WARM = 8192, 65_536, 64


class Rotation(NamedTuple):
    """The model's rotary tables, `cos, sin [positions, width]`, full width in the layout."""

    cos: Tensor
    sin: Tensor
    layout: Layout

    def remove(self, x: Tensor, places: Tensor) -> Tensor:
        """x `[n, H, d]` of the tokens at places `[n]`, without RoPE."""
        places = places.clamp(0, self.cos.shape[0] - 1)
        return unrotate(x, self.cos[places][:, None], self.sin[places][:, None], self.layout)


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
    """Slots whose keys have no bucket and code yet, the same in all layers of a group of pages: `at [slots + 1]`, the
    last nobody's. A step notes its new slots once, so that a decode step's layers need not; now: whether this step's
    layers sort their keys."""

    def __init__(self, slots: int, device: torch.device):
        self.at = torch.ones(slots + 1, dtype=torch.bool, device=device)
        self.now = False

    def note(self, slots: Tensor, *, decode: bool) -> None:
        """The new keys of a step go to slots `[n]`, negative = none. A few keys, and those of decode steps, wait: they
        are in a tail, and get bucket and code with the index that takes them in."""
        self.now = not decode and slots.shape[0] > LATER
        self.at.index_fill_(0, torch.where(slots < 0, self.at.shape[0] - 1, slots).long(), not self.now)

    def renew(self) -> None:
        """Nothing in the pages is known."""
        self.at.fill_(True)


class LayerIndex:
    """pool `[blocks, Hkv, page, 2d]`: the layer's pages. By slot: buckets `[Hkv, slots + 1]` and codes
    `[1, Hkv, slots + 1, w]`; what has no slot goes to the last. By seat: order, a list of slots, and its offsets into
    the lists of all seats; means of the buckets (scores `mean_key`), the queries' side of the sketch, and how many
    tokens and candidates are wanted. Seat `seats` is nobody's: its buckets are empty."""

    def __init__(
        self, router: RouterLayer, pool: Tensor, room: Room, unsorted: Unsorted, *, budget: int | float,
        candidates: float, scale: float, rotation: Rotation | None = None,
    ):
        self.unsorted = unsorted
        dtype, device = pool.dtype, pool.device
        self.keys, self.values = by_slot(pool)
        self.slots, self.page = self.keys.shape[1], pool.shape[2]
        self.room, self.scale, self.rotation = room, scale, rotation
        self.token_budget, self.candidates = budget, candidates
        self.heads, self.buckets, self.dim = router.centroids.shape
        # the kernel compares in the keys' precision, its twin in float32
        self.centroids = router.centroids.to(device, dtype if device.type == "cuda" else None)
        self.weights: QueryModel | None = None
        if router.scores == "mlp":
            assert router.weights is not None
            self.weights = QueryModel(*(w.to(device, dtype).contiguous() for w in router.weights))
        self.sketch = None if router.sketch is None else Sketch(*(x.to(device).float() for x in router.sketch))
        self.width = router.sketch_bytes
        self.space = router.key_space
        self.widest = most_tokens(budget, room.longest)
        self.widest_pool = min(room.longest, max(most_tokens(candidates, room.longest),
                                                 LEAST_CANDIDATES * self.widest))

        def zeros(*shape: int, kind: torch.dtype) -> Tensor:
            return torch.zeros(*shape, dtype=kind, device=device)

        seats, heads, buckets, dim = room.seats, self.heads, self.buckets, self.dim
        self.bucket_at = zeros(heads, self.slots + 1, kind=torch.int16)
        self.order = zeros(heads, seats * room.longest, kind=torch.int32)
        self.offsets = zeros(seats + 1, heads, buckets + 1, kind=torch.int32)
        self.spent = zeros(2, seats + 1, kind=torch.int64)
        self.means = None if self.weights is not None else zeros(seats + 1, heads, buckets, dim, kind=dtype)
        scored = 0 if self.means is None else buckets
        self.scored = zeros(seats + 1, heads, scored, dim, kind=torch.int8)
        self.squares, self.steps, self.spread = zeros(3, seats + 1, heads, scored, kind=torch.float32)
        self.codes: Tensor | None = None
        if self.sketch is not None:
            self.codes = zeros(1, heads, self.slots + 1, self.width, kind=torch.int8)
            self.asks = zeros(seats + 1, heads, dim, self.sketch.rank, kind=torch.float32)
        self.fitted = [0] * seats

    def warm(self, sink_size: int) -> None:
        """Run once what prompts and new requests launch, for lengths that 16 divides, odd ones and others (strides that
        16 divides are compiled for), so that no request waits until it is compiled. Leaves nothing that is read: no
        seat is taken, and no slot is known."""
        for count in (WARM, WARM - 1, WARM - 2):
            slots = torch.arange(min(count, self.slots, self.room.longest), device=self.keys.device)
            ends = torch.full((1,), sink_size + slots.shape[0])
            self._sketch(self.keys[:, slots].transpose(0, 1), slots, slots)
            self.build(0, slots, Regions(torch.zeros_like(ends), ends, int(ends), sink_size))

    def write(self, keys: Tensor, slots: Tensor, places: Tensor) -> None:
        """Bucket and code of new keys `[n, Hkv, d]` with RoPE, at places `[n]`, into their slots `[n]`; a negative slot
        is none. Nothing where this step's keys wait. A graph of many tokens is for prefills too: it sorts always."""
        if self.unsorted.now or (keys.is_cuda and keys.shape[0] > LATER and torch.cuda.is_current_stream_capturing()):
            self._sketch(keys, torch.where(slots < 0, self.slots, slots).long(), places)

    def _sketch(self, keys: Tensor, at: Tensor, places: Tensor) -> None:
        rows = keys.transpose(0, 1)[None]
        if self.space == "pre":
            assert self.rotation is not None
            bare = self.rotation.remove(keys, places).transpose(0, 1)[None]
        else:
            bare = rows
        self.bucket_at.index_copy_(1, at, assign_buckets(bare, self.centroids)[0].to(torch.int16))
        if self.codes is not None and self.sketch is not None:
            self.codes.index_copy_(2, at, encode_keys(rows, self.sketch, self.width))

    def _complete(self, slots: Tensor, regions: Regions) -> None:
        """Buckets and codes of the mid region's tokens that have none, from the pages."""
        missing = self.unsorted.at[slots].nonzero()[:, 0]
        for part in missing.split(KEYS_AT_ONCE):
            at = slots[part]
            self._sketch(self.keys[:, at].transpose(0, 1), at, int(regions.mid_first) + part)

    def build(self, seat: int, slots: Tensor, regions: Regions) -> None:
        """The index of the request in a seat: the tokens of its mid region lie in `slots [M]`, in order."""
        self._complete(slots, regions)
        members = self.bucket_at[:, slots][None].int()
        ends = torch.zeros(1, dtype=torch.int64, device=slots.device)
        order, offsets = build_index(members, self.buckets, ends, ends + slots.shape[0])
        self._seat(seat, slots.int()[order[0].clamp(min=0).long()], offsets[0])
        if self.means is not None:
            sums, squares = (torch.zeros_like(x[seat], dtype=torch.float32) for x in (self.means, self.squares))
            for part, own in zip(slots.split(SUMMED_AT_ONCE), members.split(SUMMED_AT_ONCE, -1), strict=True):
                sums += bucket_sums(self.keys[None, :, part], own, None, self.buckets)[1][0]
                squares += square_sums(self.keys[None, :, part], own, None, self.buckets)[0]
            self._summed(seat, sums, squares, offsets[0].diff(dim=-1))
        self._fit(seat, slots, regions)
        self._spend(seat, regions)

    def extend(self, seat: int, slots: Tensor, more: int, regions: Regions) -> None:
        """The last `more` of the tokens in `slots [M]` have joined the mid region."""
        self._complete(slots, regions)
        known = slots.shape[0] - more
        first = seat * self.room.longest
        old = (self.offsets[seat] - first)[None]
        new = slots[known:]
        members = self.bucket_at[:, new][None].int()
        order, offsets = extend_index(self.order[None, :, first:first + known], old, members, new.int()[None])
        self._seat(seat, order[0], offsets[0])
        if self.means is not None:
            sums = bucket_sums(self.keys[None, :, new], members, None, self.buckets)[1][0]
            squares = square_sums(self.keys[None, :, new], members, None, self.buckets)[0]
            before = old.diff(dim=-1)[0]
            self._summed(seat, self.means[seat].float() * before[..., None] + sums, self.squares[seat] + squares,
                         offsets[0].diff(dim=-1))
        if slots.shape[0] > 2 * self.fitted[seat]:
            self._fit(seat, slots, regions)
        self._spend(seat, regions)

    def _summed(self, seat: int, sums: Tensor, squares: Tensor, counts: Tensor) -> None:
        """What scores the buckets of a seat, from the sums of their keys and of the squared lengths."""
        assert self.means is not None
        self.means[seat] = (sums / counts.clamp(min=1)[..., None]).to(self.means.dtype)
        self.scored[seat], self.steps[seat] = round_means(sums, counts)
        self.squares[seat], self.spread[seat] = squares, half_variance(squares, sums, counts)

    def choose(self, q: Tensor, lanes: Lanes) -> Tensor:
        """The slots that the budget buys, of one query a row, q `[R, Hq, d]` with RoPE: `[R, Hkv, n]`, padded with
        -1, as are all of a row that does not decode sparsely."""
        rows, seats = q.shape[0], lanes.seat
        order, (budget, pool) = self.order[None].expand(rows, -1, -1), self.spent
        asking = q
        if self.weights is not None and self.space == "pre":
            assert self.rotation is not None
            asking = self.rotation.remove(q, lanes.places)
        if self.codes is None or self.sketch is None:
            return route_tokens(asking, self._scores(), order, self.offsets, budget, self.widest, seats)
        candidates = Candidates(asking, self._scores(), order, self.offsets, pool, self.widest_pool, seats)
        return sketch_tokens(q, self.sketch._replace(queries=self.asks), self.codes.expand(rows, -1, -1, -1),
                             self.scale, budget, self.widest, candidates)

    def attend(self, q: Tensor, tokens: Tensor, lanes: Lanes, table: Tensor, out: Tensor) -> Tensor:
        """Attention of one query a row, q `[R, Hq, d]` with RoPE, into out `[R, Hq, d]`: over the row's anchors and
        tokens `[R, Hkv, n]`, or over all it has in its pages, table `[R, blocks]`."""
        keys, values = (x[None].expand(q.shape[0], -1, -1, -1) for x in (self.keys, self.values))
        used = lanes.anchored
        return attend_tokens(q, keys, values, tokens, scale=self.scale, starts=used, sink_size=0, tail_starts=used,
                             lengths=used, pages=Pages(lanes.anchors, lanes.rest, table, self.page), out=out)[0]

    def _scores(self) -> RouterScores:
        if self.weights is not None:
            return self.weights
        assert self.means is not None
        return BucketMeans(self.scored, self.steps, self.scale, self.spread)

    def _seat(self, seat: int, order: Tensor, offsets: Tensor) -> None:
        first = seat * self.room.longest
        self.order[:, first:first + order.shape[1]] = order
        self.offsets[seat] = offsets + first

    def _fit(self, seat: int, slots: Tensor, regions: Regions) -> None:
        """What queries multiply codes by, for the mid region as it now is."""
        self.fitted[seat] = slots.shape[0]
        if self.codes is not None and self.sketch is not None:
            # evenly spaced by position, as the selector's
            step = max(1, -(-int(regions.mid_last) // FITTED_KEYS))
            some = slots[-int(regions.mid_first) % step::step]
            used = torch.ones(1, some.shape[0], dtype=torch.bool, device=slots.device)
            self.asks[seat] = fit_queries(self.sketch, self.codes[:, :, some], self.keys[None, :, some], used)[0]

    def _spend(self, seat: int, regions: Regions) -> None:
        tokens = int(tokens_of_budget(self.token_budget, regions))
        wanted = int(tokens_of_budget(float(self.candidates), regions))
        mid = int(regions.mid_sizes)
        self.spent[0, seat] = min(tokens, self.widest)
        self.spent[1, seat] = min(max(wanted, LEAST_CANDIDATES * tokens), mid, self.widest_pool)


def most_tokens(budget: int | float, longest: int) -> int:
    """The most tokens that a budget pays for in a request of at most `longest`."""
    return min(longest, budget if isinstance(budget, int) else math.ceil(budget * longest - 1e-9))


def bytes_of(router: RouterLayer, room: Room, slots: int, size: int) -> tuple[int, int]:
    """Bytes that a layer keeps beside its pages: by slot and by seat. size: bytes of a number of the cache."""
    heads, buckets, dim = router.centroids.shape
    rank = 0 if router.sketch is None else router.sketch.rank
    seat = 4 * heads * room.longest + 4 * heads * (buckets + 1) + 4 * heads * dim * rank
    if router.scores == "mean_key":
        seat += heads * buckets * (dim * (size + 1) + 12)
    return slots * heads * (2 + router.sketch_bytes), room.seats * seat
