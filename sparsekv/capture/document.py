"""One window through the model: what the tap shows is sampled, freed of RoPE and sent to the shards as it comes."""

from __future__ import annotations

import shutil
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparsekv.capture.config import CaptureConfig, query_positions
from sparsekv.capture.corpus import TokenWindow
from sparsekv.capture.store.manifest import sealed
from sparsekv.capture.store.place import Place, encode
from sparsekv.capture.store.shard import ShardWriter
from sparsekv.capture.store.store import DTYPE, STATISTICS, document_name, layer_name
from sparsekv.capture.tap import AttentionCall, StopForward
from sparsekv.capture.transfer import Transfer, upload
from sparsekv.core.rope import LayerRope, inverse, rotate
from sparsekv.kernels import query_statistics
from sparsekv.util.errors import SparseKVError

PIECE_BYTES = 1 << 25


@dataclass
class _Layer:
    """One layer of one document, under way."""

    scale: float
    shard: ShardWriter
    table: int
    queries: list[Tensor] = field(default_factory=list)
    unsound: list[Tensor] = field(default_factory=list)
    """Of every chunk the heads with NaN or infinities, `[Hq + 2 Hkv]` bool: queries, keys, values."""
    jobs: list[Future[Any]] = field(default_factory=list)


class DocumentCapture:
    """Listens to the tap for one window and stores the layers in `ropes`. The shards grow under a temporary name;
    `finish` makes them a document, and `seal` has a thread do that."""

    def __init__(
        self, config: CaptureConfig, ropes: dict[int, LayerRope], window: TokenWindow, index: int, place: Place,
        transfer: Transfer, origin: dict[str, str] | None = None,
    ):
        """origin: what every shard and the document say of the run: its options and its model."""
        self.origin = origin or {}
        self.config, self.ropes, self.window, self.index = config, ropes, window, index
        self.place, self.transfer = place, transfer
        self.query_positions = query_positions(config, index)
        self.folder = place.scratch(document_name(index))
        self._layers: dict[int, _Layer] = {}
        self._last = max(ropes)
        self._rotary: list[tuple[int, Future[list[Tensor]]]] = []
        self._tables: dict[tuple[torch.device, int, LayerRope], tuple[int, Tensor, Tensor, Tensor]] = {}
        self._positions: dict[torch.device, Tensor] = {}
        self._first = -1
        self._sealed: Future[None] | None = None

    def __call__(self, call: AttentionCall) -> None:
        if call.layer in self.ropes:
            self._take(call)
        if call.layer == self._last:
            raise StopForward

    def _take(self, call: AttentionCall) -> None:
        rope, device = self.ropes[call.layer], call.key.device
        last = call.key.shape[2]
        first = last - call.query.shape[2]
        if first != self._first:
            self._first = first
            self._tables.clear()
        table, cos, sin = self._full_tables(call, rope)
        layer = self._layers.get(call.layer) or self._start_layer(call, table)
        if device not in self._positions:
            self._positions[device] = upload(self.query_positions, device)
        positions = self._positions[device]
        start, stop = torch.searchsorted(self.query_positions, torch.tensor([first, last])).tolist()
        chosen = positions[start:stop] - first
        queries = call.query[0][:, chosen]
        layer.queries.append(queries)
        queries_pre = rotate(queries, cos[chosen], sin[chosen], rope.layout).to(DTYPE).contiguous()
        fresh, values = (x[0, :, first:] for x in (call.key, call.value))
        layer.unsound.append(torch.cat([~x.isfinite().flatten(1).all(1) for x in (queries, fresh, values)]))
        piece = max(1, PIECE_BYTES // (2 * fresh.shape[0] * fresh.shape[2] * DTYPE.itemsize))
        for at in range(0, last - first, piece):
            part = slice(at, at + piece)
            tensors = [rotate(fresh[:, part], cos[part], sin[part], rope.layout).to(DTYPE).contiguous(),
                       values[:, part].to(DTYPE).contiguous(), *([queries_pre] if at == 0 else [])]
            layer.jobs.append(self.transfer.send(tensors, partial(_write, layer.shard, (first + at, start))))
        for job in layer.jobs:
            if job.done():
                job.result()  # an error of the disk stops the run here
        if last == self.config.context_length:
            self._finish_layer(call, layer, positions)

    def _start_layer(self, call: AttentionCall, table: int) -> _Layer:
        (heads_q, dim), heads_kv = (call.query.shape[i] for i in (1, 3)), call.key.shape[1]
        count, kept = len(self.query_positions), (heads_kv, self.config.context_length, dim)
        shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "keys_pre": (DTYPE, kept), "values": (DTYPE, kept), "queries_pre": (DTYPE, (heads_q, count, dim)),
            "query_positions": (torch.int32, (heads_q, count)),
            **{name: (dtype, (heads_q, count)) for name, dtype in STATISTICS.items()}}
        layer = _Layer(call.scale, ShardWriter(self.folder / layer_name(call.layer), shapes, {
            "document": self.window.sha256, "layer": str(call.layer), **self.origin}), table)
        self._layers[call.layer] = layer
        return layer

    def _full_tables(self, call: AttentionCall, rope: LayerRope) -> tuple[int, Tensor, Tensor]:
        """Number of this chunk's tables among `_rotary`, and the tables for undoing RoPE, full width.

        The model's own table is kept alive beside its copy, so that its address stands for its content."""
        if call.cos is None or call.sin is None:
            raise SparseKVError(f"layer {call.layer} gave no rotary tables in this forward pass")
        key = (call.key.device, call.cos.data_ptr(), rope)
        if key not in self._tables:
            cos, sin = rope.table(call.cos).contiguous(), rope.table(call.sin).contiguous()
            self._rotary.append((self._first, self.transfer.send([cos, sin], lambda host: [t.clone() for t in host])))
            self._tables[key] = (len(self._rotary) - 1, *inverse(cos, sin), call.cos)
        return self._tables[key][:3]

    def _groups(self) -> tuple[list[int], list[list[tuple[Tensor, Tensor]]]]:
        """The group of every table, and the tables of a group, chunk by chunk. Layers whose tables are equal share a
        group in the store: a table belongs to the group that has the same of its chunk, else to the one that waits for
        its table of that chunk."""
        numbers: list[int] = []
        groups: list[list[tuple[Tensor, Tensor]]] = []
        for first, job in self._rotary:
            cos, sin = job.result()
            ends = [sum(len(c) for c, _ in parts) for parts in groups]
            same = [g for g, end in enumerate(ends) if end == first + len(cos)
                    and torch.equal(groups[g][-1][0], cos) and torch.equal(groups[g][-1][1], sin)]
            waiting = [g for g, end in enumerate(ends) if end == first > 0]
            if not same:
                if not waiting:
                    waiting = [len(groups)]
                    groups.append([])
                groups[waiting[0]].append((cos, sin))
            numbers.append((same or waiting)[0])
        return numbers, groups

    def _finish_layer(self, call: AttentionCall, layer: _Layer, positions: Tensor) -> None:
        """Every key is there: the sampled queries' statistics and positions go to the shard."""
        queries = torch.cat(layer.queries, dim=1)
        layer.queries.clear()
        statistics = query_statistics(queries, call.key[0], positions, scale=call.scale,
                                      sink_size=self.config.sink_size, window_size=self.config.window_size)
        # all are of four bytes: one copy, and one piece of the file
        numbers = torch.stack([positions.to(torch.int32).expand(queries.shape[0], -1),
                               *(statistics[name].view(torch.int32) for name in STATISTICS)])
        layer.jobs.append(self.transfer.send([torch.stack(layer.unsound).any(0)], partial(
            _check_sound, call.layer, queries.shape[0])))
        jobs, shard = list(layer.jobs), layer.shard

        def close() -> dict[str, Any]:
            for job in jobs:
                job.result()
            return shard.close()

        layer.jobs.append(self.transfer.send(
            [numbers], lambda host: shard.write_side_by_side(["query_positions", *STATISTICS], host[0]), close))

    def seal(self) -> None:
        """Every layer was seen: a thread finishes the document."""
        self._sealed = self.transfer.submit(self.finish)

    def wait(self) -> None:
        """For that thread."""
        assert self._sealed is not None
        self._sealed.result()

    def finish(self) -> None:
        """Wait for the shards, write the rotary tables, and rename the document into place."""
        shards = {layer_name(number): layer.jobs[-1].result() for number, layer in self._layers.items()}
        tensors: dict[str, Tensor] = {"tokens": torch.tensor(self.window.tokens, dtype=torch.int32)}
        numbers, groups = self._groups()
        for group, parts in enumerate(groups):
            tensors[f"cos.{group}"], tensors[f"sin.{group}"] = (torch.cat([p[i] for p in parts]) for i in (0, 1))
        rotary = ShardWriter(self.folder / "rotary.safetensors", {k: (t.dtype, tuple(t.shape))
                                                                  for k, t in tensors.items()},
                             {"document": self.window.sha256, **self.origin})
        for name, tensor in tensors.items():
            rotary.write(name, tensor)
        name = document_name(self.index)
        shards["rotary.safetensors"] = rotary.close()
        about = {
            "document": {"id": self.index, "sources": sorted(set(self.window.sources)), "sha256": self.window.sha256,
                         "num_tokens": len(self.window.tokens)},
            "layers": {str(number): {"layout": self.ropes[number].layout, "rotary": numbers[layer.table],
                                     "scale": layer.scale} for number, layer in sorted(self._layers.items())},
            "shards": {f"{name}/{file}": entry for file, entry in sorted(shards.items())},
            **self.origin,
        }
        (self.folder / "document.json").write_text(encode(sealed(about)), encoding="utf-8")
        self.place.commit(self.folder, name)

    def abandon(self) -> None:
        """Drop what was written of an unfinished document."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _write(shard: ShardWriter, at: tuple[int, int], host: list[Tensor]) -> None:
    """Keys and values from token `at[0]` on and, where there are any, queries from `at[1]` on."""
    for name, start, tensor in zip(("keys_pre", "values", "queries_pre"), (at[0], at[0], at[1]), host, strict=False):
        shard.write(name, tensor, start, axis=1)


def _check_sound(layer: int, heads: int, host: list[Tensor]) -> None:
    """Raises SparseKVError for the first head with values that are no numbers; host: as `_Layer.unsound`."""
    found = host[0].nonzero().flatten().tolist()
    if found:
        head, of_queries = found[0], found[0] < heads
        groups = (len(host[0]) - heads) // 2
        kind = "query" if of_queries else "KV"
        raise SparseKVError(f"layer {layer} of the model has NaN or infinite values in {kind} "
                            f"head {head if of_queries else (head - heads) % groups}; its weights are damaged, or it "
                            "overflows: load it in bfloat16 or float32, or fetch it anew")
