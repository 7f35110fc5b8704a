"""The Triton kernels of `attention_mass.py`; importing this module imports Triton."""

import triton
import triton.language as tl


@triton.jit
def summary_kernel(
    q, k, positions, part, part_best, scale, count, sink, window, rows, span, k_head, k_token,
    GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):
    """Sums over one stretch, relative to its own largest score."""
    # grid: (blocks of queries, Hq, stretches of span keys)
    # q          [Hq, T, d]                      with RoPE; count = T, DIM = d, rows = Hq·T
    # k          [Hkv, N, d]                     with RoPE; strides k_head, k_token
    # positions  [T] int32                       the last key that a query sees
    # part       [stretches, 6, rows] fp32       written: largest score, then sums of exp(score - largest): all, sink,
    #                                            mid region; the latter's times (score - largest); best score
    # part_best  [stretches, rows] int32         written: the best key outside the sink
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
    # grid: (blocks of SLOTS rows,)
    # part, part_best  as `summary_kernel` writes them; splits = stretches
    # positions        [T] int32            count = T
    # out              [7, rows] fp32       written: STATISTICS, in their order; scores are natural logarithms
    # best             [rows] int32         written: the best key outside the sink, -1 = none
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
