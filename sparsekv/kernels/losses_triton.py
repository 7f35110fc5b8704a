"""The Triton kernels of `losses.py`; importing this module imports Triton.

Shapes: H query heads of Hkv KV heads, T queries a head, N keys drawn, d the head dimension; rows = H·T. student and
teacher `[H, T, N]` are logits, natural logarithms; mask `[H, T, N]` by strides m_head, m_row, m_key is not zero where a
key counts for a query. Everything is float32 unless named otherwise.
"""

import triton
import triton.language as tl

LOWEST: tl.constexpr = tl.constexpr(-(2**31))


@triton.jit
def logits_of(place, used):
    return tl.load(place, mask=used, other=float("-inf")).to(tl.float32)


@triton.jit
def counts_of(mask, row, key, inside, count, m_head, m_row, m_key):
    """Whether keys count for queries; row and key broadcast."""
    return tl.load(mask + row // count * m_head + row % count * m_row + key * m_key, mask=inside, other=0) != 0


@triton.jit
def or_zero(x):
    """x, and zero for -inf: a shift that may be of an empty set."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def kl_huber_kernel(
    student, teacher, mask, terms, weights, count, length, m_head, m_row, m_key, PADDED: tl.constexpr,
):
    """Every term of a query's loss, and the gradient with respect to its student's logits: one program a query, its row
    in registers."""
    # grid: (H·T,)
    # terms    `Terms`, written: [H, T], gradient [H, T, N]
    # weights  `Weights`, numbers; thresholds and δ in nats
    row = tl.program_id(0).to(tl.int64)
    key = tl.arange(0, PADDED)
    inside = key < length
    used = counts_of(mask, row, key, inside, count, m_head, m_row, m_key)
    a, b = logits_of(teacher + row * length + key, used), logits_of(student + row * length + key, used)
    top = tl.max(a, 0)
    lives = (top > float("-inf")).to(tl.float32)
    a, b = a - or_zero(top), b - or_zero(top)
    highest = or_zero(tl.max(b, 0))
    p, q = tl.exp(a), tl.exp(b - highest)
    sum_p, sum_q = tl.sum(p, 0), tl.sum(q, 0)
    sum_p, sum_q = tl.where(sum_p > 0, sum_p, 1.0), tl.where(sum_q > 0, sum_q, 1.0)
    p, q = p / sum_p, q / sum_q
    apart = (highest + tl.log(sum_q) - tl.log(sum_p)) * lives
    difference = tl.where(used, b - a, 0.0)
    delta = weights.delta
    slope = weights.partition * tl.minimum(tl.maximum(apart, 0.0), delta) + weights.under * tl.maximum(
        tl.minimum(apart, 0.0), -delta)
    found = q * (1 + slope) - p

    error = tl.where(used & (a >= -weights.band), difference, 0.0)
    weight = 1 / tl.maximum(tl.sum((used & (a >= -weights.band)).to(tl.float32), 0), 1.0)
    pull = tl.minimum(tl.maximum(error, -delta), delta)
    tl.store(terms.near + row, tl.sum(pull * error - 0.5 * pull * pull, 0) * weight)
    found += pull * (weight * weights.top)

    beyond = used & (a < -weights.far)
    error = tl.where(beyond, tl.maximum(b + weights.band, 0.0), 0.0)
    weight = 1 / tl.maximum(tl.sum(beyond.to(tl.float32), 0), 1.0)
    pull = tl.minimum(error, delta)
    tl.store(terms.away + row, tl.sum(pull * error - 0.5 * pull * pull, 0) * weight)
    found += pull * (weight * weights.distant)

    tl.store(terms.kl + row, (apart - tl.sum(p * difference, 0)) * lives)
    tl.store(terms.gap + row, apart)
    tl.store(terms.alive + row, lives)
    tl.store(terms.gradient + row * length + key, tl.where(used, found, 0.0), mask=inside)


@triton.jit
def mass_kernel(
    student, teacher, mask, anchor, threshold, masses, rows, count, length, best, m_head, m_row, m_key,
    PADDED: tl.constexpr, READS: tl.constexpr,
):
    """The log masses of a query's output, anchors included: by the teacher, by the student, and (READS) by the teacher
    for the keys whose logits are the `best` largest, by the student for the others; and the least of those logits."""
    # grid: (H·T,)
    # anchor     [H, T]           log mass of the anchors
    # threshold  [H, T]           written if READS: that logit
    # masses     [2 or 3, H, T]   written: by teacher, by student, by both if READS
    row = tl.program_id(0).to(tl.int64)
    key = tl.arange(0, PADDED)
    inside = key < length
    used = counts_of(mask, row, key, inside, count, m_head, m_row, m_key)
    a, b = logits_of(teacher + row * length + key, used), logits_of(student + row * length + key, used)
    beside = tl.load(anchor + row)
    tl.store(masses + row, mass_of(a, beside))
    tl.store(masses + rows + row, mass_of(b, beside))
    if READS:
        # logits order as these whole numbers do; the least of the best of them, bit by bit
        bits = a.to(tl.int32, bitcast=True)
        order = tl.where(used, bits ^ ((bits >> 31) & 0x7FFFFFFF), LOWEST)
        lowest = tl.where(tl.sum((order >= 0).to(tl.int32), 0) >= best, 0, LOWEST)
        bit = tl.program_id(0) * 0 + (1 << 30)
        for _ in range(31):
            higher = lowest | bit
            lowest = tl.where(tl.sum((order >= higher).to(tl.int32), 0) >= best, higher, lowest)
            bit = bit >> 1
        smallest = tl.min(tl.where(used & (order >= lowest), a, float("inf")), 0)
        tl.store(threshold + row, smallest)
        tl.store(masses + 2 * rows + row, mass_of(tl.where(used & (a >= smallest), a, b), beside))


@triton.jit
def mass_of(logits, beside):
    top = tl.maximum(tl.max(logits, 0), beside)
    shift = or_zero(top)
    return shift + tl.log(tl.sum(tl.exp(logits - shift), 0) + tl.exp(beside - shift))


@triton.jit
def shares_of(student, teacher, threshold, masses, row, key, there, used, rows, length, READS: tl.constexpr):
    """The shares of a block of keys in the outputs of a block of queries, by teacher, student and both; and the keys
    that the third has from the teacher."""
    place = row[:, None] * length + key[None, :]
    a, b = logits_of(teacher + place, used), logits_of(student + place, used)
    first = tl.load(masses + row, mask=there, other=0.0)
    second = tl.load(masses + rows + row, mask=there, other=0.0)
    by_teacher, by_student = tl.exp(a - first[:, None]), tl.exp(b - second[:, None])
    if READS:
        chosen = used & (a >= tl.load(threshold + row, mask=there, other=0.0)[:, None])
        third = tl.load(masses + 2 * rows + row, mask=there, other=0.0)
        by_both = tl.exp(tl.where(chosen, a, b) - third[:, None])
    else:
        chosen, by_both = used, by_student
    return by_teacher, by_student, by_both, chosen


@triton.jit
def outputs_kernel(
    student, teacher, mask, values, threshold, masses, outs, rows, of_head, count, length, dim, m_head, m_row, m_key,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, READS: tl.constexpr,
):
    """What the drawn keys give to WIDTH numbers of a block of outputs of one KV head: by teacher, student and (READS)
    both."""
    # grid: (Hkv, blocks of of_head = H / Hkv · T outputs, blocks of WIDTH)
    # values             [Hkv, N, d]
    # threshold, masses  as `mass_kernel` writes them
    # outs               [2 or 3, H, T, d]    written
    head = tl.program_id(0).to(tl.int64)
    own = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    there, row, width = own < of_head, head * of_head + own, tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    full = tl.zeros([ROWS, WIDTH], tl.float32)
    guess = tl.zeros([ROWS, WIDTH], tl.float32)
    mixed = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(0, length, BLOCK):
        key = start + tl.arange(0, BLOCK)
        inside = there[:, None] & (key < length)[None, :]
        used = counts_of(mask, row[:, None], key[None, :], inside, count, m_head, m_row, m_key)
        by_teacher, by_student, by_both, _ = shares_of(student, teacher, threshold, masses, row, key, there, used, rows,
                                                       length, READS=READS)
        value = tl.load(values + (head * length + key)[:, None] * dim + width[None, :],
                        mask=(key < length)[:, None] & (width < dim)[None, :], other=0.0).to(tl.float32)
        full = tl.dot(by_teacher, value, full, input_precision="tf32x3")
        guess = tl.dot(by_student, value, guess, input_precision="tf32x3")
        if READS:
            mixed = tl.dot(by_both, value, mixed, input_precision="tf32x3")
    place = row[:, None] * dim + width[None, :]
    kept = there[:, None] & (width < dim)[None, :]
    tl.store(outs + place, full, mask=kept)
    tl.store(outs + rows * dim + place, guess, mask=kept)
    if READS:
        tl.store(outs + 2 * rows * dim + place, mixed, mask=kept)


@triton.jit
def output_gradient_kernel(
    student, teacher, mask, values, threshold, masses, slopes, along, gradient, rows, of_head, count, length, dim,
    m_head, m_row, m_key, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, READS: tl.constexpr,
):
    """The gradient of the outputs' errors with respect to a block of the student's logits: a key's share times what its
    value lies along the slope beyond the output itself."""
    # grid: (Hkv, blocks of of_head = H / Hkv · T outputs, blocks of keys)
    # values             [Hkv, N, d]
    # threshold, masses  as `mass_kernel` writes them
    # slopes             [1 or 2, H, T, d]    gradient of the error with respect to outputs, by student, by both
    # along              [1 or 2, H, T]       its product with the output
    # gradient           [H, T, N]            written
    head = tl.program_id(0).to(tl.int64)
    own = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    there, row = own < of_head, head * of_head + own
    key = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = there[:, None] & (key < length)[None, :]
    guess = tl.zeros([ROWS, BLOCK], tl.float32)
    mixed = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.range(0, dim, WIDTH, num_stages=1):
        width = start + tl.arange(0, WIDTH)
        value = tl.load(values + (head * length + key)[None, :] * dim + width[:, None],
                        mask=(key < length)[None, :] & (width < dim)[:, None], other=0.0).to(tl.float32)
        kept = there[:, None] & (width < dim)[None, :]
        place = slopes + row[:, None] * dim + width[None, :]
        guess = tl.dot(tl.load(place, mask=kept, other=0.0), value, guess, input_precision="tf32x3")
        if READS:
            mixed = tl.dot(tl.load(place + rows * dim, mask=kept, other=0.0), value, mixed, input_precision="tf32x3")
    used = counts_of(mask, row[:, None], key[None, :], inside, count, m_head, m_row, m_key)
    _, by_student, by_both, chosen = shares_of(student, teacher, threshold, masses, row, key, there, used, rows, length,
                                               READS=READS)
    found = by_student * (guess - tl.load(along + row, mask=there, other=0.0)[:, None])
    if READS:
        offset = tl.load(along + rows + row, mask=there, other=0.0)
        found += tl.where(chosen, 0.0, by_both * (mixed - offset[:, None]))
    tl.store(gradient + row[:, None] * length + key[None, :], tl.where(used, found, 0.0), mask=inside)
