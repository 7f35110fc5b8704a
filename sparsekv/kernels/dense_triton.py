"""The Triton kernel of `dense.py`; importing this module imports Triton."""

import triton
import triton.language as tl


@triton.jit
def add_kernel(o, more, lse, more_lse, heads, count, DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """The attention of ROWS queries of one head to two disjoint sets of keys, from that to each."""
    # grid: (B·H, blocks of queries)
    # o, more        Tokens [B, H, c, d]   o is read and written
    # lse, more_lse  [B, H, c] fp32        natural logarithms; lse is read and written
    pair = tl.program_id(0).to(tl.int64)
    row, head = pair // heads, pair % heads
    slot = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    place = tl.arange(0, WIDTH)
    there = slot < count
    mask = there[:, None] & (place < DIM)[None, :]
    own = tl.load(lse + pair * count + slot, mask=there, other=0.0)
    other = tl.load(more_lse + pair * count + slot, mask=there, other=0.0)
    top = tl.maximum(own, other)
    safe = tl.where(top == float("-inf"), 0.0, top)
    one, two = tl.exp(own - safe), tl.exp(other - safe)
    total = tl.where(one + two > 0, one + two, 1.0)
    at = o.base + row * o.row + head * o.head + slot[:, None] * o.token + place[None, :]
    out = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    added = tl.load(more.base + row * more.row + head * more.head + slot[:, None] * more.token + place[None, :],
                    mask=mask, other=0.0).to(tl.float32)
    out += (two / total)[:, None] * (added - out)
    tl.store(at, out.to(o.base.dtype.element_ty), mask=mask)
    tl.store(lse + pair * count + slot, tl.log(total) + top, mask=there)
