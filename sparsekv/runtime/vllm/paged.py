"""A layer whose keys and values lie in a server's pages: the third storage of `core/layer.py: CacheLayer`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from sparsekv.core.layer import CacheLayer, Queries, Selection
from sparsekv.kernels import Anchored, CompletionQuery, Pages, Sketch, attend_tokens, encode_keys
from sparsekv.runtime.vllm.pages import by_slot, taken

LATER = 64
"""New keys of a step up to which their codes wait."""
KEYS_AT_ONCE = 8192


class DecodeMetadata(NamedTuple):
    """The rows of a decode step, as the layers need them.

    sparse `[R]`: who decodes sparsely; seat `[R]`: with which index, for the others nobody's; anchors `[R, A]`: slots
    of sink and tail, the first `anchored [R]`, -1 behind them; positions `[R]` of the queries; rest `[R]` int32:
    lengths of the rows that are attended to fully, 0 for the others.
    """

    sparse: Tensor
    seat: Tensor
    anchors: Tensor
    positions: Tensor
    rest: Tensor
    anchored: Tensor


class UncodedSlots:
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
    """The factors of the numbers in the pages: those of a float8 cache are keys and values over these."""

    key: float = 1.0
    value: float = 1.0


class LayerPages:
    """A layer's pages, pool `[blocks, Hkv, page, 2d]`, and codes of its keys by slot, `[1, Hkv, slots + 1, w]`: what
    has no slot goes to the last. Of a float8 cache, kind: the precision of the queries; scales: the layer's."""

    def __init__(self, pool: Tensor, uncoded: UncodedSlots, kind: torch.dtype | None, scales: Scales | None):
        self.keys, self.values = by_slot(pool)
        self.uncoded, self.kind, self.scales = uncoded, kind or pool.dtype, scales or Scales()
        self.slots, self.page = self.keys.shape[1], pool.shape[2]
        self.sketch: Sketch | None = None
        self.width = 0
        self.codes: Tensor | None = None

    def keep_codes(self, sketch: Sketch, width: int) -> None:
        """Make room for codes of `width` bytes."""
        self.sketch, self.width = sketch, width
        self.codes = torch.zeros(1, self.keys.shape[0], self.slots + 1, width, dtype=torch.int8,
                                 device=self.keys.device)

    def write(self, keys: Tensor, slots: Tensor) -> None:
        """Codes of new keys `[n, Hkv, d]` with RoPE into their slots `[n]`; a negative slot is none. Nothing where this
        step's keys wait. A graph of many tokens is for prefills too: it makes them always."""
        if self.codes is not None and (self.uncoded.now or (
                keys.is_cuda and keys.shape[0] > LATER and torch.cuda.is_current_stream_capturing())):
            self._encode(keys, torch.where(slots < 0, self.slots, slots).long())

    def encode_in(self, slots: Tensor) -> None:
        """Codes of the keys in slots `[n]`, from the pages."""
        for part in slots.split(KEYS_AT_ONCE) if slots.numel() else ():
            self._encode(self.keys_in(part).transpose(0, 1), part)

    def keys_in(self, slots: Tensor) -> Tensor:
        """The keys in slots `[n]`, `[Hkv, n, d]`."""
        keys = taken(self.keys, slots).to(self.kind)
        return keys if self.scales.key == 1 else keys * self.scales.key

    def values_in(self, slots: Tensor) -> Tensor:
        """The values in slots `[n]`, as the pages have them, `[Hkv, n, d]`."""
        return taken(self.values, slots).to(self.kind)

    def _encode(self, keys: Tensor, slots: Tensor) -> None:
        assert self.codes is not None and self.sketch is not None
        self.codes.index_copy_(2, slots, encode_keys(keys.transpose(0, 1)[None], self.sketch, self.width))


@dataclass(eq=False)
class PagedView(CacheLayer):
    """One request of a layer, to be built: slots `[N]` of its first tokens, the mid region's last among them. Or the
    batch of a decode step, one row of R queries: its metadata, page table `[R, blocks]` and output `[R, Hq, d]`.

    Keys are given as they are, values as the pages have them: summaries and attention are short of the value's scale
    alike, and it multiplies the output. The key's scale is in that of the scores, and in the map of keys."""

    pages: LayerPages
    slots: Tensor | None = None
    metadata: DecodeMetadata | None = None
    table: Tensor | None = None
    out: Tensor | None = None

    in_place: ClassVar[bool] = True
    keeps_codes: ClassVar[bool] = True

    @property
    def shape(self) -> tuple[int, int, int, int]:
        heads, slots, dim = self.pages.keys.shape
        return 1, heads, slots if self.slots is None else self.slots.shape[0], dim

    @property
    def dtype(self) -> torch.dtype:
        return self.pages.kind

    def keys_at(self, first: int, last: int, step: int = 1) -> Tensor:
        return self.pages.keys_in(self._slots(first, last, step))[None]

    def values_at(self, first: int, last: int) -> Tensor:
        return self.pages.values_in(self._slots(first, last))[None]

    def numbers(self, first: int, last: int) -> Tensor:
        return self._slots(first, last)[None]

    def encoded(self, known: Tensor | None, sketch: Sketch, width: int, last: int) -> Tensor | None:
        """Codes depend on the key alone; those of a request are there before it is built (`index.build_seat`)."""
        return self.pages.codes

    def codes_at(self, codes: Tensor | None, first: int, last: int, step: int) -> Tensor:
        assert self.pages.codes is not None
        return self.pages.codes[:, :, self._slots(first, last, step)]

    def attend(
        self, queries: Queries, selection: Selection, completion: CompletionQuery | None = None,
        anchored: Anchored | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Rows that do not decode sparsely read all they have in their pages."""
        assert self.metadata is not None and self.table is not None and selection.tokens is not None
        q, rows, scales = queries.folded, self.metadata, self.pages.scales
        keys, values = (x[None].expand(q.shape[0], -1, -1, -1) for x in (self.pages.keys, self.pages.values))
        used = rows.anchored
        out, lse = attend_tokens(
            q, keys, values, selection.tokens, scale=self.scale * scales.key, starts=used, sink_size=0,
            tail_starts=used, lengths=used, completion=completion,
            pages=Pages(rows.anchors, rows.rest, self.table, self.pages.page), out=self.out)
        return (out if scales.value == 1 else out.mul_(scales.value)), lse

    def _slots(self, first: int, last: int, step: int = 1) -> Tensor:
        assert self.slots is not None
        return self.slots[first:last:step]
