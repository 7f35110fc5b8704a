"""The Triton kernels of `sketch.py`; importing this module imports Triton."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def project(key, maps, centre, channel, dim, top, RANK: tl.constexpr, DIM: tl.constexpr):
    """Some channels of the codes of a block of keys, `[BLOCK, WIDTH]` int32."""
    width = tl.arange(0, DIM)
    weights = tl.load(maps + width[:, None] * RANK + channel[None, :],
                      mask=(width < dim)[:, None] & (channel < RANK)[None, :], other=0.0)
    middle = tl.load(centre + channel, mask=channel < RANK, other=0.0).to(tl.float32)
    found = tl.dot(key, weights.to(key.dtype), input_precision="ieee") - middle[None, :]
    return tl.minimum(tl.maximum(tl.floor(found + 0.5), -top), top).to(tl.int32)


@triton.jit
def encode_kernel(
    keys, maps, centre, codes, heads, length, dim, k_row, k_head, k_token, m_row, c_row,
    RANK: tl.constexpr, BYTES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr,
):
    WHOLE: tl.constexpr = 2 * BYTES - RANK
    row = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    width = tl.arange(0, DIM)
    key = tl.load(keys + row * k_row + head * k_head + token[:, None].to(tl.int64) * k_token + width[None, :],
                  mask=(token < length)[:, None] & (width < dim)[None, :], other=0.0)
    maps += row * m_row + head * dim * RANK
    centre += row * c_row + head * RANK
    byte = tl.arange(0, WIDTH)
    found = project(key, maps, centre, byte, dim, tl.where(byte < WHOLE, 127.0, 7.0)[None, :], RANK=RANK, DIM=DIM)
    if WHOLE < BYTES:
        high = project(key, maps, centre, byte + RANK - BYTES, dim, 7.0, RANK=RANK, DIM=DIM)
        found = tl.where((byte < WHOLE)[None, :], found, found + 16 * high)
    place = codes + ((row * heads + head) * length + token[:, None]) * BYTES + byte[None, :]
    tl.store(place, found.to(tl.int8), mask=(token < length)[:, None] & (byte < BYTES)[None, :])


@triton.jit
def query_kernel(
    q, maps, side, scale, heads_q, group, per_row, dim, q_row, q_head, m_row,
    RANK: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr,
):
    row = (tl.program_id(0) // heads_q).to(tl.int64)
    head = (tl.program_id(0) % heads_q).to(tl.int64)
    width, channel = tl.arange(0, DIM), tl.arange(0, WIDTH)
    maps += row // per_row * m_row + head // group * dim * RANK
    weights = tl.load(maps + width[:, None] * RANK + channel[None, :],
                      mask=(width < dim)[:, None] & (channel < RANK)[None, :], other=0.0)
    query = tl.load(q + row * q_row + head * q_head + width, mask=width < dim, other=0.0)
    total = tl.sum(query.to(tl.float32)[:, None] * weights.to(tl.float32), 0) * scale
    tl.store(side + (row * heads_q + head) * RANK + channel, total, mask=channel < RANK)


@triton.jit
def score_kernel(
    side, codes, tokens, first, last, logits, tops, masses, heads, per_row, count, c_row, c_head, c_token,
    LISTED: tl.constexpr, RANK: tl.constexpr, BYTES: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):
    """Products of the group's query sides with a block of codes, the largest and the mass of each; -inf where there is
    no candidate."""
    WHOLE: tl.constexpr = 2 * BYTES - RANK
    at = tl.program_id(0).to(tl.int64)
    row, head = at // heads, at % heads
    group, byte = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    if LISTED:
        token = tl.load(tokens + at * count + place, mask=place < count, other=-1)
        used = token >= 0
    else:
        token = place
        used = (place < count) & (place >= tl.load(first + row)) & (place < tl.load(last + row))
    from_side = side + (at * GROUP + group[:, None]) * RANK + byte[None, :]
    inside = (group < GROUP)[:, None] & (byte < BYTES)[None, :]
    held = tl.load(codes + row // per_row * c_row + head * c_head + token[None, :].to(tl.int64) * c_token
                   + byte[:, None], mask=used[None, :] & (byte < BYTES)[:, None], other=0).to(tl.int32)
    query = tl.load(from_side, mask=inside, other=0.0)
    if WHOLE < BYTES:
        high = tl.load(from_side + RANK - BYTES, mask=inside & (byte >= WHOLE)[None, :], other=0.0)
        low = tl.where((byte < WHOLE)[:, None], held, (held << 28) >> 28)
        total = tl.dot(query, low.to(tl.float32), input_precision="tf32")
        total += tl.dot(high, ((held + 8) >> 4).to(tl.float32), input_precision="tf32")
    else:
        total = tl.dot(query, held.to(tl.float32), input_precision="tf32")
    total = tl.where(used[None, :], total, float("-inf"))
    top = tl.max(total, 1)
    mass = tl.sum(tl.exp(total - tl.where(top == float("-inf"), 0.0, top)[:, None]), 1)
    head_q = at * GROUP + group
    parts = tl.num_programs(1)
    tl.store(tops + head_q * parts + tl.program_id(1), top, mask=group < GROUP)
    tl.store(masses + head_q * parts + tl.program_id(1), mass, mask=group < GROUP)
    tl.store(logits + head_q[:, None] * count + place[None, :], total,
             mask=(group < GROUP)[:, None] & (place < count)[None, :])


@triton.jit
def weigh_kernel(
    logits, tops, masses, scores, count, parts,
    GROUP: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):
    """The softmax of every head over all candidates, summed over the group; -1 where there is no candidate."""
    at = tl.program_id(0).to(tl.int64)
    group, part = tl.arange(0, ROWS), tl.arange(0, PARTS)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    head_q = at * GROUP + group
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    there = (group < GROUP)[:, None] & (part < parts)[None, :]
    each = tl.load(tops + head_q[:, None] * parts + part[None, :], mask=there, other=float("-inf"))
    weight = tl.load(masses + head_q[:, None] * parts + part[None, :], mask=there, other=0.0)
    top = tl.max(each, 1)
    top = tl.where(top == float("-inf"), 0.0, top)
    mass = tl.sum(weight * tl.exp(each - top[:, None]), 1)
    inside = (group < GROUP)[:, None] & (place < count)[None, :]
    value = tl.load(logits + head_q[:, None] * count + place[None, :], mask=inside, other=float("-inf"))
    share = tl.exp(value - top[:, None]) / tl.where(mass > 0, mass, 1.0)[:, None]
    total = tl.where(tl.max(value, 0) == float("-inf"), -1.0, tl.sum(share, 0))
    tl.store(scores + at * count + place, total, mask=place < count)


@triton.jit
def numbers(scores, at, place, count):
    """Scores as integers in the same order, from 1 on; 0 where there is no candidate."""
    score = tl.load(scores + at * count + place, mask=place < count, other=-1.0)
    return tl.where(score >= 0, tl.maximum(score, 0.0).to(tl.int32, bitcast=True) + 1, 0)


@triton.jit
def next_digit(tally, missing, BINS: tl.constexpr):
    """The digit of the last score that is chosen, where `missing` are still to be chosen, and how many of that digit;
    -1 where none is missing."""
    digit = tl.arange(0, BINS)
    size = tl.load(tally + digit)
    above = tl.sum(size, 0) - tl.cumsum(size, 0)
    here = (above < missing) & (above + size >= missing)
    return tl.max(tl.where(here, digit, -1), 0), missing - tl.sum(tl.where(here, above, 0), 0)


@triton.jit
def wanted(tallies, budget, row, at, width):
    """How many are chosen: the budget, and no more than there are or the list holds."""
    digit = tl.arange(0, 2048)
    there = tl.sum(tl.load(tallies + at * 2048 + digit), 0)
    return tl.minimum(tl.minimum(tl.load(budget + row), width), there).to(tl.int32)


@triton.jit
def last_chosen(tallies, budget, row, at, rows, width):
    """The smallest number that is chosen, and how many of those that equal it; no number where nothing is."""
    missing = wanted(tallies, budget, row, at, width)
    high, left = next_digit(tallies + at * 2048, missing, BINS=2048)
    middle, left = next_digit(tallies + (rows + at) * 2048, left, BINS=1024)
    low, left = next_digit(tallies + (2 * rows + at) * 2048, left, BINS=1024)
    least = (high << 20) | (middle << 10) | low
    return tl.where(missing > 0, least, 0x7FFFFFFF), tl.where(missing > 0, left, 0)


@triton.jit
def tally_kernel(
    scores, tallies, budget, heads, rows, count, width,
    DIGIT: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):
    """How many numbers of a block have every value of one digit, of those whose digits before it are the last chosen
    one's."""
    at = tl.program_id(0).to(tl.int64)
    row = at // heads
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    number = numbers(scores, at, place, count)
    BINS: tl.constexpr = 2048 if DIGIT == 0 else 1024
    used = number > 0
    value = number >> 20
    if DIGIT > 0:
        high, left = next_digit(tallies + at * 2048, wanted(tallies, budget, row, at, width), BINS=2048)
        used = used & (value == high)
        value = (number >> 10) & 1023
        if DIGIT > 1:
            middle, left = next_digit(tallies + (rows + at) * 2048, left, BINS=1024)
            used = used & (value == middle)
            value = number & 1023
    digit = tl.arange(0, BINS)
    size = tl.histogram(tl.where(used, value, 0), BINS)
    size -= tl.where(digit == 0, BLOCK - tl.sum(used.to(tl.int32), 0), 0)
    tl.atomic_add(tallies + (DIGIT * rows + at) * 2048 + digit, size, mask=size > 0, sem="relaxed")


