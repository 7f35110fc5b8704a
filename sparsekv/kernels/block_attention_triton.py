"""The Triton kernels of `block_attention.py`; importing this module imports Triton.

Shapes: B rows, Hq query heads of which `group` share a KV head, T queries after `past` tokens or blocks, d the head
dimension, n blocks of queries, m blocks of keys, g groups of queries. Structs are those of `launch.py`.
"""

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def take(query, key, value, hidden, scale, top, mass, out, MASKED: tl.constexpr):
    """One block of keys joins a running softmax to the base 2; hidden `[ROWS, KEYS]`, if MASKED. scale is above 0, so
    that the highest score stays the highest."""
    score = tl.dot(query, tl.trans(key), input_precision="ieee")
    if MASKED:
        score = tl.where(hidden, float("-inf"), score)
    higher = tl.maximum(top, tl.max(score, 1) * scale)
    safe = higher
    if MASKED:
        safe = tl.where(higher == float("-inf"), 0.0, higher)
    weight = tl.exp2(score * scale - safe[:, None])
    keep = tl.exp2(top - safe)
    mass = mass * keep + tl.sum(weight, 1)
    out = tl.dot(weight.to(value.dtype), value, out * keep[:, None], input_precision="ieee")
    return higher, mass, out


@triton.jit
def score_kernel(
    q, k, out, scale, heads, group, groups, blocks, DIM: tl.constexpr, STRIDE: tl.constexpr, EACH: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr,
):
    """Tiles of ROWS groups of queries by COLUMNS groups of keys: STRIDE products, CHANNELS at a time, and of each block
    of keys the log-sum-exp."""
    # grid: (B·Hq, rows of tiles, parts)
    # q    Tokens [B, Hq, T, d]
    # k    Tokens [B, Hkv, N, d]
    # out  [B, Hq, g, m] fp32            written: natural logarithm
    pair = tl.program_id(0).to(tl.int64)
    row, head = pair // heads, pair % heads
    first = tl.program_id(1) * ROWS
    member = first + tl.arange(0, ROWS)
    columns = blocks * EACH
    past = columns - groups
    channel = tl.arange(0, CHANNELS)[None, :]
    # beyond the last group the last one is read again: no load is masked
    asking = q.base + row * q.row + head * q.head + (STRIDE - 1) * q.token
    asking += tl.minimum(member, groups - 1).to(tl.int64)[:, None] * (STRIDE * q.token) + channel
    keys = k.base + row * k.row + head // group * k.head
    scale *= LOG2_E / STRIDE
    parts: tl.constexpr = (DIM + CHANNELS - 1) // CHANNELS
    for tile in range(tl.program_id(2), tl.cdiv(columns, COLUMNS), tl.num_programs(2)):
        column = tile * COLUMNS + tl.arange(0, COLUMNS)
        score = tl.zeros([ROWS, COLUMNS], tl.float32)
        # behind the last of the rows' own groups nothing is seen
        if tile * COLUMNS <= past + first + ROWS - 1:
            given = keys + tl.minimum(column, columns - 1).to(tl.int64)[:, None] * (STRIDE * k.token) + channel
            for step in range(STRIDE * parts):
                i, at = step // parts, step % parts * CHANNELS
                if DIM % CHANNELS == 0:
                    left = tl.load(asking - i * q.token + at)
                    right = tl.load(given + i * k.token + at)
                else:
                    left = tl.load(asking - i * q.token + at, mask=at + channel < DIM, other=0.0)
                    right = tl.load(given + i * k.token + at, mask=at + channel < DIM, other=0.0)
                score = tl.dot(left, tl.trans(right.to(left.dtype)), score, input_precision="ieee")
        score = tl.where(column[None, :] > (past + member)[:, None], float("-inf"), score * scale)
        each = tl.reshape(score, [ROWS, COLUMNS // EACH, EACH])
        top = tl.max(each, 2)
        safe = tl.where(top == float("-inf"), 0.0, top)
        whole = (safe + tl.log2(tl.sum(tl.exp2(each - safe[:, :, None]), 2))) / LOG2_E
        block = tile * (COLUMNS // EACH) + tl.arange(0, COLUMNS // EACH)
        tl.store(out + (pair * groups + member)[:, None] * blocks + block[None, :], whole,
                 mask=(member < groups)[:, None] & (block < blocks)[None, :])


@triton.jit(do_not_specialize=["past"])
def mass_kernel(scores, mass, heads, past, blocks, EACH: tl.constexpr, COLUMNS: tl.constexpr):
    """What EACH groups of queries give to every block of keys that they see; +inf for the first and their own, nothing
    in place of NaN."""
    # grid: (n, B·Hq)
    # scores  [B, Hq, n·EACH, m] fp32
    # mass    [B, n, Hq, m] fp32      written up to a block's own
    pair = tl.program_id(1).to(tl.int64)
    row, head = pair // heads, pair % heads
    block, count = tl.program_id(0), tl.num_programs(0)
    given = scores + ((pair * count + block) * EACH + tl.arange(0, EACH))[:, None] * blocks
    own = past + block
    every = tl.arange(0, COLUMNS)
    top = tl.full([EACH], float("-inf"), tl.float32)
    whole = tl.zeros([EACH], tl.float32)
    for at in range(0, own + 1, COLUMNS):
        column = (at + every)[None, :]
        score = tl.load(given + column, mask=column <= own, other=float("-inf"))
        # each group sees groups of the first block, so that this is finite
        higher = tl.maximum(top, tl.max(score, 1))
        whole = whole * tl.exp(top - higher) + tl.sum(tl.exp(score - higher[:, None]), 1)
        top = higher
    less = (top + tl.log(whole))[:, None]
    to = mass + ((row * count + block) * heads + head) * blocks
    for at in range(0, own + 1, COLUMNS):
        column = at + every
        score = tl.load(given + column[None, :], mask=(column <= own)[None, :], other=float("-inf"))
        found = tl.sum(tl.exp(score - less), 0)
        bits = found.to(tl.int32, bitcast=True)  # of NaN above those of inf: a float's comparison may be rewritten
        found = tl.where((bits >= 0) & (bits <= 0x7F800000), found, 0.0)
        found = tl.where((column == 0) | (column == own), float("inf"), found)
        tl.store(to + column, found, mask=column <= own)


@triton.jit(do_not_specialize=["past"])
def floor_kernel(bits, floor, heads, past, blocks, share, least, BITS: tl.constexpr, COLUMNS: tl.constexpr):
    """The largest mass that as many blocks of all heads reach as are wanted, its bits from the highest down: masses are
    not negative, so that their bits are in their order."""
    # grid: (n, B)
    # bits   [B, n, Hq, m] int32      of masses
    # floor  [B, n] int32             written: of a mass, at least the smallest above zero
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    own = past + block
    wanted = tl.maximum((own.to(tl.int64) * share + (1 << (BITS - 1))) >> BITS, least) + 2
    wanted = (heads * tl.minimum(wanted, own + 1)).to(tl.int32)
    at = row * tl.num_programs(0) + block
    given = bits + at * heads * blocks
    every = tl.arange(0, COLUMNS)
    seen = own + 1
    total = heads * seen
    found = 0
    for step in range(31):
        tried = found | (1 << (30 - step))
        many = tl.zeros([COLUMNS], tl.int32)
        for first in range(0, total, COLUMNS):
            place = first + every
            value = tl.load(given + (place // seen).to(tl.int64) * blocks + place % seen, mask=place < total, other=0)
            many += (value >= tried).to(tl.int32)
        found = tl.where(tl.sum(many, 0) >= wanted, tried, found)
    tl.store(floor + at, tl.maximum(found, 1))


@triton.jit(do_not_specialize=["past"])
def list_kernel(bits, floor, lists, counts, heads, past, blocks, COLUMNS: tl.constexpr):
    """The blocks of a head that reach the floor, ascending."""
    # grid: (n, B·Hq)
    # bits    [B, n, Hq, m] int32
    # floor   [B, n] int32
    # lists   [B, Hq, n, m] int32     written up to the counts
    # counts  [B, Hq, n] int32        written
    pair = tl.program_id(1).to(tl.int64)
    row, head = pair // heads, pair % heads
    block, count = tl.program_id(0), tl.num_programs(0)
    own = past + block
    least = tl.load(floor + row * count + block)
    given = bits + ((row * count + block) * heads + head) * blocks
    to = lists + (pair * count + block) * blocks
    every = tl.arange(0, COLUMNS)
    found = 0
    for at in range(0, own + 1, COLUMNS):
        column = at + every
        kept = (tl.load(given + column, mask=column <= own, other=0) >= least) & (column <= own)
        place = found + tl.cumsum(kept.to(tl.int32), 0) - 1
        tl.store(to + place, column, mask=kept)
        found += tl.sum(kept.to(tl.int32), 0)
    tl.store(counts + pair * count + block, found)


@triton.jit
def block_kernel(
    q, k, v, lists, counts, o, lse, scale, heads, group, past, room,
    DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr,
):
    """A block of queries of a head: whole blocks of keys before its own, in which nothing is hidden, then its own."""
    # grid: (n, B·Hq)
    # q, o    Tokens [B, Hq, T, d]           o is written
    # k, v    Tokens [B, Hkv, past + T, d]
    # lists   [B, Hq, n, room] int32         ascending; the last of `counts` is the queries' own
    # counts  [B, Hq, n] int32
    # lse     [B, Hq, T] fp32                written: natural logarithm
    pair = tl.program_id(1).to(tl.int64)
    row, head = pair // heads, pair % heads
    # the last blocks have the longest lists: they begin first
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    member, width = tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    wide = (width < DIM)[None, :]
    token = (block * BLOCK + member).to(tl.int64)[:, None]
    asking = q.base + row * q.row + head * q.head + token * q.token + width[None, :]
    every = tl.arange(0, KEYS)
    keys = k.base + row * k.row + head // group * k.head + every.to(tl.int64)[:, None] * k.token + width[None, :]
    values = v.base + row * v.row + head // group * v.head + every.to(tl.int64)[:, None] * v.token + width[None, :]
    query = tl.load(asking, mask=wide, other=0.0)
    at = pair * tl.num_programs(0) + block
    named, many = lists + at * room, tl.load(counts + at)
    scale *= LOG2_E
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    out = tl.zeros([BLOCK, WIDTH], tl.float32)
    parts: tl.constexpr = BLOCK // KEYS
    for i in range((many - 1) * parts):
        place = (tl.load(named + i // parts) * BLOCK + i % parts * KEYS).to(tl.int64)
        if DIM == WIDTH:
            key, value = tl.load(keys + place * k.token), tl.load(values + place * v.token)
        else:
            key = tl.load(keys + place * k.token, mask=wide, other=0.0)
            value = tl.load(values + place * v.token, mask=wide, other=0.0)
        top, mass, out = take(query, key.to(query.dtype), value.to(query.dtype), wide, scale, top, mass, out,
                              MASKED=False)
    for i in range(parts):
        place = (past + block * BLOCK + i * KEYS).to(tl.int64)
        key = tl.load(keys + place * k.token, mask=wide, other=0.0)
        value = tl.load(values + place * v.token, mask=wide, other=0.0)
        top, mass, out = take(query, key.to(query.dtype), value.to(query.dtype),
                              (i * KEYS + every)[None, :] > member[:, None], scale, top, mass, out, MASKED=True)
    out = out / mass[:, None]
    tl.store(o.base + row * o.row + head * o.head + token * o.token + width[None, :], out.to(o.base.dtype.element_ty),
             mask=wide)
    tl.store(lse + at * BLOCK + member, (top + tl.log2(mass)) / LOG2_E)
