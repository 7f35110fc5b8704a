"""The Triton kernel of `chunk_attention.py`; importing this module imports Triton."""

import triton
import triton.language as tl

from sparsekv.kernels.block_attention_triton import LOG2_E, take


@triton.jit(do_not_specialize=["past", "count", "listed"])
def chunk_kernel(
    q, k, v, lists, o, lse, scale, heads, group, chunk, past, count, listed,
    DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr,
):
    """A block of a chunk's queries, of one head: the rows of the chunk's list where they lie, then the chunk itself."""
    # grid: (blocks of a chunk, B·Hq, n): programs of a chunk run together, and read the same rows
    # q, o   Tokens [B, Hq, count, d]           o is written; chunks of `chunk` tokens
    # k, v   Tokens [B, Hkv, past + count, d]
    # lists  [B, n, listed] int32               -1 = none
    # lse    [B, Hq, count] fp32                written: natural logarithm
    pair = tl.program_id(1).to(tl.int64)
    row, head = pair // heads, pair % heads
    number = tl.program_id(2)
    member, width = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    first = number * chunk
    here = tl.minimum(chunk, count - first)
    wide, asked = (width < DIM)[None, :], member < here
    token = (first + member).to(tl.int64)[:, None]
    query = tl.load(q.base + row * q.row + head * q.head + token * q.token + width[None, :],
                    mask=asked[:, None] & wide, other=0.0)
    keys = k.base + row * k.row + head // group * k.head + width[None, :]
    values = v.base + row * v.row + head // group * v.head + width[None, :]
    named = lists + (row * tl.num_programs(2) + number) * listed
    every = tl.arange(0, KEYS)
    scale *= LOG2_E
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    out = tl.zeros([BLOCK, WIDTH], tl.float32)
    for at in range(0, listed, KEYS):
        place = tl.load(named + at + every, mask=at + every < listed, other=-1)
        # of a place without a token the first row is read: only the channels of a load are masked
        rows = tl.maximum(place, 0).to(tl.int64)[:, None]
        if DIM == WIDTH:
            key, value = tl.load(keys + rows * k.token), tl.load(values + rows * v.token)
        else:
            key = tl.load(keys + rows * k.token, mask=wide, other=0.0)
            value = tl.load(values + rows * v.token, mask=wide, other=0.0)
        top, mass, out = take(query, key.to(query.dtype), value.to(query.dtype), (place < 0)[None, :], scale, top, mass,
                              out, MASKED=True)
    for at in range(0, tl.minimum(tl.program_id(0) * BLOCK + BLOCK, here), KEYS):
        own = at + every
        rows = (past + first + tl.minimum(own, here - 1)).to(tl.int64)[:, None]
        key = tl.load(keys + rows * k.token, mask=wide, other=0.0)
        value = tl.load(values + rows * v.token, mask=wide, other=0.0)
        top, mass, out = take(query, key.to(query.dtype), value.to(query.dtype), own[None, :] > member[:, None], scale,
                              top, mass, out, MASKED=True)
    out = out / mass[:, None]
    tl.store(o.base + row * o.row + head * o.head + token * o.token + width[None, :], out.to(o.base.dtype.element_ty),
             mask=asked[:, None] & wide)
    tl.store(lse + pair * count + first + member, (top + tl.log2(mass)) / LOG2_E, mask=asked)
