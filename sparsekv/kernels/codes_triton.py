"""The Triton kernel of `codes.py`; importing this module imports Triton."""

import triton
import triton.language as tl


@triton.jit
def project(total, key, maps, channel, width, dim, RANK: tl.constexpr):
    """`total [BLOCK, WIDTH]` with the products of a part of a block of keys and the maps of some channels."""
    weights = tl.load(maps + width[:, None] * RANK + channel[None, :],
                      mask=(width < dim)[:, None] & (channel < RANK)[None, :], other=0.0)
    return tl.dot(key, weights.to(key.dtype), total, input_precision="ieee")


@triton.jit
def rounded(total, centre, channel, top, RANK: tl.constexpr):
    """Some channels of the codes of a block of keys, `[BLOCK, WIDTH]` int32, from their products with the maps."""
    middle = tl.load(centre + channel, mask=channel < RANK, other=0.0).to(tl.float32)
    return tl.minimum(tl.maximum(tl.floor(total - middle[None, :] + 0.5), -top), top).to(tl.int32)


@triton.jit(do_not_specialize=["heads", "length"])
def encode_kernel(
    keys, maps, centre, codes, heads, length, dim, k_row, k_head, k_token, m_row, c_row,
    RANK: tl.constexpr, BYTES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr,
):
    """Codes of BLOCK keys; keys and maps pass through shared memory DEPTH of the head dimension at a time."""
    # grid: (B·Hkv, blocks of keys)
    # keys    [B, Hkv, N, d]        with RoPE; strides k_row, k_head, k_token
    # maps    [B or 1, Hkv, d, r]   RANK = r; stride m_row, 0 where all rows share them
    # centre  [B or 1, Hkv, r]      in steps of the codes; stride c_row
    # codes   [B, Hkv, N, w] int8   written; BYTES = w
    WHOLE: tl.constexpr = 2 * BYTES - RANK
    row = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keys += row * k_row + head * k_head
    maps += row * m_row + head * dim * RANK
    centre += row * c_row + head * RANK
    byte = tl.arange(0, WIDTH)
    first = tl.zeros([BLOCK, WIDTH], tl.float32)
    second = tl.zeros([BLOCK, WIDTH], tl.float32)
    for at in tl.range(0, dim, DEPTH, num_stages=1):
        width = at + tl.arange(0, DEPTH)
        key = tl.load(keys + token[:, None].to(tl.int64) * k_token + width[None, :],
                      mask=(token < length)[:, None] & (width < dim)[None, :], other=0.0)
        first = project(first, key, maps, byte, width, dim, RANK=RANK)
        if WHOLE < BYTES:
            second = project(second, key, maps, byte + RANK - BYTES, width, dim, RANK=RANK)
    found = rounded(first, centre, byte, tl.where(byte < WHOLE, 127.0, 7.0)[None, :], RANK=RANK)
    if WHOLE < BYTES:
        high = rounded(second, centre, byte + RANK - BYTES, 7.0, RANK=RANK)
        found = tl.where((byte < WHOLE)[None, :], found, found + 16 * high)
    place = codes + ((row * heads + head) * length + token[:, None]) * BYTES + byte[None, :]
    tl.store(place, found.to(tl.int8), mask=(token < length)[:, None] & (byte < BYTES)[None, :])