@triton.jit
def count_kernel(
    scores, tallies, above, equal, budget, heads, rows, count, width, blocks,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):
    """How many numbers of every block are larger than the last chosen one, and how many equal it."""
    at = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    number = numbers(scores, at, place, count)
    least, _ = last_chosen(tallies, budget, at // heads, at, rows, width)
    own = at * blocks + tl.program_id(1)
    tl.store(above + own, tl.sum((number > least).to(tl.int32), 0))
    tl.store(equal + own, tl.sum((number == least).to(tl.int32), 0))


@triton.jit
def fill_kernel(
    scores, tokens, tallies, above, equal, out, budget, heads, rows, count, width, blocks,
    LISTED: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):
    """The chosen tokens of a block in their places, and -1 in the places behind the last."""
    at = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    number = numbers(scores, at, place, count)
    least, missing = last_chosen(tallies, budget, at // heads, at, rows, width)
    part = tl.arange(0, PARTS)
    before = part < tl.minimum(tl.program_id(1), blocks)
    larger = tl.sum(tl.load(above + at * blocks + part, mask=before, other=0), 0)
    same = tl.sum(tl.load(equal + at * blocks + part, mask=before, other=0), 0)
    equals = (number == least).to(tl.int32)
    rank = same + tl.cumsum(equals, 0)
    chosen = (number > least) | ((number == least) & (rank <= missing))
    slot = larger + tl.minimum(same, missing) + tl.cumsum(chosen.to(tl.int32), 0) - 1
    if LISTED:
        token = tl.load(tokens + at * count + place, mask=chosen, other=-1)
    else:
        token = place
    tl.store(out + at * width + slot, token, mask=chosen)
    total = wanted(tallies, budget, at // heads, at, width)
    tl.store(out + at * width + place, -1, mask=(place >= total) & (place < width))
