"""The Triton kernel of `indexing.py`; importing this module imports Triton."""

import triton
import triton.language as tl


@triton.jit
def assign_kernel(
    keys, centroids, assigned, heads, length, num_buckets, dim, k_row, k_head, k_token, c_row, c_head,
    BLOCK: tl.constexpr, BUCKETS: tl.constexpr, DIM: tl.constexpr,
):
    """The centroid with the largest inner product, for BLOCK keys; the first of equals."""
    # grid: (B·H, blocks of keys)
    # keys       [B, H, N, d]              strides k_row, k_head, k_token; length = N
    # centroids  [B or 1, H, C, d]         in the dtype of keys; strides c_row (0 where all rows share them), c_head
    # assigned   [B, H, N] int32           written
    row = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    width = tl.arange(0, DIM)
    inside = width < dim
    key = tl.load(keys + row * k_row + head * k_head + token[:, None].to(tl.int64) * k_token + width[None, :],
                  mask=(token < length)[:, None] & inside[None, :], other=0.0)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    which = tl.zeros([BLOCK], tl.int32)
    for at in range(0, num_buckets, BUCKETS):
        bucket = at + tl.arange(0, BUCKETS)
        center = tl.load(centroids + row * c_row + head * c_head + bucket[None, :] * dim + width[:, None],
                         mask=(bucket < num_buckets)[None, :] & inside[:, None], other=0.0)
        score = tl.dot(key, center.to(key.dtype), input_precision="ieee")
        score = tl.where((bucket < num_buckets)[None, :], score, float("-inf"))
        top, place = tl.max(score, 1, return_indices=True)
        which = tl.where(top > best, at + place, which)
        best = tl.maximum(top, best)
    tl.store(assigned + (row * heads + head) * length + token, which, mask=token < length)
