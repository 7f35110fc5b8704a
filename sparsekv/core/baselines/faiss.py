"""Top-k over a vector database: a Faiss index per row, layer and KV head, in CPU memory, or on the keys' GPU."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsekv.core.layer import LayerView, Queries, Selection
from sparsekv.core.regions import Regions
from sparsekv.core.selectors.base import Selector
from sparsekv.core.selectors.topk import key_bytes
from sparsekv.util.config import option
from sparsekv.util.errors import SparseKVError

ON_GPU = ("flat", "ivf")
"""The indices that lie on a GPU if the keys do; others stay in CPU memory."""
SHORT = {"flat": "Flat", "ivf": "IVF{lists},Flat", "hnsw": "HNSW{links}"}
PROBED, SEARCHED = 8, 2
"""Budgets of keys that the inverted lists searched hold, and budgets of nodes that a graph is searched for: of 2 % of
16k keys with RoPE an index finds 0.95 and 0.995 so, and 0.49 and 0.84 with Faiss's usual settings."""

GPU_LONGEST = 2048
"""The most neighbours that an index on a GPU gives (faiss/gpu/utils/DeviceDefs.cuh)."""


@dataclass(frozen=True)
class FaissIndex:
    """A Faiss index of keys by inner product, on `device`, with its resources where that is a GPU. A graph, which wants
    distances, has `bound`, the largest squared length: with one more coordinate, `√(bound − |k|²)` of a key and 0 of a
    query, the nearest key has the largest product (Bachrach et al., RecSys 2014). A key that came later and is longer
    counts as of that length."""

    index: Any
    bound: float | None = None
    device: torch.device = torch.device("cpu")
    resources: Any = None

    @property
    def ntotal(self) -> int:
        return int(self.index.ntotal)

    def add(self, keys: Tensor) -> None:
        keys = self._points(keys)
        if self.bound is not None:
            keys = torch.cat([keys, (self.bound - keys.square().sum(1, keepdim=True)).clamp(min=0).sqrt()], dim=1)
        self.index.add(keys)

    def search(self, q: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Products and numbers of the best k, `[n, k]` each."""
        q = self._points(q)
        if self.bound is None:
            return self.index.search(q, k)
        distances, ids = self.index.search(F.pad(q, (0, 1)), k)
        return (q.square().sum(1, keepdim=True) + self.bound - distances) / 2, ids

    def clone(self, *, on_gpu: bool = True) -> FaissIndex:
        """An independent copy; in CPU memory if it is not to be `on_gpu`."""
        if self.resources is None:
            return replace(self, index=import_faiss().clone_index(self.index))
        copy = FaissIndex(import_faiss().index_gpu_to_cpu(self.index), self.bound)
        return copy.moved(self.device, self.resources) if on_gpu else copy

    def moved(self, device: torch.device, resources: Any) -> FaissIndex:
        """The index on a GPU."""
        index = import_faiss().index_cpu_to_gpu(resources, device.index or 0, self.index)
        return FaissIndex(index, self.bound, device, resources)

    def _points(self, x: Tensor) -> Tensor:
        return x.detach().to(self.device, torch.float32).contiguous()


@dataclass(eq=False)
class FaissTopK(Selector):
    """k-nearest neighbours by inner product over the RoPE'd prefill keys (top-k paper §3, algorithm 1).

    Every query head searches on its own; with `per_query_head` off the lists of a group are joined and the best scores
    stay, so that `token_budget` counts the group's list as elsewhere. Flat and inverted indices of keys on a GPU lie
    there, if Faiss has GPU support and `token_budget` is at most 2048 tokens; all others in CPU memory.
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
        self.resources = gpu_resources(view.keys.device, self.widest)
        self.indexes = [[self._index(view.keys[b, h, self.first[b]:int(regions.mid_last[b])])
                         for h in range(view.num_kv_heads)] for b in range(view.keys.shape[0])]
        self.compared: float | None = None

    def _index(self, points: Tensor) -> FaissIndex:
        faiss = import_faiss()
        count, dim = points.shape
        lists = min(self.lists or int(4 * max(count, 1) ** 0.5), max(count // 4, 1))
        text = SHORT.get(self.factory.lower(), self.factory).format(lists=lists, links=self.links)
        graph = text.startswith("HNSW") and "," not in text
        bound = float(points.float().square().sum(1).max()) if graph and count else 0.0 if graph else None
        try:
            index = faiss.index_factory(dim + graph, text, faiss.METRIC_L2 if graph else faiss.METRIC_INNER_PRODUCT)
            if (inverted := faiss.try_extract_index_ivf(index)) is not None:
                inverted.cp.min_points_per_centroid = 1  # it warns of lists as short as these are meant to be
            made = FaissIndex(index, bound)
            if self.resources is not None and self.factory.lower() in ON_GPU:
                made = made.moved(points.device, self.resources)
            if not made.index.is_trained:
                made.index.train(made._points(points))
        except (RuntimeError, TypeError) as error:
            raise SparseKVError(f"Faiss refused the index {text!r} for {count} keys of dimension {dim}: "
                                f"{str(error).splitlines()[-1]}") from error
        made.add(points)
        return made

    def extend(self, view: LayerView, old: Regions) -> None:
        """Add the keys that joined; an index shared with a fork is copied first, and leaves a GPU where lists become
        longer than one gives."""
        grown, fits = [], self.widest <= GPU_LONGEST
        # the first token of a mid region that was empty is known now
        self.first = [first if row[0].ntotal else int(view.regions.mid_first[b])
                      for b, (first, row) in enumerate(zip(self.first, self.indexes, strict=True))]
        for b, row in enumerate(self.indexes):
            start = self.first[b] + row[0].ntotal
            keys = view.keys[b, :, start:int(view.regions.mid_last[b])]
            copies = [index.clone(on_gpu=fits) for index in row]
            for index, points in zip(copies, keys, strict=True):
                index.add(points)
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
        elif hasattr(core := import_faiss().try_extract_index_ivf(index) or index, "nprobe"):
            wanted = self.nprobe or -(-PROBED * k * core.nlist // max(1, index.ntotal))
            core.nprobe = min(max(1, wanted), core.nlist)

    def select(self, view: LayerView, queries: Queries) -> Selection:
        counters = [getattr(import_faiss().cvar, name) for name in ("indexIVF_stats", "hnsw_stats")]
        for counter in counters:
            counter.reset()
        batch, heads_q, count, dim = queries.rot.shape
        k = self.budget.tolist()
        width, group = self.widest, view.group
        where = next((index.device for row in self.indexes for index in row), torch.device("cpu"))
        tokens = torch.full((batch, count, heads_q, width), -1, device=where)
        scores = torch.full(tokens.shape, float("-inf"), device=where)
        q = queries.rot.transpose(1, 2).to(where)
        for b, row in enumerate(self.indexes):
            own = min(k[b], row[0].ntotal)
            if own == 0:
                continue
            for h, index in enumerate(row):
                self._tune(index.index, own)
                heads = slice(h * group, (h + 1) * group)
                found, ids = index.search(q[b, :, heads].reshape(-1, dim), own)
                tokens[b, :, heads, :own] = torch.where(ids < 0, -1, ids + self.first[b]).view(count, group, own)
                scores[b, :, heads, :own] = found.masked_fill(ids < 0, float("-inf")).view(count, group, own)
        self.compared = sum(counter.ndis for counter in counters) / (batch * count) or None
        listed = tokens.flatten(0, 1)
        if not self.per_query_head and group > 1:
            listed = join_lists(listed, scores.flatten(0, 1), view.num_kv_heads, width)
            # a group's list may be longer than a head's
            paid = torch.tensor(k, device=where).repeat_interleave(count)[:, None, None]
            listed = torch.where(torch.arange(listed.shape[-1], device=where) < paid, listed, -1)
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


def gpu_resources(device: torch.device, longest: int) -> Any:
    """Faiss's resources of a GPU, for an index of keys there that gives lists of up to `longest`; None where the keys
    lie elsewhere, the package has no GPU support, or a GPU index gives no lists as long: the index is then in CPU
    memory."""
    faiss = import_faiss()
    if device.type != "cuda" or longest > GPU_LONGEST or not hasattr(faiss, "StandardGpuResources"):
        return None
    return _resources()


@functools.cache
def _resources() -> Any:
    """Return the resources that all indices of the process share: each would reserve memory of its own."""
    return import_faiss().StandardGpuResources()


def import_faiss() -> Any:
    """faiss, taking tensors, or an error that says which of the two packages to install."""
    try:
        import faiss
        import faiss.contrib.torch_utils
    except ImportError as error:
        raise SparseKVError("selector faiss needs faiss, which is not installed: run `pip install 'sparsekv[cpu]'` (or "
                            "'sparsekv[gpu]' on a CUDA machine; the two exclude each other)") from error
    return faiss
