"""The attention backend: vLLM's own for prompts and for short requests, sparse steps for the others. Batches of single
tokens run in vLLM's full CUDA graphs: what a step reads lies in buffers that stay. Beside a prompt's chunk vLLM's own
attention sees one token of the rows that decode sparsely, and their steps follow it. Where long prompts are read
sparsely it sees none of theirs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsekv.runtime.vllm.metadata import ServedLayer, SparseBuilder, SparseMetadata
from sparsekv.runtime.vllm.parts import counted, plan_for
from sparsekv.runtime.vllm.share import count_in
from sparsekv.runtime.vllm.stock import (
    AttentionType,
    StockBackend,
    StockImpl,
    check_hook,
    layouts,
    workers,
)
from sparsekv.util.errors import SparseKVError


class SparseImpl(StockImpl):
    """One layer: the stock attention, and where it may decode sparsely, sparse steps."""

    served: ServedLayer | None = None
    written = False
    """Whether keys have come to their codes."""

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None, sliding_window: int | None = None, kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None, attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None, **more: Any,
    ) -> None:
        from vllm.config import get_current_vllm_config

        check_hook()
        plan_for(get_current_vllm_config())
        for worker in workers():
            count_in(worker, counted)
        super().__init__(num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype,
                         logits_soft_cap, attn_type, kv_sharing_target_layer_name, **more)
        self.may_be_sparse = (attn_type == AttentionType.DECODER and kv_sharing_target_layer_name is None and not any(
            (alibi_slopes, sliding_window, logits_soft_cap, more.get("sinks") is not None)))

    def fused_rope_kvcache_supported(self) -> bool:
        return False

    def fused_qk_norm_rope_kvcache_supported(self) -> bool:
        return False

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor,
    ) -> None:
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        if self.served is not None and kv_cache.numel():
            count = slot_mapping.shape[0]
            self.served.at(kv_cache).pages.write(key[:count], slot_mapping)
            self.written = True

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: Any,
        output: Tensor, output_scale: Tensor | None = None, output_block_scale: Tensor | None = None,
    ) -> Tensor:
        batch: SparseMetadata | None = attn_metadata
        if self.served is None or batch is None or (batch.decode is None and not batch.pieces):
            return super().forward(layer, query, key, value, kv_cache, None if batch is None else batch.full, output,
                                   output_scale, output_block_scale)
        if not self.written:
            raise SparseKVError(f"keys of layer {self.served.layer_idx} were written past do_kv_cache_update, where "
                                "their codes are made; serve this model with vLLM's own attention")
        decode, index = batch.decode, self.served.at(kv_cache)
        if decode is not None and batch.tokens is None:
            assert batch.block_table is not None
            rows = decode.sparse.shape[0]
            index.step(unrounded(query[:rows], layer, output), decode, batch.block_table, output[:rows])
            return output
        super().forward(layer, query, key, value, kv_cache, batch.others, output, output_scale, output_block_scale)
        if decode is not None and batch.tokens is not None and batch.block_table is not None:
            q, dense = unrounded(rows_at(query, batch.tokens), layer, output), output[batch.tokens]
            sparse = index.step(q, decode, batch.block_table, torch.empty_like(q))
            output[batch.tokens] = torch.where(decode.sparse[:, None, None], sparse.view_as(dense), dense)
        for piece in batch.pieces:
            out, reads = output[piece.first:piece.last], self.served.builder.plan.reads
            assert reads is not None
            q = unrounded(query[piece.first:piece.last], layer, output)
            out.copy_(index.read(q, piece.slots, reads).reshape(out.shape))
        return output


class SparseBackend(StockBackend):
    """`--attention-backend CUSTOM`. Models may not write keys by themselves (0.33)."""

    supports_kv_cache_update_bypass = False

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type:
        return SparseImpl

    @staticmethod
    def get_builder_cls() -> type:
        return SparseBuilder

    @classmethod
    def get_required_kv_cache_layout(cls) -> str:
        return "NHD"

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        return layouts()

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER


def rows_at(q: Tensor, at: Tensor) -> Tensor:
    """Rows `at [n]` of q `[T, Hq, d]`. Float8 goes as bytes, which every version of torch can index on CUDA."""
    return q[at] if q.dtype.itemsize > 1 else q.view(torch.uint8)[at].view(q.dtype)


def unrounded(q: Tensor, layer: Any, like: Tensor) -> Tensor:
    """Queries in the precision of the output: vLLM hands them over in that of a float8 cache, over a scale."""
    return q if q.dtype == like.dtype else q.to(like.dtype) * layer._q_scale.to(like.dtype)
