"""What a training will take: disk, memory and time, from rates that were measured. Estimates, and said as such."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from sparsekv.capture.store.store import storage_bytes

CHUNK = 32_768
"""Tokens of a prefill chunk."""
ITERATIONS = 10
"""Iterations of k-means."""


class Rates(NamedTuple):
    """Operations a second, multiplications and additions counted apart, and where they were measured. prefill of models
    up to 1B and above; clusters: k-means; maps: steps of feature maps. cards: query heads times tokens of held-out
    windows a second, for the quality cards of router and maps; text: for those on text, by every method."""

    small_prefill: float
    prefill: float
    clusters: float
    maps: float
    cards: float
    text: float
    measured: str

    def times(self, count: int) -> Rates:
        """Return the rates of so many devices."""
        prefill = (count * self.small_prefill, count * self.prefill)
        return Rates(*prefill, count * self.clusters, count * self.maps, count * self.cards,
                     count * self.text, self.measured)


DISK = 8.7e8
"""Bytes a second of a store (docs/results/training.md, the slower machine's)."""
GPU = Rates(2.2e14, 5.6e14, 6e12, 1.3e13, 2.4e5, 1e7, "one H200: a capture of SmolLM2-135M at 32k and of an 8B shape "
            "at 128k (docs/results/training.md); one H100: buckets, maps and cards of Qwen2.5-Coder-1.5B "
            "(docs/train.md); quality on text is a guess")
CPU_THREAD = Rates(8.0e10, 8.0e10, 2.0e10, 9.1e9, 6e3, 1.5e5, "two threads of an x86-64 CPU: a capture of "
                   "SmolLM2-135M (docs/results/training.md); buckets, maps and cards of its shape (docs/train.md)")


@dataclass(frozen=True)
class ModelShape:
    """What of a model decides the cost. layers: those that are trained; elements: bytes of a weight."""

    parameters: int
    layers: int
    all_layers: int
    heads_q: int
    heads_kv: int
    dim: int
    intermediate: int
    elements: int


@dataclass(frozen=True)
class Work:
    """What is to be done, in the trainers' own words. The last three are of the router's query model, 0 where it has
    none."""

    documents: int
    length: int
    queries: int
    num_buckets: int
    max_steps: int
    width: int
    batch_size: int
    keys_per_step: int
    key_width: int
    features: int
    query_blocks: int
    muon: bool
    router_steps: int = 0
    router_batch: int = 0
    router_hidden: int = 0


@dataclass(frozen=True)
class Estimate:
    """Bytes and seconds."""

    store: int
    artifacts: int
    capture_memory: int
    layer_memory: int
    capture_seconds: float
    router_seconds: float
    phi_seconds: float
    card_seconds: float
    text_seconds: float

    @property
    def seconds(self) -> float:
        return (self.capture_seconds + self.router_seconds + self.phi_seconds + self.card_seconds
                + self.text_seconds)

    def layers_at_once(self, memory: int, layers: int) -> int:
        """Return how many layers fit a share of the memory [bytes] that leaves room for the rest."""
        return max(1, min(layers, int(0.7 * memory) // self.layer_memory))

    def training_memory(self, layers: int) -> int:
        return layers * self.layer_memory


def shape_of(config: Any, layers: int | None, elements: int) -> ModelShape:
    """From a transformers configuration; the weights are counted without being loaded. layers: None for all with full
    attention."""
    import torch
    from transformers import AutoModelForCausalLM

    from sparsekv.artifacts.hub.models import attention_sizes

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    text = config.get_text_config()
    full, heads_q, heads_kv, dim = attention_sizes(config)
    return ModelShape(
        parameters=sum(p.numel() for p in model.parameters()), layers=layers or full, all_layers=text.num_hidden_layers,
        heads_q=heads_q, heads_kv=heads_kv, dim=dim,
        intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size, elements=elements)


def store_bytes(shape: ModelShape, documents: int, length: int, queries: int) -> int:
    """Count the bytes of a capture."""
    return storage_bytes(num_documents=documents, num_layers=shape.layers, heads_kv=shape.heads_kv,
                         heads_q=shape.heads_q, length=length, queries=queries, dim=shape.dim)


def estimate(shape: ModelShape, work: Work, rates: Rates) -> Estimate:
    """Disk exactly; memory and time to within the rates, loading and compiling left out."""
    from sparsekv.trainers.pool import held_out

    tokens = work.documents * work.length
    chunk = min(CHUNK, work.length)
    cache = 2 * shape.all_layers * shape.heads_kv * work.length * shape.dim * shape.elements
    clusters = 2 * ITERATIONS * tokens * shape.layers * shape.heads_kv * work.num_buckets * shape.dim
    store = store_bytes(shape, work.documents, work.length, work.queries)
    return Estimate(
        store=store,
        artifacts=_artifact_bytes(shape, work),
        capture_memory=shape.parameters * shape.elements + cache + 3 * chunk * shape.intermediate * shape.elements,
        layer_memory=_layer_memory(shape, work),
        capture_seconds=max(prefill_seconds(shape, work, rates), store / DISK),
        router_seconds=clusters / rates.clusters + (
            work.router_steps * shape.layers * _query_model_operations(shape, work) / rates.maps),
        phi_seconds=work.max_steps * shape.layers * step_operations(shape, work) / rates.maps,
        card_seconds=held_out(work.documents) * work.length * shape.heads_q * shape.layers / rates.cards,
        text_seconds=text_seconds(shape, work, rates))


def text_seconds(shape: ModelShape, work: Work, rates: Rates) -> float:
    """Count the seconds of the quality card on text: every window is prefilled once and continued by every method, and
    once more by full attention, whose next tokens they are compared with."""
    from sparsekv.evaluation.text_quality import WINDOWS, card_methods

    tokens = WINDOWS * work.length * (len(card_methods()) + 1)
    return prefill_seconds(shape, replace(work, documents=WINDOWS), rates) + (
        tokens * shape.heads_q * shape.layers / rates.text)


def prefill_seconds(shape: ModelShape, work: Work, rates: Rates) -> float:
    """Count the seconds of all windows' prefills."""
    tokens = work.documents * work.length
    operations = 2 * shape.parameters * tokens + (
        2 * shape.all_layers * shape.heads_q * shape.dim * work.length * tokens)
    return operations / (rates.prefill if shape.parameters > 1e9 else rates.small_prefill)


def step_operations(shape: ModelShape, work: Work) -> float:
    """A training step of the feature maps of one layer: forward, backward, and Muon's orthogonal matrices."""
    d, w, u, r = shape.dim, work.width, 2 * work.key_width, work.features or shape.dim
    keys = min(work.keys_per_step, work.length)
    query_maps = shape.heads_q * work.batch_size * 2 * (d * w + 2 * work.query_blocks * w * w + w * r)
    key_maps = shape.heads_kv * keys * 2 * (d * u + u * r)
    pairs = shape.heads_q * work.batch_size * (keys / 2) * 2 * (2 * d + r)
    made = 3 * (query_maps + key_maps + pairs)
    if work.muon:
        of_queries = _orthogonal(d, w) + 2 * work.query_blocks * _orthogonal(w, w) + _orthogonal(w, r)
        of_keys = 2 * (_orthogonal(d, work.key_width) + _orthogonal(work.key_width, r))
        made += shape.heads_q * of_queries + shape.heads_kv * of_keys
    return made


def _query_model_operations(shape: ModelShape, work: Work) -> float:
    """A training step of the query models of one layer, forward and backward; every model has a batch."""
    return 3 * shape.heads_kv * work.router_batch * 2 * work.router_hidden * (shape.dim + work.num_buckets)


def _orthogonal(rows: int, columns: int) -> float:
    """Operations of `muon.orthogonal` on one matrix."""
    from sparsekv.trainers.muon import STEPS

    m, n = sorted((rows, columns))
    return STEPS * (4 * m * m * n + 2 * m**3)


def _artifact_bytes(shape: ModelShape, work: Work) -> int:
    d, w, u, r = shape.dim, work.width, 2 * work.key_width, work.features or shape.dim
    maps = shape.heads_q * ((d + r) * w + 2 * work.query_blocks * w * w) + shape.heads_kv * (d + r) * u
    second = work.router_hidden * (d + work.num_buckets) if work.router_hidden else 2 * d * d
    router = shape.heads_kv * (d * work.num_buckets + second)
    return 4 * shape.layers * (maps + router)


def _layer_memory(shape: ModelShape, work: Work) -> int:
    """A layer's captured tensors on the device, and what a step of its feature maps holds: 0.41 GB where the peak of a
    run on a CPU rose by 0.39 GB a layer (9 query heads of 64, the trainers' defaults)."""
    keys = min(work.keys_per_step, work.length)
    pool = work.documents * (2 * 2 * shape.heads_kv * work.length + 6 * shape.heads_q * work.queries) * shape.dim
    units = 10 * work.width * shape.heads_q * work.batch_size + 4 * work.key_width * shape.heads_kv * keys
    step = 4 * (units + 10 * shape.heads_q * work.batch_size * keys // 2)
    if work.router_hidden:  # the targets of all queries, in half precision; the models are trained before the maps
        targets = 2 * work.documents * work.queries * shape.heads_q * work.num_buckets
        batch = 4 * shape.heads_kv * work.router_batch * (2 * work.router_hidden + 3 * work.num_buckets)
        step = max(step, targets + batch)
    return pool + step
