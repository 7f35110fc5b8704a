"""The Triton kernel of `scaled.py`; importing this module imports Triton."""

import triton
import triton.language as tl


@triton.jit
def scaled_kernel(x, out, scale, count, BLOCK: tl.constexpr):
    """A block of numbers times one."""
    # grid: (⌈count / BLOCK⌉,)
    # x      [count]     dense
    # out    [count]     written, in the dtype of x
    # scale  fp32
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    tl.store(out + place, tl.load(x + place, mask=inside, other=0.0).to(tl.float32) * scale, mask=inside)
