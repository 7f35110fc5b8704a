"""The capture store: a folder of safetensors shards, one a document and layer, and a manifest with their checksums.

```
manifest.json                     format version, model fingerprint, options, documents, checksum of every shard
doc00000/layer003.safetensors     keys_pre, values [Hkv, N, d]; queries_pre [Hq, T, d]; positions; statistics [Hq, T]
doc00000/rotary.safetensors       tokens [N]; cos.<group>, sin.<group> [N, rotary_dim] as the model used them
```

A document's folder is written under a temporary name and renamed when it is whole, the manifest comes last: what is
there is complete. A pure leaf: imports no stage.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sparsekv.capture.rope import Layout, rotate
from sparsekv.errors import SparseKVError

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
STATISTICS = ("lse", "lse_mid", "top1_position", "top1_score", "mass_sink", "mass_tail", "mass_mid", "entropy_mid")


@dataclass(frozen=True)
class LayerCapture:
    """What one layer did on one document. `*_pre` carry no RoPE; query t saw the keys `0..query_positions[h, t]`.

    keys_pre, values `[Hkv, N, d]`, queries_pre `[Hq, T, d]` in the store's dtype; query_positions `[Hq, T]` int64;
    cos, sin `[N, rotary_dim]` float32, full width in `layout`; scale: the model's softmax scaling; statistics `[Hq, T]`
    each, see `capture/statistics.py`.
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

    def keys_rot(self) -> Tensor:
        """Keys with RoPE, `[Hkv, N, d]` float32."""
        return rotate(self.keys_pre.float(), self.cos, self.sin, self.layout)

    def queries_rot(self) -> Tensor:
        """Queries with RoPE, `[Hq, T, d]` float32."""
        return rotate(self.queries_pre.float(), self.cos[self.query_positions], self.sin[self.query_positions],
                      self.layout)


class CaptureStore:
    """Reader. Shards are memory-mapped: a layer is read without touching the others."""

    def __init__(self, path: Path, manifest: dict[str, Any]):
        self.path = path
        self.manifest = manifest
        self.model: dict[str, Any] = manifest["model"]
        self.config: dict[str, Any] = manifest["config"]
        self.documents: list[dict[str, Any]] = manifest["documents"]
        self.layers: list[int] = [int(layer) for layer in manifest["layers"]]

    @classmethod
    def open(cls, path: str | Path) -> CaptureStore:
        """Raises SparseKVError for a folder that is no store, is unfinished, or is of a newer format."""
        path = Path(path)
        file = path / MANIFEST
        if not file.is_file():
            if (path / "config.json").is_file():
                raise SparseKVError(f"{str(path)!r} is not a capture store (it looks like an artifact or a model); "
                                    "expected the folder that `sparsekv capture` wrote")
            unfinished = path.is_dir() and any(path.glob("doc*"))
            raise SparseKVError(
                f"the capture store {str(path)!r} is unfinished; run the same `sparsekv capture` command again to go on"
                if unfinished else f"no capture store at {str(path)!r}: expected a folder with {MANIFEST}")
        try:
            manifest = json.loads(file.read_text(encoding="utf-8"))
            version = manifest["format_version"]
            if version > FORMAT_VERSION:
                raise SparseKVError(f"the capture store {str(path)!r} has format {version}; this version of sparsekv "
                                    f"reads up to {FORMAT_VERSION}. Upgrade sparsekv.")
            return cls(path, manifest)
        except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError) as error:
            raise SparseKVError(f"the manifest of {str(path)!r} is damaged ({type(error).__name__}: {error}); "
                                "capture again with --overwrite") from error

    num_documents = property(lambda self: len(self.documents))
    context_length = property(lambda self: int(self.manifest["context_length"]))
    num_query_heads = property(lambda self: int(self.model["num_query_heads"]))
    num_kv_heads = property(lambda self: int(self.model["num_kv_heads"]))
    head_dim = property(lambda self: int(self.model["head_dim"]))

    def read(self, layer: int, document: int, *, kv_heads: slice | None = None) -> LayerCapture:
        """One layer of one document; `kv_heads` reads only those KV heads and the query heads of their groups."""
        about = self.manifest["layers"].get(str(layer))
        if about is None or not 0 <= document < self.num_documents:
            raise SparseKVError(f"the store holds layers {self.layers} and documents 0..{self.num_documents - 1}; "
                                f"layer {layer} of document {document} was asked for")
        kv = kv_heads or slice(0, self.num_kv_heads)
        start, stop, _ = kv.indices(self.num_kv_heads)
        group = self.num_query_heads // self.num_kv_heads
        folder = self.path / document_name(document)
        tensors: dict[str, Tensor] = {}
        with self._open(folder / f"layer{layer:03d}.safetensors") as shard:
            for name in shard.keys():
                span = slice(start, stop) if name in ("keys_pre", "values") else slice(start * group, stop * group)
                tensors[name] = shard.get_slice(name)[span]
        with self._open(folder / "rotary.safetensors") as shard:
            cos, sin = (shard.get_tensor(f"{part}.{about['rotary']}") for part in ("cos", "sin"))
        return LayerCapture(
            keys_pre=tensors.pop("keys_pre"), values=tensors.pop("values"), queries_pre=tensors.pop("queries_pre"),
            query_positions=tensors.pop("query_positions").long(), cos=cos, sin=sin, layout=about["layout"],
            scale=about["scale"], statistics=tensors)

    def tokens(self, document: int) -> Tensor:
        """The token ids of a document's window, `[N]` int64."""
        with self._open(self.path / document_name(document) / "rotary.safetensors") as shard:
            return shard.get_tensor("tokens").long()

    def verify(self) -> list[str]:
        """One line for every shard that is missing or whose bytes changed; an empty list for a sound store."""
        problems = []
        for name, about in self.manifest["shards"].items():
            file = self.path / name
            if not file.is_file():
                problems.append(f"{name}: missing")
            elif file.stat().st_size != about["bytes"]:
                problems.append(f"{name}: {file.stat().st_size} bytes, expected {about['bytes']}")
            elif checksum(file) != about["sha256"]:
                problems.append(f"{name}: contents changed (checksum differs)")
        return problems

    def _open(self, file: Path) -> Any:
        try:
            return safe_open(str(file), framework="pt")
        except (SafetensorError, OSError) as error:
            what = "is damaged" if file.is_file() else "is missing"
            raise SparseKVError(f"shard {file.relative_to(self.path)} of the capture store {str(self.path)!r} {what}; "
                                "delete its folder and the manifest and run the same capture again") from error

    def summary(self) -> str:
        size = sum(about["bytes"] for about in self.manifest["shards"].values())
        return (f"capture store {self.path}: {self.num_documents} documents × {self.context_length} tokens, "
                f"{len(self.layers)} layers, {self.num_query_heads}/{self.num_kv_heads} heads of {self.head_dim}, "
                f"{self.config['queries_per_document']} queries a document and head, {size / 1e9:.2f} GB")


