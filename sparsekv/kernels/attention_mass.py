"""Where the attention of sampled queries lies: what capture's statistics are made of.

On CUDA scores stay in registers: a program owns a block of queries of one head and one stretch of the keys; small
kernels put the stretches together, always in the same order, so that the same input gives the same bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsekv.kernels.launch import NEG_INF, at_once, on_device, padded

TILE_ELEMENTS = 4_000_000
QUERIES_AT_ONCE = 64
KEYS_AT_ONCE = 64
PROGRAMS = 2048
MERGED_AT_ONCE = 128
STATISTICS = ("lse", "lse_mid", "top1_score", "mass_sink", "mass_tail", "mass_mid", "entropy_mid")


def query_statistics(
    queries_rot: Tensor, keys_rot: Tensor, positions: Tensor, *, scale: float, sink_size: int, window_size: int,
) -> dict[str, Tensor]:
    """Measure where the attention of each query lies.

    Args:
        queries_rot: `[Hq, T, d]` with RoPE.
        keys_rot: `[Hkv, N, d]` with RoPE.
        positions: `[T]`, rising: query t attends to the keys `0..position`.
        sink_size, window_size: the first keys, and the last up to and including the query's own position [tokens]; the
            mid region lies between.

    Returns:
        Each `[Hq, T]`:

        - `lse`, `lse_mid`: log-sum-exp of the scores over all visible keys and over the mid region (−inf if empty)
          [nats];
        - `mass_sink`, `mass_tail`, `mass_mid`: shares of the attention, summing to one (a key in both counts as sink);
        - `top1_position` (int32), `top1_score`: the best key outside the sink, and its scaled score (−1 and −inf if
          none);
        - `entropy_mid`: entropy of the attention within the mid region over `log |mid|`, in 0..1.
    """
    launch = launch_statistics if on_device(queries_rot) else query_statistics_reference
    return launch(queries_rot, keys_rot, positions, scale=scale, sink_size=sink_size, window_size=window_size)


def query_statistics_reference(
    queries_rot: Tensor, keys_rot: Tensor, positions: Tensor, *, scale: float, sink_size: int, window_size: int,
) -> dict[str, Tensor]:
    """`query_statistics` in plain torch, a tile of queries at a time."""
    heads_q, count, _ = queries_rot.shape
    tile = max(1, min(count, TILE_ELEMENTS // max(1, heads_q * keys_rot.shape[1])))
    parts = [_tile(queries_rot[:, a:a + tile], keys_rot, positions[a:a + tile], scale, sink_size, window_size)
             for a in range(0, count, tile)]
    return {name: torch.cat([p[name] for p in parts], dim=1) for name in parts[0]}


def _tile(queries: Tensor, keys: Tensor, positions: Tensor, scale: float, sink: int, window: int) -> dict[str, Tensor]:
    heads_q, count, dim = queries.shape
    visible = int(positions.max()) + 1
    keys = keys[:, :visible]
    dtype = torch.promote_types(queries.dtype, torch.float32)
    grouped = queries.to(dtype).reshape(keys.shape[0], heads_q // keys.shape[0] * count, dim)
    scores = ((grouped * scale) @ keys.to(dtype).mT).reshape(heads_q, count, visible)
    column = torch.arange(visible, device=keys.device)
    place = positions[:, None]
    scores.masked_fill_(column > place, NEG_INF)
    top = scores.amax(-1, keepdim=True)
    relative = (scores - top).clamp_(min=-1e4)
    weights = torch.exp(relative)
    total = weights.sum(-1)
    sink_sum = weights[..., :sink].sum(-1)
    score, best = (scores[..., sink:].max(-1) if visible > sink else
                   (total.new_full(total.shape, NEG_INF), total.long()))
    # from here on only the mid region: where it starts is one column for all, where it ends differs by row
    start, stop = sink, max(sink, int(positions.max()) + 1 - window)
    weights = weights[..., start:stop].masked_fill_(column[start:stop] > place - window, 0.0)
    mid_sum = weights.sum(-1)
    energy = (weights.reshape(-1, 1, stop - start) @ relative[..., start:stop].reshape(-1, stop - start, 1)
              ).reshape(mid_sum.shape)
    size = (positions - window + 1 - sink).clamp(min=0).expand(heads_q, count)
    return _finish(top[..., 0], total, sink_sum, mid_sum, energy, score, best + sink, size)


def _finish(
    top: Tensor, total: Tensor, sink_sum: Tensor, mid_sum: Tensor, energy: Tensor, score: Tensor, best: Tensor,
    size: Tensor,
) -> dict[str, Tensor]:
    """The statistics from the sums of `exp(s − top)`; `energy = Σ_mid exp(s − top) (s − top)`; all `[Hq, T]`."""
    safe = mid_sum.clamp(min=torch.finfo(mid_sum.dtype).tiny)
    entropy = (safe.log() - energy / safe) / size.clamp(min=2).to(safe.dtype).log()
    return {
        "lse": total.log() + top,
        "lse_mid": torch.where(mid_sum > 0, safe.log() + top, NEG_INF),
        "top1_position": torch.where(torch.isinf(score), -1, best).to(torch.int32),
        "top1_score": score,
        "mass_sink": sink_sum / total,
        "mass_tail": ((total - sink_sum - mid_sum) / total).clamp(min=0.0),
        "mass_mid": mid_sum / total,
        "entropy_mid": torch.where((size >= 2) & (mid_sum > 0), entropy, 0.0).clamp(0.0, 1.0),
    }


def launch_statistics(
    queries: Tensor, keys: Tensor, positions: Tensor, *, scale: float, sink_size: int, window_size: int,
) -> dict[str, Tensor]:
    """`query_statistics` through Triton: one pass over the keys."""
    from sparsekv.kernels.attention_mass_triton import merge_kernel, summary_kernel

    heads_q, count, dim = queries.shape
    queries, positions = queries.contiguous(), positions.to(torch.int32)
    rows = heads_q * count
    span, splits = _stretches(heads_q, count, keys.shape[1])
    part = queries.new_empty(splits, 6, rows, dtype=torch.float32)
    part_best, best = (queries.new_empty(*shape, dtype=torch.int32) for shape in ((splits, rows), (heads_q, count)))
    out = queries.new_empty(len(STATISTICS), heads_q, count, dtype=torch.float32)
    summary_kernel[(-(-count // QUERIES_AT_ONCE), heads_q, splits)](
        queries, keys, positions, part, part_best, scale, count, sink_size, window_size, rows, span, keys.stride(0),
        keys.stride(1), GROUP=heads_q // keys.shape[0], ROWS=QUERIES_AT_ONCE, DIM=dim, WIDTH=padded(dim),
        BLOCK=at_once(KEYS_AT_ONCE, padded(dim) * keys.element_size()), num_warps=4, num_stages=2)
    merge_kernel[(-(-rows // MERGED_AT_ONCE),)](
        part, part_best, positions, out, best, count, sink_size, window_size, rows, splits, SLOTS=MERGED_AT_ONCE,
        num_warps=4)
    return dict(zip(STATISTICS, out.unbind(0), strict=True)) | {"top1_position": best}


def _stretches(heads: int, count: int, keys: int) -> tuple[int, int]:
    """Keys of a stretch, and how many stretches: enough programs for a large device, none too short."""
    wanted = max(1, PROGRAMS // (heads * -(-count // QUERIES_AT_ONCE)))
    span = max(4 * KEYS_AT_ONCE, -(-keys // (wanted * KEYS_AT_ONCE)) * KEYS_AT_ONCE)
    return span, -(-keys // span)
