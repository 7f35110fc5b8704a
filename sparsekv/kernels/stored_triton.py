"""The Triton kernels of `stored.py`; importing this module imports Triton."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def append_kernel(
    k, v, keys, values, lengths, heads, k_row, k_head, v_row, v_head, c_row, c_head, c_token, w_row, w_head, w_token,
    DIM: tl.constexpr, WIDTH: tl.constexpr,
):
    """One new token of one row and KV head into its place, the last of the row's length."""
    # grid: (B·Hkv,)
    # k, v     [B, Hkv, 1, d]    the new token; strides k_row, k_head and v_row, v_head; DIM = d
    # keys     [B, Hkv, N, d]    written; strides c_row, c_head, c_token
    # values   [B, Hkv, N, d]    written; strides w_row, w_head, w_token
    # lengths  [B] integers      tokens of a row, the new one included
    row = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    place = tl.load(lengths + row).to(tl.int64) - 1
    width = tl.arange(0, WIDTH)
    wide = width < DIM
    key = tl.load(k + row * k_row + head * k_head + width, mask=wide)
    value = tl.load(v + row * v_row + head * v_head + width, mask=wide)
    tl.store(keys + row * c_row + head * c_head + place * c_token + width, key, mask=wide)
    tl.store(values + row * w_row + head * w_head + place * w_token + width, value, mask=wide)


@triton.jit
def decode_kernel(
    q, k, v, starts, lengths, partial, partial_lse, scale, heads, q_row, q_head, k_row, k_head, k_token, v_row, v_head,
    v_token,
    GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):
    """One stretch of the tokens of one row, for one KV head and its GROUP query heads."""
    # grid: (B·Hkv, splits)
    # q            [B, Hq, d]                  strides q_row, q_head; DIM = d
    # k, v         [B, Hkv, N, d]              strides k_row, k_head, k_token and v_row, v_head, v_token
    # starts       [B] integers                the first token of a row
    # lengths      [B] integers                one behind its last
    # partial      [B, Hq, splits, d] fp32     written: the stretch's attention, normalised over itself
    # partial_lse  [B, Hq, splits] fp32        written: natural logarithm of its mass
    row = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    split = tl.program_id(1)
    parts = tl.num_programs(1)
    if OVERLAP:
        gdc_wait()
    start = tl.load(starts + row).to(tl.int32)
    length = tl.load(lengths + row).to(tl.int32)
    per_split = tl.cdiv(tl.maximum(length - start, 0), parts)
    first = start + split * per_split
    last = tl.minimum(first + per_split, length)
    group = tl.arange(0, ROWS)
    width = tl.arange(0, WIDTH)
    block = tl.arange(0, BLOCK)
    wide = (width < DIM)[None, :]
    query = tl.load(q + row * q_row + (head * GROUP + group)[:, None] * q_head + width[None, :],
                    mask=(group < GROUP)[:, None] & wide, other=0.0)
    k += row * k_row + head * k_head
    v += row * v_row + head * v_head
    top = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, WIDTH], tl.float32)
    for at in tl.range(first, last, BLOCK, num_stages=STAGES):
        token = at + block
        inside = token < last
        place = token[:, None].to(tl.int64)
        key = tl.load(k + place * k_token + width[None, :], mask=inside[:, None] & wide, other=0.0)
        value = tl.load(v + place * v_token + width[None, :], mask=inside[:, None] & wide, other=0.0)
        score = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee") * scale
        score = tl.where(inside[None, :], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        keep = tl.exp(top - higher)
        weight = tl.exp(score - higher[:, None])
        mass = mass * keep + tl.sum(weight, 1)
        value = value.to(query.dtype)
        out = out * keep[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        top = higher
    if OVERLAP:
        gdc_launch_dependents()
    slot = ((row * heads + head) * GROUP + group) * parts + split
    kept = group < GROUP
    tl.store(partial_lse + slot, tl.where(mass > 0, tl.log(tl.where(mass > 0, mass, 1.0)) + top, float("-inf")),
             mask=kept)
    tl.store(partial + slot[:, None] * DIM + width[None, :], out / tl.where(mass > 0, mass, 1.0)[:, None],
             mask=kept[:, None] & wide)
