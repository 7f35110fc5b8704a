"""The capture store: a folder of safetensors shards, one a document and layer, and a manifest with their checksums.

```
manifest.json                     format version, model fingerprint, options, documents, checksum of every shard
doc00000/layer003.safetensors     keys_pre, values [Hkv, N, d]; queries_pre [Hq, T, d], both without RoPE;
                                  query_positions (the same for every head) and statistics [Hq, T]
doc00000/rotary.safetensors       tokens [N]; cos.<group>, sin.<group> [N, rotary_dim] as the model used them
doc00000/document.json            what the manifest says of this document: the mark that it is whole
```

A document's folder is written under a temporary name and renamed when it is whole; the manifest says `complete` last of
all. A pure leaf: imports no stage.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from sparsekv.core.rope import Layout, rotate
from sparsekv.errors import SparseKVError
from sparsekv.store.place import Place, place

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
OPEN_SHARDS = 256
DTYPE = torch.bfloat16
STATISTICS = {
    "lse": torch.float32, "lse_mid": torch.float32, "top1_position": torch.int32, "top1_score": torch.float32,
    "mass_sink": torch.float32, "mass_tail": torch.float32, "mass_mid": torch.float32, "entropy_mid": torch.float32,
}


@dataclass(frozen=True)
class LayerCapture:
    """What one layer did on one document. `*_pre` carry no RoPE; query t saw the keys `0..query_positions[t]`.

    keys_pre, values `[Hkv, N, d]`, queries_pre `[Hq, T, d]` bfloat16; query_positions `[T]` int64, rising; cos, sin
    `[N, rotary_dim]` float32, full width in `layout`; scale: the model's softmax scaling; statistics `[Hq, T]` each,
    see `kernels/attention_mass.py`.
    """

    keys_pre: Tensor
    values: Tensor
    queries_pre: Tensor
    query_positions: Tensor
    cos: Tensor
    sin: Tensor
    layout: Layout
    scale: float
    statistics: dict[str, Tensor]

    def to(self, device: str | torch.device) -> LayerCapture:
        """The same on a device."""
        moved: dict[str, Any] = {"statistics": {k: x.to(device) for k, x in self.statistics.items()}}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                moved[field.name] = value.to(device)
        return replace(self, **moved)

    def keys_rot(self) -> Tensor:
        """Keys with RoPE, `[Hkv, N, d]` float32."""
        return rotate(self.keys_pre.float(), self.cos, self.sin, self.layout)

    def queries_rot(self) -> Tensor:
        """Queries with RoPE, `[Hq, T, d]` float32."""
        return rotate(self.queries_pre.float(), self.cos[self.query_positions], self.sin[self.query_positions],
                      self.layout)


class CaptureStore:
    """Reader. Local shards are memory-mapped, remote ones read by byte ranges: nothing but what is asked for."""

    def __init__(self, where: Place, manifest: dict[str, Any]):
        self._place = where
        self._shards: dict[str, Callable[[str, slice], Tensor]] = {}
        self.path: Path | str = where.root or str(where)
        self.manifest = manifest
        self.model: dict[str, Any] = manifest["model"]
        self.config: dict[str, Any] = manifest["config"]
        self.documents: list[dict[str, Any]] = manifest["documents"]
        self.layers: list[int] = sorted(int(layer) for layer in manifest["layers"])

    @classmethod
    def open(cls, path: str | Path) -> CaptureStore:
        """Raises SparseKVError for a folder that is no store, is unfinished, is of a newer format, or was written with
        options that earlier versions had: a part of the keys or heads, or other queries for every head."""
        where = place(path)
        name = repr(str(where))
        try:
            manifest = where.read_json(MANIFEST)
            if manifest is None:
                looks = " (it looks like an artifact or a model)" if "config.json" in where.names() else ""
                raise SparseKVError(f"no capture store at {name}{looks}: expected the folder that `sparsekv capture` "
                                    f"wrote, with a {MANIFEST}")
            version = manifest["format_version"]
            if version > FORMAT_VERSION:
                raise SparseKVError(f"the capture store {name} has format {version}; this version of sparsekv "
                                    f"reads up to {FORMAT_VERSION}. Upgrade sparsekv.")
            if not manifest.get("complete", True):
                raise SparseKVError(f"the capture store {name} is unfinished; run the same `sparsekv capture` command "
                                    "again to go on")
            made, heads = manifest["config"], manifest["model"]["num_kv_heads"]
            if (made.get("key_fraction", 1.0) < 1.0 or len(manifest.get("kv_heads") or range(heads)) < heads
                    or made.get("query_sampling", "uniform") != "uniform"):
                raise SparseKVError(f"the capture store {name} holds only a part of the keys or heads, or other "
                                    "queries for every head, as an earlier version could write it (--key-fraction, "
                                    "--kv-heads, --query-sampling); capture again with this version")
            return cls(where, manifest)
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
            raise SparseKVError(f"the manifest of {name} is damaged ({type(error).__name__}: {error}); "
                                "capture again with --overwrite") from error
        except OSError as error:
            raise SparseKVError(f"the capture store {name} cannot be read: {error.strerror or error}") from error

    num_documents = property(lambda self: len(self.documents))
    context_length = property(lambda self: int(self.manifest["context_length"]))
    group = property(lambda self: self.num_query_heads // self.num_kv_heads)
    num_kv_heads = property(lambda self: int(self.model["num_kv_heads"]))
    num_query_heads = property(lambda self: int(self.model["num_query_heads"]))
    head_dim = property(lambda self: int(self.model["head_dim"]))

    def read(self, layer: int, document: int, *, kv_heads: slice | None = None) -> LayerCapture:
        """One layer of one document; `kv_heads` reads only those KV heads and their query heads.

        A local shard's tensors are views of the mapped file. Raises SparseKVError for a layer or document that is not
        there, and for a missing or damaged shard.
        """
        about = self.manifest["layers"].get(str(layer))
        if about is None or not 0 <= document < self.num_documents:
            raise SparseKVError(f"the store holds layers {self.layers} and documents 0..{self.num_documents - 1}; "
                                f"layer {layer} of document {document} was asked for")
        start, stop, _ = (kv_heads or slice(None)).indices(self.num_kv_heads)
        keys, queries = slice(start, stop), slice(start * self.group, stop * self.group)
        spans = {name: queries for name in ("queries_pre", *STATISTICS)}
        spans |= {"keys_pre": keys, "values": keys, "query_positions": slice(1)}
        tensors = self._slices(f"{document_name(document)}/{layer_name(layer)}", spans)
        cos, sin = (f"{name}.{about['rotary']}" for name in ("cos", "sin"))
        rotary = self._slices(f"{document_name(document)}/rotary.safetensors", {cos: slice(None), sin: slice(None)})
        return LayerCapture(
            keys_pre=tensors["keys_pre"], values=tensors["values"], queries_pre=tensors["queries_pre"],
            query_positions=tensors["query_positions"][0].long(), cos=rotary[cos], sin=rotary[sin],
            layout=about["layout"], scale=about["scale"], statistics={name: tensors[name] for name in STATISTICS})

    def tokens(self, document: int) -> Tensor:
        """The token ids of a document's window, `[N]` int64."""
        name = f"{document_name(document)}/rotary.safetensors"
        return self._slices(name, {"tokens": slice(None)})["tokens"].long()

    def verify(self) -> list[str]:
        """One line for every shard that is missing or whose bytes changed; an empty list for a sound store."""
        problems = []
        for name, about in self.manifest["shards"].items():
            size = self._place.size(name)
            if size is None:
                problems.append(f"{name}: missing")
            elif size != about["bytes"]:
                problems.append(f"{name}: {size} bytes, expected {about['bytes']}")
            elif self._place.checksum(name) != about["sha256"]:
                problems.append(f"{name}: contents changed (checksum differs)")
        return problems

    def _slices(self, name: str, spans: dict[str, slice]) -> dict[str, Tensor]:
        """Slices of the first axis of a shard's tensors, by name."""
        try:
            shard = self._shards.get(name)
            if shard is None:
                if self._place.size(name) != self.manifest["shards"][name]["bytes"]:
                    raise OSError("its size is not the recorded one")
                if len(self._shards) >= OPEN_SHARDS:
                    self._shards.pop(next(iter(self._shards)))
                self._shards[name] = shard = self._place.open_shard(name)
            return {tensor: shard(tensor, span) for tensor, span in spans.items()}
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            what = "is missing" if self._place.size(name) is None else f"is damaged ({error})"
            raise SparseKVError(f"shard {name} of the capture store {str(self.path)!r} {what}; restore it, or capture "
                                "again with --overwrite") from error

    def summary(self) -> str:
        size = sum(about["bytes"] for about in self.manifest["shards"].values())
        return (f"capture store {self.path}: {self.num_documents} documents × {self.context_length} tokens, "
                f"{len(self.layers)} layers, {self.num_query_heads}/{self.num_kv_heads} heads of {self.head_dim}, "
                f"{self.config['queries_per_document']} queries a document and head, {size / 1e9:.2f} GB")


def document_name(document: int) -> str:
    return f"doc{document:05d}"


def layer_name(layer: int) -> str:
    return f"layer{layer:03d}.safetensors"


def finished_document(store: Place, document: int) -> dict[str, Any] | None:
    """What was recorded when the document was finished; None where it is not there, or a shard of it is cut short."""
    try:
        found = store.read_json(f"{document_name(document)}/document.json")
    except (json.JSONDecodeError, UnicodeDecodeError):
        return None
    if found is None or any(store.size(name) != about["bytes"] for name, about in found["shards"].items()):
        return None
    return found


def storage_bytes(
    *, num_documents: int, num_layers: int, heads_kv: int, heads_q: int, length: int, queries: int, dim: int,
) -> int:
    """Size of a store before it is made: keys and values, queries, positions and statistics, rotary tables [bytes]."""
    size = dim * DTYPE.itemsize
    layer = 2 * heads_kv * length * size + heads_q * queries * (size + 4 * (1 + len(STATISTICS)))
    return num_documents * (num_layers * layer + length * (2 * dim * 4 + 4))
