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
    """Whether BLOCK keys share at least `least` hash tables with each of ROWS queries of one KV head's group."""
    # grid: (B·Hkv · parts of the queries, blocks of keys)
    # codes    [B, Hkv, N, L] int16    buckets of keys; strides c_row, c_head, C_TOKEN, c_table; TABLES = L
    # queries  [B, Hq, T, L] int16     buckets of queries; strides q_row, q_head, q_token, q_table
    # out      [B, Hq, T, N] bool      written; total = Hq / Hkv · T, count = T, length = N
    place = tl.program_id(0) // parts
    row = (place // heads).to(tl.int64)
    head = (place % heads).to(tl.int64)
    query = tl.program_id(0) % parts * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * BLOCK
    near = tl.arange(0, BLOCK)
    token = first + near
    query_codes = queries + row * q_row + (head * GROUP + query // count) * q_head
    query_codes += (query % count).to(tl.int64) * q_token
    # C_TOKEN and STEP are known when compiling: several codes a load, and few registers for addresses
    begin = tl.multiple_of(row * c_row + head * c_head, STEP) + first.to(tl.int64) * C_TOKEN
    key_codes = codes + begin + near.to(tl.int64) * C_TOKEN
    # [queries, keys, tables] from the start, so that the codes stay in the registers they are loaded to
    query_codes, key_codes = query_codes[:, None, None], key_codes[None, :, None]
    of_query, of_key = (query < total)[:, None, None], (token < length)[None, :, None]
    hits = tl.zeros([ROWS, BLOCK, WIDTH], tl.float32)
    for at in range(0, TABLES, WIDTH):
        table = (at + tl.arange(0, WIDTH))[None, None, :]
        inside = table < TABLES
        # past the last table 0 meets 1
        mine = tl.load(query_codes + table.to(tl.int64) * q_table, mask=of_query & inside, other=1)
        theirs = tl.load(key_codes + table.to(tl.int64) * c_table, mask=of_key & inside, other=0)
        # floats hold 16 bits exactly, and comparing them gives the number to add in one instruction
        hits += (mine.to(tl.float32) == theirs.to(tl.float32)).to(tl.float32)
    slot = (place.to(tl.int64) * total + query)[:, None] * length + token[None, :]
    tl.store(out + slot, tl.sum(hits, 2) >= least, mask=(query < total)[:, None] & (token < length)[None, :])
