"""A page pool, requests that take its pages and give them back, and one layer's tokens: what vLLM does, in short."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparsekv.artifacts.phi import PhiLayer
from sparsekv.core.buckets import spherical_kmeans
from sparsekv.core.index import RouterLayer, Untrained
from sparsekv.core.rope import RopeTable
from sparsekv.core.selectors import SELECTORS
from sparsekv.core.selectors.router import Router
from sparsekv.core.sketch import fit_sketch, second_moment
from sparsekv.kernels import QueryModel, dense_attention, slots_at
from sparsekv.models.feature_map import FeatureMap, FeatureMaps
from sparsekv.runtime.vllm.index import LayerIndex, Room, warm
from sparsekv.runtime.vllm.own import OwnIndex
from sparsekv.runtime.vllm.paged import DecodeMetadata, Scales, UncodedSlots
from sparsekv.runtime.vllm.seats import SeatMatches, SeatRule, Seats, StepRows, rows_of
from sparsekv.runtime.vllm.summaries import OwnMeans

PAGE, HEADS, GROUP, DIM, BUCKETS = 16, 2, 3, 16, 8
SINK, WINDOW, DECODE_WINDOW, LONGEST = 4, 16, 12, 512
SCALE = DIM**-0.5


def tokens(length: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q `[N, Hq, d]`, k and v `[N, Hkv, d]`."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(DIM, DIM, generator=generator)
    q, k, v = (torch.randn(length, h, DIM, generator=generator) for h in (HEADS * GROUP, HEADS, HEADS))
    return q @ mixed, k @ mixed + 1, v


def rope() -> RopeTable:
    """Of `LONGEST` positions."""
    angles = torch.arange(LONGEST)[:, None] * 0.3 ** torch.arange(DIM // 2)
    return RopeTable("half", *(torch.cat([x, x], -1)[None] for x in (angles.cos(), angles.sin())))


def router(scores: str = "mean_key", space: str = "rot", sketched: bool = True) -> RouterLayer:
    q, k, _ = tokens(200, seed=9)
    keys, queries = k.transpose(0, 1), q.transpose(0, 1)[None]
    centroids = spherical_kmeans(keys, BUCKETS)
    g = torch.Generator().manual_seed(3)
    weights = QueryModel(*(torch.randn(HEADS, *s, generator=g) for s in ((DIM, 20), (20,), (20, BUCKETS), (BUCKETS,))))
    mean = keys.mean(1)
    away = keys - mean[:, None]
    sketch = fit_sketch(second_moment(queries, HEADS)[0], mean, away.mT @ away / 200, 6, 2)
    return RouterLayer(centroids, weights if scores == "mlp" else None, space, scores, sketch if sketched else None,
                       6 if sketched else 0)


def untrained(buckets: int = BUCKETS) -> Untrained:
    """A layer that nothing was trained for, of so many buckets."""
    made = Untrained.of_shape(HEADS, DIM, torch.device("cpu"))
    return made._replace(centroids=made.centroids[:, :buckets])


def selector(made: RouterLayer, budget: int | float, candidates: float | None) -> Router:
    """What a layer is decoded with, as `attach` and the settings file make it."""
    if made.sketch is None:
        return SELECTORS["router"](token_budget=budget, layer=made)
    return SELECTORS["sketch"](token_budget=budget, candidates=candidates, layer=made)


def maps() -> PhiLayer:
    """Feature maps, half of them centred and the mass capped, calibrated for two shares; one head's gate is closed."""
    torch.manual_seed(4)
    sizes = (HEADS * GROUP, 12), (HEADS, 6), (HEADS, 6)
    made = FeatureMaps(*(FeatureMap(h, DIM, r, 10, blocks=not i).weights() for i, (h, r) in enumerate(sizes)))
    offsets = torch.stack([torch.zeros(HEADS * GROUP), torch.full((HEADS * GROUP,), -0.5)])
    offsets[:, 1] = float("-inf")
    return PhiLayer(made.map(lambda w: 0.3 * w.detach()), offsets, (0.0, 0.3), capped=True)


class Request:
    """A prompt and its answer: pages, and how many of its tokens are in them. flat: scores differ by so little that
    what is not read has weight; scales: keys and values are what a float8 cache makes of them."""

    def __init__(self, seed: int, total: int, pages: list[int], *, flat: bool = False, scales: Scales | None = None):
        self.q, self.k, self.v = tokens(total, seed)
        if scales is not None:
            self.k, self.v = ((x / s).to(torch.float8_e4m3fn).float() * s for x, s in zip(
                (self.k, self.v), scales, strict=True))
        if flat:
            self.q /= 8
        self.pages, self.length = pages, 0


class Host(Seats):
    """Seats as a host serves them, by the launches of a CUDA device or in plain torch. built: the seats that got an
    index, in order; blind: nobody is served; looks: how often the steps were counted."""

    def __init__(self, seats: int, places: SeatRule, *, launches: bool):
        super().__init__(seats, places, LONGEST, torch.device("cpu"), most=8)
        self.launches = launches
        self.built: list[int] = []
        self.blind, self.looks = False, 0

    def serve(self, batch: StepRows, found: SeatMatches, indices: Sequence[LayerIndex]) -> SeatMatches:
        return found if self.blind else super().serve(batch, found, indices)

    def _sit(self, seat: int, table: torch.Tensor, length: int, indices: Sequence[LayerIndex]) -> None:
        self.built.append(seat)
        super()._sit(seat, table, length, indices)

    def _left_behind(self, wants: torch.Tensor) -> bool:
        return False  # there is no device to leave something

    def _count_steps(self) -> None:
        self.looks += 1
        super()._count_steps()