def document_name(document: int) -> str:
    return f"doc{document:05d}"


def checksum(file: Path) -> str:
    """SHA-256 of a file's bytes."""
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


class DocumentWriter:
    """Writes one document's shards under a temporary name; `commit` renames the folder when all are there."""

    def __init__(self, store: Path, document: int):
        self.final = store / document_name(document)
        self.folder = store / f".{document_name(document)}.tmp"
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def write(self, name: str, tensors: dict[str, Tensor]) -> None:
        save_file({k: t.contiguous() for k, t in tensors.items()}, str(self.folder / f"{name}.safetensors"))

    def commit(self, about: dict[str, Any]) -> None:
        """Record the shards' checksums in `document.json`, then make the document visible in one rename."""
        shards = {f"{self.final.name}/{f.name}": {"bytes": f.stat().st_size, "sha256": checksum(f)}
                  for f in sorted(self.folder.glob("*.safetensors"))}
        write_json(self.folder / "document.json", {"document": about, "shards": shards})
        os.replace(self.folder, self.final)


def finished_document(store: Path, document: int) -> dict[str, Any] | None:
    """What `DocumentWriter.commit` recorded, or None where the document is not there yet."""
    file = store / document_name(document) / "document.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write through a temporary name, so that a reader sees the old file or the new one, never a part."""
    temporary = file.with_name(f".{file.name}.tmp")
    temporary.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(temporary, file)


def storage_bytes(
    *, num_documents: int, num_layers: int, heads_kv: int, heads_q: int, length: int, queries: int, dim: int, item: int,
) -> int:
    """Size of a store before it is made: keys and values, queries, positions and statistics, rotary tables [bytes]."""
    layer = 2 * heads_kv * length * dim * item + heads_q * queries * (dim * item + 4 * (1 + len(STATISTICS)))
    return num_documents * (num_layers * layer + length * (2 * dim * 4 + 4))


