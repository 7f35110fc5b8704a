"""The capture store: a folder of safetensors shards, one a document and layer, and a manifest with their checksums.

```
manifest.json                     format version, model fingerprint, options, documents, checksum of every shard and
                                  of itself
doc00000/layer003.safetensors     keys_pre, values [Hkv, N, d]; queries_pre [Hq, T, d], both without RoPE;
                                  query_positions (the same for every head) and statistics [Hq, T]
doc00000/rotary.safetensors       tokens [N]; cos.<group>, sin.<group> [N, rotary_dim] as the model used them
doc00000/document.json            what the manifest says of this document: the mark that it is whole
```

A document's folder is written under a temporary name and renamed when it is whole; the manifest says `complete` last of
all. Every shard says in its header of which window, layer, model and options it is. A pure leaf: imports no stage.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from sparsekv.artifacts.checks import brief, damaged, digest, reason
from sparsekv.capture.store.manifest import MANIFEST, check_fields, check_manifest, held_queries, sample
from sparsekv.capture.store.place import Place, place
from sparsekv.capture.store.shard import LocalShard, RemoteShard
from sparsekv.core.rope import Layout, rotate
from sparsekv.util.errors import SparseKVError

OPEN_SHARDS = 256
READING = (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, IndexError)
"""What reading a damaged shard raises."""
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
        self._shards: dict[str, LocalShard | RemoteShard] = {}
        self.path: Path | str = where.root or str(where)
        self.manifest = manifest
        self.model: dict[str, Any] = manifest["model"]
        self.config: dict[str, Any] = manifest["config"]
        self.documents: list[dict[str, Any]] = manifest["documents"]
        self.layers: list[int] = sorted(int(layer) for layer in manifest["layers"])
        self.dtype: torch.dtype = getattr(torch, self.config.get("storage_dtype", "bfloat16"))

    @classmethod
    def open(cls, path: str | Path) -> CaptureStore:
        """Raises SparseKVError for a folder that is no store, and for what `check_manifest` refuses."""
        where = place(path)
        name = repr(str(where))
        try:
            manifest = where.read_json(MANIFEST)
            if manifest is None:
                looks = " (it looks like an artifact or a model)" if "config.json" in where.names() else ""
                raise SparseKVError(f"no capture store at {name}{looks}: expected the folder that `sparsekv capture` "
                                    f"wrote, with a {MANIFEST}")
        except OSError as error:
            raise SparseKVError(f"the capture store {name} cannot be read: {error.strerror or error}") from error
        check_manifest(manifest, name)
        if manifest["config"].get("storage_dtype", "bfloat16") not in ("bfloat16", "float16", "float32"):
            raise damaged(f"the manifest of {name}", f"its storage_dtype is {manifest['config']['storage_dtype']!r}")
        store = cls(where, manifest)
        missing = set(store._expected()) - set(manifest["shards"])
        if missing:
            raise damaged(f"the manifest of {name}", f"it does not list shard {min(missing)}")
        return store

    def _expected(self) -> list[str]:
        """Names of all shards that the documents and layers have."""
        files = ["rotary.safetensors", *map(layer_name, self.layers)]
        return [f"{document_name(i)}/{file}" for i in range(self.num_documents) for file in files]

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
        shard = self._open(document, layer_name(layer), layer)
        tensors = self._slices(shard, spans)
        positions = tensors["query_positions"][0].long()
        ends = (int(positions[0]), int(positions[-1])) if len(positions) else (-1, -1)
        if not 0 <= ends[0] <= ends[1] < self.context_length or bool((positions.diff() <= 0).any()):
            raise self._broken(shard, "its queries are not at rising positions of the window")
        cos, sin = (f"{name}.{about['rotary']}" for name in ("cos", "sin"))
        rotary = self._slices(self._open(document, "rotary.safetensors"), {cos: slice(None), sin: slice(None)})
        return LayerCapture(
            keys_pre=tensors["keys_pre"], values=tensors["values"], queries_pre=tensors["queries_pre"],
            query_positions=positions, cos=rotary[cos], sin=rotary[sin],
            layout=about["layout"], scale=about["scale"], statistics={name: tensors[name] for name in STATISTICS})

    def tokens(self, document: int) -> Tensor:
        """The token ids of a document's window, `[N]` int64."""
        found = self._slices(self._open(document, "rotary.safetensors"), {"tokens": slice(None)})
        return found["tokens"].long()

    def verify(self, names: list[str] | None = None) -> list[str]:
        """One line for every shard that is missing, whose size or whose bytes changed; an empty list for a sound store.
        names: the shards whose bytes are read, without it all."""
        problems, read = self._verify_documents(), set(self.manifest["shards"] if names is None else names)
        for name, about in self.manifest["shards"].items():
            size = self._place.size(name)
            if size is None:
                problems.append(f"{name}: missing")
            elif size != about["bytes"]:
                problems.append(f"{name}: {size} bytes, expected {about['bytes']}")
            elif name in read and self._place.checksum(name) != about["sha256"]:
                problems.append(f"{name}: contents changed (checksum differs)")
        return problems

    def _verify_documents(self) -> list[str]:
        """One line for every `document.json` that is damaged, or says another thing than the manifest. One that is
        missing is no loss: the manifest says all of it."""
        problems = []
        for number, document in enumerate(self.documents):
            name = f"{document_name(number)}/document.json"
            try:
                found = self._place.read_json(name)
            except (SparseKVError, OSError) as error:
                problems.append(f"{name}: {reason(error)}")
                continue
            if found is None:
                continue
            if found.get("sha256") != digest({k: v for k, v in found.items() if k != "sha256"}):
                problems.append(f"{name}: contents changed (checksum differs)")
            elif found.get("document") != document:
                problems.append(f"{name}: it is of another window than the manifest says")
        return problems

    def check(self, everything: bool = False, seed: int = 0) -> None:
        """Before a training: no shard is missing or of another size, and the bytes of all, or of `sample`, are those
        that were written. Says on standard error how many it read where that is a sample. Raises SparseKVError."""
        shards = self.manifest["shards"]
        chosen = list(shards) if everything else sample(shards, seed)
        if len(chosen) < len(shards):
            print(f"checksums of {len(chosen)} of {len(shards)} shards are compared; --verify compares all",
                  file=sys.stderr)
        problems = self.verify(chosen)
        if problems:
            more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
            raise SparseKVError(f"the capture store {str(self.path)!r} is damaged: {'; '.join(problems[:3])}{more}; "
                                "restore those files, or capture again with --overwrite")

    def _open(self, document: int, file: str, layer: int | None = None) -> str:
        """The name of a shard that is open, and of this window and layer, with tensors of these shapes. Raises
        SparseKVError."""
        name = f"{document_name(document)}/{file}"
        if name in self._shards:
            return name
        try:
            if self._place.size(name) != self.manifest["shards"][name]["bytes"]:
                raise OSError("its size is not the recorded one")
            shard = self._place.open_shard(name)
            whose = {"document": self.documents[document]["sha256"], "model": self.model["weights"],
                     **({} if layer is None else {"layer": str(layer)})}
            others = [f"{k} {brief(shard.says[k])}" for k, v in whose.items() if shard.says.get(k, v) != v]
            if others:
                raise ValueError("it is of " + ", ".join(others))
            for tensor, expected in (self._tables(shard) if layer is None else self._tensors(shard)).items():
                if (found := shard.layout(tensor)) != expected:
                    raise ValueError(f"{tensor} is {found[0]} {found[1]}, expected {expected[0]} {expected[1]}")
        except READING as error:
            raise self._broken(name, error) from error
        if len(self._shards) >= OPEN_SHARDS:
            self._shards.pop(next(iter(self._shards)))
        self._shards[name] = shard
        return name

    def _tensors(self, shard: LocalShard | RemoteShard) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """What a layer's shard must hold; of queries, as many as were asked for or fewer where the window is short."""
        _, (*_, found) = shard.layout("query_positions")
        heads, count = self.num_query_heads, min(found, self.config["queries_per_document"])
        kept = (self.num_kv_heads, self.context_length, self.head_dim)
        return {"keys_pre": (self.dtype, kept), "values": (self.dtype, kept),
                "queries_pre": (self.dtype, (heads, count, self.head_dim)),
                "query_positions": (torch.int32, (heads, count)),
                **{name: (dtype, (heads, count)) for name, dtype in STATISTICS.items()}}

    def _tables(self, shard: LocalShard | RemoteShard) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """What a window's tokens and rotary tables must be."""
        groups = {about["rotary"] for about in self.manifest["layers"].values()}
        tables = {f"{name}.{group}": (torch.float32, (self.context_length, shard.layout(f"cos.{group}")[1][-1]))
                  for group in sorted(groups) for name in ("cos", "sin")}
        return {"tokens": (torch.int32, (self.context_length,)), **tables}

    def _slices(self, name: str, spans: dict[str, slice]) -> dict[str, Tensor]:
        """Slices of the first axis of an open shard's tensors, by name."""
        try:
            return {tensor: self._shards[name].read(tensor, span) for tensor, span in spans.items()}
        except READING as error:
            raise self._broken(name, error) from error

    def _broken(self, name: str, why: Any) -> SparseKVError:
        missing = self._place.size(name) is None
        return SparseKVError(f"shard {name} of the capture store {str(self.path)!r} is "
                             f"{'missing' if missing else f'damaged ({reason(why)})'}; restore it, or capture again "
                             "with --overwrite")

    def summary(self) -> str:
        size = sum(about["bytes"] for about in self.manifest["shards"].values())
        return (f"capture store {self.path}: {self.num_documents} documents × {self.context_length} tokens, "
                f"{len(self.layers)} layers, {self.num_query_heads}/{self.num_kv_heads} heads of {self.head_dim}, "
                f"{held_queries(self.config)} queries a document and head, {size / 1e9:.2f} GB")


