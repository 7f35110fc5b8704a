"""The Triton kernels of `chunk_attention.py`; importing this module imports Triton.

Shapes: B rows of a cache, Hq query heads, Hkv KV heads of G query heads, c queries of a chunk, `past` tokens before it,
d the head dimension, K places of a list. Structs are those of `launch.py`.
"""

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def take(query, key, value, hidden, scale, top, mass, out, MASKED: tl.constexpr):
    """One block of keys joins a running softmax to the base 2; hidden `[ROWS, KEYS]`, if MASKED. scale is above 0, so
    that the highest score stays the highest."""
    score = tl.dot(query, tl.trans(key), input_precision="ieee")
    if MASKED:
        score = tl.where(hidden, float("-inf"), score)
    higher = tl.maximum(top, tl.max(score, 1) * scale)
    safe = higher
    if MASKED:
        safe = tl.where(higher == float("-inf"), 0.0, higher)
    weight = tl.exp2(score * scale - safe[:, None])
    keep = tl.exp2(top - safe)
    mass = mass * keep + tl.sum(weight, 1)
    out = tl.dot(weight.to(value.dtype), value, out * keep[:, None], input_precision="ieee")
    return higher, mass, out


@triton.jit
def chunk_kernel(
    q, k, v, tokens, starts, o, lse, scale, heads, count, past, listed,
    GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """ROWS rows, the group's heads of neighbouring queries: first the whole blocks of the list, in which nothing is
    hidden unless PADDED, then its last, then the chunk up to the last of the queries."""
    # grid: (B·Hkv, blocks of rows)
    # q, o    Tokens [B, Hq, c, d]     with RoPE; o is written
    # k, v    Tokens [B, Hkv, N, d]    N = past + c
    # tokens  Heads [B, Hkv, K]        before the chunk; -1 for none if PADDED; listed = K
    # starts  [B] int64                first real tokens, if PADDED
    # lse     [B, Hq, c] fp32          written: natural logarithm
    row = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    # the longest rows first: what is left at the end is short
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    member = block * ROWS + tl.arange(0, ROWS)
    token, width = member // GROUP, tl.arange(0, WIDTH)
    own = head * GROUP + member % GROUP
    there, wide = token < count, width < DIM
    at = token.to(tl.int64)[:, None]
    query = tl.load(q.base + row * q.row + own[:, None] * q.head + at * q.token + width[None, :],
                    mask=there[:, None] & wide[None, :], other=0.0)
    keys = k.base + row * k.row + head * k.head + width[None, :]
    values = v.base + row * v.row + head * v.head + width[None, :]
    named = tokens.base + row * tokens.row + head * tokens.head
    scale *= LOG2_E
    top = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, WIDTH], tl.float32)
    every = tl.arange(0, KEYS)
    whole = 0 if PADDED else listed // KEYS * KEYS
    for at in range(0, whole, KEYS):
        place = tl.load(named + at + every).to(tl.int64)[:, None]
        key = tl.load(keys + place * k.token, mask=wide[None, :], other=0.0)
        value = tl.load(values + place * v.token, mask=wide[None, :], other=0.0)
        top, mass, out = take(query, key.to(query.dtype), value.to(query.dtype), there[:, None], scale, top, mass, out,
                              MASKED=False)
    for at in range(whole, listed, KEYS):
        place = tl.load(named + at + every, mask=at + every < listed, other=-1).to(tl.int64)
        used = place >= 0
        mask = used[:, None] & wide[None, :]
        key = tl.load(keys + place[:, None] * k.token, mask=mask, other=0.0)
        value = tl.load(values + place[:, None] * v.token, mask=mask, other=0.0)
        top, mass, out = take(query, key.to(query.dtype), value.to(query.dtype), ~used[None, :], scale, top, mass, out,
                              MASKED=True)
    first = 0
    if PADDED:
        first = tl.maximum(tl.load(starts + row).to(tl.int32) - past, 0)
    last = tl.minimum((block * ROWS + ROWS - 1) // GROUP + 1, count)
    for at in range(0, last, KEYS):
        column = at + every
        mask = (column < last)[:, None] & wide[None, :]
        place = (past + column).to(tl.int64)[:, None]
        key = tl.load(keys + place * k.token, mask=mask, other=0.0)
        value = tl.load(values + place * v.token, mask=mask, other=0.0)
        hidden = (column[None, :] > token[:, None]) | (column < first)[None, :]
        top, mass, out = take(query, key.to(query.dtype), value.to(query.dtype), hidden, scale, top, mass, out,
                              MASKED=True)
    found = out / tl.where(mass > 0, mass, 1.0)[:, None]
    tl.store(o.base + row * o.row + own[:, None] * o.head + token.to(tl.int64)[:, None] * o.token + width[None, :],
             found.to(o.base.dtype.element_ty), mask=there[:, None] & wide[None, :])
    at = (row * heads * GROUP + own) * count + token
    tl.store(lse + at, tl.where(mass > 0, (top + tl.log2(mass)) / LOG2_E, float("-inf")), mask=there)
