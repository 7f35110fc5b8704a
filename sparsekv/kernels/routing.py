"""Routing of one decode step: scores of the buckets for every query head, softmax, sum over the group, best buckets.

The scores are the query model's (`mlp`, Saap §4.2), the bucket means' (`mean_key`) or their sum (`hybrid`). Three
launches (two for `mean_key`) and no host synchronisation: the hidden layer cut over its units, the scores cut over the
buckets, one program a KV head that ranks by a partial sort. From sm_90 on each launch is prepared while the one before
it ends.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsekv.kernels import reference
from sparsekv.kernels.reference import BucketMeans, RouterWeights

HIDDEN_BLOCK, HIDDEN_WARPS = 32, 4
BUCKET_PROGRAMS, SCORE_WARPS = 128, 4
DEPTH_BLOCK, STAGES = 128, 5
RANK_WARPS = 8
MAX_ROWS = 64


def route(
    q: Tensor, weights: RouterWeights | None, heads_kv: int, probes: int, counts: Tensor | None = None, *,
    means: BucketMeans | None = None, q_means: Tensor | None = None, density: bool = False,
) -> Tensor:
    """The `probes` best buckets of every KV head, `[B, Hkv, probes]` int32, padded with -1 where fewer are non-empty.

    q `[B, Hq, d]` in the router's space; `weights` scores by the query model, `means` by `log n + q·mean·scale`, both
    by the sum; q_means: the query for the means, where its space differs from the router's. counts `[B, Hkv, C]`:
    empty buckets are never chosen (needed with `means`). density: rank by probability per key of the bucket.
    `reference.route` in three launches on CUDA.
    """
    if q.is_cuda and _fits(q, weights, counts):
        return launch(q, weights, heads_kv, probes, counts, means, q_means, density)
    return reference.route(q, weights, heads_kv, probes, counts, means=means, q_means=q_means, density=density)


def _fits(q: Tensor, weights: RouterWeights | None, counts: Tensor | None) -> bool:
    dense = weights is None or (weights.w1.dtype == q.dtype and all(w.is_contiguous() for w in weights))
    return dense and q.dtype in (torch.bfloat16, torch.float16, torch.float32)


def overlaps(device: torch.device) -> bool:
    """Whether kernels can start before the one ahead of them ends (programmatic dependent launch)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def launch(
    q: Tensor, weights: RouterWeights | None, heads_kv: int, probes: int, counts: Tensor | None,
    means: BucketMeans | None = None, q_means: Tensor | None = None, density: bool = False,
) -> Tensor:
    """`route` through Triton. The first launch waits for everything before it, the others only for their inputs."""
    from sparsekv.kernels.routing_triton import hidden_kernel, rank_kernel, score_kernel

    q = q if q.stride(-1) == 1 else q.contiguous()
    q_means = q if q_means is None else q_means
    batch, heads_q, dim = q.shape
    overlap = overlaps(q.device)
    pdl: dict[str, Any] = {"launch_pdl": True} if overlap else {}
    buckets = weights.w2.shape[2] if weights is not None else means.means.shape[2]  # type: ignore[union-attr]
    models = weights.w1.shape[0] if weights is not None else heads_kv
    group = heads_q // models
    fold = 1 if means is not None else max(1, min(batch, MAX_ROWS // group))
    rows = max(16, _power_of_two(fold * group))
    programs = models * -(-batch // fold)
    logits = torch.empty(batch, heads_q, buckets, dtype=torch.float32, device=q.device)
    probes = min(probes, buckets)
    chosen = torch.empty(batch, heads_kv, probes, dtype=torch.int32, device=q.device)
    shape: dict[str, Any] = {"FOLD": fold, "GROUP": group, "ROWS": rows, "OVERLAP": overlap}
    block = max(16, min(64, _power_of_two(buckets * programs // BUCKET_PROGRAMS)))
    middle, hidden = logits, 16
    if weights is not None:
        hidden = weights.w1.shape[2]
        middle = torch.empty(batch, heads_q, hidden, dtype=weights.w2.dtype, device=q.device)
        hidden_kernel[(programs, -(-hidden // HIDDEN_BLOCK))](
            q, weights.w1, weights.b1, middle, models, batch, q.stride(0), q.stride(1), dim, hidden,
            **shape, BLOCK=HIDDEN_BLOCK, DEPTH=max(16, _power_of_two(dim)), num_warps=HIDDEN_WARPS)
    w2, b2 = (weights.w2, weights.b2) if weights is not None else (q, q)
    mean, scale = (means.means, means.scale) if means is not None else (q[:, :, None], 1.0)
    score_kernel[(programs, -(-buckets // block))](
        middle, w2, b2, q_means, mean, logits if counts is None else counts, logits, scale, models, heads_kv, batch,
        q_means.stride(0), q_means.stride(1), mean.stride(0), mean.stride(1), mean.stride(2), dim, hidden, buckets,
        MLP=weights is not None, MEANS=means is not None, **shape, BLOCK=block,
        DEPTH=DEPTH_BLOCK, WIDTH=max(16, _power_of_two(dim)), WAITS=overlap and weights is not None,
        num_warps=SCORE_WARPS, num_stages=STAGES, **(pdl if weights is not None else {}))
    padded = _power_of_two(buckets)
    rank_kernel[(batch * heads_kv,)](
        logits, logits if counts is None else counts, chosen, buckets, probes, GROUP=heads_q // heads_kv,
        ROWS=_power_of_two(heads_q // heads_kv), PADDED=padded, KEPT=min(padded, _power_of_two(probes)),
        COUNTED=counts is not None, DENSITY=density, OVERLAP=overlap, num_warps=RANK_WARPS, **pdl)
    return chosen


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
