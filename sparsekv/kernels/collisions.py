"""Keys that share hash tables with a query: who is sampled by MagicPIG (Chen et al. 2024, §4).

`collisions` runs the Triton kernel on CUDA tensors and its plain-torch twin `collisions_reference` elsewhere. A program
compares a block of keys of one KV head with up to `ROWS` of the head's queries at once: a decode step reads the codes
from memory once, and neither comparisons nor counts are ever written.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

TABLES_AT_ONCE = 32
ROWS, PAIRS, BLOCK, WIDTH, WARPS = 8, 64, 32, 16, 1


def collisions(codes: Tensor, queries: Tensor, *, least: int = 2) -> Tensor:
    """Whether at least `least` of L hash tables hold key and query in the same bucket (MagicPIG, Chen et al. 2024, §4).

    codes `[B, Hkv, N, L]` and queries `[B, Hq, T, L]` int16, with any strides: the buckets of keys and queries; query
    head h looks at KV head `h // (Hq // Hkv)`. Returns bool `[B, Hq, T, N]`.
    """
    if not codes.is_cuda:
        return collisions_reference(codes, queries, least=least)
    return launch(codes, queries, least=least)


def collisions_reference(codes: Tensor, queries: Tensor, *, least: int = 2) -> Tensor:
    """The plain-torch truth of `collisions`; it holds the comparisons of one KV head and `TABLES_AT_ONCE` tables."""
    batch, heads, length, tables = codes.shape
    group = queries.shape[1] // heads
    out = torch.empty(*queries.shape[:3], length, dtype=torch.bool, device=codes.device)
    for h in range(heads):
        own = slice(h * group, (h + 1) * group)
        asked = queries[:, own].flatten(1, 2)
        hits = torch.zeros(batch, asked.shape[1], length, dtype=torch.int16, device=codes.device)
        for t in range(0, tables, TABLES_AT_ONCE):
            some = slice(t, t + TABLES_AT_ONCE)
            hits += (codes[:, h, None, :, some] == asked[:, :, None, some]).sum(-1, dtype=torch.int16)
        out[:, own] = (hits >= least).reshape(out[:, own].shape)
    return out


def launch(codes: Tensor, queries: Tensor, *, least: int = 2) -> Tensor:
    """`collisions` through Triton."""
    batch, heads, length, tables = codes.shape
    group, count = queries.shape[1] // heads, queries.shape[2]
    out = torch.empty(*queries.shape[:3], length, dtype=torch.bool, device=codes.device)
    if not out.numel():
        return out
    rows = min(ROWS, 1 << (group * count - 1).bit_length())
    parts, block = -(-group * count // rows), min(BLOCK, PAIRS // rows)
    # the parts of the queries lie side by side: the later ones find the codes in the L2 cache
    kernel()[(batch * heads * parts, -(-length // block))](
        codes, queries, out, heads, parts, group * count, count, length, least, codes.stride(0), codes.stride(1),
        codes.stride(3), *queries.stride(), C_TOKEN=codes.stride(2), STEP=math.gcd(*codes.stride()[:2], 8), GROUP=group,
        TABLES=tables, ROWS=rows, BLOCK=block, WIDTH=WIDTH, num_warps=WARPS)
    return out


@functools.cache
def kernel() -> Any:
    """The jitted kernel; importing Triton waits until it is wanted."""
    import triton
    import triton.language as tl

    @triton.jit
    def collision_kernel(
        codes, queries, out, heads, parts, total, count, length, least,
        c_row, c_head, c_table, q_row, q_head, q_token, q_table,
        C_TOKEN: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr, TABLES: tl.constexpr, ROWS: tl.constexpr,
        BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    ):
        place = tl.program_id(0) // parts
        row = (place // heads).to(tl.int64)
        head = (place % heads).to(tl.int64)
        query = tl.program_id(0) % parts * ROWS + tl.arange(0, ROWS)
        first = tl.program_id(1) * BLOCK
        near = tl.arange(0, BLOCK)
        token = first + near
        asks = queries + row * q_row + (head * GROUP + query // count) * q_head + (query % count).to(tl.int64) * q_token
        # C_TOKEN and STEP are known when compiling: several codes a load, and few registers for addresses
        begin = tl.multiple_of(row * c_row + head * c_head, STEP) + first.to(tl.int64) * C_TOKEN
        holds = codes + begin + near.to(tl.int64) * C_TOKEN
        # [queries, keys, tables] from the start, so that the codes stay in the registers they are loaded to
        asks, holds = asks[:, None, None], holds[None, :, None]
        asked, held = (query < total)[:, None, None], (token < length)[None, :, None]
        hits = tl.zeros([ROWS, BLOCK, WIDTH], tl.float32)
        for at in range(0, TABLES, WIDTH):
            table = (at + tl.arange(0, WIDTH))[None, None, :]
            inside = table < TABLES
            # past the last table 0 meets 1
            mine = tl.load(asks + table.to(tl.int64) * q_table, mask=asked & inside, other=1)
            theirs = tl.load(holds + table.to(tl.int64) * c_table, mask=held & inside, other=0)
            # floats hold 16 bits exactly, and comparing them gives the number to add in one instruction
            hits += (mine.to(tl.float32) == theirs.to(tl.float32)).to(tl.float32)
        slot = (place.to(tl.int64) * total + query)[:, None] * length + token[None, :]
        tl.store(out + slot, tl.sum(hits, 2) >= least, mask=(query < total)[:, None] & (token < length)[None, :])

    return collision_kernel
