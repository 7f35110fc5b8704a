"""The attention that sparse decoding stands on: FlashAttention on CUDA, and on a CPU, whose own backend keeps keys in a
layout of its own, attention over the pages in plain torch. What differs between vLLM 0.26 and 0.33 is here."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.attention import backend as interface
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)

from sparsekv.runtime.vllm.pages import attend_pages, by_slot, write
from sparsekv.util.errors import SparseKVError

__all__ = ["AttentionCGSupport", "AttentionMetadataBuilder", "AttentionType", "CommonAttentionMetadata", "StockBackend",
           "StockBuilder", "StockImpl", "check_hook", "full_graphs", "graph_manager", "layouts", "rotary_modules",
           "workers"]


def layouts() -> tuple[Any, ...]:
    """The only layout of the pages that is read, from 0.28 on: layer, block, token, head, content."""
    kinds = getattr(interface, "KVCacheLayout", None)
    return () if kinds is None else (kinds.LBNHC,)


def check_hook() -> None:
    """Refuse an attention that writes keys by itself: no codes would be made of them. Raises SparseKVError."""
    if getattr(StockBackend, "forward_includes_kv_cache_update", True) or not hasattr(StockImpl, "do_kv_cache_update"):
        raise SparseKVError(f"{StockBackend.__name__} of this vLLM writes keys in its forward; expected a call of "
                            "do_kv_cache_update, where their codes are made; serve with vLLM's own attention")


def rotary_modules() -> list[Any]:
    """The rotary modules of the model that was loaded, each once."""
    from vllm.model_executor.layers import rotary_embedding

    return list({id(m): m for m in rotary_embedding._ROPE_DICT.values()}.values())


def workers() -> list[type]:
    """The classes that find out how much memory there is for pages."""
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker

        return [CPUWorker]
    from vllm.v1.worker.gpu_worker import Worker

    return [Worker]


def graph_manager() -> Any:
    """The class that keeps the full CUDA graphs of the second model runner, None where there is none."""
    try:
        from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
    except ImportError:
        return None
    return CudaGraphManager if current_platform.is_cuda() else None


def full_graphs() -> Any:
    """Return what its full graphs are filed under."""
    from vllm.config import CUDAGraphMode

    return CUDAGraphMode.FULL


class PlainBackend(AttentionBackend):
    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type:
        return PlainImpl

    @staticmethod
    def get_builder_cls() -> type:
        return PlainBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(16)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        return (1, 0, 3, 2, 4) if include_num_layers_dimension else (0, 2, 1, 3)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True


class PlainBuilder(AttentionMetadataBuilder):
    def __init__(self, *given: Any):  # vLLM's own is abstract
        super().__init__(*given)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        return copy.copy(common_attn_metadata)


class PlainImpl(AttentionImpl):
    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None, sliding_window: int | None = None, kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None, attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None, sinks: Tensor | None = None,
    ) -> None:
        if alibi_slopes is not None or sinks is not None or attn_type != AttentionType.DECODER:
            raise SparseKVError("this model has ALiBi, learned sinks or an encoder; expected a decoder with plain "
                                "softmax attention; serve it with vLLM's own attention")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.window, self.softcap = sliding_window, logits_soft_cap or None
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor,
    ) -> None:
        write(kv_cache, key, value, slot_mapping)

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: Any,
        output: Tensor, output_scale: Tensor | None = None, output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if attn_metadata is None:
            return output.fill_(0)
        rows: CommonAttentionMetadata = attn_metadata
        count = rows.num_actual_tokens
        keys, values = by_slot(kv_cache)
        output[:count] = attend_pages(
            query[:count], keys, values, rows.query_start_loc, rows.seq_lens, rows.block_table_tensor,
            kv_cache.shape[2], scale=self.scale, window=self.window, softcap=self.softcap)
        return output


StockBackend: type = PlainBackend
StockBuilder: type = PlainBuilder
StockImpl: type = PlainImpl
if current_platform.is_cuda():
    from vllm.v1.attention.backends import flash_attn

    StockBackend = flash_attn.FlashAttentionBackend
    StockBuilder = flash_attn.FlashAttentionMetadataBuilder
    StockImpl = flash_attn.FlashAttentionImpl
