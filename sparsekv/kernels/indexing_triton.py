"""The Triton kernels of `indexing.py`; importing this module imports Triton."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["heads", "length", "num_buckets"])
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


@triton.jit(do_not_specialize=["length", "num_buckets"])
def count_kernel(keyed, counts, length, num_buckets, STRETCH: tl.constexpr):
    """How many places of a stretch are of every bucket."""
    # grid: (rows, stretches)
    # keyed   [rows, N] int32                   the bucket of every place, C: of none; length = N, num_buckets = C
    # counts  [rows, stretches, C + 1] int32    zeros, added to: whole numbers, so that their order does not matter
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = part * STRETCH + tl.arange(0, STRETCH)
    inside = place < length
    bucket = tl.load(keyed + row * length + place, mask=inside, other=0)
    tl.atomic_add(counts + (row * tl.num_programs(1) + part) * (num_buckets + 1) + bucket, 1, mask=inside,
                  sem="relaxed")


@triton.jit(do_not_specialize=["length", "num_buckets"])
def place_kernel(keyed, first, order, length, num_buckets, STRETCH: tl.constexpr, BLOCK: tl.constexpr):
    """The places of a stretch in the order of their buckets, BLOCK after BLOCK."""
    # grid: (rows, stretches)
    # keyed  [rows, N] int32                   as count_kernel has it
    # first  [rows, stretches, C + 1] int32    where the stretch's next place of a bucket goes; counted up
    # order  [rows, N] int32                   written
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first += (row * tl.num_programs(1) + part) * (num_buckets + 1)
    slot = tl.arange(0, BLOCK)
    for begin in range(part * STRETCH, tl.minimum(part * STRETCH + STRETCH, length), BLOCK):
        place = begin + slot
        inside = place < length
        bucket = tl.load(keyed + row * length + place, mask=inside, other=-1)
        # the same bucket once more down the other axis, by a second load
        other = tl.load(keyed + row * length + begin + slot, mask=begin + slot < length, other=-1)
        same = bucket[:, None] == other[None, :]
        rank = tl.sum((same & (slot[None, :] < slot[:, None])).to(tl.int32), 1)
        count = tl.sum(same.to(tl.int32), 1)
        next_place = tl.load(first + bucket, mask=inside, other=0)
        tl.debug_barrier()  # all have read where the next goes
        tl.store(order + row * length + next_place + rank, place, mask=inside)
        tl.store(first + bucket, next_place + count, mask=inside & (rank == count - 1))
        tl.debug_barrier()  # and all see where it goes then
