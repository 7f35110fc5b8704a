"""What the layers of a served step share: its rows by seat, what is left to vLLM's own attention, and the layers'
indices, made once the pages are there."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsekv.core.index import Untrained
from sparsekv.core.rope import RopeTable
from sparsekv.runtime.break_even import dense_rule
from sparsekv.runtime.vllm.checks import check_pages
from sparsekv.runtime.vllm.graphs import TURN, capture_twice
from sparsekv.runtime.vllm.index import LayerIndex, Room, warm
from sparsekv.runtime.vllm.own import OwnIndex
from sparsekv.runtime.vllm.paged import DecodeMetadata, Scales, UncodedSlots
from sparsekv.runtime.vllm.parts import kept_beside, layer_number, part_of, plan_for, seats_of
from sparsekv.runtime.vllm.prompts import Piece, hold, pieces_of, warm_blocks, without
from sparsekv.runtime.vllm.seats import SeatRule, Seats, StepRows, rows_of
from sparsekv.runtime.vllm.stock import (
    AttentionCGSupport,
    AttentionMetadataBuilder,
    StockBuilder,
    full_graphs,
    graph_manager,
    rotary_modules,
)
from sparsekv.util.errors import SparseKVError


@dataclass
class SparseMetadata:
    """full: the stock backend's metadata. Of a batch in which some rows may be sparse also decode, and block_table
    `[R, blocks]`; beside a prompt's chunk these are of the R rows that decode, whose queries are `tokens [R]`. pieces:
    of prompts that are read sparsely. others: the stock backend's metadata of what is left to it, in which rows that
    decode sparsely have one token, and the requests of pieces none."""

    full: Any
    decode: DecodeMetadata | None = None
    block_table: Tensor | None = None
    tokens: Tensor | None = None
    others: Any = None
    pieces: Sequence[Piece] = ()


class ServedLayer:
    """A layer that decodes sparsely: what its index is made of, once the pages are there."""

    def __init__(self, builder: SparseBuilder, layer_idx: int, layer: Any):
        self.builder, self.layer_idx, self.layer, self.impl = builder, layer_idx, layer, layer.impl
        self.index: LayerIndex | None = None
        self.pages: tuple[int, torch.Size] | None = None
        self.selector, self.maps = part_of(builder.vllm_config, builder.plan, layer_idx, self.impl)

    def ready(self) -> LayerIndex | None:
        """The index, if there are pages. Before a step, not in it: a graph that is being captured must not make one."""
        if self.index is None:
            pool = self.layer.kv_cache
            pool = pool[0] if isinstance(pool, list | tuple) else pool
            if pool.numel():
                self.at(pool)
        return self.index

    def at(self, pool: Tensor) -> LayerIndex:
        """The index over these pages; another one where the engine has made new pages."""
        if self.index is None or self.pages != (pool.data_ptr(), pool.shape):
            check_pages(pool.shape, self.impl.num_kv_heads, self.impl.head_size, self.builder.seats.rule.page)
            uncoded = self.builder.make_room(pool, again=self.index is not None)
            kind = OwnIndex if isinstance(self.selector.trained, Untrained) else LayerIndex
            self.index = kind(self.selector, pool, self.builder.room, uncoded, scale=self.impl.scale,
                              rope=self.builder.rope, maps=self.maps, **self._rounded())
            self.pages = (pool.data_ptr(), pool.shape)
        return self.index

    def _rounded(self) -> dict[str, Any]:
        """Return what an index must know of a float8 cache."""
        if not self.impl.kv_cache_dtype.startswith("fp8"):
            return {}
        scales = self.layer._k_scale, self.layer._v_scale
        if any(x.numel() != 1 for x in scales):
            raise SparseKVError(f"layer {self.layer_idx} has {scales[0].numel()} scales of keys in its cache; expected "
                                "one; use --kv-cache-dtype auto")
        return {"kind": self.builder.vllm_config.model_config.dtype, "scales": Scales(*(float(x) for x in scales))}


class SparseBuilder(AttentionMetadataBuilder):
    """Metadata of the layers of one group of pages. Seats and their indices are its own; indices grow before a step."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # two, since what a builder gave last may lie in buffers of its own
        self.full, self.others = (StockBuilder(kv_cache_spec, layer_names, vllm_config, device) for _ in range(2))
        self.plan = plan_for(vllm_config)
        layers = vllm_config.compilation_config.static_forward_context
        self.sparse_layers: list[ServedLayer] = []
        # chunks of a local attention come as requests of their own, whose lengths on the CPU are the whole requests'
        local = getattr(kv_cache_spec, "attention_chunk_size", None) is not None
        for name in layer_names:
            impl = layers[name].impl
            impl.served = None
            if impl.may_be_sparse and not local and self.plan.layer(layer_number(name)) is not None:
                impl.served = ServedLayer(self, layer_number(name), layers[name])
                self.sparse_layers.append(impl.served)
        if not self.sparse_layers:
            return
        serving, longest = self.plan.serving, vllm_config.model_config.max_model_len
        centroids, size = self.sparse_layers[0].selector.trained.centroids, kv_cache_spec.dtype.itemsize
        token = 2 * centroids.shape[0] * centroids.shape[2] * size
        rule = dense_rule(serving.dense_below, token_bytes=token, device=device.type)
        log = logging.getLogger("vllm.sparsekv")
        log.info("requests decode sparsely from %d tokens on, %d of a batch together: %s", rule.shortest, rule.together,
                 rule.why)
        if rule.shortest > longest:
            log.warning("sparsekv: no request decodes sparsely: requests have at most %d tokens (--max-model-len) and "
                        "do from %d on; set dense_below in the settings file", longest, rule.shortest)
        seat_rule = SeatRule(self.plan.sink_size, self.plan.window_size, serving.decode_window, rule.shortest,
                        kv_cache_spec.block_size)
        self.kept = kept_beside(vllm_config, self.plan)
        self.room = Room(seats_of(vllm_config, self.plan, self.kept), longest)
        graphs = vllm_config.compilation_config.max_cudagraph_capture_size or 0
        self.seats = Seats(self.room.seats, seat_rule, longest, device,
                           max(vllm_config.scheduler_config.max_num_seqs, graphs))
        self.rope = rope_of() if any(h.selector.trained.key_space == "pre" for h in self.sparse_layers) else None
        self.uncoded: UncodedSlots | None = None
        self.warm = self.held = False
        # a full graph that was captured with sparse steps needs to know which rows are sparse, in every batch
        mode = vllm_config.compilation_config.cudagraph_mode
        self.eager = mode is None or not mode.has_full_cudagraphs()
        TURN.lowest(rule.shortest, rule.together)
        manager = graph_manager()
        if manager is not None:
            capture_twice(manager, full_graphs())
        elif device.type == "cuda" and not self.eager:
            logging.getLogger("vllm.sparsekv").info("this vLLM keeps its full CUDA graphs elsewhere: batches of short "
                                                    "requests replay graphs with sparse steps")

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> SparseMetadata:
        common, reads = common_attn_metadata, self.plan.reads
        pieces = pieces_of(common, reads, self.seats.rule.page) if self.sparse_layers and reads is not None else []
        if pieces and not self.held:
            hold(self.kept.prompts, self.device)
            self.held = True
        return self._build(common, serves=True, pieces=pieces)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> SparseMetadata:
        return self._build(common_attn_metadata, serves=False)

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        return False

    def make_room(self, pool: Tensor, *, again: bool) -> UncodedSlots:
        """Make what the layers' indices share, once. Refuses what the device has no memory for: raises SparseKVError
        with the sizes. again: the engine has made new pages, in which nothing is."""
        slots = pool.shape[0] * pool.shape[2]
        if self.uncoded is not None and self.uncoded.at.shape[0] == slots + 1:
            if again:
                self.uncoded.renew()
                self.seats.leave()
            return self.uncoded
        self.seats.uncoded = self.uncoded = UncodedSlots(slots, pool.device)
        self.seats.leave()
        if pool.device.type == "cuda":
            self._check_memory(pool, slots)
        return self.uncoded

    def _check_memory(self, pool: Tensor, slots: int) -> None:
        """Check the memory beside the pages, which vLLM has not counted where their number was given."""
        free, total = torch.cuda.mem_get_info(pool.device)
        wanted, gib = self.kept.of(slots, self.room.seats), 2**30
        if wanted > free:
            raise SparseKVError(
                f"codes of {slots} tokens take {self.kept.slot * slots / gib:.2f} GiB and indices and summaries of "
                f"{self.room.seats} requests with the feature maps {self.kept.of(0, self.room.seats) / gib:.2f} GiB"
                f"{self.kept.of_prompts} beside the cache, and {free / gib:.2f} GiB are left; lower "
                f"--gpu-memory-utilization by {(wanted - free) / total + 0.01:.2f}, fewer pages if their number is "
                "given, or requests in the settings file")

    def _build(self, common: Any, *, serves: bool, pieces: Sequence[Piece] = ()) -> SparseMetadata:
        if not self.sparse_layers or (not serves and TURN.capturing):
            return self._full(common)
        batch = StepRows(common.seq_lens, common.query_start_loc, common.block_table_tensor, common.slot_mapping,
                         getattr(common, "is_prefilling", None))
        indices = [index for h in self.sparse_layers if (index := h.ready()) is not None]
        if indices and not self.warm:
            warm(indices, self.seats.rule.sink_size)
            if self.plan.reads is not None:
                warm_blocks(indices[0], self.sparse_layers[0].impl.num_heads, self.plan.reads)
            self.warm = True
        new, decode = batch.slot_mapping if serves else batch.slot_mapping[:0], common.max_query_len == 1
        rows = None if decode else decoding_rows(common)
        lengths = lengths_of(common)
        lengths = lengths if rows is None or not rows.numel() else lengths[rows]
        short = serves and TURN.take(lengths) and (self.eager or TURN.captured or not decode)
        if self.seats.empty(short):
            if self.uncoded is not None:
                self.uncoded.note(new, decode=decode)
            return self._full(common, pieces)
        matches = self.seats.follow(batch, new=new, decode=decode)
        if short or (rows is not None and not (serves and rows.numel())):
            self.seats.other_batch()
            return self._full(common, pieces)
        if serves and len(indices) == len(self.sparse_layers):
            matches = self.seats.serve(batch, matches, indices)
        if rows is not None:
            self.seats.other_batch()
            batch, matches, tokens = rows_of(batch, matches, rows.to(batch.seq_lens.device, non_blocking=True))
        metadata = self.seats.metadata(batch, matches)
        if not metadata.sparse.is_cuda and not metadata.sparse.any():
            return self._full(common, pieces)
        if rows is None:
            return SparseMetadata(self.full.build(0, common), metadata, batch.block_table)
        lengths = common.seq_lens.index_copy(
            0, rows.to(batch.seq_lens.device, non_blocking=True), batch.seq_lens.masked_fill(metadata.sparse, 1))
        return SparseMetadata(self.full.build(0, common), metadata._replace(rest=torch.zeros_like(metadata.rest)),
                              batch.block_table, tokens, self._others(common, lengths, pieces), pieces)

    def _full(self, common: Any, pieces: Sequence[Piece] = ()) -> SparseMetadata:
        others = self._others(common, common.seq_lens, pieces) if pieces else None
        return SparseMetadata(self.full.build(0, common), others=others, pieces=pieces)

    def _others(self, common: Any, lengths: Tensor, pieces: Sequence[Piece]) -> Any:
        """The stock backend's metadata of these lengths, without the requests of pieces."""
        others = copy.copy(common)
        others.seq_lens = without(lengths, pieces)
        return self.others.build(0, others)


