"""What an estimator is: a stand-in for the mid tokens that a step does not read, as one more partial attention."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from sparsekv.core.layer import LayerView, Queries, Selection
from sparsekv.core.regions import Regions
from sparsekv.kernels import CompletionQuery

BLOCK, DEVICE_BLOCK = 4096, 32_768


class Estimator:
    """Estimates `Σ exp(s_i)` and `Σ exp(s_i) v_i` over the mid tokens outside a selection, whatever made it.

    State is replaced and never changed in place, so that `fork` is a shallow copy; `row_state` names the tensors (or
    tuples of tensors) whose first dimension is the batch.
    """

    row_state: ClassVar[tuple[str, ...]] = ()

    def build(self, view: LayerView) -> None:
        """Summarise the mid region."""
        raise NotImplementedError

    def extend(self, view: LayerView, old: Regions) -> None:
        """The mid region grew from `old` to `view.regions`; the default builds again."""
        self.build(view)

    def reads(self, view: LayerView, share: float) -> None:
        """The steps that follow read this share of the context beside the anchors."""

    @property
    def in_kernel(self) -> bool:
        """Whether the attention kernel can take the selection out of the estimate and add what is left, given `query`;
        otherwise `partial` is called after it."""
        return False

    def query(self, view: LayerView, queries: Queries) -> CompletionQuery:
        """The queries' side of the estimate."""
        raise NotImplementedError

    def partial(self, view: LayerView, queries: Queries, selection: Selection) -> tuple[Tensor, Tensor]:
        """`(out [Q, Hq, d], lse [Q, Hq])` over what was not selected, lse its log mass; -inf where it estimates
        nothing."""
        raise NotImplementedError

    def cost_tokens(self, view: LayerView) -> float:
        """What a step fetches of the summary, per KV head, in tokens of `2d` elements (completion paper, appendix
        D)."""
        raise NotImplementedError

    def feature_tokens(self, view: LayerView) -> float:
        """What a step fetches beside every token that it reads exactly, in the same unit."""
        return 0.0

    def cost_bytes(self, view: LayerView) -> Tensor | float:
        """Bytes that a step of a layer reads for it, of one row, in the precision of the keys. Waits for no device."""
        return self.cost_tokens(view) * 2 * view.keys.shape[-1] * view.keys.element_size() * view.num_kv_heads

    def fork(self) -> Self:
        return copy.copy(self)

    def take_rows(self, index: Tensor) -> None:
        """Keep the chosen rows of the batch, in that order."""
        for name in self.row_state:
            setattr(self, name, take_rows(getattr(self, name), index))


def take_rows(value: Any, index: Tensor) -> Any:
    """The chosen rows of a tensor or of a named tuple of tensors and tuples; None stays None."""
    if isinstance(value, tuple):
        return type(value)(*(take_rows(x, index) for x in value))
    return None if value is None else value[index.to(value.device)]


def edges_of(first: Tensor, last: Tensor) -> list[int]:
    """Smallest and largest `first`, smallest and largest `last` of all rows: one wait for the device."""
    return torch.stack([first.min(), first.max(), last.min(), last.max()]).tolist()


def blocks(
    first: Tensor, last: Tensor, edges: list[int] | None = None, low: int | None = None,
) -> Iterator[tuple[slice, Tensor | None]]:
    """Tokens from `low`, or the first of any row, to the last of any, a block at a time and at least one, if empty:
    where they are, and `[B, 1, n, 1]` whether `first[b] <= i < last[b]`; None where that is so of all (`counted`).
    edges: `edges_of` them, where known."""
    edges = edges_of(first, last) if edges is None else edges
    low, high = edges[0] if low is None else low, edges[3]
    size = DEVICE_BLOCK if first.is_cuda else BLOCK  # there a block is a handful of launches, whatever its size
    for a in range(low, high, size) or [low]:
        b = max(a, min(a + size, high))
        if edges[1] <= a and b <= edges[2]:
            yield slice(a, b), None
            continue
        places = torch.arange(a, b, device=first.device)
        inside = (places >= first[:, None]) & (places < last[:, None])
        yield slice(a, b), inside[:, None, :, None]


def counted(x: Tensor, inside: Tensor | None, other: float = 0.0) -> Tensor:
    """x `[B, H, n, ...]` of one of the `blocks`, with `other` where a token does not count."""
    return x if inside is None else x.masked_fill(~inside, other)
