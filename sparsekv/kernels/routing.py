"""Routing of one decode step: the query model of every head, softmax, sum over the group, the best buckets.

Three launches and no host synchronisation: the hidden layer cut over its units, the logits cut over the buckets (both
read every weight once, which is the floor), and one program a KV head that ranks the buckets by a single sort.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from sparsekv.kernels import reference
from sparsekv.kernels.reference import RouterWeights

HIDDEN_BLOCK = 32
BUCKET_BLOCK = 64
DEPTH_BLOCK = 128
STAGES = 5


def route(q: Tensor, weights: RouterWeights, heads_kv: int, probes: int, counts: Tensor | None = None) -> Tensor:
    """The `probes` best buckets of every KV head: q `[B, Hq, d]` in the router's space -> `[B, Hkv, probes]` int32.

    `top_buckets(router_logits(q, weights), heads_kv, probes, counts)` in one call (Saap §4.2); counts `[B, Hkv, C]`:
    empty buckets are never chosen, the list is padded with -1. CUDA tensors with a query model per KV head go through
    Triton.
    """
    if q.is_cuda and weights.w1.shape[0] == heads_kv:
        return _launch(q, weights, probes, counts)
    return reference.top_buckets(reference.router_logits(q, weights), heads_kv, probes, counts)


@functools.cache
def kernels() -> tuple[Any, Any]:
    """The jitted kernels; importing Triton waits until they are wanted."""
    import triton
    import triton.language as tl

    @triton.jit
    def layer_kernel(
        x, w, b, y, heads, x_row, x_head, w_head, w_in, y_row, y_head, num_in, num_out,
        GROUP: tl.constexpr, ROWS: tl.constexpr, RELU: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr,
    ):
        row = (tl.program_id(0) // heads).to(tl.int64)
        head = (tl.program_id(0) % heads).to(tl.int64)
        unit = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        group = tl.arange(0, ROWS)
        total = tl.zeros([ROWS, BLOCK], tl.float32)
        for at in range(0, num_in, DEPTH):
            depth = at + tl.arange(0, DEPTH)
            left = tl.load(x + row * x_row + (head * GROUP + group)[:, None] * x_head + depth[None, :],
                           mask=(group < GROUP)[:, None] & (depth < num_in)[None, :], other=0.0)
            right = tl.load(w + head * w_head + depth[:, None].to(tl.int64) * w_in + unit[None, :],
                            mask=(depth < num_in)[:, None] & (unit < num_out)[None, :], other=0.0)
            total += tl.dot(left.to(right.dtype), right, input_precision="ieee")
        total += tl.load(b + head * num_out + unit, mask=unit < num_out, other=0.0).to(tl.float32)[None, :]
        if RELU:
            total = tl.maximum(total, 0.0)
        tl.store(y + row * y_row + (head * GROUP + group)[:, None] * y_head + unit[None, :],
                 total.to(y.dtype.element_ty), mask=(group < GROUP)[:, None] & (unit < num_out)[None, :])

    @triton.jit
    def rank_kernel(
        logits, counts, chosen, heads, l_row, l_head, num_buckets, probes,
        GROUP: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr, KEPT: tl.constexpr, COUNTED: tl.constexpr,
    ):
        row = (tl.program_id(0) // heads).to(tl.int64)
        head = (tl.program_id(0) % heads).to(tl.int64)
        group, bucket = tl.arange(0, ROWS), tl.arange(0, PADDED)
        inside = (group < GROUP)[:, None] & (bucket < num_buckets)[None, :]
        value = tl.load(logits + row * l_row + (head * GROUP + group)[:, None] * l_head + bucket[None, :], mask=inside,
                        other=float("-inf"))
        top = tl.max(value, 1)
        weight = tl.where(inside, tl.exp(value - tl.where(group < GROUP, top, 0.0)[:, None]), 0.0)
        mass = tl.sum(weight, 1)
        score = tl.sum(weight / tl.where(mass > 0, mass, 1.0)[:, None], 0)
        usable = bucket < num_buckets
        if COUNTED:
            size = tl.load(counts + (row * heads + head) * num_buckets + bucket, mask=usable, other=0)
            usable = usable & (size > 0)
        # a positive float orders as its bits do: the last bits of the score give way to the bucket's number, so that
        # one 32-bit key carries both (scores closer than 2^-13 of each other may swap at C = 1024)
        bits = (score + 1e-30).to(tl.int32, bitcast=True)
        key = tl.where(usable, (bits & -PADDED) | (PADDED - 1 - bucket), 0)
        if KEPT < PADDED:
            key = tl.topk(key, KEPT)
        else:
            key = tl.sort(key, descending=True)
        place = tl.arange(0, KEPT)
        best = tl.where(key >= PADDED, PADDED - 1 - (key & (PADDED - 1)), -1)
        tl.store(chosen + (row * heads + head) * probes + place, best, mask=place < probes)

    return layer_kernel, rank_kernel


def _launch(q: Tensor, weights: RouterWeights, probes: int, counts: Tensor | None) -> Tensor:
    layer_kernel, rank_kernel = kernels()
    batch, heads_q, _ = q.shape
    heads, _, hidden = weights.w1.shape
    buckets = weights.w2.shape[2]
    group = heads_q // heads
    rows = max(16, 1 << (group - 1).bit_length())
    q = q if q.stride(-1) == 1 else q.contiguous()
    middle = torch.empty(batch, heads_q, hidden, dtype=weights.w2.dtype, device=q.device)
    logits = torch.empty(batch, heads_q, buckets, dtype=torch.float32, device=q.device)
    probes = min(probes, buckets)
    chosen = torch.empty(batch, heads, probes, dtype=torch.int32, device=q.device)
    for x, w, b, y, relu, block in ((q, weights.w1, weights.b1, middle, True, HIDDEN_BLOCK),
                                    (middle, weights.w2, weights.b2, logits, False, BUCKET_BLOCK)):
        layer_kernel[(batch * heads, -(-w.shape[2] // block))](
            x, w, b, y, heads, x.stride(0), x.stride(1), w.stride(0), w.stride(1), y.stride(0), y.stride(1), w.shape[1],
            w.shape[2], GROUP=group, ROWS=rows, RELU=relu, BLOCK=block, DEPTH=DEPTH_BLOCK, num_warps=4,
            num_stages=STAGES)
    padded = 1 << (buckets - 1).bit_length()
    rank_kernel[(batch * heads,)](
        logits, logits if counts is None else counts, chosen, heads, logits.stride(0), logits.stride(1), buckets,
        probes, GROUP=group, ROWS=1 << (group - 1).bit_length(), PADDED=padded,
        KEPT=min(padded, 1 << (probes - 1).bit_length()), COUNTED=counts is not None, num_warps=8)
    return chosen
