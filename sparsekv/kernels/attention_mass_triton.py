"""The Triton kernels of `attention_mass.py`; importing this module imports Triton."""

import triton
import triton.language as tl


@triton.jit
def summary_kernel(
    q, k, positions, part, part_best, scale, count, sink, window, rows, span, k_head, k_token,
    GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):
    """Sums over one stretch, relative to its own largest score."""
    head = tl.program_id(1).to(tl.int64)
    stretch = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    width = tl.arange(0, WIDTH)
    column = tl.arange(0, BLOCK)
    place = tl.load(positions + row, mask=row < count, other=0)
    query = tl.load(q + (head * count + row)[:, None] * DIM + width[None, :],
                    mask=(row < count)[:, None] & (width < DIM)[None, :], other=0.0)
    key_base = k + (head // GROUP) * k_head
    # finite, so that a stretch in which a query sees nothing adds nothing
    top = tl.full([ROWS], -1.0e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sinks = tl.zeros([ROWS], tl.float32)
    middle = tl.zeros([ROWS], tl.float32)
    energy = tl.zeros([ROWS], tl.float32)
    score_best = tl.full([ROWS], float("-inf"), tl.float32)
    at_best = tl.zeros([ROWS], tl.int32)
    first = tl.program_id(2) * span
    last = tl.minimum(tl.max(place, 0) + 1, first + span)
    for at in range(first, last, BLOCK):
        token = at + column
        key = tl.load(key_base + token.to(tl.int64)[:, None] * k_token + width[None, :],
                      mask=(token < last)[:, None] & (width < DIM)[None, :], other=0.0)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        score = tl.where((token[None, :] <= place[:, None]) & (token < last)[None, :], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        keep = tl.exp(top - higher)
        relative = tl.maximum(score - higher[:, None], -10000.0)
        weight = tl.exp(relative)
        energy = tl.where(middle > 0, keep * (energy + middle * (top - higher)), 0.0)
        total = total * keep + tl.sum(weight, 1)
        sinks = sinks * keep + tl.sum(tl.where(token[None, :] < sink, weight, 0.0), 1)
        inside = (token[None, :] >= sink) & (token[None, :] <= place[:, None] - window)
        weight = tl.where(inside, weight, 0.0)
        middle = middle * keep + tl.sum(weight, 1)
        energy += tl.sum(weight * relative, 1)
        outside = tl.where(token[None, :] >= sink, score, float("-inf"))
        here = tl.max(outside, 1)
        where = tl.min(tl.where(outside == here[:, None], token[None, :], 2147483647), 1)
        at_best = tl.where(here > score_best, where, at_best)
        score_best = tl.maximum(score_best, here)
        top = higher
    plane = rows.to(tl.int64)
    slot = head * count + row
    base = part + stretch * 6 * plane + slot
    tl.store(base, top, mask=row < count)
    tl.store(base + plane, total, mask=row < count)
    tl.store(base + 2 * plane, sinks, mask=row < count)
    tl.store(base + 3 * plane, middle, mask=row < count)
    tl.store(base + 4 * plane, energy, mask=row < count)
    tl.store(base + 5 * plane, score_best, mask=row < count)
    tl.store(part_best + stretch * plane + slot, at_best, mask=row < count)


@triton.jit
def merge_kernel(part, part_best, positions, out, best, count, sink, window, rows, splits, SLOTS: tl.constexpr):
    """All stretches of a query together, and the statistics from the sums."""
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    there = slot < rows
    plane = rows.to(tl.int64)
    top = tl.full([SLOTS], -1.0e30, tl.float32)
    total = tl.zeros([SLOTS], tl.float32)
    sinks = tl.zeros([SLOTS], tl.float32)
    middle = tl.zeros([SLOTS], tl.float32)
    energy = tl.zeros([SLOTS], tl.float32)
    score_best = tl.full([SLOTS], float("-inf"), tl.float32)
    at_best = tl.full([SLOTS], -1, tl.int32)
    for stretch in range(splits):
        base = part + stretch * 6 * plane + slot
        its_top = tl.load(base, mask=there, other=-1.0e30)
        its_middle = tl.load(base + 3 * plane, mask=there, other=0.0)
        its_energy = tl.load(base + 4 * plane, mask=there, other=0.0)
        its_score = tl.load(base + 5 * plane, mask=there, other=float("-inf"))
        higher = tl.maximum(top, its_top)
        keep, its = tl.exp(top - higher), tl.exp(its_top - higher)
        mine = tl.where(middle > 0, keep * (energy + middle * (top - higher)), 0.0)
        energy = mine + tl.where(its_middle > 0, its * (its_energy + its_middle * (its_top - higher)), 0.0)
        total = total * keep + its * tl.load(base + plane, mask=there, other=0.0)
        sinks = sinks * keep + its * tl.load(base + 2 * plane, mask=there, other=0.0)
        middle = middle * keep + its * its_middle
        at_best = tl.where(its_score > score_best,
                           tl.load(part_best + stretch * plane + slot, mask=there, other=-1), at_best)
        score_best = tl.maximum(score_best, its_score)
        top = higher
    total = tl.where(there, total, 1.0)
    safe = tl.maximum(middle, 1.17549435e-38)
    place = tl.load(positions + slot % count, mask=there, other=0)
    size = tl.maximum(place - window + 1 - sink, 0)
    entropy = (tl.log(safe) - energy / safe) / tl.log(tl.maximum(size, 2).to(tl.float32))
    entropy = tl.where((size >= 2) & (middle > 0), tl.minimum(tl.maximum(entropy, 0.0), 1.0), 0.0)
    tl.store(out + slot, tl.log(total) + top, mask=there)
    tl.store(out + plane + slot, tl.where(middle > 0, tl.log(safe) + top, float("-inf")), mask=there)
    tl.store(out + 2 * plane + slot, score_best, mask=there)
    tl.store(out + 3 * plane + slot, sinks / total, mask=there)
    tl.store(out + 4 * plane + slot, tl.maximum((total - sinks - middle) / total, 0.0), mask=there)
    tl.store(out + 5 * plane + slot, middle / total, mask=there)
    tl.store(out + 6 * plane + slot, entropy, mask=there)
    tl.store(best + slot, at_best, mask=there)


@triton.jit
def above_kernel(
    q, k, positions, bracket, lse, part, scale, depth, count, rows, span, k_head, k_token,
    GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    FIRST: tl.constexpr,
):
    """Share of the attention and number of keys of one stretch above eight edges: those between the ninths of the
    whole depth, or those between the fifths of either bracket."""
    head = tl.program_id(1).to(tl.int64)
    stretch = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    width = tl.arange(0, WIDTH)
    column = tl.arange(0, BLOCK)
    place = tl.load(positions + row, mask=row < count, other=0)
    query = tl.load(q + (head * count + row)[:, None] * DIM + width[None, :],
                    mask=(row < count)[:, None] & (width < DIM)[None, :], other=0.0)
    slot = head * count + row
    plane = rows.to(tl.int64)
    norm = tl.load(lse + slot, mask=row < count, other=0.0)
    if FIRST:
        step0 = tl.zeros([ROWS], tl.float32) + depth / 9
        step1 = step0
        low0 = tl.zeros([ROWS], tl.float32)
        low1 = 4 * step0
    else:
        low0 = tl.load(bracket + slot, mask=row < count, other=0.0)
        low1 = tl.load(bracket + plane + slot, mask=row < count, other=0.0)
        step0 = (tl.load(bracket + 2 * plane + slot, mask=row < count, other=0.0) - low0) * 0.2
        step1 = (tl.load(bracket + 3 * plane + slot, mask=row < count, other=0.0) - low1) * 0.2
    t0 = (norm - (low0 + step0))[:, None]
    t1 = (norm - (low0 + 2 * step0))[:, None]
    t2 = (norm - (low0 + 3 * step0))[:, None]
    t3 = (norm - (low0 + 4 * step0))[:, None]
    t4 = (norm - (low1 + step1))[:, None]
    t5 = (norm - (low1 + 2 * step1))[:, None]
    t6 = (norm - (low1 + 3 * step1))[:, None]
    t7 = (norm - (low1 + 4 * step1))[:, None]
    # one accumulator an edge and element of the tile: nothing is summed across threads before the end
    m0 = tl.zeros([ROWS, BLOCK], tl.float32)
    n0 = tl.zeros([ROWS, BLOCK], tl.float32)
    m1 = tl.zeros([ROWS, BLOCK], tl.float32)
    n1 = tl.zeros([ROWS, BLOCK], tl.float32)
    m2 = tl.zeros([ROWS, BLOCK], tl.float32)
    n2 = tl.zeros([ROWS, BLOCK], tl.float32)
    m3 = tl.zeros([ROWS, BLOCK], tl.float32)
    n3 = tl.zeros([ROWS, BLOCK], tl.float32)
    m4 = tl.zeros([ROWS, BLOCK], tl.float32)
    n4 = tl.zeros([ROWS, BLOCK], tl.float32)
    m5 = tl.zeros([ROWS, BLOCK], tl.float32)
    n5 = tl.zeros([ROWS, BLOCK], tl.float32)
    m6 = tl.zeros([ROWS, BLOCK], tl.float32)
    n6 = tl.zeros([ROWS, BLOCK], tl.float32)
    m7 = tl.zeros([ROWS, BLOCK], tl.float32)
    n7 = tl.zeros([ROWS, BLOCK], tl.float32)
    key_base = k + (head // GROUP) * k_head
    first = tl.program_id(2) * span
    last = tl.minimum(tl.max(place, 0) + 1, first + span)
    for at in range(first, last, BLOCK):
        token = at + column
        key = tl.load(key_base + token.to(tl.int64)[:, None] * k_token + width[None, :],
                      mask=(token < last)[:, None] & (width < DIM)[None, :], other=0.0)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        score = tl.where((token[None, :] <= place[:, None]) & (token < last)[None, :], score, float("-inf"))
        weight = tl.exp(score - norm[:, None])
        m0 += tl.where(score >= t0, weight, 0.0)
        n0 += tl.where(score >= t0, 1.0, 0.0)
        m1 += tl.where(score >= t1, weight, 0.0)
        n1 += tl.where(score >= t1, 1.0, 0.0)
        m2 += tl.where(score >= t2, weight, 0.0)
        n2 += tl.where(score >= t2, 1.0, 0.0)
        m3 += tl.where(score >= t3, weight, 0.0)
        n3 += tl.where(score >= t3, 1.0, 0.0)
        m4 += tl.where(score >= t4, weight, 0.0)
        n4 += tl.where(score >= t4, 1.0, 0.0)
        m5 += tl.where(score >= t5, weight, 0.0)
        n5 += tl.where(score >= t5, 1.0, 0.0)
        m6 += tl.where(score >= t6, weight, 0.0)
        n6 += tl.where(score >= t6, 1.0, 0.0)
        m7 += tl.where(score >= t7, weight, 0.0)
        n7 += tl.where(score >= t7, 1.0, 0.0)
    base = part + stretch * 16 * plane + slot
    tl.store(base, tl.sum(m0, 1), mask=row < count)
    tl.store(base + plane, tl.sum(m1, 1), mask=row < count)
    tl.store(base + 2 * plane, tl.sum(m2, 1), mask=row < count)
    tl.store(base + 3 * plane, tl.sum(m3, 1), mask=row < count)
    tl.store(base + 4 * plane, tl.sum(n0, 1), mask=row < count)
    tl.store(base + 5 * plane, tl.sum(n1, 1), mask=row < count)
    tl.store(base + 6 * plane, tl.sum(n2, 1), mask=row < count)
    tl.store(base + 7 * plane, tl.sum(n3, 1), mask=row < count)
    tl.store(base + 8 * plane, tl.sum(m4, 1), mask=row < count)
    tl.store(base + 9 * plane, tl.sum(m5, 1), mask=row < count)
    tl.store(base + 10 * plane, tl.sum(m6, 1), mask=row < count)
    tl.store(base + 11 * plane, tl.sum(m7, 1), mask=row < count)
    tl.store(base + 12 * plane, tl.sum(n4, 1), mask=row < count)
    tl.store(base + 13 * plane, tl.sum(n5, 1), mask=row < count)
    tl.store(base + 14 * plane, tl.sum(n6, 1), mask=row < count)
    tl.store(base + 15 * plane, tl.sum(n7, 1), mask=row < count)


@triton.jit
def narrow_kernel(
    bracket, part, positions, found, goal0, goal1, depth, count, rows, splits,
    SLOTS: tl.constexpr, FIRST: tl.constexpr,
):
    """Keep the ninth, then its fifth, in which the goal is reached; then count, within it by interpolation."""
    which = tl.program_id(1)
    goal = tl.where(which == 0, goal0, goal1)
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    there = slot < rows
    plane = rows.to(tl.int64)
    at = bracket + which * plane + slot
    if FIRST:
        low = tl.zeros([SLOTS], tl.float32)
        high = low + depth
        mass_low = low
        count_low = low
        mass_high = low + 1.0
        count_high = (tl.load(positions + slot % count, mask=there, other=0) + 1).to(tl.float32)
        step = low + depth / 9
    else:
        low = tl.load(at, mask=there, other=0.0)
        high = tl.load(at + 2 * plane, mask=there, other=0.0)
        mass_low = tl.load(at + 4 * plane, mask=there, other=0.0)
        count_low = tl.load(at + 6 * plane, mask=there, other=0.0)
        mass_high = tl.load(at + 8 * plane, mask=there, other=1.0)
        count_high = tl.load(at + 10 * plane, mask=there, other=1.0)
        step = (high - low) * 0.2
    start = low
    reached = tl.zeros([SLOTS], tl.int32)
    for edge in tl.static_range(8 if FIRST else 4):
        # planes of `part`: four masses and four numbers of either bracket
        if FIRST:
            index = (edge // 4) * 8 + edge % 4
        else:
            index = which * 8 + edge
        mass = tl.zeros([SLOTS], tl.float32)
        number = tl.zeros([SLOTS], tl.float32)
        for stretch in range(splits):
            base = part + (stretch * 16 + index) * plane + slot
            mass += tl.load(base, mask=there, other=0.0)
            number += tl.load(base + 4 * plane, mask=there, other=0.0)
        here = start + (edge + 1) * step
        below = (mass < goal) & (reached == 0)
        ends = (mass >= goal) & (reached == 0)
        low = tl.where(below, here, low)
        mass_low = tl.where(below, mass, mass_low)
        count_low = tl.where(below, number, count_low)
        high = tl.where(ends, here, high)
        mass_high = tl.where(ends, mass, mass_high)
        count_high = tl.where(ends, number, count_high)
        reached = tl.where(ends, 1, reached)
    if FIRST:
        tl.store(at, low, mask=there)
        tl.store(at + 2 * plane, high, mask=there)
        tl.store(at + 4 * plane, mass_low, mask=there)
        tl.store(at + 6 * plane, count_low, mask=there)
        tl.store(at + 8 * plane, mass_high, mask=there)
        tl.store(at + 10 * plane, count_high, mask=there)
    else:
        width = tl.maximum(high - low, 1e-6)
        share = (goal - mass_low) / tl.maximum(mass_high - mass_low, 1.17549435e-38)
        share = tl.minimum(tl.maximum(share, 0.0), 1.0)
        inward = -tl.log(tl.maximum(1.0 - share * (1.0 - tl.exp(-width)), 1e-30)) / width
        needed = count_low + tl.ceil(tl.minimum(inward, 1.0) * (count_high - count_low) - 1e-4)
        tl.store(found + which * plane + slot, tl.maximum(needed, 1.0).to(tl.int32), mask=there)
