"""The Triton kernel of `collisions.py`; importing this module imports Triton."""

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
    of_query, of_key = (query < total)[:, None, None], (token < length)[None, :, None]
    hits = tl.zeros([ROWS, BLOCK, WIDTH], tl.float32)
    for at in range(0, TABLES, WIDTH):
        table = (at + tl.arange(0, WIDTH))[None, None, :]
        inside = table < TABLES
        # past the last table 0 meets 1
        mine = tl.load(asks + table.to(tl.int64) * q_table, mask=of_query & inside, other=1)
        theirs = tl.load(holds + table.to(tl.int64) * c_table, mask=of_key & inside, other=0)
        # floats hold 16 bits exactly, and comparing them gives the number to add in one instruction
        hits += (mine.to(tl.float32) == theirs.to(tl.float32)).to(tl.float32)
    slot = (place.to(tl.int64) * total + query)[:, None] * length + token[None, :]
    tl.store(out + slot, tl.sum(hits, 2) >= least, mask=(query < total)[:, None] & (token < length)[None, :])
