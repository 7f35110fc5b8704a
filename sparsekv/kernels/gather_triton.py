"""The Triton kernels of `gather.py`; importing this module imports Triton."""

import triton
import triton.language as tl

HASH = tl.constexpr(0x9E3779B1)
HIT, TOKEN = tl.constexpr(1 << 31), tl.constexpr((1 << 31) - 1)


@triton.jit
def slots_of(token, slots):
    """The two slots of a token in int64."""
    hashed = ((token * HASH) & 0xFFFFFFFF) >> 7
    return token % slots, hashed % slots


@triton.jit
def claim_kernel(
    index, held, claims, clock, slots, count, heads, per_row, heads_kv, LISTS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Every token of a block of a list claims one of its two slots; the largest claim wins."""
    # grid: (blocks of tokens, Q·H)
    # index   [Q, H, K] integers      count = K, heads = H, per_row = Q / B; -1 = none
    # held    [B, Hkv, slots] int64   call · 2^32 + token, -1 = none
    # claims  [B, Hkv, slots] int64   written: call · 2^32 + hit · 2^31 + token
    # clock   [1] int64               the number of this call
    pair = tl.program_id(1).to(tl.int64)
    query, head = pair // heads, pair % heads
    table = (query // per_row * heads_kv + head // LISTS) * slots
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(index + pair * count + at, mask=at < count, other=-1).to(tl.int64)
    real = token >= 0
    first, second = slots_of(tl.maximum(token, 0), slots)
    there = tl.load(held + table + first, mask=real, other=-1)
    there_too = tl.load(held + table + second, mask=real, other=-1)
    lies = (there >= 0) & ((there & TOKEN) == token)
    lies_too = (there_too >= 0) & ((there_too & TOKEN) == token)
    slot = tl.where(lies | ((lies_too == 0) & (there <= there_too)), first, second)
    claim = (tl.load(clock) << 32) + tl.where(lies | lies_too, HIT, 0).to(tl.int64) + token
    tl.atomic_max(claims + table + slot, claim, mask=real, sem="relaxed")


@triton.jit
def fetch_kernel(
    source, index, out, places, held, claims, clock, slots, counts, count, heads, per_row, heads_kv,
    s_row, s_head, s_token, o_row, o_head, o_token,
    LISTS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, HOT: tl.constexpr,
    COUNTS: tl.constexpr,
):
    """BLOCK tokens of one list, one of LISTS of a KV head."""
    # grid: (blocks of tokens, Q·H)
    # source  [B, Hkv, N, d]          may lie in page-locked memory of the host; strides s_row, s_head, s_token; DIM = d
    # index   [Q, H, K] integers      count = K, heads = H, per_row = Q / B; -1 = none
    # out     [B, Hkv, slots + …, d]  written, zeros where there is no token without HOT; strides o_row, o_head, o_token
    # places  [Q, H, K] int32         written: the slot of every token in `out`, -1 = none
    # held    [B, Hkv, slots] int64   with HOT, written: call · 2^32 + token
    # claims  [B, Hkv, slots] int64   with HOT: call · 2^32 + hit · 2^31 + token
    # clock   [1] int64               with HOT, written
    # counts  [2] int64               with COUNTS, added to: tokens listed, rows copied
    pair = tl.program_id(1).to(tl.int64)
    query, head = pair // heads, pair % heads
    row, kv_head = query // per_row, head // LISTS
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.arange(0, WIDTH)
    inside, wide = at < count, (channel < DIM)[None, :]
    token = tl.load(index + pair * count + at, mask=inside, other=-1).to(tl.int64)
    real = token >= 0
    slot = slots + (query % per_row * LISTS + head % LISTS) * count + at
    copied, written = real, inside
    if HOT:
        # 1. the slot that it claimed, if it has won it
        table = (row * heads_kv + kv_head) * slots
        first, second = slots_of(tl.maximum(token, 0), slots)
        best = tl.load(claims + table + first, mask=real, other=-1)
        best_too = tl.load(claims + table + second, mask=real, other=-1)
        won, won_too = real & ((best & TOKEN) == token), real & ((best_too & TOKEN) == token)
        slot = tl.where(won, first, tl.where(won_too, second, slot))
        copied = real & (((won & ((best & HIT) != 0)) | (won_too & ((best_too & HIT) != 0))) == 0)
        written = copied
        # 2. whose it is from here on; the claims have their call
        now = tl.where(won, best, best_too)
        tl.store(held + table + slot, (now >> 32 << 32) + token, mask=won | won_too)
        if (pair == 0) & (tl.program_id(0) == 0):
            tl.store(clock, tl.load(clock) + 1)
    rows = tl.load(source + row * s_row + kv_head * s_head + token[:, None] * s_token + channel[None, :],
                   mask=copied[:, None] & wide, other=0.0)
    tl.store(out + row * o_row + kv_head * o_head + slot[:, None] * o_token + channel[None, :], rows,
             mask=written[:, None] & wide)
    tl.store(places + pair * count + at, tl.where(real, slot, -1).to(tl.int32), mask=inside)
    if COUNTS:
        tl.atomic_add(counts, tl.sum(real.to(tl.int64), 0), sem="relaxed")
        tl.atomic_add(counts + 1, tl.sum(copied.to(tl.int64), 0), sem="relaxed")
