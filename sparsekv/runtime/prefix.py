"""A prefilled prompt on disk: keys, values and rotary tables, paid for once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sparsekv.errors import SparseKVError
from sparsekv.runtime.cache import GrowingRope, SparseCache, SparseLayer

FORMAT_VERSION = 1


def save_prefix(cache: SparseCache, path: str | Path, fingerprint: dict[str, Any]) -> None:
    """Write a cache of full-attention layers to one safetensors file: keys and values, recent queries, rotary tables.
    Raises SparseKVError for sliding-window layers or an empty cache."""
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
    save_file({k: t.detach().contiguous().cpu() for k, t in tensors.items()}, str(path),
              metadata={"sparsekv": json.dumps(meta)})


def load_prefix(cache: SparseCache, path: str | Path, fingerprint: dict[str, Any], device: Any) -> SparseCache:
    """Fill an empty cache from a file; index and estimates are built when decoding begins.

    Raises SparseKVError for a missing, damaged or foreign file.
    """
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            meta = json.loads((file.metadata() or {})["sparsekv"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise SparseKVError(f"no prefix could be read from {str(path)!r} ({error}); expected a file of save_prefix"
                            ) from error
    if meta["format_version"] > FORMAT_VERSION:
        raise SparseKVError(f"the prefix {str(path)!r} has format {meta['format_version']}; this version reads up to "
                            f"{FORMAT_VERSION}. Upgrade sparsekv.")
    if any(not isinstance(layer, SparseLayer) for layer in cache.layers):
        raise SparseKVError("this model has sliding-window layers, for which no prefix can be loaded")
    differ = [k for k, v in meta["model"].items() if fingerprint.get(k) != v]
    if differ:
        raise SparseKVError(f"the prefix {str(path)!r} was made by a model with "
                            + ", ".join(f"{k} {meta['model'][k]}" for k in differ) + "; this model has "
                            + ", ".join(f"{k} {fingerprint.get(k)}" for k in differ))
    for i, layer in enumerate(cache.layers):
        layer.update(tensors[f"{i}.keys"].to(device), tensors[f"{i}.values"].to(device))  # type: ignore[union-attr]
        if f"{i}.recent" in tensors:
            layer.recent = tensors[f"{i}.recent"].to(device)  # type: ignore[union-attr]
            layer.recent_end = meta["recent_end"][str(i)]  # type: ignore[union-attr]
    for n, (key, layout) in meta["rope"].items():
        table = cache.rope[key] = GrowingRope(layout)
        table.append(tensors[f"rope.{n}.cos"].to(device), tensors[f"rope.{n}.sin"].to(device), 0)
    return cache

