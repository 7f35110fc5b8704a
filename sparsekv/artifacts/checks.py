"""What every file passes on its way in: JSON, version, checksum, finite tensors, types of fields, counts."""

from __future__ import annotations

import hashlib
import json
from dataclasses import MISSING, fields
from typing import Any, get_args, get_type_hints

import torch
import xxhash
from torch import Tensor

from sparsekv.util.config import MOST, is_a
from sparsekv.util.errors import SparseKVError, brief

DEEPEST = 50
"""Levels of a JSON file; ours have seven."""
FINGERPRINT: dict[str, type] = {
    "architecture": str, "num_layers": int, "num_query_heads": int, "num_kv_heads": int, "head_dim": int, "rope": dict,
    "weights": str}


def damaged(where: str, what: str) -> SparseKVError:
    """where: what is damaged, as in `the artifact 'x'`."""
    return SparseKVError(f"{where} is damaged: {what}; make it again or fetch it anew")


def parse_object(text: str | bytes, where: str) -> dict[str, Any]:
    """The JSON object in a text. Raises SparseKVError for anything else, a key that stands twice, or deep nesting."""
    try:
        found = json.loads(text, object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as error:
        raise damaged(where, f"it is no JSON ({reason(error)})") from error
    if not isinstance(found, dict):
        raise damaged(where, "its JSON is no object")
    level: list[Any] = [found]
    for _ in range(DEEPEST):
        level = [x for part in level if isinstance(part, dict | list)
                 for x in (part.values() if isinstance(part, dict) else part)]
    if level:
        raise damaged(where, f"its JSON is nested deeper than {DEEPEST} levels")
    return found


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice")
    return found


def check_version(version: Any, newest: int, where: str) -> None:
    if type(version) is not int or version < 1:
        raise damaged(where, f"its format_version is {brief(version)}, expected 1 to {newest}")
    if version > newest:
        raise SparseKVError(f"{where} has format {version}; this version of sparsekv reads up to {newest}. "
                            "Upgrade sparsekv.")


def digest(record: dict[str, Any], tensors: dict[str, Tensor] | None = None) -> str:
    """SHA-256 over a record's canonical JSON and every CPU tensor's name, dtype, shape and the 128-bit XXH3 of its
    bytes, which takes a twenty-fifth of the time of their SHA-256. Format 2 hashed the bytes themselves."""
    plain = json.loads(json.dumps(record))  # keys as they will be read: text, in its order
    found = hashlib.sha256(json.dumps(plain, sort_keys=True).encode())
    old = record.get("format_version") == 2
    for name, tensor in sorted((tensors or {}).items()):
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
        found.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(data if old else xxhash.xxh3_128_digest(data))
    return found.hexdigest()


def check_digest(record: dict[str, Any], tensors: dict[str, Tensor], where: str) -> None:
    """Compare with the record's own `sha256`, which files of format 1 have none of."""
    rest = {k: v for k, v in record.items() if k != "sha256"}
    if (record["format_version"] > 1 or "sha256" in record) and record.get("sha256") != digest(rest, tensors):
        raise damaged(where, "its checksum is another than when it was written")


def check_finite(tensors: dict[str, Tensor], where: str, why: str) -> None:
    """Refuse NaN and infinities. Raises SparseKVError naming the first such tensor."""
    for name, tensor in tensors.items():
        # the sum is thirty times faster, and finite but for values near the end of the range
        if not tensor.sum(dtype=torch.float32).isfinite() and not tensor.float().isfinite().all():
            raise SparseKVError(f"{where} has NaN or infinite values in tensor {name}: {why}")


def from_record(cls: Any, record: dict[str, Any], where: str) -> Any:
    """A dataclass from the record's fields of the same names, others left out. Raises SparseKVError for a field that is
    missing or of another type."""
    for field in fields(cls):
        if field.name not in record and field.default is MISSING and field.default_factory is MISSING:
            raise damaged(where, f"{field.name} is missing")
    made = cls(**{f.name: record[f.name] for f in fields(cls) if f.name in record})
    check_types(made, where)
    return made


def check_types(made: Any, where: str) -> None:
    """Refuse a dataclass whose values are not what its annotations say; of dicts, that they are dicts."""
    for name, hint in get_type_hints(type(made)).items():
        if not is_a(getattr(made, name), hint):
            expected = getattr(hint, "__name__", str(hint)) if not get_args(hint) else str(hint)
            raise damaged(where, f"{name} is {brief(getattr(made, name))}, expected {expected.replace('typing.', '')}")


def check_model_record(model: dict[str, Any], where: str) -> None:
    """Refuse a fingerprint that is incomplete, or whose heads make no model."""
    for name, kind in FINGERPRINT.items():
        value = model.get(name)
        if type(value) is not kind or (isinstance(value, int) and value < 1):
            expected = "a count of at least 1" if kind is int else kind.__name__
            raise damaged(where, f"its model's {name} is {brief(value)}, expected {expected}")
    if type(model.get("attention", {})) is not dict:
        raise damaged(where, f"its model's attention is {brief(model['attention'])}, expected an object")
    for name in ("weights_float16", "dtype"):
        if type(model.get(name, "")) is not str:
            raise damaged(where, f"its model's {name} is {brief(model[name])}, expected str")
    if model["num_query_heads"] % model["num_kv_heads"]:
        raise damaged(where, f"its model has {model['num_query_heads']} query heads for {model['num_kv_heads']} KV "
                             "heads, expected a multiple")


def check_scope(made: Any, where: str, **least: int) -> None:
    """Check what router and feature maps have in common: the model, layers that ascend, each once, and sizes from
    `least` to `MOST`."""
    check_model_record(made.model, where)
    layers, count = made.layers, made.model["num_layers"]
    if not layers or sorted(set(layers)) != layers or not 0 <= layers[0] <= layers[-1] < count:
        raise damaged(where, f"its layers are {brief(layers)}, expected some of 0 to {count - 1}, each once, ascending")
    for name, low in {"sink_size": 0, "window_size": 0, **least}.items():
        if not low <= getattr(made, name) <= MOST:
            raise damaged(where, f"{name} is {brief(getattr(made, name))}, expected {low} to {MOST}")


def reason(error: Any) -> str:
    """Return what an exception says, on one line that a sentence can hold."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else f"{text[:197]}..."
