"""The Triton kernels of `bucket_sums.py`; importing this module imports Triton."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["heads", "num_buckets", "length"])
def sums_kernel(
    x, order, offsets, sums, heads, num_buckets, length, x_row, x_head, x_token,
    DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):
    """The sum over one bucket of one row and head."""
    # grid: (B·H·C,)
    # x        [B, H, N, d]            strides x_row, x_head, x_token; DIM = d, length = N
    # order    [B, H, N] int32         tokens by bucket
    # offsets  [B, H, C + 1] int32     where buckets begin in the order; num_buckets = C
    # sums     [B, H, C, d] fp32       written
    at = (tl.program_id(0) // num_buckets).to(tl.int64)
    bucket = tl.program_id(0) % num_buckets
    x += (at // heads) * x_row + (at % heads) * x_head
    width = tl.arange(0, WIDTH)
    slot = tl.arange(0, BLOCK)
    first = tl.load(offsets + at * (num_buckets + 1) + bucket)
    last = tl.load(offsets + at * (num_buckets + 1) + bucket + 1)
    total = tl.zeros([WIDTH], tl.float32)
    for begin in range(first, last, BLOCK):
        inside = begin + slot < last
        token = tl.load(order + at * length + begin + slot, mask=inside, other=0).to(tl.int64)
        row = tl.load(x + token[:, None] * x_token + width[None, :], mask=inside[:, None] & (width < DIM)[None, :],
                      other=0.0)
        total += tl.sum(row.to(tl.float32), 0)
    tl.store(sums + (at * num_buckets + bucket) * DIM + width, total, mask=width < DIM)


@triton.jit(do_not_specialize=["heads", "length"])
def rows_kernel(
    x, table, bucket, out, heads, length, x_row, x_head, x_token, t_row, t_head,
    DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, APART: tl.constexpr,
):
    """Product of BLOCK rows with their bucket's row of the table, or their distance from it."""
    # grid: (B·H, blocks of rows)
    # x       [B, H, N, d]      strides x_row, x_head, x_token; DIM = d, length = N
    # table   [B, H, C, d]      strides t_row, t_head
    # bucket  [B, H, N] int32
    # out     [B, H, N] fp32    written: inner product or, APART, distance
    at = tl.program_id(0).to(tl.int64)
    row, head = at // heads, at % heads
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    width = tl.arange(0, WIDTH)
    inside = place < length
    wide = inside[:, None] & (width < DIM)[None, :]
    own = tl.load(bucket + at * length + place, mask=inside, other=0).to(tl.int64)
    left = tl.load(x + row * x_row + head * x_head + place[:, None].to(tl.int64) * x_token + width[None, :], mask=wide,
                   other=0.0).to(tl.float32)
    right = tl.load(table + row * t_row + head * t_head + own[:, None] * DIM + width[None, :], mask=wide,
                    other=0.0).to(tl.float32)
    if APART:
        value = tl.sqrt(tl.sum((left - right) * (left - right), 1))
    else:
        value = tl.sum(left * right, 1)
    tl.store(out + at * length + place, value, mask=inside)
