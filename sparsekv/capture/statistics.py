"""The best keys of sampled queries."""

from __future__ import annotations

import torch
from torch import Tensor

TOP_ELEMENTS = {False: 4_000_000, True: 64_000_000}  # by whether the device is CUDA: 256 MB of scores there


def top_keys(
    queries_rot: Tensor, keys_rot: Tensor, positions: Tensor, *, count: int, scale: float, sink_size: int,
) -> tuple[Tensor, Tensor]:
    """The `count` best keys of each query outside the sink, best first: positions (int32) and scaled scores (float32),
    `[Hq, T, count]` each, −1 and −inf where fewer keys are in sight. Arguments as in `query_statistics`.

    One KV head and one tile of queries at a time: the memory grows with N, not with N × T."""
    heads_q, total, dim = queries_rot.shape
    heads_kv, length, _ = keys_rot.shape
    group = heads_q // heads_kv
    grouped = queries_rot.reshape(heads_kv, group, total, dim)
    dtype = torch.promote_types(queries_rot.dtype, torch.float32)
    where = torch.full((heads_kv, group, total, count), -1, dtype=torch.int32, device=queries_rot.device)
    score = torch.full(where.shape, float("-inf"), dtype=torch.float32, device=queries_rot.device)
    column = torch.arange(sink_size, length, device=keys_rot.device)
    tile = max(1, TOP_ELEMENTS[keys_rot.is_cuda] // (group * length))
    for head in range(heads_kv):
        keys = keys_rot[head, sink_size:].to(dtype)
        for at in range(0, total, tile):
            part = slice(at, at + tile)
            scores = (grouped[head, :, part].to(dtype) * scale) @ keys.mT
            scores.masked_fill_(column > positions[part, None], float("-inf"))
            best = scores.topk(min(count, len(column)))
            kept = slice(best.values.shape[-1])
            score[head, :, part, kept] = best.values.to(torch.float32)
            where[head, :, part, kept] = torch.where(
                best.values.isinf(), -1, best.indices + sink_size).to(torch.int32)
    return where.flatten(0, 1), score.flatten(0, 1)
