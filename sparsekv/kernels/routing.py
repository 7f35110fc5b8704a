"""Routing of one decode step: scores of the buckets for every query head, softmax, sum over the group, and what is
read: the best buckets (Saap §4), or tokens by the budget rule.

The scores are the query model's (`QueryModel`) or the bucket means' (`BucketMeans`). Four launches at most and no host
synchronisation: the hidden layer cut over its units, the scores cut over the buckets, one program a query and KV head
that ranks, and for tokens one more that writes them. From sm_90 on each launch is prepared while the one before it
ends.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsekv.kernels.indexing import per_query, tokens_at
from sparsekv.kernels.launch import (
    NEG_INF,
    acc_dtype,
    at_once,
    dense_last,
    on_device,
    overlaps,
    padded,
    power_of_two,
    seats_or,
)
from sparsekv.kernels.types import BucketMeans, QueryModel, RouterScores

HIDDEN_BLOCK, HIDDEN_WARPS = 32, 4
BUCKET_PROGRAMS, SCORE_WARPS = 128, 4
DEPTH_BLOCK, STAGES = 128, 5
"""Stages in half precision; wider numbers take as many fewer, so that they fit the shared memory."""
RANK_WARPS = 8
FILL_BLOCK, FILL_WARPS = 256, 4
MAX_ROWS = 64
MAX_BUCKETS = 4096


def bucket_logits_reference(q: Tensor, scores: RouterScores, counts: Tensor) -> Tensor:
    """Scores of every bucket before the softmax, `[Q, Hq, C]`, in plain torch: q `[Q, Hq, d]` in the space of the
    scores, counts `[B, Hkv, C]`. Empty buckets get -inf."""
    if isinstance(scores, BucketMeans):
        return mean_key_logits(q, scores, counts)
    empty = per_query(counts == 0, *q.shape[:2])
    return router_logits(q, scores).masked_fill(empty, NEG_INF)


def router_logits(q: Tensor, model: QueryModel) -> Tensor:
    """`W2 relu(W1 q + b1) + b2` (Saap §4): q `[Q, Hq, d]` in the model's space -> `[Q, Hq, C]`."""
    count, heads_q, dim = q.shape
    acc = acc_dtype(q)
    query = q.to(acc).reshape(count, model.w1.shape[0], -1, dim)
    hidden = torch.einsum("bhgd,hdn->bhgn", query, model.w1.to(acc)) + model.b1.to(acc)[:, None]
    logits = torch.einsum("bhgn,hnc->bhgc", hidden.relu(), model.w2.to(acc)) + model.b2.to(acc)[:, None]
    return logits.reshape(count, heads_q, -1)


