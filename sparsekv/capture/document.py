"""One window through the model: what the tap shows is sampled, freed of RoPE and sent to the shards as it comes."""

from __future__ import annotations

import shutil
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparsekv.capture.config import DTYPES, CaptureConfig, num_queries, sampled_keys, sampled_queries
from sparsekv.capture.statistics import top_keys
from sparsekv.capture.tap import AttentionCall, StopForward
from sparsekv.capture.transfer import Transfer
from sparsekv.core.rope import LayerRope, inverse, rotate
from sparsekv.corpus import Window
from sparsekv.errors import SparseKVError
from sparsekv.kernels import query_statistics
from sparsekv.store.place import Place, encode
from sparsekv.store.shard import ShardWriter
from sparsekv.store.store import STATISTICS, document_name, layer_name

PIECE_BYTES = 1 << 25


@dataclass(frozen=True)
class Plan:
    """What is stored of every document: layers, how each rotates, and the KV heads with their query heads."""

    config: CaptureConfig
    layers: list[int]
    ropes: dict[int, LayerRope]
    kv_heads: list[int]
    group: int

    @property
    def query_heads(self) -> list[int]:
        return [h * self.group + g for h in self.kv_heads for g in range(self.group)]


@dataclass
class _Layer:
    """One layer of one document, under way."""

    scale: float
    shard: ShardWriter
    rotary: int
    written: int = 0
    queries: list[Tensor] = field(default_factory=list)
    jobs: list[Future[Any]] = field(default_factory=list)


@dataclass
class _Chunk:
    """What all layers of a chunk share on one device: which keys and queries of it are taken (None: all keys)."""

    keys: Tensor | None
    queries: Tensor


