"""The Triton kernel of `gather.py`; importing this module imports Triton."""

import triton
import triton.language as tl


@triton.jit
def gather_kernel(
    source, index, out, count, heads, per_row, s_row, s_head, s_token,
    DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):
    """BLOCK tokens of one query and head."""
    # grid: (blocks of tokens, Q·H)
    # source  [B, H, N, d]          in page-locked memory of the host; strides s_row, s_head, s_token; DIM = d
    # index   [Q, H, K] integers    count = K
    # out     [Q, H, K, d]          written
    pair = tl.program_id(1).to(tl.int64)
    slot = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.arange(0, WIDTH)
    inside = (slot < count)[:, None] & (channel < DIM)[None, :]
    token = tl.load(index + pair * count + slot, mask=slot < count, other=0).to(tl.int64)
    first = (pair // heads // per_row) * s_row + (pair % heads) * s_head + token * s_token
    values = tl.load(source + first[:, None] + channel[None, :], mask=inside, other=0.0)
    tl.store(out + (pair * count + slot)[:, None] * DIM + channel[None, :], values, mask=inside)