def mean_key_logits(q: Tensor, means: BucketMeans, counts: Tensor) -> Tensor:
    """`log n_c + scale q·mean_c + scale² |q|² spread_c`, the log-mass of a bucket to the second order, its keys being
    spread alike in all directions, and less what is the same for all (`round_means`): q `[Q, Hq, d]` with RoPE, counts
    `[B, Hkv, C]` -> `[Q, Hq, C]`. Empty buckets get -inf. The first two terms alone are what Jensen's inequality puts
    below it."""
    count, heads_q, dim = q.shape
    acc = acc_dtype(q)
    batch, heads_kv, buckets, _ = means.means.shape
    query = q.to(acc).reshape(batch, count // batch, heads_kv, -1, dim) * means.scale
    logits = torch.einsum("bthgd,bhcd->bthgc", query, means.means.to(acc)) * means.steps.to(acc)[:, None, :, None]
    logits += query.square().sum(-1, keepdim=True) * means.spread.to(acc)[:, None, :, None]
    return (logits + counts.to(acc).log()[:, None, :, None]).reshape(count, heads_q, buckets)


def round_means(sums: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Round the means of buckets to 8 bits, less the mean of all keys, which adds the same to every score of a query.

    Args:
        sums: `[..., C, d]` of the keys.
        counts: `[..., C]`.

    Returns:
        `[..., C, d]` int8, and the steps they are in, `[..., C]` float32. A channel is off by half a step at most,
        1/254 of the largest.
    """
    means = sums / counts.clamp(min=1)[..., None]
    middle = sums.sum(-2, keepdim=True) / counts.sum(-1)[..., None, None].clamp(min=1)
    away = means - middle
    steps = away.abs().amax(-1) / 127
    return (away / steps.clamp(min=1e-30)[..., None]).round().to(torch.int8), steps.float()


def half_variance(squares: Tensor, sums: Tensor, counts: Tensor) -> Tensor:
    """Compute the `spread` of buckets from the sums of their keys' squared lengths `[..., C]`, of their keys
    `[..., C, d]`, and their counts `[..., C]`.
    """
    counts = counts.clamp(min=1)
    return ((squares / counts - (sums / counts[..., None]).square().sum(-1)) / (2 * sums.shape[-1])).clamp(min=0)


def group_probability(logits: Tensor, heads_kv: int) -> Tensor:
    """`p_c = Σ_{g in group} softmax_c(logits_g)`: logits `[Q, Hq, C]` -> `[Q, Hkv, C]`; zero where all are -inf."""
    return logits.softmax(-1).nan_to_num(0.0).unflatten(1, (heads_kv, -1)).sum(2)


def route(q: Tensor, scores: RouterScores, counts: Tensor, probes: int) -> Tensor:
    """Choose the buckets of the largest probability, summed over the group (Saap §4).

    Args:
        q: `[Q, Hq, d]`, in the space of the scores.
        scores: a query model, or the means of the buckets.
        counts: `[B, Hkv, C]`, tokens of every bucket.
        probes: buckets to choose.

    Returns:
        `[Q, Hkv, probes]` int32, padded with -1 where fewer are non-empty.
    """
    if routable(q, scores):
        return launch_route(q, scores, counts, probes)
    return top_buckets(group_probability(bucket_logits_reference(q, scores, counts), counts.shape[1]), counts, probes)


def top_buckets(probability: Tensor, counts: Tensor, probes: int) -> Tensor:
    """`route` from probabilities `[Q, Hkv, C]`, in plain torch."""
    empty = per_query(counts <= 0, *probability.shape[:2])
    values, chosen = probability.masked_fill(empty, NEG_INF).topk(min(probes, counts.shape[-1]), dim=-1)
    return torch.where(torch.isinf(values), -1, chosen).to(torch.int32)


def route_tokens(
    q: Tensor, scores: RouterScores, order: Tensor, offsets: Tensor, budget: Tensor, widest: int,
    seats: Tensor | None = None,
) -> Tensor:
    """List the tokens that a budget buys.

    Buckets come by descending density, whole until the budget is reached, the last one in part, its first tokens. The
    density is the probability, summed over the group, over tokens, to the eight bits of bfloat16's precision; ties: the
    lower number.

    Args:
        q: `[Q, Hq, d]`, in the space of the scores.
        order, offsets: `[B, Hkv, M]` and `[B, Hkv, C + 1]`.
        budget: `[Q]` [tokens]; widest: the largest of it.
        seats: `[Q]` int64, the rows of offsets, bucket means and budget that are the queries', where these are kept by
            request; the order's rows stay the queries' own.

    Returns:
        `[Q, Hkv, widest]` int32 in the order of the buckets, padded with -1.
    """
    if routable(q, scores):
        logits = launch_logits(q, scores, offsets, offsets=True, seats=seats)
        return launch_choose(logits, order, offsets, budget, widest, logits=True, seats=seats)
    return route_tokens_reference(q, scores, order, offsets, budget, widest, seats)


def route_tokens_reference(
    q: Tensor, scores: RouterScores, order: Tensor, offsets: Tensor, budget: Tensor, widest: int,
    seats: Tensor | None = None,
) -> Tensor:
    """`route_tokens` in plain torch."""
    if seats is not None:
        offsets, budget = offsets[seats], budget[seats]
        if isinstance(scores, BucketMeans):
            scores = scores._replace(means=scores.means[seats], steps=scores.steps[seats], spread=scores.spread[seats])
    counts = offsets.diff(dim=-1)
    probability = group_probability(bucket_logits_reference(q, scores, counts), counts.shape[1])
    density = probability / per_query(counts, *probability.shape[:2]).clamp(min=1)
    return choose_tokens_reference(density, order, offsets, budget, widest)


def choose_tokens(density: Tensor, order: Tensor, offsets: Tensor, budget: Tensor, widest: int) -> Tensor:
    """Apply the budget rule of `route_tokens` to densities `[Q, H, C]` ≥ 0, `H` a multiple of `Hkv`: `[Q, H, widest]`.
    Densities of empty buckets do not matter.
    """
    if on_device(density) and density.shape[-1] <= MAX_BUCKETS:
        return launch_choose(density.float(), order, offsets, budget, widest, logits=False)
    return choose_tokens_reference(density, order, offsets, budget, widest)


def choose_tokens_reference(density: Tensor, order: Tensor, offsets: Tensor, budget: Tensor, widest: int) -> Tensor:
    """`choose_tokens` in plain torch."""
    table = per_query(offsets, *density.shape[:2]).long()
    counts = table.diff(dim=-1)
    upper = density.float().clamp(min=0.0).view(torch.int32) >> 16
    ranked = upper.masked_fill(counts == 0, -1).argsort(dim=-1, descending=True, stable=True)
    sizes = counts.gather(-1, ranked)
    sizes = torch.minimum(sizes, (budget.clamp(max=widest)[:, None, None] - sizes.cumsum(-1) + sizes).clamp(min=0))
    return tokens_at(order, table[..., :-1], torch.empty_like(sizes).scatter_(-1, ranked, sizes), widest)


def routable(q: Tensor, scores: RouterScores) -> bool:
    """Whether the kernels take it: a CUDA device, half precision or float32, a model in the dtype of q."""
    if not on_device(q):
        return False
    if isinstance(scores, BucketMeans):
        return scores.means.shape[2] <= MAX_BUCKETS
    return scores.w1.dtype == q.dtype and scores.w2.shape[2] <= MAX_BUCKETS


def launch_logits(
    q: Tensor, scores: RouterScores, table: Tensor, *, offsets: bool, seats: Tensor | None = None,
) -> Tensor:
    """`bucket_logits_reference` through Triton. table: counts, or with `offsets` the offsets of the index. The first
    launch waits for everything before it, a second only for its inputs."""
    from sparsekv.kernels.routing_triton import hidden_kernel, mean_kernel, score_kernel

    q, table = dense_last(q), table.contiguous()
    count, heads_q, dim = q.shape
    batch, heads_kv = table.shape[0] if seats is None else count, table.shape[1]
    buckets, group = table.shape[2] - offsets, heads_q // heads_kv
    by_seat = seats_or(seats, table)
    by_model = isinstance(scores, QueryModel)
    # a product takes the queries of one row where the scores are the row's own, else any
    per_row = count if by_model else count // batch
    fold = max(1, min(per_row, MAX_ROWS // group))
    programs = heads_kv * (count // per_row) * -(-per_row // fold)
    block = max(16, min(64, power_of_two(buckets * programs // BUCKET_PROGRAMS)))
    if not by_model:
        block = min(block, at_once(64, padded(dim) * q.element_size()))
    overlap = overlaps(q.device)
    shape: dict[str, Any] = {"FOLD": fold, "GROUP": group, "ROWS": padded(fold * group), "OVERLAP": overlap}
    logits = torch.empty(count, heads_q, buckets, dtype=torch.float32, device=q.device)
    grid = (programs, -(-buckets // block))
    if isinstance(scores, BucketMeans):
        means = dense_last(scores.means)
        mean_kernel[grid](
            q, means, scores.steps.contiguous(), scores.spread.contiguous(), table, by_seat, logits, scores.scale,
            heads_kv, per_row, *q.stride()[:2], *means.stride()[:3], dim, buckets, **shape, BLOCK=block,
            WIDTH=padded(dim), OFFSETS=offsets, SEATED=seats is not None, num_warps=SCORE_WARPS)
        return logits
    w1, b1, w2, b2 = (w.contiguous() for w in scores)
    hidden = w1.shape[2]
    middle = torch.empty(count, heads_q, hidden, dtype=w2.dtype, device=q.device)
    hidden_kernel[(programs, -(-hidden // HIDDEN_BLOCK))](
        q, w1, b1, middle, heads_kv, count, *q.stride()[:2], dim, hidden, **shape, BLOCK=HIDDEN_BLOCK,
        DEPTH=padded(dim), num_warps=HIDDEN_WARPS)
    score_kernel[grid](
        middle, w2, b2, table, by_seat, logits, heads_kv, count, count // batch, hidden, buckets, **shape, BLOCK=block,
        DEPTH=DEPTH_BLOCK, OFFSETS=offsets, SEATED=seats is not None, num_warps=SCORE_WARPS,
        num_stages=STAGES * 2 // w2.element_size(), **({"launch_pdl": True} if overlap else {}))
    return logits


def launch_route(q: Tensor, scores: RouterScores, counts: Tensor, probes: int) -> Tensor:
    """`route` through Triton."""
    from sparsekv.kernels.routing_triton import rank_kernel

    counts = counts.contiguous()
    logits = launch_logits(q, scores, counts, offsets=False)
    count, heads_q, buckets = logits.shape
    heads_kv, probes = counts.shape[1], min(probes, buckets)
    chosen = torch.empty(count, heads_kv, probes, dtype=torch.int32, device=q.device)
    wide, rows, overlap = power_of_two(buckets), power_of_two(heads_q // heads_kv), overlaps(q.device)
    rank_kernel[(count * heads_kv,)](
        logits, counts, chosen, heads_kv, count // counts.shape[0], buckets, probes, GROUP=heads_q // heads_kv,
        ROWS=rows, PADDED=wide, KEPT=min(wide, power_of_two(probes)), OVERLAP=overlap,
        num_warps=rank_warps(rows * wide), **({"launch_pdl": True} if overlap else {}))
    return chosen


class RunArguments(NamedTuple):
    """What `routing_triton.bucket_runs` reads and writes, in which the shapes stand."""

    scores: Tensor
    offsets: Tensor
    budget: Tensor
    seats: Tensor
    runs: Tensor
    counts: Tensor


def launch_runs(
    scores: Tensor, offsets: Tensor, budget: Tensor, widest: int, *, logits: bool, seats: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The runs of slots that buckets fill (`empty_runs`), and how many tokens these are, `[Q, H]`: scores `[Q, H, C]`
    are densities, or with `logits` logits of the query heads, normalised and summed over the group."""
    from sparsekv.kernels.routing_triton import runs_kernel

    scores, offsets = scores.contiguous(), offsets.contiguous()
    count, heads, buckets = scores.shape
    batch, heads_kv = offsets.shape[0] if seats is None else count, offsets.shape[1]
    group = heads // heads_kv if logits else 1
    heads //= group
    rows, wide, overlap = power_of_two(group), padded_buckets(buckets), overlaps(scores.device)
    runs, counts = empty_runs(count, heads, buckets, scores.device)
    run = RunArguments(scores, offsets, budget.contiguous(), seats_or(seats, offsets), runs, counts)
    runs_kernel[(count * heads,)](
        run, heads, count // batch, buckets, widest, LISTS=heads // heads_kv, OVERLAP=overlap, GROUP=group, ROWS=rows,
        PADDED=wide, LOGITS=logits, SEATED=seats is not None, num_warps=rank_warps(rows * wide),
        **({"launch_pdl": True} if logits and overlap else {}))
    return runs, counts


def padded_buckets(buckets: int) -> int:
    """Places of a list's runs: a power of two, at least 2, since Triton 3.6 does not compile a search among one."""
    return max(2, power_of_two(buckets))


def empty_runs(count: int, heads: int, buckets: int, device: Any) -> tuple[Tensor, Tensor]:
    """Place for the runs of lists, `[Q, H, 2, C]` int32 with C from `padded_buckets` (`routing_triton.bucket_runs`),
    and for the numbers of their tokens, `[Q, H]`."""
    runs = torch.empty(count, heads, 2, padded_buckets(buckets), dtype=torch.int32, device=device)
    return runs, torch.empty(count, heads, dtype=torch.int32, device=device)


def launch_choose(
    scores: Tensor, order: Tensor, offsets: Tensor, budget: Tensor, widest: int, *, logits: bool,
    seats: Tensor | None = None,
) -> Tensor:
    """`choose_tokens` through Triton, or with `logits` the end of `route_tokens`. How many tokens of every
    bucket are taken, then the tokens themselves."""
    from sparsekv.kernels.routing_triton import fill_kernel

    runs, counts = launch_runs(scores, offsets, budget, widest, logits=logits, seats=seats)
    order = dense_last(order)
    count, heads, _, wide = runs.shape
    batch, heads_kv = order.shape[0], offsets.shape[1]
    overlap = overlaps(scores.device)
    tokens = torch.empty(count, heads, widest, dtype=torch.int32, device=scores.device)
    pdl: dict[str, Any] = {"launch_pdl": True} if overlap else {}
    lists: dict[str, Any] = {"LISTS": heads // heads_kv, "OVERLAP": overlap}
    if tokens.numel():
        fill_kernel[(count * heads, -(-widest // FILL_BLOCK))](
            order, runs, counts, tokens, heads, count // batch, widest, *order.stride()[:2], **lists, PADDED=wide,
            BLOCK=FILL_BLOCK, num_warps=FILL_WARPS, **pdl)
    return tokens


def rank_warps(scores: int) -> int:
    """Warps of a program that holds so many scores in registers."""
    return max(RANK_WARPS, min(32, scores // 2048))
