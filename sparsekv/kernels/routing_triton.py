"""The Triton kernels of `routing.py`; importing this module imports Triton."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def hidden_kernel(
    x, w, b, y, models, batch, x_row, x_head, num_in, num_out,
    FOLD: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """`relu(x W1 + b1)`; the rows of a product are FOLD rows of the batch times the group."""
    model = (tl.program_id(0) % models).to(tl.int64)
    r = tl.arange(0, ROWS)
    row = ((tl.program_id(0) // models) * FOLD + r // GROUP).to(tl.int64)
    head = model * GROUP + r % GROUP
    used = (r < FOLD * GROUP) & (row < batch)
    unit = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    depth = tl.arange(0, DEPTH)
    right = tl.load(w + (model * num_in + depth[:, None]) * num_out + unit[None, :],
                    mask=(depth < num_in)[:, None] & (unit < num_out)[None, :], other=0.0)
    left = tl.load(x + row[:, None] * x_row + head[:, None] * x_head + depth[None, :],
                   mask=used[:, None] & (depth < num_in)[None, :], other=0.0)
    bias = tl.load(b + model * num_out + unit, mask=unit < num_out, other=0.0)
    total = tl.dot(left.to(right.dtype), right, input_precision="ieee") + bias.to(tl.float32)[None, :]
    if OVERLAP:
        gdc_launch_dependents()
    place = (row * models * GROUP + head)[:, None] * num_out + unit[None, :]
    tl.store(y + place, tl.maximum(total, 0.0).to(y.dtype.element_ty),
             mask=used[:, None] & (unit < num_out)[None, :])


@triton.jit
def score_kernel(
    y, w, b, q, means, counts, logits, scale, models, heads_kv, batch, q_row, q_head, m_row, m_head, m_bucket,
    dim, num_in, num_out,
    MLP: tl.constexpr, MEANS: tl.constexpr, FOLD: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr, OVERLAP: tl.constexpr, WAITS: tl.constexpr,
):
    """`y W2 + b2` and `q·mean·scale + log n`."""
    model = (tl.program_id(0) % models).to(tl.int64)
    r = tl.arange(0, ROWS)
    row = ((tl.program_id(0) // models) * FOLD + r // GROUP).to(tl.int64)
    head = model * GROUP + r % GROUP
    used = (r < FOLD * GROUP) & (row < batch)
    unit = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = unit < num_out
    depth = tl.arange(0, DEPTH)
    from_y = y + (row * models * GROUP + head)[:, None] * num_in + depth[None, :]
    if MLP:
        weights = w + model * num_in * num_out + unit[None, :]
        bias = tl.load(b + model * num_out + unit, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    if MEANS:
        first = ((tl.program_id(0) // models) * FOLD).to(tl.int64)
        kv = model // (models // heads_kv)
        width = tl.arange(0, WIDTH)
        mean = tl.load(means + first * m_row + kv * m_head + unit[None, :].to(tl.int64) * m_bucket + width[:, None],
                       mask=inside[None, :] & (width < dim)[:, None], other=0.0)
        query = tl.load(q + row[:, None] * q_row + head[:, None] * q_head + width[None, :],
                        mask=used[:, None] & (width < dim)[None, :], other=0.0)
        size = tl.load(counts + (first * heads_kv + kv) * num_out + unit, mask=inside, other=0)
        base = tl.where(size > 0, tl.log(tl.maximum(size, 1).to(tl.float32)), float("-inf"))
        total += tl.dot(query, mean.to(query.dtype), input_precision="ieee") * scale + base[None, :]
    if WAITS:
        gdc_wait()
    if MLP:
        total += bias[None, :]
        for at in range(0, num_in, DEPTH):
            left = tl.load(from_y + at, mask=used[:, None] & (at + depth < num_in)[None, :], other=0.0)
            part = tl.load(weights + (at + depth)[:, None] * num_out,
                           mask=(at + depth < num_in)[:, None] & inside[None, :], other=0.0)
            total += tl.dot(left, part, input_precision="ieee")
    if OVERLAP:
        gdc_launch_dependents()
    tl.store(logits + (row * models * GROUP + head)[:, None] * num_out + unit[None, :], total,
             mask=used[:, None] & inside[None, :])


@triton.jit
def rank_kernel(
    logits, counts, chosen, num_buckets, probes,
    GROUP: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr, KEPT: tl.constexpr, COUNTED: tl.constexpr,
    DENSITY: tl.constexpr, OVERLAP: tl.constexpr,
):
    """Softmax over the buckets, sum over the group, the best: one program a KV head."""
    at = tl.program_id(0).to(tl.int64)
    group, bucket = tl.arange(0, ROWS), tl.arange(0, PADDED)
    inside = (group < GROUP)[:, None] & (bucket < num_buckets)[None, :]
    usable = bucket < num_buckets
    if COUNTED:
        size = tl.load(counts + at * num_buckets + bucket, mask=usable, other=0)
        usable = usable & (size > 0)
        inside = inside & usable[None, :]
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    value = tl.load(logits + (at * GROUP + group)[:, None] * num_buckets + bucket[None, :], mask=inside,
                    other=float("-inf"))
    top = tl.max(value, 1)
    weight = tl.where(inside, tl.exp(value - tl.where(top == float("-inf"), 0.0, top)[:, None]), 0.0)
    mass = tl.sum(weight, 1)
    score = tl.sum(weight / tl.where(mass > 0, mass, 1.0)[:, None], 0)
    if DENSITY:
        score = score / tl.maximum(size, 1).to(tl.float32)
    # a positive float orders as its bits do: the last bits of the score give way to the bucket's number, so that one
    # 32-bit key carries both (scores closer than 2^-13 of each other may swap at C = 1024)
    bits = (score + 1e-30).to(tl.int32, bitcast=True)
    key = tl.where(usable, (bits & -PADDED) | (PADDED - 1 - bucket), 0)
    if KEPT < PADDED:
        key = tl.topk(key, KEPT)
    else:
        key = tl.sort(key, descending=True)
    place = tl.arange(0, KEPT)
    best = tl.where(key >= PADDED, PADDED - 1 - (key & (PADDED - 1)), -1)
    tl.store(chosen + at * probes + place, best, mask=place < probes)
