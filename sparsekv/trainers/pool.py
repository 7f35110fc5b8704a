"""The captured tensors a trainer draws from, for all heads of a group of layers, and the split into training and
validation documents."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsekv.capture.rope import rotate
from sparsekv.capture.store import CaptureStore
from sparsekv.errors import SparseKVError


@dataclass(frozen=True)
class Pool:
    """`Lk = layers · Hkv`, `Lq = layers · Hq`, heads of a layer side by side. keys, values `[D, Lk, N, d]`, queries
    `[D, Lq, T, d]`, positions `[D, Lq, T]`, best `[D, Lq, T]` (position of the best key outside the sink)."""

    keys: Tensor
    values: Tensor
    queries: Tensor
    positions: Tensor
    best: Tensor
    scale: float
    group: int

    @property
    def documents(self) -> int:
        return self.keys.shape[0]


def load_pool(
    store: CaptureStore, layers: list[int], documents: list[int], *, space: str, device: str,
    dtype: torch.dtype = torch.bfloat16, values: bool = True,
) -> Pool:
    """Read the layers of the documents; `space` is `rot` (with RoPE) or `pre` (without). Without `values` that field is
    empty: training needs none.

    Raises SparseKVError for NaN in a shard.
    """
    held: dict[str, Tensor] = {}
    scale = 1.0
    for row, document in enumerate(documents):
        for place, layer in enumerate(layers):
            item = store.read(layer, document)
            scale = item.scale
            keys, queries = item.keys_pre, item.queries_pre
            if space == "rot":
                keys = rotate(keys.float(), item.cos, item.sin, item.layout)
                queries = rotate(queries.float(), item.cos[item.query_positions], item.sin[item.query_positions],
                                 item.layout)
            if not (torch.isfinite(keys.sum()) and torch.isfinite(queries.sum()) and torch.isfinite(item.values.sum())):
                raise SparseKVError(f"layer {layer} of document {document} of the capture store {str(store.path)!r} "
                                    "holds NaN or infinite numbers; capture it again, in bfloat16 or float32")
            found = {"keys": keys, "values": item.values, "queries": queries, "positions": item.query_positions,
                     "best": item.statistics["top1_position"]}
            for name, tensor in found.items():
                if name == "values" and not values:
                    tensor = tensor[:, :0]
                if name not in held:
                    shape = (len(documents), len(layers) * tensor.shape[0], *tensor.shape[1:])
                    kind = torch.int32 if name in ("positions", "best") else dtype
                    held[name] = torch.empty(shape, dtype=kind, device=device)
                held[name][row, place * tensor.shape[0]:(place + 1) * tensor.shape[0]] = tensor
    return Pool(**held, scale=scale, group=store.num_query_heads // store.num_kv_heads)


def split_documents(store: CaptureStore, validation: int) -> tuple[list[int], list[int]]:
    """The last `validation` documents are kept for validation. Raises SparseKVError where none are left to train on."""
    if not 0 < validation < store.num_documents:
        raise SparseKVError(f"{validation} validation documents asked for, and the capture store has "
                            f"{store.num_documents}; expected at least 1, and at least 1 left to train on")
    cut = store.num_documents - validation
    return list(range(cut)), list(range(cut, store.num_documents))


def layer_groups(layers: list[int], size: int) -> list[list[int]]:
    """Layers trained at once; `size` 0: all."""
    return [layers[i:i + size] for i in range(0, len(layers), size)] if size else [layers]
