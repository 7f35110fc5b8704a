"""The tokens that chunks of a prompt read: one list a KV head for all of a chunk's queries, in groups of neighbouring
tokens.

Every query asks, since what a single one needs is lost in a mean of many. Sums along antidiagonals make that cheap: of
`GROUP` neighbouring queries and `GROUP` neighbouring keys one number is made, the mean of the scores of the pairs
(i, GROUP − 1 − i), in which each of them occurs once (XAttention §2.1). Each group of queries has a softmax of its own
over the groups of keys; a group of keys has the sum of what all groups of queries give it, and the best are read.
XAttention chooses blocks of 128 by 128 pairs for each query head; here a list serves all queries of a chunk and heads
of a group, so that a key is fetched once for all. The work is a product of matrices and torch's own: a sixteenth of
full attention's multiplications and a 64th of its exponentials. Nothing waits for the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsekv.kernels.launch import acc_dtype

GROUP = 8
"""Neighbouring tokens that are scored together, and read together."""


def chunk_tokens(
    q: Tensor, k: Tensor, first: int, last: int, count: int, *, scale: float, step: int = 0,
) -> Tensor:
    """The `count` tokens of `first … last − 1` in the groups that chunks of queries attend to most, in ascending order:
    `[B·n, Hkv, count]` int32. Of the chunks of a row each has `step` more candidates than the one before it.

    q `[B·n, Hq, c, d]` and k `[B, Hkv, N, d]`, both with RoPE. `last − first`, step and count (at most `last − first`)
    are multiples of `GROUP`.
    """
    batch, heads, chunks = len(k), k.shape[1], len(q) // len(k)
    if (last - first) % GROUP or step % GROUP or count % GROUP:
        raise ValueError(f"candidates, step and count must be multiples of {GROUP}, found {last - first}, {step}, "
                         f"{count}")
    asking = query_groups(q, heads, scale).unflatten(0, (batch, chunks))
    width = (last - first + (chunks - 1) * step) // GROUP
    # of chunks with fewer candidates than the last the others are none
    mass = torch.full((batch, chunks, heads, width), -1.0, dtype=acc_dtype(q), device=q.device)
    for i in range(chunks):
        keys = k[:, :, first:last + i * step].unflatten(2, (-1, GROUP)).flatten(3)
        shares = (asking[:, i] @ keys.mT).softmax(-1)
        mass[:, i, :, :keys.shape[2]] = shares.sum(2, dtype=mass.dtype)
    best = mass.flatten(0, 1).topk(count // GROUP, dim=-1, sorted=False).indices.sort(dim=-1).values
    tokens = best[..., None] * GROUP + torch.arange(first, first + GROUP, device=q.device)
    return tokens.flatten(2).int()


def query_groups(q: Tensor, heads_kv: int, scale: float) -> Tensor:
    """Groups of neighbouring queries `[Q, Hq, c, d]`, in reverse order one behind the other and scaled, so that the
    product with a group of keys is the mean of an antidiagonal: `[Q, Hkv, G · ⌈c / GROUP⌉, GROUP · d]`. A last group
    that is too short is filled with its last query."""
    missing = -q.shape[2] % GROUP
    if missing:
        q = torch.cat([q, q[:, :, -1:].expand(-1, -1, missing, -1)], dim=2)
    groups = (q * (scale / GROUP)).unflatten(2, (-1, GROUP)).flip(3).flatten(3)
    return groups.unflatten(1, (heads_kv, -1)).flatten(2, 3)
