"""The Triton kernel of `gather.py`; importing this module imports Triton."""

import triton
import triton.language as tl


@triton.jit
def fetch_kernel(
    source, index, out, places, count, heads, per_row, s_row, s_head, s_token, o_row, o_head, o_token,
    LISTS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):
    """BLOCK tokens of one list, one of LISTS of a KV head."""
    # grid: (blocks of tokens, Q·H)
    # source  [B, Hkv, N, d]        may lie in page-locked memory of the host; strides s_row, s_head, s_token; DIM = d
    # index   [Q, H, K] integers    count = K, heads = H, per_row = Q / B; -1 = none
    # out     [B, Hkv, slots, d]    written, zeros where there is no token; strides o_row, o_head, o_token
    # places  [Q, H, K] int32       written: the slot of every token in `out`, -1 = none
    pair = tl.program_id(1).to(tl.int64)
    query, head = pair // heads, pair % heads
    row, kv_head = query // per_row, head // LISTS
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.arange(0, WIDTH)
    inside, wide = at < count, (channel < DIM)[None, :]
    token = tl.load(index + pair * count + at, mask=inside, other=-1).to(tl.int64)
    slot = (query % per_row * LISTS + head % LISTS) * count + at
    rows = tl.load(source + row * s_row + kv_head * s_head + token[:, None] * s_token + channel[None, :],
                   mask=(token >= 0)[:, None] & wide, other=0.0)
    tl.store(out + row * o_row + kv_head * o_head + slot[:, None] * o_token + channel[None, :], rows,
             mask=inside[:, None] & wide)
    tl.store(places + pair * count + at, tl.where(token >= 0, slot, -1).to(tl.int32), mask=inside)
