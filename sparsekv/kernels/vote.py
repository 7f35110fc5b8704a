"""Token-level selection: scores of all query heads against all keys, and the heads' vote (TokenSelect §5.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsekv.kernels.launch import NEG_INF, acc_dtype, at_once, dense_last, on_device, padded, power_of_two

KEYS_AT_ONCE, WARPS = 128, 4
VOTES_AT_ONCE = 256


def soft_vote(q: Tensor, k: Tensor, first: Tensor, last: Tensor, *, scale: float) -> Tensor:
    """Soft vote of the heads on every token: `Σ_h softmax(q_h·k·scale)` over tokens `first[q] <= n < last[q]`.

    q `[Q, Hq, d]`; first, last `[Q]`; k `[B, Hkv, N, d]` with any strides. Returns `[Q, 1, N]`, zero outside. On CUDA
    the scores are written once and read once.
    """
    vote = launch_vote if on_device(q) else soft_vote_reference
    return vote(q, k, first, last, scale=scale)


def soft_vote_reference(q: Tensor, k: Tensor, first: Tensor, last: Tensor, *, scale: float) -> Tensor:
    """`soft_vote` in plain torch."""
    count, _, dim = q.shape
    batch, heads_kv = k.shape[:2]
    acc = acc_dtype(q)
    query = q.to(acc).reshape(batch, count // batch, heads_kv, -1, dim).transpose(1, 2)
    scores = (query.reshape(batch, heads_kv, -1, dim) @ k.to(acc).mT) * scale
    scores = scores.reshape(batch, heads_kv, count // batch, -1, k.shape[2]).transpose(1, 2).flatten(0, 1)
    place = torch.arange(k.shape[2], device=q.device)
    inside = (place >= first[:, None]) & (place < last[:, None])
    return scores.masked_fill(~inside[:, None, None], NEG_INF).softmax(-1).nan_to_num(0.0).sum((1, 2))[:, None]


def launch_vote(q: Tensor, k: Tensor, first: Tensor, last: Tensor, *, scale: float) -> Tensor:
    """`soft_vote` through Triton."""
    from sparsekv.kernels.vote_triton import scores_kernel, vote_kernel

    q, k = dense_last(q), dense_last(k)
    count, heads_q, dim = q.shape
    heads_kv, length = k.shape[1:3]
    block = at_once(KEYS_AT_ONCE, padded(dim) * k.element_size())
    group, blocks = heads_q // heads_kv, -(-length // block)
    scores = torch.empty(count, heads_q, length, dtype=torch.float32, device=q.device)
    tops, masses = (torch.empty(count, heads_q, blocks, dtype=torch.float32, device=q.device) for _ in range(2))
    scores_kernel[(count * heads_kv, blocks)](
        q, k, first.contiguous(), last.contiguous(), scores, tops, masses, scale, heads_kv, count // k.shape[0], length,
        dim, *q.stride()[:2], *k.stride()[:3], GROUP=group, ROWS=padded(group), BLOCK=block, DIM=padded(dim),
        num_warps=WARPS)
    lse = torch.logsumexp(tops + masses.clamp(min=1e-30).log(), -1)
    votes = torch.empty(count, 1, length, dtype=torch.float32, device=q.device)
    vote_kernel[(count, -(-length // VOTES_AT_ONCE))](
        scores, lse, votes, length, HEADS=heads_q, ROWS=power_of_two(heads_q), BLOCK=VOTES_AT_ONCE, num_warps=WARPS)
    return votes
