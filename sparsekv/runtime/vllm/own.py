"""A served layer that nothing was trained for: codes, buckets and their means are fitted to every request, and lie by
its seat. Tokens are chosen by place: token `i` of the request in seat `s` has place `s · longest + i`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparsekv.core.layer import CacheLayer, Queries, Selection
from sparsekv.core.selectors.router import Router
from sparsekv.kernels import Anchored, CompletionQuery, KeyBuckets, Sketch
from sparsekv.runtime.vllm.index import LayerIndex, Room
from sparsekv.runtime.vllm.paged import PagedView
from sparsekv.runtime.vllm.summaries import Copied


@dataclass(eq=False)
class OwnView(PagedView):
    """A request whose first token has place `first`; or the batch of a decode step, whose tokens are chosen by place:
    places `[P + 1]` int32, the slot of every place, the last -1."""

    first: int = 0
    places: Tensor | None = None

    keeps_codes: ClassVar[bool] = False

    encoded = CacheLayer.encoded
    codes_at = CacheLayer.codes_at

    def numbers(self, first: int, last: int) -> Tensor:
        return torch.arange(self.first + first, self.first + last, device=self.device)[None]

    def attend(
        self, queries: Queries, selection: Selection, completion: CompletionQuery | None = None,
        anchored: Anchored | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert self.places is not None and selection.tokens is not None
        at = selection.tokens.long() % len(self.places)  # -1 is the last
        if completion is not None and isinstance(completion.keys, KeyBuckets):
            number = completion.keys.number.expand(len(at), -1, -1).gather(2, at)
            completion = completion._replace(keys=KeyBuckets(number, listed=True))
        return super().attend(queries, Selection(self.places[at]), completion, anchored)


class OwnIndex(LayerIndex):
    """A layer whose requests have codes of their own, `[1, Hkv, seats · longest, w]`."""

    def __init__(self, selector: Router, pool: Tensor, room: Room, *given: Any, **more: Any):
        self.places = torch.full((room.seats * room.longest + 1,), -1, dtype=torch.int32, device=pool.device)
        super().__init__(selector, pool, room, *given, **more)

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.places.nbytes

    def _room_for_codes(self, sketch: Sketch, width: int) -> Tensor | None:
        heads = self.pages.keys.shape[0]
        return torch.zeros(1, heads, len(self.places) - 1, width, dtype=torch.int8, device=self.places.device)

    def _view(self, seat: int = 0, **given: Any) -> OwnView:
        return OwnView(pages=self.pages, scale=self.scale, rope=self.rope, first=seat * self.room.longest,
                       places=self.places, **given)

    def _put_codes(self, seat: int, selector: Any, view: PagedView, copied: list[Copied]) -> None:
        assert isinstance(view, OwnView) and view.slots is not None
        own = slice(view.first, view.first + len(view.slots))
        codes = self.by_seat.codes[:, :, own]
        copied += [(codes[0], selector.codes[0]), (self.places[own], view.slots.int())]
        selector.codes = codes