def decoding_rows(common: Any) -> Tensor:
    """The requests of a step that decode beside a prompt, on the CPU; none where it does not say whose prompt goes
    on."""
    prefilling, counts = getattr(common, "is_prefilling", None), common.query_start_loc_cpu[:common.num_reqs + 1].diff()
    if prefilling is None:
        return torch.zeros(0, dtype=torch.int64)
    return ((counts == 1) & ~prefilling[:common.num_reqs]).nonzero()[:, 0]


def lengths_of(common: Any) -> Tensor:
    """Lengths of a step's requests on the CPU, at most."""
    known = getattr(common, "seq_lens_cpu_upper_bound", None)
    if known is not None:
        return known[:common.num_reqs]
    return torch.full((common.num_reqs,), common.max_seq_len)


def rope_of() -> RopeTable:
    """The rotary tables of the model that was loaded. Raises SparseKVError where there is not exactly one, and
    where a token's place does not say its row."""
    modules = [m for m in rotary_modules() if getattr(m, "cos_sin_cache", None) is not None]
    if len(modules) != 1:
        raise SparseKVError(f"this model has {len(modules)} rotary tables and the router clusters keys without RoPE; "
                            "expected one table; train the router with --key-space rot")
    if getattr(modules[0], "mrope_section", None):
        raise SparseKVError("this model rotates images in three dimensions (M-RoPE) and the router clusters keys "
                            "without RoPE, which a token's place does not undo; train the router with --key-space rot")
    tables = modules[0].cos_sin_cache.float().chunk(2, dim=-1)
    if modules[0].is_neox_style:
        return RopeTable("half", *(torch.cat([x, x], -1)[None] for x in tables))
    return RopeTable("interleaved", *(x.repeat_interleave(2, -1)[None] for x in tables))
