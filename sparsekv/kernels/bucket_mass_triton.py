"""The Triton kernel of `bucket_mass.py`; importing this module imports Triton."""

import triton
import triton.language as tl


@triton.jit
def bucket_mass_kernel(
    q, k, where, offsets, positions, out, scale, count, length, buckets, per_part, sink, window,
    GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):
    """The logarithm of the mass of per_part buckets for ROWS queries of one head, over keys sorted by bucket."""
    # grid: (blocks of queries, Hq, parts of the buckets)
    # q          [Hq, T, d]           with RoPE; count = T, DIM = d
    # k          [Hkv, N, d]          with RoPE, in the order of where; length = N
    # where      [Hkv, N] int32       a key's place in the context
    # offsets    [Hkv, C + 1] int32   where buckets begin in k; buckets = C
    # positions  [Hq, T] int32        the last key that a query sees
    # out        [Hq, T, C] fp32      written: natural logarithm, -inf for none
    head = tl.program_id(1).to(tl.int64)
    head_kv = head // GROUP
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    width = tl.arange(0, WIDTH)
    column = tl.arange(0, BLOCK)
    place = tl.load(positions + head * count + row, mask=row < count, other=-1)
    query = tl.load(q + (head * count + row)[:, None] * DIM + width[None, :],
                    mask=(row < count)[:, None] & (width < DIM)[None, :], other=0.0)
    key_base = k + head_kv * length * DIM
    where_base = where + head_kv * length
    edge = offsets + head_kv * (buckets + 1)
    slot = out + (head * count + row) * buckets
    first = tl.program_id(2) * per_part
    last = tl.minimum(first + per_part, buckets)
    for c in range(first, last):
        begin = tl.load(edge + c)
        end = tl.load(edge + c + 1)
        # a finite floor: -inf minus -inf must not appear
        top = tl.full([ROWS], -1e30, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        for at in range(begin, end, BLOCK):
            token = at + column
            inside = token < end
            key = tl.load(key_base + token.to(tl.int64)[:, None] * DIM + width[None, :],
                          mask=inside[:, None] & (width < DIM)[None, :], other=0.0)
            origin = tl.load(where_base + token, mask=inside, other=-1)
            score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
            mid = (origin[None, :] >= sink) & (origin[None, :] <= place[:, None] - window) & inside[None, :]
            score = tl.where(mid, score, float("-inf"))
            higher = tl.maximum(top, tl.max(score, 1))
            total = total * tl.exp(top - higher) + tl.sum(tl.exp(score - higher[:, None]), 1)
            top = higher
        tl.store(slot + c, tl.where(total > 0, top + tl.log(total), float("-inf")), mask=row < count)
