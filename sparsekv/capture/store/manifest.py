"""The store's manifest: what it must say, and the checksum over it."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sparsekv.artifacts.checks import brief, check_model_record, check_version, damaged, digest, from_record
from sparsekv.core.rope import LAYOUTS
from sparsekv.util.config import MOST
from sparsekv.util.errors import SparseKVError

FORMAT_VERSION = 2
"""1 had no checksum of the manifest, and shards did not say whose they are."""
MANIFEST = "manifest.json"
WORDS, COUNTS = ("corpus", "split"), ("sink_size", "window_size", "queries_per_document", "seed")
SAMPLE_BYTES = 2 << 30
"""Shards of so many bytes are read and hashed before a training, unless all of them are to be verified."""


@dataclass(frozen=True)
class Manifest:
    """What the file says of a finished store. layers: layout, rotary table and softmax scale by layer; shards: bytes
    and checksum by file."""

    model: dict[str, Any]
    config: dict[str, Any]
    layers: dict[str, Any]
    context_length: int
    documents: list[dict[str, Any]]
    shards: dict[str, Any]
    skipped_layers: dict[str, Any] = field(default_factory=dict)


def sealed(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest with its checksum."""
    return {**manifest, "sha256": digest(manifest)}


def check_manifest(raw: dict[str, Any], name: str) -> Manifest:
    """name: the store's. Raises SparseKVError for a manifest that is damaged, of a newer format, of an unfinished
    store, or of one with options that earlier versions had: a part of the keys or heads, or other queries for every
    head."""
    where = f"the manifest of {name}"
    check_version(raw.get("format_version"), FORMAT_VERSION, f"the capture store {name}")
    if raw.get("complete", True) is not True:
        raise SparseKVError(f"the capture store {name} is unfinished; run the same `sparsekv capture` command again to "
                            "go on")
    rest = {k: v for k, v in raw.items() if k != "sha256"}
    if raw["format_version"] > 1 and raw.get("sha256") != digest(rest):
        raise damaged(where, "its checksum is another than when it was written")
    made = from_record(Manifest, raw, where)
    check_model_record(made.model, where)
    heads = made.model["num_kv_heads"]
    if (made.config.get("key_fraction", 1.0) != 1.0 or raw.get("kv_heads") not in (None, list(range(heads)))
            or made.config.get("query_sampling", "uniform") != "uniform"):
        raise SparseKVError(f"the capture store {name} holds only a part of the keys or heads, or other queries for "
                            "every head, as an earlier version could write it (--key-fraction, --kv-heads, "
                            "--query-sampling); capture again with this version")
    for key, kind in (*((w, str) for w in WORDS), *((c, int) for c in COUNTS)):
        if type(made.config.get(key)) is not kind or (kind is int and made.config[key] < 0):
            raise damaged(where, f"its option {key} is {brief(made.config.get(key))}, expected {kind.__name__}")
    if made.context_length < 2 or not made.documents or not made.layers:
        raise damaged(where, "it has no tokens, no documents or no layers")
    if made.context_length > MOST:
        raise damaged(where, f"its windows are of {brief(made.context_length)} tokens, expected at most {MOST}")
    for layer, about in made.layers.items():
        if not re.fullmatch("0|[1-9][0-9]{,5}", layer) or int(layer) >= made.model["num_layers"]:
            raise damaged(where, f"it names layer {brief(layer)} of a model of {made.model['num_layers']}")
        check_fields(about, {"layout": str, "rotary": int, "scale": float}, f"layer {layer}", where)
        if about["layout"] not in LAYOUTS or about["rotary"] < 0 or not 0 < about["scale"] < 1e6:
            raise damaged(where, f"layer {layer} is {brief(about)}")
    for document in made.documents:
        check_fields(document, {"sha256": str}, "a document", where)
    for shard, about in made.shards.items():
        check_fields(about, {"bytes": int, "sha256": str}, f"shard {brief(shard)}", where)
    return made


def check_fields(record: Any, kinds: dict[str, type], what: str, where: str) -> None:
    """Refuse a part of a record that lacks one of these fields, or has it in another type."""
    for key, kind in kinds.items():
        if not isinstance(record, dict) or type(record.get(key)) is not kind:
            raise damaged(where, f"{what} is {brief(record)}, expected {', '.join(kinds)}")


def sample(shards: dict[str, Any], seed: int) -> list[str]:
    """Names of shards of SAMPLE_BYTES in all, drawn by the seed; all of a store that has no more."""
    names = sorted(shards)
    random.Random(seed).shuffle(names)
    taken: list[str] = []
    size = 0
    for name in names:
        size += shards[name]["bytes"]
        if taken and size > SAMPLE_BYTES:
            break
        taken.append(name)
    return sorted(taken)


def held_queries(config: Mapping[str, Any]) -> int:
    """Queries of a document and head in a store of these options."""
    length = config["context_length"]
    return min(config["queries_per_document"], length - first_query(length, config["sink_size"], config["window_size"]))


def first_query(length: int, sink: int, window: int) -> int:
    """The position from which on queries of a window are stored: past its first eighth, and past sink and window."""
    return min(max(sink + window, length // 8), length - 1)
