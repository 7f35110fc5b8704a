"""What the layers of an engine decode with: the settings of its model, and every layer's part of the artifacts. Reads
attributes of vLLM's objects alone."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from sparsekv.artifacts.phi import PhiLayer
from sparsekv.core.index import Untrained
from sparsekv.core.selectors.router import Router
from sparsekv.runtime.vllm import summaries
from sparsekv.runtime.vllm.checks import check_engine, head_slice, served_shape
from sparsekv.runtime.vllm.index import heads_of
from sparsekv.runtime.vllm.prompts import prompt_bytes
from sparsekv.runtime.vllm.settings import VARIABLE, ServedModel, ServedShape, Serving, served_model, settings_path
from sparsekv.runtime.vllm.share import Counted, MemoryPlan, count, memory_plan, seats_within
from sparsekv.runtime.vllm.summaries import OwnMeans
from sparsekv.util.errors import SparseKVError
from sparsekv.util.memory import memory_of


def plan_for(config: Any) -> ServedModel:
    """The settings for the engine's model, loaded once a process. Raises SparseKVError in one sentence."""
    path = settings_path()
    if path is None:
        raise SparseKVError(f"the attention backend CUSTOM is sparsekv's and {VARIABLE} is not set; set it to a "
                            "settings file (docs/serve.md), or choose another backend")
    check_engine(config)
    return _plan(path, served_shape(config.model_config))


@functools.cache
def _plan(path: str, shape: ServedShape) -> ServedModel:
    return served_model(Serving.load(path), shape)


def layer_number(name: str) -> int:
    """The number in a layer's name, such as `model.layers.3.self_attn.attn`."""
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    if len(numbers) != 1:
        raise SparseKVError(f"the layer {name!r} has {len(numbers)} numbers in its name; expected one, its own; serve "
                            "this model with vLLM's own attention")
    return numbers[0]


def part_of(config: Any, plan: ServedModel, layer_idx: int, impl: Any) -> tuple[Router, PhiLayer | OwnMeans | None]:
    """Selector and completion of the heads that this rank holds of a layer that decodes sparsely."""
    selector = plan.layer(layer_idx)
    maps: PhiLayer | OwnMeans | None = plan.maps(layer_idx)
    assert selector is not None
    own = head_slice(config, selector.trained.centroids.shape[0], impl.num_kv_heads)
    if isinstance(selector.layer, Untrained):
        selector.layer = Untrained.of_shape(impl.num_kv_heads, impl.head_size, torch.device("cpu"))
    else:
        selector.layer = heads_of(selector.layer, *own)
    if plan.by_means:
        maps = OwnMeans(impl.num_kv_heads, impl.head_size)
    elif isinstance(maps, PhiLayer):
        maps = summaries.heads_of(maps, head_slice(config, maps.offsets.shape[1], impl.num_heads), own)
    return selector, maps


def sparse_layers(config: Any, plan: ServedModel) -> Iterator[tuple[str, Any]]:
    """Names and attention of the layers that decode sparsely."""
    for name, layer in config.compilation_config.static_forward_context.items():
        impl = getattr(layer, "impl", None)
        if getattr(impl, "may_be_sparse", False) and plan.layer(layer_number(name)) is not None:
            yield name, impl


def kept_beside(config: Any, plan: ServedModel) -> MemoryPlan:
    """Count what all layers of this rank keep beside the pages, and what one needs while it reads a prompt sparsely."""
    layers, model = list(sparse_layers(config, plan)), config.model_config
    longest, kind = model.max_model_len, model.dtype
    kept = memory_plan([part_of(config, plan, layer_number(name), impl) for name, impl in layers], longest, kind)
    if plan.reads is None or longest < plan.reads.shortest:
        return kept
    rounded = config.cache_config.cache_dtype.startswith("fp8")
    return kept._replace(prompts=max((prompt_bytes(
        (impl.num_heads, impl.num_kv_heads), impl.head_size, longest, kind.itemsize, rounded=rounded)
        for _, impl in layers), default=0))


def seats_of(config: Any, plan: ServedModel, kept: MemoryPlan) -> int:
    """Count the requests that may decode sparsely at once, the same on all ranks."""
    most, serving = config.scheduler_config.max_num_seqs, plan.serving
    if serving.requests is not None:
        return min(serving.requests, most)
    memory = config.cache_config.kv_cache_memory_bytes
    if memory is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        memory = memory_of(device) * config.cache_config.gpu_memory_utilization
    return seats_within(kept, serving.memory_share * memory, most)


def counted(config: Any, available: int) -> Counted | None:
    """Count the memory that is left to the pages, of what vLLM found for them; None where no layer decodes sparsely.
    Raises SparseKVError."""
    plan = plan_for(config)
    if next(sparse_layers(config, plan), None) is None:
        return None
    kept = kept_beside(config, plan)
    impls = [getattr(layer, "impl", None) for layer in config.compilation_config.static_forward_context.values()]
    of_pages = sum(2 * impl.num_kv_heads * impl.head_size for impl in impls
                   if impl is not None and getattr(impl, "kv_sharing_target_layer_name", None) is None)
    rounded = config.cache_config.cache_dtype.startswith("fp8")
    return count(kept, available, of_pages * (1 if rounded else config.model_config.dtype.itemsize),
                 seats_of(config, plan, kept))
