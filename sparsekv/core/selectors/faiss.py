"""Top-k over a vector database: a Faiss index per row, layer and KV head, in CPU memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from sparsekv.config import option
from sparsekv.core.layer import LayerView, Queries, Selection
from sparsekv.core.regions import Regions
from sparsekv.core.selectors.base import Selector
from sparsekv.core.selectors.topk import key_bytes
from sparsekv.errors import SparseKVError

SHORT = {"flat": "Flat", "ivf": "IVF{lists},Flat", "hnsw": "HNSW{links}"}


@dataclass(eq=False)
class FaissTopK(Selector):
    """k-nearest neighbours by inner product over the RoPE'd prefill keys (top-k paper §3, algorithm 1).

    Every query head searches on its own; with `per_query_head` off the lists of a group are joined and the best scores
    stay, so that `token_budget` counts the group's list as elsewhere.
    """

    name: ClassVar[str] = "faiss"
    source: ClassVar[str] = "top-k paper §3"

    factory: str = option("flat", help="flat, ivf, hnsw, or any Faiss factory string, for example IVF256,PQ16.")
    nprobe: int = option(8, help="Inverted lists searched; IVF only [lists].", min=1)
    lists: int = option(0, help="Inverted lists of ivf; 0 takes 4·sqrt(keys) [lists].", min=0)
    links: int = option(32, help="Links of a node of hnsw [links].", min=2)
    ef_search: int = option(64, help="Breadth of the search; HNSW only [nodes].", min=1)
    per_query_head: bool = option(False, help="Every query head reads its own list.")

    def build(self, view: LayerView) -> None:
        regions = view.regions
        self.first = [int(x) for x in regions.mid_first]
        self.indexes = [[self._index(view.keys[b, h, self.first[b]:int(regions.mid_last[b])])
                         for h in range(view.num_kv_heads)] for b in range(view.keys.shape[0])]

    def _index(self, keys: Tensor) -> Any:
        faiss = import_faiss()
        points = _numpy(keys)
        count, dim = points.shape
        lists = min(self.lists or int(4 * max(count, 1) ** 0.5), max(count // 4, 1))
        text = SHORT.get(self.factory.lower(), self.factory).format(lists=lists, links=self.links)
        try:
            index = faiss.index_factory(dim, text, faiss.METRIC_INNER_PRODUCT)
            if not index.is_trained:
                index.train(points)
        except RuntimeError as error:
            raise SparseKVError(f"Faiss refused the index {text!r} for {count} keys of dimension {dim}: "
                                f"{str(error).splitlines()[-1]}") from error
        index.add(points)
        core = faiss.extract_index_ivf(index) if "IVF" in text else None
        if core is not None:
            core.nprobe = min(self.nprobe, core.nlist)
        if "HNSW" in text and hasattr(index, "hnsw"):
            index.hnsw.efSearch = self.ef_search
        return index

    def extend(self, view: LayerView, old: Regions) -> None:
        """Add the keys that joined; an index shared with a fork is copied first."""
        faiss = import_faiss()
        grown = []
        # the first token of a mid region that was empty is known now
        self.first = [first if row[0].ntotal else int(view.regions.mid_first[b])
                      for b, (first, row) in enumerate(zip(self.first, self.indexes, strict=True))]
        for b, row in enumerate(self.indexes):
            start = self.first[b] + row[0].ntotal
            keys = view.keys[b, :, start:int(view.regions.mid_last[b])]
            copies = [faiss.clone_index(index) for index in row]
            for index, points in zip(copies, keys, strict=True):
                index.add(_numpy(points))
            grown.append(copies)
        self.indexes = grown

    def take_rows(self, index: Tensor) -> None:
        super().take_rows(index)
        rows = [int(i) for i in index]
        self.indexes, self.first = [self.indexes[i] for i in rows], [self.first[i] for i in rows]

    def cost_bytes(self, view: LayerView) -> Tensor | float:
        """A flat index; what an approximate one reads is not known, and no less is said."""
        return key_bytes(view)

    def select(self, view: LayerView, queries: Queries) -> Selection:
        batch, heads_q, count, dim = queries.rot.shape
        k = self.budget.tolist()
        width, group = self.widest, view.group
        tokens = np.full((batch, count, heads_q, width), -1, dtype=np.int64)
        scores = np.full(tokens.shape, -np.inf, dtype=np.float32)
        q = _numpy(queries.rot.transpose(1, 2).reshape(-1, dim)).reshape(batch, count, heads_q, dim)
        for b, row in enumerate(self.indexes):
            own = min(k[b], row[0].ntotal)
            if own == 0:
                continue
            for h, index in enumerate(row):
                heads = slice(h * group, (h + 1) * group)
                found, ids = index.search(np.ascontiguousarray(q[b, :, heads].reshape(-1, dim)), own)
                tokens[b, :, heads, :own] = np.where(ids < 0, -1, ids + self.first[b]).reshape(count, group, own)
                scores[b, :, heads, :own] = found.reshape(count, group, own)
        listed = torch.from_numpy(tokens).flatten(0, 1)
        if not self.per_query_head and group > 1:
            listed = join_lists(listed, torch.from_numpy(scores).flatten(0, 1), view.num_kv_heads, width)
        return Selection(tokens=listed.to(view.device))


def join_lists(tokens: Tensor, scores: Tensor, heads_kv: int, width: int) -> Tensor:
    """One list a KV head out of its group's: tokens and scores `[Q, Hq, K]` -> `[Q, Hkv, width]`, each token once, the
    best scores first."""
    tokens, scores = (x.unflatten(1, (heads_kv, -1)).flatten(2) for x in (tokens, scores))
    scores, order = scores.sort(dim=-1, descending=True)
    tokens, stay = tokens.gather(-1, order).sort(dim=-1, stable=True)
    repeated = torch.nn.functional.pad(tokens[..., 1:] == tokens[..., :-1], (1, 0))
    scores = scores.gather(-1, stay).masked_fill(repeated | (tokens < 0), float("-inf"))
    best, place = scores.topk(min(width, scores.shape[-1]), dim=-1)
    return torch.where(torch.isneginf(best), -1, tokens.gather(-1, place))


def import_faiss() -> Any:
    """faiss, or an error that says which of the two packages to install."""
    try:
        import faiss
    except ImportError as error:
        raise SparseKVError("selector faiss needs faiss, which is not installed: run `pip install 'sparsekv[cpu]'` (or "
                            "'sparsekv[gpu]' on a CUDA machine; the two exclude each other)") from error
    return faiss


def _numpy(x: Tensor) -> np.ndarray:
    return x.detach().float().cpu().contiguous().numpy()
