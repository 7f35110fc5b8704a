"""Exact attention over anchors and chosen tokens: split by keys, one merge, no bucket ever waited for.

The tokens to read are a list per KV head (given, or expanded from buckets), followed by the anchors. A grid of
`(rows · KV heads, splits)` programs cuts that list into equal slices, whatever bucket a key came from, so one oversized
bucket does not set the time; all query heads of a group share every key that is loaded. A second, small kernel merges
the splits by log-sum-exp.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from sparsekv.kernels import reference

BLOCK = 64
MAX_SPLITS = 128
PROGRAMS = 528
WARPS, STAGES = 2, 2


def attend_tokens(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, *, scale: float,
    starts: Tensor, sink_size: int, tail_starts: Tensor, lengths: Tensor,
) -> tuple[Tensor, Tensor]:
    """See `reference.attend_tokens`: same arguments, same result. CUDA tensors go through Triton."""
    run = _launch if q.is_cuda else reference.attend_tokens
    return run(q, k, v, indices, scale=scale, starts=starts, sink_size=sink_size, tail_starts=tail_starts,
               lengths=lengths)


def attend_buckets(
    q: Tensor, k: Tensor, v: Tensor, order: Tensor, offsets: Tensor, buckets: Tensor, *, scale: float,
    starts: Tensor, sink_size: int, tail_starts: Tensor, lengths: Tensor,
) -> tuple[Tensor, Tensor]:
    """See `reference.attend_buckets`: same arguments, same result. On CUDA the bucket lists are read by the kernel
    itself, so nothing waits for the host."""
    run = _launch if q.is_cuda else reference.attend_buckets
    return run(q, k, v, order, offsets, buckets, scale=scale, starts=starts, sink_size=sink_size,
               tail_starts=tail_starts, lengths=lengths)


@functools.cache
def kernels() -> tuple[Any, Any]:
    """The jitted kernels; importing Triton waits until they are wanted."""
    import triton
    import triton.language as tl

    @triton.jit
    def split_kernel(
        q, k, v, tokens, offsets, buckets, starts, tail_starts, lengths, partial, partial_lse,
        scale, num_listed, sink_size, heads_kv,
        q_row, q_head, k_row, k_head, k_token, v_row, v_head, v_token, t_row, t_head, f_row, f_head, b_row, b_head,
        PROBES: tl.constexpr, PADDED_PROBES: tl.constexpr, SPLITS: tl.constexpr, GROUP: tl.constexpr,
        ROWS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        row = (tl.program_id(0) // heads_kv).to(tl.int64)
        head = (tl.program_id(0) % heads_kv).to(tl.int64)
        split = tl.program_id(1)
        start = tl.load(starts + row).to(tl.int32)
        tail = tl.load(tail_starts + row).to(tl.int32)
        length = tl.load(lengths + row).to(tl.int32)
        if PROBES > 0:
            # the chosen buckets end to end: slots begin..end of the list are tokens first.. of the CSR
            probe = tl.arange(0, PADDED_PROBES)
            bucket = tl.load(buckets + row * b_row + head * b_head + probe, mask=probe < PROBES, other=-1)
            at_bucket = offsets + row * f_row + head * f_head + tl.maximum(bucket, 0)
            from_token = tl.load(at_bucket, mask=bucket >= 0, other=0)
            size = tl.load(at_bucket + 1, mask=bucket >= 0, other=0) - from_token
            end = tl.cumsum(size, 0)
            begin = end - size
            num_listed = tl.sum(size, 0)
        sinks = tl.minimum(sink_size, tl.maximum(tl.minimum(tail, length) - start, 0))
        total = num_listed + sinks + tl.maximum(length - tail, 0)

        group = tl.arange(0, ROWS)
        width = tl.arange(0, WIDTH)
        q_mask = (group < GROUP)[:, None] & (width < DIM)[None, :]
        q_at = q + row * q_row + (head * GROUP + group)[:, None] * q_head + width[None, :]
        query = tl.load(q_at, mask=q_mask, other=0.0)

        top = tl.full([ROWS], float("-inf"), tl.float32)
        mass = tl.zeros([ROWS], tl.float32)
        out = tl.zeros([ROWS, WIDTH], tl.float32)
        per_split = tl.cdiv(tl.cdiv(total, SPLITS), BLOCK) * BLOCK
        first = split * per_split
        last = tl.minimum(first + per_split, total)
        for at in range(first, last, BLOCK):
            slot = at + tl.arange(0, BLOCK)
            listed = slot < num_listed
            place_in_list = slot
            if PROBES > 0:
                inside = (begin[None, :] <= slot[:, None]) & (slot[:, None] < end[None, :])
                place_in_list += tl.sum(tl.where(inside, (from_token - begin)[None, :], 0), 1)
            token = tl.load(tokens + row * t_row + head * t_head + place_in_list, mask=listed & (slot < last), other=-1)
            token = token.to(tl.int32)
            anchor = slot - num_listed
            anchor = tl.where(anchor < sinks, start + anchor, tail + anchor - sinks)
            token = tl.where(listed, token, anchor)
            valid = (slot < last) & (token >= 0)
            place = tl.where(valid, token, 0).to(tl.int64)
            kv_mask = valid[:, None] & (width < DIM)[None, :]
            key = tl.load(k + row * k_row + head * k_head + place[:, None] * k_token + width[None, :], mask=kv_mask,
                          other=0.0)
            score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
            score = tl.where(valid[None, :], score, float("-inf"))
            higher = tl.maximum(top, tl.max(score, 1))
            safe = tl.where(higher == float("-inf"), 0.0, higher)
            keep = tl.exp(top - safe)
            weight = tl.exp(score - safe[:, None])
            mass = mass * keep + tl.sum(weight, 1)
            value = tl.load(v + row * v_row + head * v_head + place[:, None] * v_token + width[None, :], mask=kv_mask,
                            other=0.0)
            out = out * keep[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
            top = higher

        lse = tl.where(mass > 0, tl.log(mass) + top, float("-inf"))
        out = out / tl.where(mass > 0, mass, 1.0)[:, None]
        slot_out = ((row * heads_kv + head) * GROUP + group) * SPLITS + split
        tl.store(partial_lse + slot_out, lse, mask=group < GROUP)
        tl.store(partial + slot_out[:, None] * DIM + width[None, :], out, mask=q_mask)

    @triton.jit
    def merge_kernel(
        partial, partial_lse, out, out_lse, o_row, o_head, heads_q,
        SPLITS: tl.constexpr, PADDED: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    ):
        row = (tl.program_id(0) // heads_q).to(tl.int64)
        head = (tl.program_id(0) % heads_q).to(tl.int64)
        slot = (row * heads_q + head) * SPLITS
        split = tl.arange(0, PADDED)
        width = tl.arange(0, WIDTH)
        lse = tl.load(partial_lse + slot + split, mask=split < SPLITS, other=float("-inf"))
        top = tl.max(lse, 0)
        safe = tl.where(top == float("-inf"), 0.0, top)
        weight = tl.exp(lse - safe)
        total = tl.sum(weight, 0)
        mask = (split < SPLITS)[:, None] & (width < DIM)[None, :]
        parts = tl.load(partial + (slot + split)[:, None] * DIM + width[None, :], mask=mask, other=0.0)
        result = tl.sum(parts * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
        tl.store(out + row * o_row + head * o_head + width, result.to(out.dtype.element_ty), mask=width < DIM)
        tl.store(out_lse + row * heads_q + head, tl.where(total > 0, tl.log(total) + safe, float("-inf")))

    return split_kernel, merge_kernel


def _launch(
    q: Tensor, k: Tensor, v: Tensor, tokens: Tensor, offsets: Tensor | None = None, buckets: Tensor | None = None, *,
    scale: float, starts: Tensor, sink_size: int, tail_starts: Tensor, lengths: Tensor,
) -> tuple[Tensor, Tensor]:
    """Both doors: `tokens` is the list itself, or, with `offsets` and `buckets`, the CSR's order."""
    split_kernel, merge_kernel = kernels()
    batch, heads_q, dim = q.shape
    heads_kv = k.shape[1]
    group = heads_q // heads_kv
    if buckets is None and tokens.shape[1] == heads_q and heads_q != heads_kv:
        # every query head has a list of its own: treat it as a KV head with a group of one
        k, v = (x[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2) for x in (k, v))
        heads_kv, group = heads_q, 1
    q, k, v, tokens = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v, tokens))
    probes = 0 if buckets is None else buckets.shape[2]
    lists = [tokens] * 3 if offsets is None or buckets is None else [tokens, offsets, buckets]
    splits = max(1, min(MAX_SPLITS, PROGRAMS // (batch * heads_kv)))
    out = torch.empty(batch, heads_q, dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads_q, dtype=torch.float32, device=q.device)
    partial = torch.empty(batch, heads_q, splits, dim, dtype=torch.float32, device=q.device)
    partial_lse = torch.empty(batch, heads_q, splits, dtype=torch.float32, device=q.device)
    width = max(16, _power_of_two(dim))
    split_kernel[(batch * heads_kv, splits)](
        q, k, v, *lists, starts, tail_starts, lengths, partial, partial_lse,
        scale, tokens.shape[2], sink_size, heads_kv,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), k.stride(2), v.stride(0), v.stride(1), v.stride(2),
        *(stride for x in lists for stride in (x.stride(0), x.stride(1))),
        PROBES=probes, PADDED_PROBES=_power_of_two(max(probes, 1)), SPLITS=splits, GROUP=group,
        ROWS=max(16, _power_of_two(group)), DIM=dim, WIDTH=width, BLOCK=BLOCK, num_warps=WARPS, num_stages=STAGES,
    )
    merge_kernel[(batch * heads_q,)](
        partial, partial_lse, out, lse, out.stride(0), out.stride(1), heads_q,
        SPLITS=splits, PADDED=_power_of_two(splits), DIM=dim, WIDTH=width, num_warps=4,
    )
    return out, lse


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