class Engine:
    """One layer of a server: `step` takes the requests of a batch with the number of their new tokens. given: what the
    layer got in the last step."""

    def __init__(self, seats: int = 2, blocks: int = 64, dense_below: int = 0, budget: int | float = 24,
                 candidates: float | None = 0.5, made: RouterLayer | None = None, width: int = LONGEST // PAGE,
                 completes: PhiLayer | OwnMeans | None = None, scales: Scales | None = None, launches: bool = False):
        self.pool = torch.full((blocks, PAGE, HEADS, 2 * DIM), float("nan")).transpose(1, 2)
        self.pool[0] = 0
        self.scales = scales
        if scales is not None:
            self.pool = self.pool.transpose(1, 2).to(torch.float8_e4m3fn).transpose(1, 2)
        made = made or router()
        self.uncoded = UncodedSlots(blocks * PAGE, torch.device("cpu"))
        index = OwnIndex if isinstance(made, Untrained) else LayerIndex
        self.index = index(selector(made, budget, candidates), self.pool, Room(seats, LONGEST), self.uncoded,
                           scale=SCALE, rope=rope() if made.key_space == "pre" else None, maps=completes,
                           kind=torch.float32, scales=scales)
        self.seats = Host(seats, SeatRule(SINK, WINDOW, DECODE_WINDOW, dense_below, PAGE), launches=launches)
        self.seats.uncoded = self.uncoded
        warm([self.index], SINK)
        self.width = width
        self.free = list(range(1, blocks))
        self.found: SeatMatches | None = None
        self.given: tuple[torch.Tensor, DecodeMetadata, torch.Tensor] | None = None

    def take(self, request: Request, length: int) -> None:
        while len(request.pages) * PAGE < length:
            request.pages.append(self.free.pop(0))

    def step(self, work: list[tuple[Request, int]], *, prefill: bool | None = None) -> list[torch.Tensor | None]:
        """Outputs `[Hq, d]` of the rows that decode sparsely, None for the others."""
        table = torch.zeros(len(work), self.width, dtype=torch.int32)
        slots, keys, values = [], [], []
        for row, (request, count) in enumerate(work):
            first = request.length
            request.length += count
            self.take(request, request.length)
            table[row, :len(request.pages)] = torch.tensor(request.pages, dtype=torch.int32)
            new = torch.arange(first, request.length)
            slots.append(slots_at(table[row:row + 1], new[None], PAGE)[0])
            keys.append(request.k[new])
            values.append(request.v[new])
        lengths = torch.tensor([r.length for r, _ in work], dtype=torch.int32)
        starts = torch.tensor([0, *[n for _, n in work]], dtype=torch.int32).cumsum(0).int()
        prefilling = None if prefill is None else torch.full((len(work),), prefill)
        batch = StepRows(lengths, starts, table, torch.cat(slots), prefilling)
        decode = max(n for _, n in work) == 1
        self.found = found = self.seats.follow(batch, new=batch.slot_mapping, decode=decode)
        # beside a prompt the rows that decode are attended to apart
        rows = torch.tensor([i for i, (_, n) in enumerate(work) if decode or (n == 1 and not prefill)])
        if rows.numel():
            self.found = found = self.seats.serve(batch, found, [self.index])
            part, own, _ = rows_of(batch, found, rows)
            lanes = self.seats.metadata(part, own)
        if not decode:
            self.seats.other_batch()
        flat = self.pool.transpose(1, 2).flatten(0, 1)
        ks, vs = self.scales or Scales()
        flat[batch.slot_mapping] = torch.cat([torch.cat(keys) / ks, torch.cat(values) / vs], -1).to(flat.dtype)
        self.index.pages.write(torch.cat(keys), batch.slot_mapping)
        outs: list[torch.Tensor | None] = [None] * len(work)
        if not rows.numel():
            return outs
        requests = [work[row][0] for row in rows.tolist()]
        self.given = torch.stack([r.q[r.length - 1] for r in requests]), lanes, table[rows]
        out = step(self.index, *self.given)
        assert bool((lanes.rest == torch.where(lanes.sparse, 0, lengths[rows])).all())
        for at, (row, request) in enumerate(zip(rows.tolist(), requests, strict=True)):
            if lanes.sparse[at]:
                outs[row] = out[at]
            else:
                torch.testing.assert_close(out[at], full(request), rtol=1e-4, atol=1e-4)
        return outs


def step(index: LayerIndex, q: torch.Tensor, lanes: DecodeMetadata, table: torch.Tensor) -> torch.Tensor:
    """A layer's sparse step."""
    return index.step(q, lanes, table, torch.full_like(q, float("nan")))


def full(request: Request) -> torch.Tensor:
    """Full attention of a request's last token, `[Hq, d]`."""
    n = request.length
    q, k, v = (x[None, :n].transpose(1, 2) for x in (request.q, request.k, request.v))
    return dense_attention(q[:, :, n - 1:], k, v, scale=SCALE)[0, :, 0]