def document_name(document: int) -> str:
    return f"doc{document:05d}"


def layer_name(layer: int) -> str:
    return f"layer{layer:03d}.safetensors"


def finished_document(store: Place, document: int) -> dict[str, Any] | None:
    """What was recorded when the document was finished; None where it is not there or damaged, or a shard of it is cut
    short."""
    try:
        found = store.read_json(f"{document_name(document)}/document.json")
        if found is None or found.get("sha256") != digest({k: v for k, v in found.items() if k != "sha256"}):
            return None
        if any(store.size(name) != about["bytes"] for name, about in found["shards"].items()):
            return None
        check_fields(found["document"], {"id": int, "sha256": str}, "document", "it")
        for about in found["layers"].values():
            check_fields(about, {"layout": str, "rotary": int, "scale": float}, "a layer", "it")
    except (SparseKVError, KeyError, TypeError, AttributeError):
        return None
    return found


def storage_bytes(
    *, num_documents: int, num_layers: int, heads_kv: int, heads_q: int, length: int, queries: int, dim: int,
) -> int:
    """Size of a store before it is made: keys and values, queries, positions and statistics, rotary tables [bytes]."""
    size = dim * DTYPE.itemsize
    layer = 2 * heads_kv * length * size + heads_q * queries * (size + 4 * (1 + len(STATISTICS)))
    return num_documents * (num_layers * layer + length * (2 * dim * 4 + 4))
