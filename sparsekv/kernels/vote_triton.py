"""The Triton kernels of `vote.py`; importing this module imports Triton."""

import triton
import triton.language as tl


@triton.jit
def scores_kernel(
    q, k, first, last, scores, tops, masses, scale, heads_kv, per_row, length, dim, q_row, q_head, k_row, k_head,
    k_token,
    GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr,
):
    """Scores of a group's heads against BLOCK keys, with the block's largest score and its mass for every head."""
    # grid: (Q·Hkv, blocks of keys)
    # q            [Q, Hq, d]               strides q_row, q_head
    # k            [B, Hkv, N, d]           strides k_row, k_head, k_token; length = N
    # first, last  [Q] integers             tokens that vote: first <= n < last
    # scores       [Q, Hq, N] fp32          written, -inf outside
    # tops         [Q, Hq, blocks] fp32     written
    # masses       [Q, Hq, blocks] fp32     written: the sum of exp(score - top)
    row = (tl.program_id(0) // heads_kv).to(tl.int64)
    head = (tl.program_id(0) % heads_kv).to(tl.int64)
    slot = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = (slot >= tl.load(first + row)) & (slot < tl.load(last + row))
    cache_row = row // per_row
    group, width = tl.arange(0, ROWS), tl.arange(0, DIM)
    inside = (width < dim)[None, :]
    query = tl.load(q + row * q_row + (head * GROUP + group)[:, None] * q_head + width[None, :],
                    mask=(group < GROUP)[:, None] & inside, other=0.0)
    key = tl.load(k + cache_row * k_row + head * k_head + slot[:, None].to(tl.int64) * k_token + width[None, :],
                  mask=valid[:, None] & inside, other=0.0)
    score = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee") * scale
    score = tl.where(valid[None, :], score, float("-inf"))
    top = tl.max(score, 1)
    mass = tl.sum(tl.exp(score - tl.where(top == float("-inf"), 0.0, top)[:, None]), 1)
    at = (row * heads_kv + head) * GROUP + group
    tl.store(scores + at[:, None] * length + slot[None, :], score,
             mask=(group < GROUP)[:, None] & (slot < length)[None, :])
    tl.store(tops + at * tl.num_programs(1) + tl.program_id(1), top, mask=group < GROUP)
    tl.store(masses + at * tl.num_programs(1) + tl.program_id(1), mass, mask=group < GROUP)


@triton.jit
def vote_kernel(scores, lse, votes, length, HEADS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """`Σ_heads exp(score − lse)` for BLOCK tokens of one query."""
    # grid: (Q, blocks of tokens)
    # scores  [Q, Hq, N] fp32    as `scores_kernel` writes them; length = N, HEADS = Hq
    # lse     [Q, Hq] fp32       natural logarithm of a head's mass over all tokens
    # votes   [Q, 1, N] fp32     written
    at = tl.program_id(0).to(tl.int64) * HEADS + tl.arange(0, ROWS)
    used = tl.arange(0, ROWS) < HEADS
    slot = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    whole = tl.load(lse + at, mask=used, other=0.0)
    value = tl.load(scores + at[:, None] * length + slot[None, :], mask=used[:, None] & (slot < length)[None, :],
                    other=float("-inf"))
    vote = tl.sum(tl.exp(value - tl.where(whole == float("-inf"), 0.0, whole)[:, None]), 0)
    tl.store(votes + tl.program_id(0).to(tl.int64) * length + slot, vote, mask=slot < length)
