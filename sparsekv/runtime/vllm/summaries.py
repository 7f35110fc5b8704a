"""What completes a served layer's steps: the summary of every request that decodes sparsely, in buffers of fixed size.
It is made and grown by the estimator of the core (`core/estimators/phi.py`), of which a request is one row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsekv.artifacts.phi import PhiLayer
from sparsekv.core.estimators.phi import PhiEstimator, Summary
from sparsekv.core.layer import LayerView, Queries
from sparsekv.core.regions import Regions
from sparsekv.kernels import CompletionQuery
from sparsekv.util.errors import SparseKVError

_BYTES: dict[tuple[Any, ...], tuple[int, int]] = {}
"""What `bytes_of` has found, by the sizes of a layer's maps: those of most layers are alike."""


def heads_of(maps: PhiLayer, query_heads: tuple[int, int], kv_heads: tuple[int, int]) -> PhiLayer:
    """The maps of some heads, from the first up to the last: those that a tensor-parallel rank holds."""
    own = slice(*query_heads)
    return maps._replace(maps=maps.maps.heads(own, slice(*kv_heads)), offsets=maps.offsets[:, own])


class Summaries:
    """By seat a row of all that the core's estimator keeps of a request. Seat `seats` is always free: its estimate is
    zero. like: keys of the layer, `[1, Hkv, n, d]`; scale: what the numbers that a step reads
    as keys are multiplied by. Raises SparseKVError for maps that no kernel holds."""

    def __init__(self, maps: PhiLayer, like: Tensor, seats: int, scale: float = 1.0):
        self.estimator = made = empty_request(maps.to(like.device), like)
        if not made.in_kernel:
            raise SparseKVError("the maps of keys have too many units or features for a program's shared memory on "
                                "this GPU; train smaller ones, or serve with completion none in the settings file")
        made.layer = made.calibrated = maps._replace(offsets=maps.offsets.to(like.device))  # the others stay behind
        self.kept = {name: _by_seat(getattr(made, name), seats + 1) for name in made.row_state}
        assert made.key_map is not None
        self.stem = made.key_map.w_in if scale == 1 else made.key_map.w_in * scale
        offset = made.summary.offset
        self.summary = Summary(self.kept["state"], self.kept["bias"], offset.new_zeros(seats + 1, offset.shape[1]))

    def fresh(self) -> PhiEstimator:
        """The estimator of a new request."""
        return self.estimator.fork()

    def put(self, seat: int, made: PhiEstimator) -> list[tuple[Tensor, Tensor]]:
        """A request's estimator has its seat's rows from now on: what is to be copied there."""
        copied = [(self.summary.offset[seat], made.summary.offset[0])]
        for name, rows in self.kept.items():
            setattr(made, name, _put(rows, seat, getattr(made, name), copied))
        return copied

    @property
    def held(self) -> tuple[Any, ...]:
        """All that is kept: rows by seat, and the maps."""
        made = self.estimator
        return *self.kept.values(), self.summary.offset, made.key_map, made.weights

    def asked(self, q: Tensor, seats: Tensor) -> CompletionQuery:
        """The queries' side of a step, q `[R, Hq, d]` with RoPE, of the requests in seats `[R]`."""
        found = self.estimator.asked(q, self.summary, seats)
        assert found.keys is not None
        return found._replace(keys=found.keys._replace(w_in=self.stem))


def empty_request(maps: PhiLayer, like: Tensor) -> PhiEstimator:
    """The estimator of a request without a mid region, its maps as they are run."""
    nowhere = torch.zeros(1, dtype=torch.int64, device=like.device)
    heads = maps.offsets.shape[1]
    view = LayerView(like[:, :, :0], like[:, :, :0], Regions(nowhere, nowhere, 0, 0), 1.0, heads)
    made = PhiEstimator(maps)
    made.build(view)
    made.reads(view, 0.0)
    made.query(view, Queries(like.new_zeros(1, heads, 1, like.shape[-1]), nowhere))
    return made


def bytes_of(maps: PhiLayer, seats: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes that a layer with keys of `dtype` keeps for φ: its maps, at most, and by seat."""
    sizes = tuple((x.shape, x.dtype) for x in leaves((maps.maps, maps.offsets)))
    key = sizes, len(maps.shares), maps.capped, maps.centred, dtype
    if key not in _BYTES:
        heads, dim, _ = maps.maps.key.w_in.shape
        made = empty_request(maps, torch.zeros(1, heads, 0, dim, dtype=dtype))
        rows = [getattr(made, name) for name in made.row_state]
        _BYTES[key] = bytes_in((made.key_map, made.weights)), bytes_in((*rows, made.summary.offset))
    once, row = _BYTES[key]
    return once, (seats + 1) * row


def bytes_in(x: Any) -> int:
    """Bytes of a tensor, of the tensors in a tuple, or of None."""
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(x))


def leaves(x: Any) -> list[torch.Tensor]:
    """The tensors in a tuple, of tuples too; None is none."""
    if isinstance(x, tuple):
        return [leaf for y in x for leaf in leaves(y)]
    return [] if x is None else [x]


def _by_seat(x: Any, rows: int) -> Any:
    """Zeros of so many rows like those of a tensor, or of the tensors in a tuple; None stays None."""
    if isinstance(x, tuple):
        return type(x)(*(_by_seat(y, rows) for y in x))
    return None if x is None else x.new_zeros(rows, *x.shape[1:])


def _put(rows: Any, seat: int, found: Any, copied: list[tuple[Tensor, Tensor]]) -> Any:
    """The row of a seat; copied gets it, and what was found of one request."""
    if isinstance(found, tuple):
        return type(found)(*(_put(a, seat, b, copied) for a, b in zip(rows, found, strict=True)))
    if found is None:
        return None
    copied.append((rows[seat], found[0]))
    return rows[seat:seat + 1]
