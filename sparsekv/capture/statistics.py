"""Attention statistics of sampled queries, tile by tile: never `N × N` scores, and on CUDA never a score in memory."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparsekv.kernels.attention_mass import coverage, mass_summary

TILE_ELEMENTS = 4_000_000
BINS = 512
TARGETS = (0.75, 0.95)


def query_statistics(
    queries_rot: Tensor, keys_rot: Tensor, positions: Tensor, *, scale: float, sink_size: int, window_size: int,
) -> dict[str, Tensor]:
    """Where the mass of each query lies.

    queries_rot `[Hq, T, d]` and keys_rot `[Hkv, N, d]` with RoPE; positions `[T]`, rising: query t attends to the keys
    `0..position`. The sink is the first `sink_size` keys, the tail the last `window_size` up to and including the
    query's own position, the mid region what lies between. Returns, each `[Hq, T]`:

    - `lse`, `lse_mid`: log-sum-exp of the scores over all visible keys and over the mid region (−inf if empty) [nats];
    - `mass_sink`, `mass_tail`, `mass_mid`: shares of the attention, summing to one (a key in both counts as sink);
    - `top1_position` (int32), `top1_score`: the best key outside the sink, and its scaled score (−1 and −inf if none);
    - `entropy_mid`: entropy of the attention within the mid region over `log |mid|`, in 0..1;
    - `cover75`, `cover95` (int32): the fewest keys that hold 75 % and 95 % of the attention, found by a search over
      thresholds: exact but for keys whose scores lie within 0.3 nats of the last one counted.
    """
    if queries_rot.is_cuda and queries_rot.dtype != torch.float64:
        return _on_device(queries_rot, keys_rot, positions, scale, sink_size, window_size)
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
    scores.masked_fill_(column > place, float("-inf"))
    top = scores.amax(-1, keepdim=True)
    relative = (scores - top).clamp_(min=-1e4)
    weights = torch.exp(relative)
    total = weights.sum(-1)
    cover = _coverage(relative, weights, total)
    sink_sum = weights[..., :sink].sum(-1)
    score, best = (scores[..., sink:].max(-1) if visible > sink else
                   (total.new_full(total.shape, float("-inf")), total.long()))
    # from here on only the mid region: where it starts is one column for all, where it ends differs by row
    start, stop = sink, max(sink, int(positions.max()) + 1 - window)
    weights = weights[..., start:stop].masked_fill_(column[start:stop] > place - window, 0.0)
    mid_sum = weights.sum(-1)
    energy = (weights.reshape(-1, 1, stop - start) @ relative[..., start:stop].reshape(-1, stop - start, 1)
              ).reshape(mid_sum.shape)
    size = (positions - window + 1 - sink).clamp(min=0).expand(heads_q, count)
    return _finish(top[..., 0], total, sink_sum, mid_sum, energy, score, best + sink, size) | cover


def _finish(
    top: Tensor, total: Tensor, sink_sum: Tensor, mid_sum: Tensor, energy: Tensor, score: Tensor, best: Tensor,
    size: Tensor,
) -> dict[str, Tensor]:
    """The statistics from the sums of `exp(s − top)`; `energy = Σ_mid exp(s − top) (s − top)`; all `[Hq, T]`."""
    safe = mid_sum.clamp(min=torch.finfo(mid_sum.dtype).tiny)
    entropy = (safe.log() - energy / safe) / size.clamp(min=2).to(safe.dtype).log()
    return {
        "lse": total.log() + top,
        "lse_mid": torch.where(mid_sum > 0, safe.log() + top, float("-inf")),
        "top1_position": torch.where(torch.isinf(score), -1, best).to(torch.int32),
        "top1_score": score,
        "mass_sink": sink_sum / total,
        "mass_tail": ((total - sink_sum - mid_sum) / total).clamp(min=0.0),
        "mass_mid": mid_sum / total,
        "entropy_mid": torch.where((size >= 2) & (mid_sum > 0), entropy, 0.0).clamp(0.0, 1.0),
    }


def search_depth(visible: int) -> float:
    """How far below the log-sum-exp the search looks [nats]: keys of a share under `0.05 / N` hold less than 5 %."""
    return math.log(max(visible, 2)) + 3.05


def _coverage(relative: Tensor, weights: Tensor, total: Tensor) -> dict[str, Tensor]:
    """Coverage counts from a histogram of the depths `lse − s`; relative, weights `[Hq, t, N]`, total `[Hq, t]`."""
    rows, visible = total.numel(), relative.shape[-1]
    width = search_depth(visible) / BINS
    bins = ((total.log()[..., None] - relative) * (1 / width)).clamp_(0, BINS).to(torch.int64).reshape(rows, visible)
    bins += (torch.arange(rows, device=bins.device) * (BINS + 1))[:, None]
    size = rows * (BINS + 1)
    counts = torch.bincount(bins.reshape(-1), minlength=size).reshape(rows, -1)
    masses = torch.bincount(bins.reshape(-1), weights.reshape(-1), minlength=size).reshape(rows, -1)
    summed = masses.cumsum(-1)
    found = {}
    for target in TARGETS:
        goal = (target * total.double()).reshape(rows, 1)
        at = torch.searchsorted(summed, goal).clamp(max=BINS)
        mass, count = masses.gather(1, at), counts.gather(1, at)
        before = summed.gather(1, at) - mass
        keys = counts.cumsum(-1).gather(1, at) - count
        found[_name(target)] = _interpolate(keys, count, goal - before, mass).reshape(total.shape)
    return found


def _interpolate(keys: Tensor, count: Tensor, missing: Tensor, mass: Tensor) -> Tensor:
    """`keys` counted, `missing` mass to be found among the `count` keys of a narrow bin that holds `mass`."""
    more = torch.ceil(missing * count / mass.clamp(min=torch.finfo(mass.dtype).tiny) - 1e-6)
    return (keys + more.clamp(min=0).minimum(count.to(more.dtype))).clamp(min=1).to(torch.int32)


def _name(target: float) -> str:
    return f"cover{round(100 * target)}"


def _on_device(
    queries: Tensor, keys: Tensor, positions: Tensor, scale: float, sink: int, window: int,
) -> dict[str, Tensor]:
    """The same by kernels that keep scores in registers: one pass for the sums, two for the coverage counts."""
    found = mass_summary(queries, keys, positions, scale=scale, sink_size=sink, window_size=window)
    counts = coverage(queries, keys, positions, found["lse"], TARGETS, scale=scale, depth=search_depth(keys.shape[1]))
    return found | {_name(target): count for target, count in zip(TARGETS, counts, strict=True)}
