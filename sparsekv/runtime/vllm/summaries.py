"""What completes a served layer's steps: the core's estimator (φ, or bucket means) with a row of fixed size for every
seat, and what it takes of memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsekv.artifacts.phi import PhiLayer
from sparsekv.core.estimators import CentroidEstimator, Estimator, PhiEstimator
from sparsekv.core.layer import LayerView, Queries, mapped
from sparsekv.core.regions import Regions
from sparsekv.kernels import KeyMap
from sparsekv.util.errors import SparseKVError

Copied = tuple[Tensor, Tensor]
"""A place, and what is written there."""


class OwnMeans(NamedTuple):
    """Completion by the bucket means of every request's own keys: KV heads and head dimension."""

    heads: int
    dim: int


_BYTES: dict[tuple[Any, ...], tuple[int, int]] = {}
"""What `bytes_of` has found, by the sizes of a layer's maps: those of most layers are alike."""


def heads_of(maps: PhiLayer, query_heads: tuple[int, int], kv_heads: tuple[int, int]) -> PhiLayer:
    """The maps of some heads, from the first up to the last: those that a tensor-parallel rank holds."""
    own = slice(*query_heads)
    return maps._replace(maps=maps.maps.heads(own, slice(*kv_heads)), offsets=maps.offsets[:, own])


def empty_request(
    maps: PhiLayer | OwnMeans, shape: Sequence[int], dtype: torch.dtype, device: torch.device,
) -> Estimator:
    """The estimator of a request without a mid region, its maps as they are run over keys `[Hkv, slots, d]` of this
    shape. Raises SparseKVError for maps that no kernel holds."""
    nowhere = torch.zeros(1, dtype=torch.int64, device=device)
    heads = maps.heads if isinstance(maps, OwnMeans) else maps.offsets.shape[1]
    keys = torch.zeros(1, shape[0], 0, shape[2], dtype=dtype, device=device)
    view = LayerView(keys, keys, regions=Regions(nowhere, nowhere, 0, 0), scale=1.0, num_query_heads=heads)
    if isinstance(maps, OwnMeans):
        means = CentroidEstimator()
        means.build(view)
        return means
    estimator = PhiEstimator(maps.to(device))
    estimator.build(view)
    estimator.set_read_share(view, 0.0)
    estimator.query(view, Queries(keys.new_zeros(1, heads, 1, shape[2]), nowhere))
    if maps.maps.key.alpha.shape[-1]:
        raise SparseKVError("the maps of keys have residual blocks, as the preset completion trains them, and are run "
                            "outside the attention kernel, which is not served; train maps by the default preset, or "
                            "serve with completion none in the settings file")
    if not estimator.in_kernel:
        raise SparseKVError("the maps of keys have too many units or features for a program's shared memory on "
                            "this GPU; train smaller ones, or serve with completion none in the settings file")
    estimator.layer = estimator.calibrated = maps._replace(offsets=maps.offsets.to(device))  # the others stay behind
    return estimator


def seated(fresh: Estimator, room: Any, scale: float = 1.0) -> Estimator:
    """An estimator whose rows are the seats of a room (`index.Room`), all that the core's keeps of a request, their
    calibration too. The seat after them is always free: its estimate is zero. scale: what the numbers that a step reads
    as keys are multiplied by."""
    whole, seats = fresh.fork(), room.seats
    for name in whole.row_state:
        setattr(whole, name, mapped(lambda x: x.new_zeros(seats + 1, *x.shape[1:]), getattr(fresh, name)))
    if isinstance(whole, CentroidEstimator):  # by place, and one of nothing
        whole.number = whole.number.new_zeros(1, whole.number.shape[1], seats * room.longest + 1)
        return whole
    assert isinstance(fresh, PhiEstimator) and isinstance(whole, PhiEstimator)
    offsets = fresh.calibrated.offset
    whole.layer = fresh.calibrated._replace(  # type: ignore[attr-defined]
        offsets=offsets.new_zeros(1, seats + 1, offsets.shape[0]))
    assert isinstance(whole.key_map, KeyMap)
    if scale != 1:
        whole.key_map = whole.key_map._replace(w_in=whole.key_map.w_in * scale)
    return whole


def put_summary(whole: Estimator, seat: int, one: Any, first: int, copied: list[Copied]) -> None:
    """A request's summary has its seat's rows of `whole` from now on. first: the place of its first token; copied gets
    what is to be written."""
    names = one.row_state
    if isinstance(whole, CentroidEstimator):
        numbers = whole.number[:, :, first:first + one.number.shape[2]]
        copied.append((numbers[0], one.number[0]))
        one.number, names = numbers, [name for name in names if name != "number"]
    else:
        copied.append((whole.layer.offset[seat], one.layer.offset.reshape(-1)))  # type: ignore[attr-defined]
    for name in names:
        setattr(one, name, put_row(getattr(whole, name), seat, getattr(one, name), copied))


def put_row(rows: Any, seat: int, values: Any, copied: list[Copied]) -> Any:
    """The row of a seat, of tensors or named tuples of them; copied gets it, and what was found of one request."""
    def put(one: Tensor, all_rows: Tensor) -> Tensor:
        copied.append((all_rows[seat], one[0]))
        return all_rows[seat:seat + 1]

    return mapped(put, values, rows)


def bytes_of(maps: PhiLayer | OwnMeans, room: Any, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes that a layer with keys of `dtype` keeps for its completion: its maps, at most, and by seat of a room."""
    if isinstance(maps, OwnMeans):
        means: Any = empty_request(maps, (maps.heads, 0, maps.dim), dtype, torch.device("cpu"))
        row = bytes_in(tuple(getattr(means, name) for name in means.row_state))
        return 0, (room.seats + 1) * row + means.number.itemsize * maps.heads * (room.seats * room.longest + 1)
    sizes = tuple((x.shape, x.dtype) for x in leaves((maps.maps, maps.offsets)))
    key = sizes, len(maps.shares), maps.capped, maps.centred, dtype
    if key not in _BYTES:
        heads, dim, _ = maps.maps.key.w_in.shape
        estimator: Any = empty_request(maps, (heads, 0, dim), dtype, torch.device("cpu"))
        rows = [getattr(estimator, name) for name in estimator.row_state]
        _BYTES[key] = bytes_in((estimator.key_map, estimator.weights)), bytes_in((*rows, estimator.layer.offset))
    once, row = _BYTES[key]
    return once, (room.seats + 1) * row


def bytes_in(x: Any) -> int:
    """Bytes of a tensor, of the tensors in a tuple, or of None."""
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(x))


def leaves(x: Any) -> list[torch.Tensor]:
    """The tensors in a tuple, of tuples too; None is none."""
    if isinstance(x, tuple):
        return [leaf for y in x for leaf in leaves(y)]
    return [] if x is None else [x]
