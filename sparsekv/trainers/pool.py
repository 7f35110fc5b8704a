"""The captured tensors a trainer draws from, for all heads of a group of layers, and the split into training and
validation windows."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsekv.capture.corpus import SYNTHETIC
from sparsekv.capture.store.manifest import held_queries
from sparsekv.capture.store.store import CaptureStore
from sparsekv.core.layer import needed
from sparsekv.core.offline import Window
from sparsekv.core.rope import RopeTable
from sparsekv.util.errors import SparseKVError

PLACES = ("capture", "output")
"""Options that name folders of one machine: an artifact goes to others."""


class Part(NamedTuple):
    """Some KV heads of a layer, and their query heads: what a rank can train by itself."""

    layer: int
    first: int
    heads: int

    @property
    def name(self) -> str:
        return f"layer{self.layer:03d}-heads{self.first:03d}-{self.first + self.heads - 1:03d}"


@dataclass(frozen=True)
class Pool:
    """`Lk = parts · KV heads`, `Lq = Lk · group`, heads of a part side by side. keys, values `[D, Lk, N, d]` and
    queries `[D, Lq, T, d]` with RoPE, positions `[D, T]`, best `[D, Lq, T]` (position of the best key outside the
    sink). rope turns columns of a window; None where the layers do not share it."""

    keys: Tensor
    values: Tensor
    queries: Tensor
    positions: Tensor
    best: Tensor
    scale: float
    group: int
    sink_size: int = 4
    window_size: int = 16
    rope: RopeTable | None = None

    @property
    def documents(self) -> int:
        return self.keys.shape[0]

    @property
    def heads_kv(self) -> int:
        return self.keys.shape[1]

    @property
    def heads_q(self) -> int:
        return self.queries.shape[1]

    def keys_in(self, space: str, documents: slice = slice(None), heads: slice = slice(None)) -> Tensor:
        """Keys with RoPE (`rot`) or without it (`pre`), of some documents and heads: RoPE is removed in float32, which
        takes several times their memory."""
        keys = self.keys[documents, heads]
        return keys if space == "rot" else needed(self.rope).unrotate(keys, torch.arange(keys.shape[2]))

    def queries_in(self, space: str) -> Tensor:
        """Queries with RoPE (`rot`) or without it (`pre`)."""
        if space == "rot":
            return self.queries
        rope = needed(self.rope)
        return torch.cat([rope.unrotate(q[None], at) for q, at in zip(self.queries, self.positions, strict=True)])

    def window(self, document: int, kv_heads: slice = slice(None)) -> Window:
        """A document for offline requests, in float32; all of its heads, or some."""
        first, last, _ = kv_heads.indices(self.heads_kv)
        return Window(self.keys[document, first:last].float(), self.values[document, first:last].float(),
                      self.queries[document, first * self.group:last * self.group].float(),
                      self.positions[document], scale=self.scale, sink_size=self.sink_size,
                      window_size=self.window_size, rope=self.rope)


def load_pool(
    store: CaptureStore, parts: Sequence[Part], documents: list[int], *, device: str,
    values: bool = True,
) -> Pool:
    """Read parts of the documents, in bfloat16. Without `values` that field is empty. Raises SparseKVError for NaN in a
    shard, and for layers of different scales."""
    found: dict[str, Tensor] = {}
    scales: dict[int, float] = {}
    tables: dict[int, tuple[Tensor, Tensor]] = {}
    for row, document in enumerate(documents):
        for place, part in enumerate(parts):
            item = store.read(part.layer, document, kv_heads=slice(part.first, part.first + part.heads)).to(device)
            scales[part.layer] = item.scale
            tables[part.layer] = item.cos, item.sin
            if not all(bool(torch.isfinite(x.sum(dtype=torch.float32))) for x in (item.keys_pre, item.queries_pre,
                                                                                  item.values)):
                raise SparseKVError(
                    f"layer {part.layer} of document {document} of the capture store {str(store.path)!r} holds NaN or "
                    "infinite numbers; capture it again, in bfloat16 or float32")
            for name, tensor in (("keys", item.keys_rot()), ("values", item.values if values else item.values[:, :0]),
                                 ("queries", item.queries_rot()), ("best", item.statistics["top1_position"])):
                if name not in found:
                    kind = torch.int32 if name == "best" else torch.bfloat16
                    found[name] = torch.empty(len(documents), len(parts) * tensor.shape[0], *tensor.shape[1:],
                                              dtype=kind, device=device)
                found[name][row, place * tensor.shape[0]:(place + 1) * tensor.shape[0]] = tensor
            if "positions" not in found:
                found["positions"] = torch.empty(len(documents), tensor.shape[1], dtype=torch.long, device=device)
            found["positions"][row] = item.query_positions
    if len(set(scales.values())) > 1:
        raise SparseKVError(f"layers {sorted(scales)} have different softmax scales {sorted(set(scales.values()))}; "
                            "train them one by one with --layer-group 1")
    first, *others = tables.values()
    alike = all(torch.equal(x, y) for one in others for x, y in zip(first, one, strict=True))
    rope = RopeTable(item.layout, first[0][None], first[1][None]) if alike else None
    return Pool(**found, rope=rope, scale=next(iter(scales.values())), group=store.group,
                sink_size=store.config["sink_size"], window_size=store.config["window_size"])


def pool_bytes(store: CaptureStore, documents: int, heads: int, *, values: bool = True) -> int:
    """What `load_pool` makes of so many documents and KV heads [bytes]."""
    rows = (2 if values else 1) * store.context_length + store.group * held_queries(store.config)
    return 2 * documents * heads * rows * store.head_dim


def held_out(documents: int) -> int:
    """Windows of a capture that are for validation by default."""
    return max(1, min(4, documents // 10))


def fewest_trained(documents: int) -> int:
    """Windows that `split_documents` leaves to train on at least, of so many that are cut from a corpus."""
    return (documents - held_out(documents)) // 2 or 1


def split_documents(store: CaptureStore, validation: int) -> tuple[list[int], list[int]]:
    """Windows to train on and to validate on. The last `validation` (0: a tenth, 1 to 4) are for validation. Earlier
    windows that share a source document with them are left out, unless that would cost more than half of the windows
    that were cut from the corpus (a corpus of one long file).

    Raises SparseKVError where none are left to train on.
    """
    validation = validation or held_out(store.num_documents)
    if not validation < store.num_documents:
        raise SparseKVError(f"{validation} validation documents asked for, and the capture store has "
                            f"{store.num_documents}; expected at least 1, and at least 1 left to train on")
    cut = store.num_documents - validation
    kept = _sources(store, range(cut, store.num_documents))
    apart = [i for i in range(cut) if kept and kept.isdisjoint(_sources(store, [i]))]
    written = sum(_sources(store, [i]) == {SYNTHETIC} for i in range(cut))
    train = apart if 2 * (len(apart) - written) >= cut - written else list(range(cut))
    if len(train) < cut:
        print(f"{cut - len(train)} of {store.num_documents} windows share a source document with the {validation} for "
              "validation and are left out", file=sys.stderr)
    return train, list(range(cut, store.num_documents))


def _sources(store: CaptureStore, documents: Iterable[int]) -> set[str]:
    return {s for i in documents for s in store.documents[i].get("sources", [])}


def provenance(store: CaptureStore, options: dict[str, Any], train: list[int], validation: list[int]) -> dict[str, Any]:
    """Where an artifact comes from: corpus, options, code version and the hashes of the windows and sources it was
    made with."""
    from sparsekv import __version__

    sources = {"train": _sources(store, train), "validation": _sources(store, validation)}
    apart = bool(sources["validation"]) and sources["train"].isdisjoint(sources["validation"])

    def hashes(names: set[str]) -> list[str]:
        return sorted(hashlib.sha256(n.encode()).hexdigest()[:16] for n in names)

    return {"sparsekv": __version__, "model": store.config.get("model"), "corpus": store.config["corpus"],
            "split": store.config["split"], "context_length": store.context_length,
            "options": {k: v for k, v in options.items() if k not in PLACES},
            "disjoint_by": "source document" if apart else "window",
            "hash": "sha256 of a window's token ids (JSON); sha256, first 16 digits, of a source's name",
            "train_documents": [store.documents[i]["sha256"] for i in train],
            "validation_documents": [store.documents[i]["sha256"] for i in validation],
            "train_sources": hashes(sources["train"]), "validation_sources": hashes(sources["validation"])}
