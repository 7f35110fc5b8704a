"""A capture store of one layer of an 8B-shaped model, without a model: clustered keys, queries that look for clusters.
Only its shapes and the work they make are real; quality measured on it means nothing."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from sparsekv.capture.config import CaptureConfig
from sparsekv.core.rope import rotate
from sparsekv.kernels import query_statistics
from sparsekv.store.manifest import FORMAT_VERSION, MANIFEST, sealed
from sparsekv.store.shard import ShardWriter
from sparsekv.store.store import CaptureStore, document_name, layer_name

TOPICS = 4096
THETA = 500_000.0
HEADS_KV, GROUP, DIM, DOCUMENTS = 8, 4, 128, 2


def synthetic_store(
    folder: Path, *, length: int, queries: int, device: str = "cpu", seed: int = 0,
) -> CaptureStore:
    """Write a store of `DOCUMENTS` windows of `length` tokens with `queries` queries a head in the second half."""
    config = CaptureConfig(model="synthetic", corpus="synthetic", output=str(folder), context_length=length,
                           num_documents=DOCUMENTS, queries_per_document=queries, sink_size=1,
                           window_size=min(2047, length // 4))
    generator = torch.Generator(device=device).manual_seed(seed)
    angles = torch.arange(length)[:, None] * THETA ** (-torch.arange(0, DIM, 2) / DIM)
    cos, sin = (torch.cat([f(angles)] * 2, -1).float().to(device) for f in (torch.cos, torch.sin))
    topics = torch.randn(HEADS_KV, min(TOPICS, length // 4), DIM, generator=generator, device=device)
    topics = 10 * torch.nn.functional.normalize(topics, dim=-1)
    shards, entries = {}, []
    for document in range(DOCUMENTS):
        tensors = _document(config, topics, cos, sin, generator)
        place = folder / document_name(document)
        place.mkdir(parents=True)
        tables = {"tokens": torch.zeros(length, dtype=torch.int32), "cos.0": cos.cpu(), "sin.0": sin.cpu()}
        for name, held in ((layer_name(0), tensors), ("rotary.safetensors", tables)):
            shard = ShardWriter(place / name, {n: (t.dtype, tuple(t.shape)) for n, t in held.items()})
            for n, t in held.items():
                shard.write(n, t)
            shards[f"{document_name(document)}/{name}"] = shard.close()
        entries.append({"id": document, "sources": [f"synthetic/{document}"], "sha256": f"synthetic {seed} {document}",
                        "num_tokens": length})
    model = {"architecture": "synthetic", "num_layers": 1, "num_query_heads": HEADS_KV * GROUP,
             "num_kv_heads": HEADS_KV, "head_dim": DIM, "rope": {"theta": THETA}, "weights": f"synthetic {seed}"}
    manifest = {"format_version": FORMAT_VERSION, "complete": True, "model": model, "config": asdict(config),
                "documents": entries, "context_length": length, "shards": shards,
                "layers": {"0": {"layout": "half", "rotary": 0, "scale": DIM**-0.5}}}
    (folder / MANIFEST).write_text(json.dumps(sealed(manifest)))
    return CaptureStore.open(folder)


def _document(config: CaptureConfig, topics: Tensor, cos: Tensor, sin: Tensor, generator: torch.Generator,
              ) -> dict[str, Tensor]:
    heads, count, dim = topics.shape
    length, queries, device = config.context_length, config.queries_per_document, topics.device

    def near(shape: tuple[int, int], noise: float) -> Tensor:
        which = (count * torch.rand(shape, generator=generator, device=device) ** 2).long()
        found = topics.gather(1, which[..., None].expand(-1, -1, dim))
        return found + noise * torch.randn(found.shape, generator=generator, device=device)

    keys = near((heads, length), 0.5)
    wanted = near((heads, GROUP * queries), 0.7).reshape(heads * GROUP, queries, dim)
    values = torch.randn(heads, length, dim, generator=generator, device=device)
    positions = (length // 2 + torch.randperm(length - length // 2, generator=generator, device=device)[:queries])
    positions = positions.sort().values
    statistics = query_statistics(
        rotate(wanted, cos[positions], sin[positions], "half"), rotate(keys, cos, sin, "half"), positions,
        scale=dim**-0.5, sink_size=config.sink_size, window_size=config.window_size)
    held = {"keys_pre": keys.bfloat16(), "values": values.bfloat16(), "queries_pre": wanted.bfloat16(),
            "query_positions": positions.expand(heads * GROUP, -1), **statistics}
    whole = {n: t.to(torch.int32) if t.dtype == torch.int64 else t for n, t in held.items()}
    return {n: t.cpu().contiguous() for n, t in whole.items()}
