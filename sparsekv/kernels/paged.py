"""Token-level selection: scores of all query heads against all keys, and the heads' vote (TokenSelect §4.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsekv.kernels import reference

BLOCK, WARPS = 128, 4
VOTE_BLOCK = 256


def paged_scores(
    q: Tensor, k: Tensor, first: Tensor, last: Tensor, *, scale: float, table: Tensor | None = None,
    per_group: bool = False,
) -> Tensor:
    """Soft vote of the heads on every token: `Σ_h softmax(q_h·k·scale)` over tokens `first[b] <= n < last[b]`.

    q `[B, Hq, d]`; k `[B, Hkv, P, d]` with any strides (a pool shared by the batch: expanded); table `[B, N]`: where in
    k token n lies (pages of one token), None: at n. Returns `[B, 1, N]`, or `[B, Hkv, N]` with `per_group`: each group
    votes alone. Zero outside. On CUDA the scores are written once and read once.
    """
    if not q.is_cuda:
        return reference.paged_scores(q, k, first, last, scale=scale, table=table, per_group=per_group)
    return launch(q, k, first, last, scale=scale, table=table, per_group=per_group)


def launch(
    q: Tensor, k: Tensor, first: Tensor, last: Tensor, *, scale: float, table: Tensor | None = None,
    per_group: bool = False,
) -> Tensor:
    """`paged_scores` through Triton."""
    from sparsekv.kernels.indexing_triton import page_kernel, vote_kernel

    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    batch, heads_q, dim = q.shape
    heads_kv = k.shape[1]
    length = k.shape[2] if table is None else table.shape[1]
    group, blocks = heads_q // heads_kv, -(-length // BLOCK)
    scores = torch.empty(batch, heads_q, length, dtype=torch.float32, device=q.device)
    tops, masses = (torch.empty(batch, heads_q, blocks, dtype=torch.float32, device=q.device) for _ in range(2))
    page_kernel[(batch * heads_kv, blocks)](
        q, k, first if table is None else table.contiguous(), first, last, scores, tops, masses, scale, heads_kv,
        length, dim, q.stride(0), q.stride(1), *k.stride()[:3], PAGED=table is not None, GROUP=group,
        ROWS=max(16, _power_of_two(group)), BLOCK=BLOCK, DIM=max(16, _power_of_two(dim)), num_warps=WARPS)
    lse = torch.logsumexp(tops + masses.clamp(min=1e-30).log(), -1)
    voters = group if per_group else heads_q
    votes = torch.empty(batch, heads_q // voters, length, dtype=torch.float32, device=q.device)
    vote_kernel[(votes.shape[0] * votes.shape[1], -(-length // VOTE_BLOCK))](
        scores, lse, votes, heads_q, length, GROUP=voters, ROWS=_power_of_two(voters), BLOCK=VOTE_BLOCK,
        num_warps=WARPS)
    return votes


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
