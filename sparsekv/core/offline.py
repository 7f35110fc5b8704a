"""Attention of one layer on captured queries, dense on purpose: what any selection and any completion would have given,
without running the model. Used by the trainers' quality cards and by evaluation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsekv.kernels.reference import mass_cap, read_bound

NEG_INF = float("-inf")


@dataclass(frozen=True)
class Scene:
    """scores `[Hq, T, N]` scaled, -inf where a query cannot see a key; values `[Hkv, N, d]`; anchors, mid `[H1, T, N]`
    bool with `H1` = 1 or Hq; full `[Hq, T, d]`: the exact output; context `[H1, T]`: visible keys."""

    scores: Tensor
    values: Tensor
    anchors: Tensor
    mid: Tensor
    full: Tensor
    context: Tensor

    @property
    def group(self) -> int:
        return self.scores.shape[0] // self.values.shape[0]


def make_scene(
    queries_rot: Tensor, keys_rot: Tensor, values: Tensor, positions: Tensor, *, scale: float, sink_size: int,
    window_size: int, starts: Tensor | None = None,
) -> Scene:
    """queries_rot `[Hq, T, d]`; keys_rot, values `[Hkv, N, d]`; positions `[Hq or 1, T]`: the last key seen; starts
    `[Hq, 1]`: the first one, zero unless given (rows of a left-padded batch may stand as heads)."""
    scores = grouped(queries_rot, keys_rot) * scale
    column = torch.arange(keys_rot.shape[1], device=keys_rot.device)
    first = torch.zeros_like(positions[:, :1]) if starts is None else starts
    place = positions[..., None]
    visible = (column >= first[..., None]) & (column <= place)
    mid = (column >= first[..., None] + sink_size) & (column <= place - window_size)
    scores = scores.masked_fill(~visible, NEG_INF)
    full = apply_weights(scores.softmax(-1), values)
    return Scene(scores, values, visible & ~mid, mid, full, positions + 1 - first)


def grouped(queries: Tensor, keys: Tensor) -> Tensor:
    """`q·k` for grouped heads: `[Hq, T, d]`, `[Hkv, N, d]` -> `[Hq, T, N]`."""
    heads_q, count, dim = queries.shape
    return (queries.reshape(keys.shape[0], -1, dim) @ keys.mT).reshape(heads_q, count, -1)


def apply_weights(weights: Tensor, values: Tensor) -> Tensor:
    """`[Hq, T, N]`, `[Hkv, N, d]` -> `[Hq, T, d]`."""
    heads_q, count, length = weights.shape
    return (weights.reshape(values.shape[0], -1, length) @ values).reshape(heads_q, count, -1)


def share(scene: Scene, scores: Tensor) -> Tensor:
    """Sum a score over the query heads of a group and give it to each: `[Hq, T, N] -> [Hq, T, N]`."""
    heads_q, count, length = scores.shape
    summed = scores.reshape(-1, scene.group, count, length).sum(1, keepdim=True)
    return summed.expand(-1, scene.group, -1, -1).reshape(heads_q, count, length)


def top_k(scene: Scene, fraction: float, *, shared: bool = True) -> Tensor:
    """Mid keys read by exact top-k with `⌈fraction · context⌉` tokens, `[Hq, T, N]`; `shared`: one list a group."""
    mid_scores = scene.scores.masked_fill(~scene.mid, NEG_INF)
    if shared and scene.group > 1:
        mid_scores = share(scene, mid_scores.softmax(-1).nan_to_num(0.0)).masked_fill(~scene.mid, NEG_INF)
    return best(mid_scores, torch.ceil(scene.context * fraction - 1e-9).long())


def best(scores: Tensor, count: Tensor) -> Tensor:
    """True for the `count [H1, T]` largest finite entries of each row of `scores [H, T, N]`."""
    widest = min(int(count.max()), scores.shape[-1])
    found, where = scores.topk(widest, dim=-1)
    keep = (torch.arange(widest, device=scores.device) < count[..., None]) & ~torch.isneginf(found)
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, where, keep)


def top_buckets(scene: Scene, bucket: Tensor, bucket_scores: Tensor, fraction: float) -> Tensor:
    """Mid keys of the best buckets, `⌈fraction · context⌉` of them (the last bucket in part): bool `[Hq, T, N]`.

    bucket `[Hkv, N]`: the bucket of every key; bucket_scores `[Hkv, T, C]`, higher is better.
    """
    heads_kv, count, buckets = bucket_scores.shape
    length = bucket.shape[1]
    order = bucket_scores.argsort(-1, descending=True)
    places = torch.arange(buckets, device=bucket.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(-1, order, places)
    rank = rank.gather(-1, bucket[:, None].expand(-1, count, -1))
    line = -(rank * length + torch.arange(length, device=bucket.device)).double()
    mid = (scene.mid[:: scene.group] if scene.mid.shape[0] > 1 else scene.mid).expand(heads_kv, -1, -1)
    context = scene.context[:: scene.group] if scene.context.shape[0] > 1 else scene.context
    chosen = best(line.masked_fill(~mid, NEG_INF), torch.ceil(context * fraction - 1e-9).long())
    return chosen.repeat_interleave(scene.group, 0)


def bucket_mass(scene: Scene, bucket: Tensor, num_buckets: int) -> Tensor:
    """Attention mass of the mid region per bucket, normalised: `[Hq, T, C]`; the target of a router."""
    weights = scene.scores.masked_fill(~scene.mid, NEG_INF).softmax(-1).nan_to_num(0.0)
    index = bucket.repeat_interleave(scene.group, 0)[:, None].expand_as(weights)
    return weights.new_zeros(*weights.shape[:2], num_buckets).scatter_add_(-1, index, weights)


def output(scene: Scene, read: Tensor | None = None, log_weights: Tensor | None = None) -> Tensor:
    """Head outputs `[Hq, T, d]`: the anchors and `read` (bool `[Hq, T, N]`) are exact, the rest of the mid region
    is estimated with the logits `log_weights [Hq, T, N]` (None: left out). One normalisation."""
    exact = scene.anchors if read is None else scene.anchors | read
    logits = scene.scores.masked_fill(~exact, NEG_INF)
    if log_weights is not None:
        logits = torch.where(scene.mid & ~exact, log_weights, logits)
    return apply_weights(logits.softmax(-1), scene.values)


def scene_cap(scene: Scene, read: Tensor | None) -> Tensor:
    """`mass_cap` of the mid keys of every query, as many as `read` the best of them: `[Hq, T]`, -inf where there are
    none, infinite where nothing is read."""
    if read is None:
        return scene.scores.new_full(scene.scores.shape[:2], float("inf"))
    size = scene.mid.sum(-1)
    each = size.clamp(min=1)
    mean = torch.where(scene.mid, scene.scores, 0.0).sum(-1) / each
    variance = torch.where(scene.mid, scene.scores - mean[..., None], 0.0).square().sum(-1) / each
    return mass_cap(mean, variance, size.to(mean.dtype), read_bound(read.sum(-1) / each))


def capped(scene: Scene, logits: Tensor, read: Tensor | None) -> Tensor:
    """The logits `[Hq, T, N]` of an estimate, all of a query's lowered by as much as brings the mass it leaves to the
    mid keys not read down to `mass_cap`, where it is above."""
    rest = scene.mid if read is None else scene.mid & ~read
    mass = logits.masked_fill(~rest, NEG_INF).logsumexp(-1)
    return logits - (mass - scene_cap(scene, read)).nan_to_num(0.0).clamp(min=0)[..., None]


def mass_errors(
    scene: Scene, logits: Tensor, read: Tensor | None, shifts: Tensor,
) -> tuple[Tensor, Tensor]:
    """Relative output error without completion `[Hq]`, and with it, its logits `[Hq, T, N]` capped and then shifted by
    each of `shifts [P]`: `[P, Hq]`.

    A shift only changes the weight of the estimated part, so that all of them cost one pass over the keys.
    """
    exact = scene.anchors if read is None else scene.anchors | read
    base, base_mass = _part(scene, scene.scores, exact)
    rest, rest_mass = _part(scene, logits, scene.mid & ~exact)
    off, move = base - scene.full, rest - base
    size = scene.full.norm(dim=-1).clamp(min=1e-12)
    still, along, across = (off * off).sum(-1), (off * move).sum(-1), (move * move).sum(-1)
    mass = torch.minimum(rest_mass, scene_cap(scene, read))
    weight = torch.sigmoid(mass + shifts.reshape(-1, 1, 1) - base_mass)
    square = still + 2 * weight * along + weight**2 * across
    return (off.norm(dim=-1) / size).mean(-1), (square.clamp(min=0).sqrt() / size).mean(-1)


def _part(scene: Scene, logits: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
    """Output over some keys alone and the logarithm of their mass; zero and -inf for none."""
    logits = logits.masked_fill(~where, NEG_INF)
    return apply_weights(logits.softmax(-1).nan_to_num(0.0), scene.values), logits.logsumexp(-1)


def relative_error(scene: Scene, out: Tensor) -> Tensor:
    """`‖out − full‖ / ‖full‖` averaged over queries: `[Hq]`."""
    return ((out - scene.full).norm(dim=-1) / scene.full.norm(dim=-1).clamp(min=1e-12)).mean(-1)


def mass_share(scene: Scene, read: Tensor) -> Tensor:
    """Share of the mid region's attention mass that `read` reaches, averaged over queries: `[Hq]`."""
    weights = scene.scores.masked_fill(~scene.mid, NEG_INF).softmax(-1).nan_to_num(0.0)
    return (weights * read).sum(-1).mean(-1)


def mass_curve(scene: Scene, points: int = 24) -> tuple[list[float], Tensor]:
    """Share of the mid mass in the best x of the mid keys: fractions `x` and shares `[Hq, points]`."""
    weights = scene.scores.masked_fill(~scene.mid, NEG_INF).softmax(-1).nan_to_num(0.0)
    running = weights.sort(-1, descending=True).values.cumsum(-1)
    size = scene.mid.sum(-1).clamp(min=1)
    fractions = [math.exp(math.log(1e-3) * (1 - i / (points - 1))) for i in range(points)]
    shares = [running.gather(-1, (torch.ceil(size * f).long() - 1).clamp(min=0).expand(weights.shape[:2])[..., None])
              [..., 0].mean(-1) for f in fractions]
    return fractions, torch.stack(shares, -1)
