"""Which versions, configurations and pages of an engine are served, and what is refused in one sentence. Reads
attributes alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from sparsekv.runtime.vllm.settings import ServedShape
from sparsekv.util.errors import SparseKVError

OLDEST, NEWEST = (0, 26), (0, 33)
"""Of vLLM; what differs between them is in `stock`."""


def check_version(version: str) -> None:
    """Refuse a vLLM for whose interfaces sparsekv was not written. version: such as `0.32.0`. Raises SparseKVError."""
    found = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if not OLDEST <= found <= NEWEST:
        least, most = (".".join(map(str, one)) for one in (OLDEST, NEWEST))
        raise SparseKVError(f"vLLM {version} is installed; expected {least} to {most}, whose attention interfaces "
                            "sparsekv knows; install one of them, or unset SPARSEKV_SETTINGS")


def check_pages(shape: Sequence[int], heads: int, dim: int, page: int) -> None:
    """Refuse pages that are not `[blocks, heads, page, 2 * dim]`, keys beside values. Raises SparseKVError."""
    if len(shape) != 4 or tuple(shape[1:]) != (heads, page, 2 * dim):
        raise SparseKVError(f"the pages of a layer are {list(shape)}; expected [blocks, {heads}, {page}, {2 * dim}], "
                            "keys beside values; serve this model with vLLM's own attention")


def check_engine(config: Any) -> None:
    """Refuse an engine (a `VllmConfig`) that sparse decoding cannot work in. Raises SparseKVError."""
    cache, parallel = config.cache_config, config.parallel_config
    if cache.cache_dtype not in ("auto", "bfloat16", "float16", "float32", "fp8", "fp8_e4m3"):
        raise SparseKVError(f"the cache is of {cache.cache_dtype}; expected the model's own precision or fp8 (e4m3, "
                            "one scale a layer), which the kernels read; use --kv-cache-dtype auto or fp8")
    if cache.cache_dtype.startswith("fp8") and getattr(cache, "calculate_kv_scales", False):
        raise SparseKVError("scales of the cache are calculated from the first prompt; expected those of the "
                            "checkpoint or 1, since indices hold them from the start; leave out --calculate-kv-scales")
    if getattr(config, "speculative_config", None) is not None:
        raise SparseKVError("speculative decoding is on; expected one token a step, since a request is known by having "
                            "one token more than at its last step, and drafts that are taken back break that; leave "
                            "out --speculative-config")
    window = getattr(getattr(config, "model_config", None), "rswa_window", None)
    if window is not None:
        raise SparseKVError(f"this model's answers see a window of {window} tokens behind its prompt; expected one "
                            "that sees all tokens before; serve it with vLLM's own attention")
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise SparseKVError(f"{name} is {getattr(parallel, name)}; expected 1, since an index knows the keys of "
                                "one device; use tensor parallelism")
    if getattr(config, "kv_transfer_config", None) is not None or getattr(cache, "kv_offloading_size", None):
        raise SparseKVError("keys arrive from elsewhere (a KV connector or offloading); expected them to be computed "
                            "here, where their codes are written: vLLM does not say which pages a connector fills, "
                            "and such pages would keep the codes of earlier keys; leave out the connector")
    if getattr(parallel, "enable_dbo", False) or getattr(parallel, "use_ubatching", False):
        raise SparseKVError("batches are cut in two (dual batch overlap); expected whole ones; leave out --enable-dbo")


def served_shape(model: Any) -> ServedShape:
    """Return what the settings must fit, of a `ModelConfig`."""
    text = model.hf_text_config
    names = getattr(model.hf_config, "architectures", None) or [type(text).__name__]
    return ServedShape(names[0], text.num_hidden_layers, text.num_attention_heads, model.get_total_num_kv_heads(),
                 model.get_head_size())


def head_slice(config: Any, total: int, own: int) -> tuple[int, int]:
    """First and last of the `total` KV heads that this rank's layer holds, `own` of them: ranks hold heads in order,
    and share one where there are more ranks than heads."""
    ranks = config.parallel_config.tensor_parallel_size
    if ranks == 1:
        return 0, total
    from vllm.distributed import get_tensor_model_parallel_rank

    first = get_tensor_model_parallel_rank() * total // ranks
    return first, first + own
