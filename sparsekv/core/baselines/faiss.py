"""Top-k over a vector database: a Faiss index per row, layer and KV head, in CPU memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from sparsekv.core.layer import LayerView, Queries, Selection
from sparsekv.core.regions import Regions
from sparsekv.core.selectors.base import Selector
from sparsekv.core.selectors.topk import key_bytes
from sparsekv.util.config import option
from sparsekv.util.errors import SparseKVError

SHORT = {"flat": "Flat", "ivf": "IVF{lists},Flat", "hnsw": "HNSW{links}"}
PROBED, SEARCHED = 8, 2
"""Budgets of keys that the inverted lists searched hold, and budgets of nodes that a graph is searched for: of 2 % of
16k keys with RoPE an index finds 0.95 and 0.995 so, and 0.49 and 0.84 with Faiss's usual settings."""


@dataclass(frozen=True)
class FaissIndex:
    """A Faiss index of keys by inner product. A graph, which wants distances, has `bound`, the largest squared length:
    with one more coordinate, `√(bound − |k|²)` of a key and 0 of a query, the nearest key has the largest product
    (Bachrach et al., RecSys 2014). A key that came later and is longer counts as of that length."""

    index: Any
    bound: float | None = None

    @property
    def ntotal(self) -> int:
        return int(self.index.ntotal)

    def add(self, keys: np.ndarray) -> None:
        if self.bound is not None:
            rest = np.sqrt(np.maximum(self.bound - np.square(keys).sum(1, keepdims=True), 0))
            keys = np.concatenate([keys, rest.astype(keys.dtype)], axis=1)
        self.index.add(keys)

    def search(self, q: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Products and numbers of the best k, `[n, k]` each."""
        if self.bound is None:
            return self.index.search(q, k)
        distances, ids = self.index.search(np.pad(q, ((0, 0), (0, 1))), k)
        return (np.square(q).sum(1, keepdims=True) + self.bound - distances) / 2, ids

    def clone(self) -> FaissIndex:
        return FaissIndex(import_faiss().clone_index(self.index), self.bound)


@dataclass(eq=False)
class FaissTopK(Selector):
    """k-nearest neighbours by inner product over the RoPE'd prefill keys (top-k paper §3, algorithm 1).

    Every query head searches on its own; with `per_query_head` off the lists of a group are joined and the best scores
    stay, so that `token_budget` counts the group's list as elsewhere.
    """

    name: ClassVar[str] = "faiss"

    factory: str = option("flat", help="flat, ivf, hnsw, or any Faiss factory string, for example IVF256,PQ16.")
    nprobe: int = option(0, help="Inverted lists searched, IVF only; 0: as many as hold 8 budgets [lists].", min=0)
    lists: int = option(0, help="Inverted lists of ivf; 0 takes 4·sqrt(keys) [lists].", min=0)
    links: int = option(32, help="Links of a node of hnsw [links].", min=2, max=1024)
    ef_search: int = option(0, help="Breadth of the search, HNSW only; 0: 2 budgets [nodes].", min=0,
                           max=65536)
    per_query_head: bool = option(False, help="Every query head reads its own list.")

    def build(self, view: LayerView) -> None:
        regions = view.regions
        self.first = [int(x) for x in regions.mid_first]
        self.indexes = [[self._index(_numpy(view.keys[b, h, self.first[b]:int(regions.mid_last[b])]))
                         for h in range(view.num_kv_heads)] for b in range(view.keys.shape[0])]
        self.compared: float | None = None

    def _index(self, points: np.ndarray) -> FaissIndex:
        faiss = import_faiss()
        count, dim = points.shape
        lists = min(self.lists or int(4 * max(count, 1) ** 0.5), max(count // 4, 1))
        text = SHORT.get(self.factory.lower(), self.factory).format(lists=lists, links=self.links)
        graph = text.startswith("HNSW") and "," not in text
        try:
            index = faiss.index_factory(dim + graph, text, faiss.METRIC_L2 if graph else faiss.METRIC_INNER_PRODUCT)
            if (inverted := faiss.try_extract_index_ivf(index)) is not None:
                inverted.cp.min_points_per_centroid = 1  # it warns of lists as short as these are meant to be
            if not index.is_trained:
                index.train(points)
        except RuntimeError as error:
            raise SparseKVError(f"Faiss refused the index {text!r} for {count} keys of dimension {dim}: "
                                f"{str(error).splitlines()[-1]}") from error
        made = FaissIndex(index, float(np.square(points).sum(1).max(initial=0.0)) if graph else None)
        made.add(points)
        return made

    def extend(self, view: LayerView, old: Regions) -> None:
        """Add the keys that joined; an index shared with a fork is copied first."""
        grown = []
        # the first token of a mid region that was empty is known now
        self.first = [first if row[0].ntotal else int(view.regions.mid_first[b])
                      for b, (first, row) in enumerate(zip(self.first, self.indexes, strict=True))]
        for b, row in enumerate(self.indexes):
            start = self.first[b] + row[0].ntotal
            keys = view.keys[b, :, start:int(view.regions.mid_last[b])]
            copies = [index.clone() for index in row]
            for index, points in zip(copies, keys, strict=True):
                index.add(_numpy(points))
            grown.append(copies)
        self.indexes = grown

    def take_rows(self, index: Tensor) -> None:
        super().take_rows(index)
        rows = [int(i) for i in index]
        self.indexes, self.first = [self.indexes[i] for i in rows], [self.first[i] for i in rows]

    def cost_bytes(self, view: LayerView) -> Tensor | float:
        """The keys that the last step compared, with the graph's links to them or the lists' centres: as Faiss counts
        them for inverted lists and graphs; of other indices, and before the first step, all keys."""
        everything = key_bytes(view)
        if self.compared is None:
            return everything
        index = self.indexes[0][0].index
        key = view.keys.shape[-1] * view.keys.element_size()
        more = 4.0 * self.compared if hasattr(index, "hnsw") else view.num_kv_heads * key * getattr(index, "nlist", 0)
        return (self.compared * key + more + torch.zeros_like(everything)).clamp(max=everything)

    def _tune(self, index: Any, k: int) -> None:
        """How far a search goes."""
        if hasattr(index, "hnsw"):
            index.hnsw.efSearch = self.ef_search or SEARCHED * k
        elif (core := import_faiss().try_extract_index_ivf(index)) is not None:
            wanted = self.nprobe or -(-PROBED * k * core.nlist // max(1, index.ntotal))
            core.nprobe = min(max(1, wanted), core.nlist)

    def select(self, view: LayerView, queries: Queries) -> Selection:
        counters = [getattr(import_faiss().cvar, name) for name in ("indexIVF_stats", "hnsw_stats")]
        for counter in counters:
            counter.reset()
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
                self._tune(index.index, own)
                heads = slice(h * group, (h + 1) * group)
                found, ids = index.search(np.ascontiguousarray(q[b, :, heads].reshape(-1, dim)), own)
                tokens[b, :, heads, :own] = np.where(ids < 0, -1, ids + self.first[b]).reshape(count, group, own)
                scores[b, :, heads, :own] = np.where(ids < 0, -np.inf, found).reshape(count, group, own)
        self.compared = sum(counter.ndis for counter in counters) / (batch * count) or None
        listed = torch.from_numpy(tokens).flatten(0, 1)
        if not self.per_query_head and group > 1:
            listed = join_lists(listed, torch.from_numpy(scores).flatten(0, 1), view.num_kv_heads, width)
            paid = torch.tensor(k).repeat_interleave(count)[:, None, None]  # a group's list may be longer than a head's
            listed = torch.where(torch.arange(listed.shape[-1]) < paid, listed, -1)
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
