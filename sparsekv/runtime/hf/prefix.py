"""A prefilled prompt on disk: keys, values and rotary tables, and what decoding builds over them, paid for once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sparsekv.artifacts.checks import (
    brief,
    check_digest,
    check_finite,
    check_model_record,
    check_version,
    damaged,
    digest,
    from_record,
    parse_object,
    reason,
)
from sparsekv.artifacts.fingerprint import check_fingerprint
from sparsekv.artifacts.format import take, write_tensors
from sparsekv.core.index import Buckets
from sparsekv.core.rope import LAYOUTS
from sparsekv.core.selectors.base import Spends
from sparsekv.kernels import PhiState, ScoreMoments, Sketch
from sparsekv.runtime.decoding import Decoding
from sparsekv.runtime.hf.cache import Built, SparseCache, SparseLayer
from sparsekv.runtime.hf.storage import GrowingRope
from sparsekv.util.errors import SparseKVError

FORMAT_VERSION = 4
"""1 had no checksum, 2 one that a single core takes, 3 no index and estimates that are read."""
STATES: dict[str, Any] = {kind.__name__: kind for kind in (Buckets, Sketch, PhiState, ScoreMoments)}
"""What a state may consist of beside tensors."""


@dataclass(frozen=True)
class PrefixRecord:
    """The file's metadata. length: tokens. rope: kind of layer and layout, by the table's number. recent_end: the
    position after a layer's last queries, by layer. made_by, starts, built: by what index and estimates were made, the
    first real token of every row, and what they consist of by layer; None where there are none."""

    model: dict[str, Any]
    length: int
    rope: dict[str, Any]
    recent_end: dict[str, Any]
    made_by: dict[str, Any] | None = None
    starts: list[int] | None = None
    built: dict[str, Any] | None = None


def save_prefix(
    cache: SparseCache, path: str | Path, fingerprint: dict[str, Any], decoding: Decoding | None = None,
) -> None:
    """Write a cache of full-attention layers to one safetensors file: keys and values, recent queries, rotary tables,
    and index and estimates where decoding has begun and nothing was decoded.
    Raises SparseKVError for sliding-window layers, an empty cache, one with NaN, and a disk that fails."""
    tensors: dict[str, Tensor] = {}
    meta: dict[str, Any] = {"format_version": FORMAT_VERSION, "model": fingerprint, "length": cache.get_seq_length(),
                            "rope": {}, "recent_end": {}}
    if not meta["length"]:
        raise SparseKVError("this cache is empty; prefill it before saving")
    for i, layer in enumerate(cache.layers):
        if not isinstance(layer, SparseLayer):
            raise SparseKVError(f"layer {i} has sliding-window attention, whose cache cannot be saved as a prefix; "
                                "save_prefix works on models with full attention in every layer")
        tensors |= {f"{i}.keys": layer.keys, f"{i}.values": layer.values}
        if layer.recent is not None:
            tensors[f"{i}.recent"] = layer.recent
            meta["recent_end"][str(i)] = layer.recent_end
    for n, (key, table) in enumerate(cache.rope.items()):
        meta["rope"][str(n)] = [key, table.layout]
        tensors |= {f"rope.{n}.cos": table.cos.view, f"rope.{n}.sin": table.sin.view}
    states = {} if decoding is None else {i: layer.state.built() for i, layer in enumerate(cache.layers) if isinstance(
        layer, SparseLayer) and layer.state is not None and layer.state.owner is decoding}
    if decoding is not None and states and None not in states.values():
        first = next(iter(states))
        meta |= {"made_by": maker(decoding), "starts": cache.layers[first].state.view.regions.starts.tolist(),
                 "built": {str(i): _packed(state, f"{i}.built", tensors) for i, state in states.items()}}
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # what lies in CPU memory may be on its way there
    tensors = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    check_finite(_read_from(tensors), "this cache",
                 "the model overflowed; prefill it with the model in bfloat16 or float32")
    write_tensors(Path(path), tensors, {"sparsekv": json.dumps({**meta, "sha256": digest(meta, tensors)})})


def save_with_index(cache: SparseCache, path: str | Path, fingerprint: dict[str, Any], runner: Any) -> None:
    """Write a cache as `save_prefix` does; decoding begins over one of one row for as long as that lasts."""
    states = [(layer, layer.state) for layer in cache.layers if isinstance(layer, SparseLayer)]
    if cache.rows == 1:
        runner.begin(cache, cache.get_seq_length())
    try:
        save_prefix(cache, path, fingerprint, runner.decoding)
    finally:
        for layer, state in states:
            layer.state = state


def load_prefix(
    cache: SparseCache, path: str | Path, fingerprint: dict[str, Any], device: Any, decoding: Decoding | None = None,
) -> SparseCache:
    """Fill an empty cache from a file. Index and estimates are its own if it has some and a `decoding` is given; else
    they are built when decoding begins.

    Raises SparseKVError for a missing, damaged or foreign file, and for index and estimates that another decoding has
    made, before the cache is changed.
    """
    where = f"the prefix {str(path)!r}"
    if any(not isinstance(layer, SparseLayer) for layer in cache.layers):
        raise SparseKVError("this model has sliding-window layers, for which no prefix can be loaded")
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            text = (file.metadata() or {})["sparsekv"]
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise SparseKVError(f"no prefix could be read from {str(path)!r} ({reason(error)}); expected a file of "
                            "save_prefix") from error
    meta = parse_object(text, where)
    check_version(meta.get("format_version"), FORMAT_VERSION, where)
    check_digest(meta, tensors, where)
    check_finite(_read_from(tensors), where, "make it again")
    record = from_record(PrefixRecord, meta, where)
    check_model_record(record.model, where)
    check_fingerprint(record.model, fingerprint, where)
    if record.length < 1:
        raise damaged(where, f"its length is {record.length} tokens")
    shape = None, record.model["num_kv_heads"], record.length, record.model["head_dim"]
    first = take(tensors, "0.keys", shape, where)
    dtype = str(first.dtype).removeprefix("torch.")
    if dtype != fingerprint.get("dtype", dtype):
        raise SparseKVError(f"{where} holds keys in {dtype} and this model is in {fingerprint['dtype']}; load the "
                            f"model in {dtype}, or prefill and save the prefix again")
    held = record.built is not None and meta["format_version"] >= 4
    built = None if decoding is None or not held else _built(record, decoding, tensors, device, where)
    states = [_layer(record, i, tuple(first.shape), tensors, where) for i in range(len(cache.layers))]
    tables = {name: _table(record, name, tensors, where) for name in record.rope}
    for layer, (keys, values, recent, end) in zip(cache.layers, states, strict=True):
        layer.update(keys.to(device), values.to(device))  # type: ignore[union-attr]
        if recent is not None:
            layer.recent, layer.recent_end = recent.to(device), end  # type: ignore[union-attr]
    for key, layout, cos, sin in tables.values():
        table = cache.rope[key] = GrowingRope(layout)
        table.append(cos.to(device), sin.to(device), 0)
    cache.built = built
    return cache


def _read_from(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Keys, values, queries and tables. What was built of them has infinite shifts where a prefix has nothing between
    sink and window."""
    return {name: tensor for name, tensor in tensors.items() if ".built" not in name}