class DocumentCapture:
    """Listens to the tap for one window. The shards grow under a temporary name; `finish` makes them a document."""

    def __init__(self, plan: Plan, window: Window, index: int, place: Place, transfer: Transfer):
        self.plan, self.window, self.index, self.place, self.transfer = plan, window, index, place, transfer
        config = plan.config
        self.length = config.context_length
        self.dtype = DTYPES[config.storage_dtype]
        self.key_positions, self.query_positions = sampled_keys(config, index), sampled_queries(config, index)
        self.folder = place.scratch(document_name(index))
        self._layers: dict[int, _Layer] = {}
        self._wanted, self._last = set(plan.layers), max(plan.layers)
        self._groups: list[list[tuple[Tensor, Tensor]]] = []
        self._tables: dict[tuple[torch.device, int, LayerRope], tuple[int, Tensor, Tensor, Tensor]] = {}
        self._at_queries: dict[tuple[int, torch.device], list[tuple[Tensor, Tensor]]] = {}
        self._chunk: dict[torch.device, _Chunk] = {}
        self._positions: dict[torch.device, Tensor] = {}
        self._first = -1

    def __call__(self, call: AttentionCall) -> None:
        if call.layer in self._wanted:
            self._take(call)
        if call.layer == self._last:
            raise StopForward

    def _take(self, call: AttentionCall) -> None:
        rope, device = self.plan.ropes[call.layer], call.key.device
        q_len, k_len = call.query.shape[2], call.key.shape[2]
        first = k_len - q_len
        if first != self._first:
            self._first = first
            self._tables.clear()
            self._chunk.clear()
        chunk = self._chunk.get(device) or self._start_chunk(first, k_len, device)
        group, cos, sin = self._full_tables(call, rope, chunk)
        layer = self._layers.get(call.layer) or self._start_layer(call, group)
        heads = self.plan.kv_heads
        fresh, values = (self._heads(x[0], heads)[:, first:] for x in (call.key, call.value))
        if chunk.keys is not None:
            fresh, values, cos, sin = fresh[:, chunk.keys], values[:, chunk.keys], cos[chunk.keys], sin[chunk.keys]
        piece = max(1, PIECE_BYTES // (2 * len(heads) * fresh.shape[2] * self.dtype.itemsize))
        for start in range(0, fresh.shape[1], piece):
            part = slice(start, start + piece)
            keys = rotate(fresh[:, part], cos[part], sin[part], rope.layout).to(self.dtype).contiguous()
            layer.jobs.append(self.transfer.send([keys, values[:, part].to(self.dtype).contiguous()],
                                                 partial(_write_keys, layer.shard, layer.written)))
            layer.written += keys.shape[1]
        self._raise_failures(layer)
        layer.queries.append(self._heads(call.query[0], self.plan.query_heads)[:, chunk.queries])
        if k_len == self.length:
            self._finish_layer(call, layer, rope, group)

    def _heads(self, x: Tensor, heads: list[int]) -> Tensor:
        return x if len(heads) == x.shape[0] else x[heads]

    def _start_chunk(self, first: int, last: int, device: torch.device) -> _Chunk:
        """Places within the chunk of the sampled keys and queries."""
        keys, queries = (p[(p >= first) & (p < last)] - first for p in (self.key_positions, self.query_positions))
        chunk = _Chunk(None if len(keys) == last - first else keys.to(device), queries.to(device))
        self._chunk[device] = chunk
        return chunk

    def _start_layer(self, call: AttentionCall, group: int) -> _Layer:
        heads_kv, heads_q, dim = len(self.plan.kv_heads), len(self.plan.query_heads), call.key.shape[-1]
        count = num_queries(self.plan.config)
        kept = (heads_kv, len(self.key_positions), dim)
        shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "keys_pre": (self.dtype, kept), "values": (self.dtype, kept),
            "queries_pre": (self.dtype, (heads_q, count, dim)), "query_positions": (torch.int32, (heads_q, count)),
            **{name: (dtype, (heads_q, count)) for name, dtype in STATISTICS.items()}}
        if self.plan.config.top_keys:
            top = (heads_q, count, self.plan.config.top_keys)
            shapes |= {"top_positions": (torch.int32, top), "top_scores": (torch.float32, top)}
        shard = ShardWriter(self.folder / layer_name(call.layer), shapes)
        layer = _Layer(call.scale, shard, group)
        self._layers[call.layer] = layer
        return layer

    def _full_tables(self, call: AttentionCall, rope: LayerRope, chunk: _Chunk) -> tuple[int, Tensor, Tensor]:
        """Group, and this chunk's tables for undoing RoPE, full width. Layers whose tables are equal share a group in
        the store.

        The model's own table is kept alive beside its copy, so that its address stands for its content."""
        if call.cos is None or call.sin is None:
            raise SparseKVError(f"layer {call.layer} gave no rotary tables in this forward pass")
        device = call.key.device
        known = self._tables.get((device, call.cos.data_ptr(), rope))
        if known is None:
            cos, sin = rope.table(call.cos), rope.table(call.sin)
            group = self._find_group(cos.cpu(), sin.cpu())
            cos, sin = inverse(cos, sin)
            self._tables[(device, call.cos.data_ptr(), rope)] = known = (group, cos, sin, call.cos)
            at = self._at_queries.setdefault((group, device), [])
            at.append((cos[chunk.queries], sin[chunk.queries]))
        return known[:3]

    def _find_group(self, cos: Tensor, sin: Tensor) -> int:
        """The group whose table of this chunk this is; else the group that waits for its table of this chunk."""
        ends = [sum(len(c) for c, _ in parts) for parts in self._groups]
        for group, end in enumerate(ends):
            there = self._groups[group][-1]
            if end == self._first + len(cos) and torch.equal(there[0], cos) and torch.equal(there[1], sin):
                return group
        for group, end in enumerate(ends):
            if self._first > 0 and end == self._first:
                self._groups[group].append((cos, sin))
                return group
        self._groups.append([(cos, sin)])
        return len(self._groups) - 1

    def _finish_layer(self, call: AttentionCall, layer: _Layer, rope: LayerRope, group: int) -> None:
        """Every key is there: statistics of the sampled queries; they, queries and positions go to the shard."""
        config, device = self.plan.config, call.query.device
        queries = torch.cat(layer.queries, dim=1)
        layer.queries.clear()
        positions = self._positions.get(device)
        if positions is None:
            positions = self._positions[device] = self.query_positions.to(device)
        keys = self._heads(call.key[0], self.plan.kv_heads)
        statistics = query_statistics(queries, keys, positions, scale=call.scale, sink_size=config.sink_size,
                                      window_size=config.window_size)
        top: tuple[Tensor, ...] = () if not config.top_keys else top_keys(
            queries, keys, positions, count=config.top_keys, scale=call.scale, sink_size=config.sink_size)
        tables = self._at_queries[(group, device)]
        cos, sin = (torch.cat([t[i] for t in tables]) for i in (0, 1))
        queries = rotate(queries, cos, sin, rope.layout).to(self.dtype)
        positions = positions.to(torch.int32).expand(queries.shape[0], -1)
        if config.query_sampling == "long_range":
            far = (positions - statistics["top1_position"]) > config.long_range
            order = torch.argsort(far.to(torch.int8), dim=1, descending=True, stable=True)
            chosen = order[:, : config.queries_per_document].sort(dim=1).values
            queries = queries.gather(1, chosen[..., None].expand(-1, -1, queries.shape[-1]))
            statistics = {name: s.gather(1, chosen) for name, s in statistics.items()}
            positions = positions.gather(1, chosen)
            top = tuple(t.gather(1, chosen[..., None].expand(-1, -1, config.top_keys)) for t in top)
        # all are of four bytes: one copy, and one piece of the file
        numbers = torch.stack([positions, *(statistics[name].view(torch.int32) for name in STATISTICS)])
        jobs, shard = list(layer.jobs), layer.shard

        def write(host: list[Tensor]) -> None:
            shard.write("queries_pre", host[0])
            shard.write_side_by_side(["query_positions", *STATISTICS], host[1])
            for name, tensor in zip(("top_positions", "top_scores"), host[2:], strict=False):
                shard.write(name, tensor)

        def close() -> dict[str, Any]:
            for job in jobs:
                job.result()
            return shard.close()

        layer.jobs.append(self.transfer.send([queries.contiguous(), numbers, *top], write, close))

    def _raise_failures(self, layer: _Layer) -> None:
        for job in layer.jobs:
            if job.done():
                job.result()

    def finish(self) -> None:
        """Wait for the shards, write the rotary tables, and rename the document into place."""
        shards = {layer_name(number): layer.jobs[-1].result() for number, layer in self._layers.items()}
        tensors: dict[str, Tensor] = {"tokens": torch.tensor(self.window.tokens, dtype=torch.int32)}
        if len(self.key_positions) < self.length:
            tensors["key_positions"] = self.key_positions.to(torch.int32)
        for group, parts in enumerate(self._groups):
            tensors[f"cos.{group}"], tensors[f"sin.{group}"] = (torch.cat([p[i] for p in parts]) for i in (0, 1))
        rotary = ShardWriter(self.folder / "rotary.safetensors", {k: (t.dtype, tuple(t.shape))
                                                                  for k, t in tensors.items()})
        for name, tensor in tensors.items():
            rotary.write(name, tensor)
        name = document_name(self.index)
        shards["rotary.safetensors"] = rotary.close()
        about = {
            "document": {"id": self.index, "sources": sorted(set(self.window.sources)), "sha256": self.window.sha256,
                         "num_tokens": len(self.window.tokens)},
            "layers": {str(number): {"layout": self.plan.ropes[number].layout, "rotary": layer.rotary,
                                     "scale": layer.scale} for number, layer in sorted(self._layers.items())},
            "shards": {f"{name}/{file}": entry for file, entry in sorted(shards.items())},
        }
        (self.folder / "document.json").write_text(encode(about), encoding="utf-8")
        self.place.commit(self.folder, name)

    def abandon(self) -> None:
        """Drop what was written of an unfinished document."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _write_keys(shard: ShardWriter, at: int, host: list[Tensor]) -> None:
    shard.write("keys_pre", host[0], at, axis=1)
    shard.write("values", host[1], at, axis=1)
