"""The keys of one request in a server's pages, as `core/index.py: Keys`: of one layer, and of layers side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import Tensor

from sparsekv.core.layer import LayerView, joined
from sparsekv.core.stacked import StackedView
from sparsekv.kernels import Sketch


class LayerPages(Protocol):
    """A layer's pages and what lies beside them (`runtime/vllm/index.py`): codes `[1, Hkv, slots + 1, w]`."""

    codes: Tensor | None

    def keys_in(self, slots: Tensor) -> Tensor:
        """The keys in slots `[n]`, `[Hkv, n, d]`."""

    def values_in(self, slots: Tensor) -> Tensor:
        """The values in slots `[n]`, as the pages have them, `[Hkv, n, d]`."""

    def without_code(self, slots: Tensor) -> Tensor:
        """Those of the slots `[n]` whose keys have no code, the same in all layers of a group of pages."""

    def encode_in(self, slots: Tensor) -> None:
        """Codes of the keys in slots `[n]`, from the pages."""


@dataclass
class StackedRequest(StackedView):
    """A request in several layers' pages: keys by place, `[L, Hkv, N, d]`; tokens have the same numbers in all."""

    def numbers(self, first: int, last: int) -> Tensor:
        return self._requests[0].numbers(first, last).expand(len(self.views), -1)

    def encoded(self, known: Tensor | None, sketch: Sketch, width: int, last: int) -> Tensor:
        """Shape of the codes of all slots, `[L, Hkv, slots + 1, w]`: each layer has its own, made where they are not
        there. They are not read through it."""
        one, codes = self._requests[0], self._requests[0].codes
        missing = one.pages.without_code(one.slots[:last])
        for request in self._requests if missing.numel() else ():
            request.pages.encode_in(missing)
        return codes.new_empty(()).expand(len(self.views), *codes.shape[1:])

    def codes_at(self, codes: Tensor, first: int, last: int, step: int) -> Tensor:
        slots = self._requests[0].slots[first:last:step]
        return joined((request.codes[:, :, slots] for request in self._requests), len(self.views), 0)

    @property
    def _requests(self) -> Sequence[RequestKeys]:
        return cast("Sequence[RequestKeys]", self.views)


@dataclass(kw_only=True)
class RequestKeys(LayerView):
    """Keys and values `[1, Hkv, slots, d]` by slot, which are not read through them; slots `[N]` of the request's first
    tokens, the mid region's last among them. Keys are given as they are, values as the pages have them."""

    stacks_as: ClassVar[Any] = StackedRequest

    slots: Tensor
    pages: LayerPages

    @property
    def stored(self) -> int:
        return self.slots.shape[0]

    @property
    def codes(self) -> Tensor:
        """By slot."""
        assert self.pages.codes is not None
        return self.pages.codes

    def keys_at(self, first: int, last: int, step: int = 1) -> Tensor:
        return self.pages.keys_in(self.slots[first:last:step])[None]

    def values_at(self, first: int, last: int) -> Tensor:
        return self.pages.values_in(self.slots[first:last])[None]

    def keys_pre(self, first: int, last: int) -> Tensor:
        places = torch.arange(first, last, device=self.keys.device)
        assert self.rope is not None
        return self.rope.unrotate(self.keys_at(first, last), places)

    def numbers(self, first: int, last: int) -> Tensor:
        return self.slots[None, first:last]

    def encoded(self, known: Tensor | None, sketch: Sketch, width: int, last: int) -> Tensor:
        """Codes of all slots, `[1, Hkv, slots + 1, w]`; those depend on the key alone, and are there for most."""
        missing = self.pages.without_code(self.slots[:last])
        if missing.numel():
            self.pages.encode_in(missing)
        return self.codes

    def codes_at(self, codes: Tensor, first: int, last: int, step: int) -> Tensor:
        return codes[:, :, self.slots[first:last:step]]
