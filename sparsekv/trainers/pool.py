"""The captured tensors a trainer draws from, for all heads of a group of layers, and the split into training and
validation windows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsekv.core.rope import Layout, rotate
from sparsekv.corpus import GENERATED
from sparsekv.errors import SparseKVError
from sparsekv.store.store import CaptureStore


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
    queries `[D, Lq, T, d]` with RoPE, positions `[D, Lq, T]`, best `[D, Lq, T]` (position of the best key outside the
    sink). keys_pre and queries_pre, the same with RoPE removed, where asked for. frequencies `[Lk, rotary_dim]`: by how
    much RoPE turns a channel a token [radians], full width in `layout`."""

    keys: Tensor
    values: Tensor
    queries: Tensor
    positions: Tensor
    best: Tensor
    scale: float
    group: int
    sink_size: int = 4
    window_size: int = 16
    keys_pre: Tensor | None = None
    queries_pre: Tensor | None = None
    frequencies: Tensor | None = None
    layout: Layout = "half"

    @property
    def documents(self) -> int:
        return self.keys.shape[0]

    @property
    def heads_kv(self) -> int:
        return self.keys.shape[1]

    @property
    def heads_q(self) -> int:
        return self.queries.shape[1]

    def moved(self, x: Tensor, shift: Tensor) -> Tensor:
        """What queries or keys `[Lq or Lk, D, n, d]` would be `shift [D]` positions later. Moving both leaves attention
        as it is: RoPE knows distances only."""
        assert self.frequencies is not None
        angle = self.frequencies.repeat_interleave(x.shape[0] // self.heads_kv, 0)[:, None, None] * shift[:, None, None]
        return rotate(x, angle.cos(), angle.sin(), self.layout)

    def clustered(self, space: str) -> Tensor:
        """The keys that are clustered in a key space, `pre` or `rot`."""
        return self.keys if self.keys_pre is None or space == "rot" else self.keys_pre

    def asked(self, space: str) -> Tensor:
        """The queries that a query model of this space sees."""
        return self.queries if self.queries_pre is None or space == "rot" else self.queries_pre


def load_pool(
    store: CaptureStore, parts: Sequence[int | Part], documents: list[int], *, device: str, space: str = "rot",
    dtype: torch.dtype = torch.bfloat16, values: bool = True,
) -> Pool:
    """Read parts (or whole layers, by number) of the documents. `space` pre: also without RoPE. Without `values` that
    field is empty: training needs none.

    Raises SparseKVError for NaN in a shard, and for layers of different scales.
    """
    held: dict[str, Tensor] = {}
    scales: dict[int, float] = {}
    frequencies: dict[Part, Tensor] = {}
    for row, document in enumerate(documents):
        for place, part in enumerate(parts):
            part = Part(part, 0, store.num_kv_heads) if isinstance(part, int) else part
            item = store.read(part.layer, document, kv_heads=slice(part.first, part.first + part.heads)).to(device)
            scales[part.layer] = item.scale
            turn = torch.atan2(item.sin[:2], item.cos[:2])[-1]
            frequencies[part] = turn.expand(part.heads, -1)
            if not all(bool(torch.isfinite(x.sum(dtype=torch.float32))) for x in (item.keys_pre, item.queries_pre,
                                                                                  item.values)):
                raise SparseKVError(
                    f"layer {part.layer} of document {document} of the capture store {str(store.path)!r} holds NaN or "
                    "infinite numbers; capture it again, in bfloat16 or float32")
            found = {"keys": item.keys_rot(), "values": item.values if values else item.values[:, :0],
                     "queries": item.queries_rot(), "positions": item.query_positions.expand(len(item.queries_pre), -1),
                     "best": item.statistics["top1_position"]}
            if space == "pre":
                found |= {"keys_pre": item.keys_pre, "queries_pre": item.queries_pre}
            for name, tensor in found.items():
                if name not in held:
                    shape = (len(documents), len(parts) * tensor.shape[0], *tensor.shape[1:])
                    kind = torch.int32 if name in ("positions", "best") else dtype
                    held[name] = torch.empty(shape, dtype=kind, device=device)
                held[name][row, place * tensor.shape[0]:(place + 1) * tensor.shape[0]] = tensor
    if len(set(scales.values())) > 1:
        raise SparseKVError(f"layers {sorted(scales)} have different softmax scales {sorted(set(scales.values()))}; "
                            "train them one by one with --layer-group 1")
    turns = torch.cat(list(frequencies.values())).float().to(device)
    return Pool(**held, frequencies=turns, layout=item.layout, scale=next(iter(scales.values())), group=store.group,
                sink_size=store.config["sink_size"], window_size=store.config["window_size"])


def split_documents(store: CaptureStore, validation: int) -> tuple[list[int], list[int]]:
    """Windows to train on and to validate on: the last `validation` are for validation, and those before that share a
    source document with them are left out, unless that would cost more than half of those cut from the corpus (a corpus
    of one long file).

    Raises SparseKVError where none are left to train on.
    """
    if not 0 < validation < store.num_documents:
        raise SparseKVError(f"{validation} validation documents asked for, and the capture store has "
                            f"{store.num_documents}; expected at least 1, and at least 1 left to train on")
    cut = store.num_documents - validation
    held = _sources(store, range(cut, store.num_documents))
    apart = [i for i in range(cut) if held and held.isdisjoint(_sources(store, [i]))]
    written = sum(_sources(store, [i]) == {GENERATED} for i in range(cut))
    enough = 2 * (len(apart) - written) >= cut - written
    return apart if enough else list(range(cut)), list(range(cut, store.num_documents))


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

    return {"sparsekv": __version__, "corpus": store.config["corpus"], "split": store.config["split"],
            "context_length": store.context_length, "options": options,
            "disjoint_by": "source document" if apart else "window",
            "hash": "sha256 of a window's token ids (JSON); sha256, first 16 digits, of a source's name",
            "train_documents": [store.documents[i]["sha256"] for i in train],
            "validation_documents": [store.documents[i]["sha256"] for i in validation],
            "train_sources": hashes(sources["train"]), "validation_sources": hashes(sources["validation"])}