def maker(decoding: Decoding) -> dict[str, Any]:
    """Return what index and estimates depend on: selector and its options, completion, sizes, and checksums of what was
    trained."""
    selector, router, phi = decoding.selector, decoding.router, decoding.phi
    spent = {"layer", "accounting", *(("token_budget", "probes") if selector.spends is Spends.AT_STEP else ())}
    trained = {} if router is None else {"centroids": router.centroids, **{
        f"{name}.{x}": tensor for name, part in (("weights", router.weights), ("sketch", router.sketch))
        if part is not None for x, tensor in part._asdict().items()}}
    found = {"selector": selector.name, "completion": decoding.completion, "sink_size": decoding.sink_size,
             "window_size": decoding.window_size, "dense_layers": sorted(decoding.dense_layers),
             **{name: getattr(selector, name) for name in selector.option_names() if name not in spent},
             "router": digest({}, {k: t.cpu() for k, t in trained.items()}) if trained else None,
             "phi": None if phi is None else digest({}, {k: t.cpu() for k, t in phi.maps.named().items()})}
    made: dict[str, Any] = json.loads(json.dumps(found))
    return made


def _packed(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """A state as JSON, its tensors among others under names that begin with `name`."""
    if isinstance(value, Tensor):
        tensors[name] = value.to("cpu", copy=True)  # layers share some, and a file holds no tensor twice
        return name
    if isinstance(value, dict):
        return {k: _packed(x, f"{name}.{k}", tensors) for k, x in value.items()}
    if value is None:
        return None
    return [type(value).__name__, _packed(value._asdict(), name, tensors)]


def _unpacked(value: Any, tensors: dict[str, Tensor], device: Any) -> Any:
    """Raises KeyError, TypeError or ValueError for what `_packed` did not write."""
    if value is None:
        return None
    if isinstance(value, dict):
        return {k: _unpacked(x, tensors, device) for k, x in value.items()}
    if isinstance(value, str):
        return tensors[value].to(device)
    kind, parts = value
    return STATES[kind](**_unpacked(parts, tensors, device))


def _built(
    made: PrefixRecord, decoding: Decoding, tensors: dict[str, Tensor], device: Any, where: str,
) -> Built:
    """Index and estimates, if this decoding would make the same."""
    mine, theirs = maker(decoding), made.made_by or {}
    differ = [name for name in mine if theirs.get(name) != mine[name]]
    if differ:
        told, here = (", ".join(f"{name} {brief(which.get(name))}" for name in differ) for which in (theirs, mine))
        raise SparseKVError(f"{where} holds index and estimates made with {told}; this attachment has {here}: attach "
                            "alike, or load keys and values alone with load_prefix(path, index=False)")
    try:
        layers = {int(i): _unpacked(state, tensors, device) for i, state in (made.built or {}).items()}
        return Built(made.length, [int(x) for x in made.starts or []], layers)
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(where, f"its index is none of this version ({reason(error)})") from error


def _layer(
    record: PrefixRecord, i: int, shape: tuple[int, ...], tensors: dict[str, Tensor], where: str,
) -> tuple[Tensor, Tensor, Tensor | None, int]:
    """Keys and values `[B, Hkv, N, d]` of a layer, its last queries `[B, Hq, T, d]` and the position after them."""
    keys, values = (take(tensors, f"{i}.{name}", shape, where) for name in ("keys", "values"))
    if f"{i}.recent" not in tensors:
        return keys, values, None, 0
    recent = take(tensors, f"{i}.recent", (shape[0], record.model["num_query_heads"], None, shape[3]), where)
    end = record.recent_end.get(str(i))
    if type(end) is not int or not recent.shape[2] <= end <= record.length:
        raise damaged(where, f"the last queries of layer {i} end at {brief(end)}, expected a position of "
                             f"{record.length}")
    return keys, values, recent, end


def _table(record: PrefixRecord, name: str, tensors: dict[str, Tensor], where: str) -> tuple[Any, Any, Tensor, Tensor]:
    """Key, layout, cos and sin `[B or 1, N, rotary_dim]` of a rotary table."""
    entry = record.rope[name]
    if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str | None) and entry[1] in LAYOUTS):
        raise damaged(where, f"the rotary table {name} is {brief(entry)}, expected a kind of layer and a layout")
    cos = take(tensors, f"rope.{name}.cos", (None, record.length, None), where)
    return entry[0], entry[1], cos, take(tensors, f"rope.{name}.sin", tuple(cos.shape), where)
