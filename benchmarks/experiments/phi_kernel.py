"""Other forms of `completed_kernel`, timed by phi_tune.py. Shapes and arguments as there."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from sparsekv.kernels.attend_triton import bucket_slots, edges_of
from sparsekv.kernels.routing_triton import kept_row


@triton.jit
def locate(
    at, mine_listed, mine, first_listed, first_anchor, sinks, start, tail, begin, end, shift, tokens, anchors, whole,
    table, PROBES: tl.constexpr, PAGE: tl.constexpr,
):
    """The tokens of a block of a slice, -1 where there is none: first its share of the list, then its share of the
    anchors; or, where `whole` is not zero, of all tokens in their pages."""
    listed = at < mine_listed
    place = first_listed + at
    if PROBES > 0:
        inside = (begin[None, :] <= place[:, None]) & (place[:, None] < end[None, :])
        place += tl.sum(tl.where(inside, shift[None, :], 0), 1)
    token = tl.load(tokens + place, mask=listed, other=-1).to(tl.int32)
    anchor = first_anchor + at - mine_listed
    beside = (at >= mine_listed) & (at < mine)
    if PAGE > 0:
        paged = (at >= mine_listed) & (at < tl.where(whole > 0, mine, 0))
        page = tl.load(table + anchor // PAGE, mask=paged, other=0).to(tl.int32)
        one = tl.load(anchors + anchor, mask=beside & (at < tl.where(whole > 0, 0, mine)), other=-1).to(tl.int32)
        anchor = tl.where(whole > 0, page * PAGE + anchor % PAGE, one)
    else:
        anchor = tl.where(anchor < sinks, start + anchor, tail + anchor - sinks)
    return tl.where(listed, token, tl.where(beside, anchor, -1))


@triton.jit
def in_rows(bias, dtype: tl.constexpr):
    """A bias `[N]` in float32 as rows `[16, N]` of numbers of `dtype` whose sum it is."""
    part = tl.arange(0, 16)[:, None]
    high = bias.to(dtype)
    left = bias - high.to(tl.float32)
    middle = left.to(dtype)
    low = (left - middle.to(tl.float32)).to(dtype)
    rows = tl.where(part == 0, high[None, :], tl.where(part == 1, middle[None, :], low[None, :]))
    return tl.where(part < 3, rows, 0.0).to(dtype)


@triton.jit
def lean_kernel(
    q, k, v, tokens, offsets, buckets, log_weights, maps, features, seats, edges, pages, partial, scale, num_listed,
    sink_size, heads, per_row, units,
    PROBES: tl.constexpr, PADDED_PROBES: tl.constexpr, LISTS: tl.constexpr, GROUP: tl.constexpr, QUARTER: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, FEATURES: tl.constexpr,
    PADDED_FEATURES: tl.constexpr, UNITS: tl.constexpr, WEIGHTED: tl.constexpr, SEATED: tl.constexpr,
    OVERLAP: tl.constexpr, PAGE: tl.constexpr, BIASED: tl.constexpr, LATE: tl.constexpr, PHI: tl.constexpr,
    AHEAD: tl.constexpr,
):
    # BIASED  biases of the map that are rows of a product: none, the last, or both
    # LATE    what a program reads once is asked for all at once, before any of it is waited for
    # AHEAD   places of keys are looked up a block ahead by the code, not by the compiler
    # PHI     false: attention alone in this form
    row = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    split = tl.program_id(1)
    cache_row, kv_head = row // per_row, head // LISTS
    start, tail, length, sinks, anchored = edges_of(edges, row, sink_size)
    keys = k.base + cache_row * k.row + kv_head * k.head
    values = v.base + cache_row * v.row + kv_head * v.head
    weights = log_weights.base + row * log_weights.row + head * log_weights.head
    anchors, table = pages.anchors, pages.table
    begin, end, shift = tl.arange(0, PADDED_PROBES), tl.arange(0, PADDED_PROBES), tl.arange(0, PADDED_PROBES)
    if PROBES > 0:
        own = tokens.base + cache_row * tokens.row + head * tokens.head
        begin, end, shift, num_listed = bucket_slots(offsets, buckets, row, head, cache_row, PROBES=PROBES,
                                                     PADDED_PROBES=PADDED_PROBES)
    else:
        own = tokens.base + row * tokens.row + head * tokens.head
    whole = 0
    if PAGE > 0:
        whole = tl.load(pages.whole + row).to(tl.int32)
        anchors += row * pages.anchors_row
        table += row * pages.table_row
        num_listed = tl.where(whole > 0, 0, num_listed)
        anchored = tl.where(whole > 0, whole, length)
    # every slice reads its share of the list and its share of the anchors
    parts = tl.num_programs(1)
    share, share_anchors = tl.cdiv(num_listed, parts), tl.cdiv(anchored, parts)
    first_listed, first_anchor = split * share, split * share_anchors
    mine_listed = tl.maximum(tl.minimum(share, num_listed - first_listed), 0)
    mine = mine_listed + tl.maximum(tl.minimum(share_anchors, anchored - first_anchor), 0)
    slot = tl.arange(0, BLOCK)
    token = locate(slot, mine_listed, mine, first_listed, first_anchor, sinks, start, tail, begin, end, shift, own,
                   anchors, whole, table, PROBES=PROBES, PAGE=PAGE)

    request = kept_row(seats, row if SEATED else cache_row, True, SEATED=SEATED) * (heads // LISTS) + kv_head
    width, unit, feature = tl.arange(0, WIDTH), tl.arange(0, UNITS), tl.arange(0, PADDED_FEATURES)
    wide = width < DIM
    stem = tl.load(maps.w_in + (kv_head * DIM + width)[:, None] * units + unit[None, :],
                   mask=wide[:, None] & (unit < units)[None, :], other=0.0)
    second = tl.load(maps.w_out + (kv_head * units + unit)[:, None] * FEATURES + feature[None, :],
                     mask=(unit < units)[:, None] & (feature < FEATURES)[None, :], other=0.0)
    bias = tl.load(maps.bias + request * units + unit, mask=unit < units, other=0.0)
    outward = tl.load(maps.b_out + kv_head * FEATURES + feature, mask=feature < FEATURES, other=-30000.0)
    moved = tl.load(maps.shift + request * FEATURES + feature, mask=feature < FEATURES, other=0.0)
    outward -= tl.where(moved == float("-inf"), 0.0, moved)
    column = tl.arange(0, 4 * QUARTER)
    estimates, lower = column >= 2 * QUARTER, column >= 3 * QUARTER
    member = column % QUARTER
    asking = head * GROUP + member
    query = tl.load(q.base + row * q.row + asking[None, :] * q.head + width[:, None],
                    mask=(column < GROUP)[None, :] & wide[:, None], other=0.0)
    asked = tl.load(features + (row * heads * GROUP + asking)[None, :] * FEATURES + feature[:, None],
                    mask=(estimates & (member < GROUP))[None, :] & (feature < FEATURES)[:, None], other=0.0)
    if LATE:
        # what is in flight is waited for after everything has been asked for
        stem, second = tl.where(mine > 0, stem, 0.0), tl.where(mine > 0, second, 0.0)
        query, asked = tl.where(mine > 0, query, 0.0), tl.where(mine > 0, asked, 0.0)
    asked = asked.to(stem.dtype)
    if BIASED > 0:
        ones = tl.where((tl.arange(0, 16) < 3)[None, :] & (slot >= 0)[:, None], 1.0, 0.0).to(stem.dtype)
        outward_rows = in_rows(outward, stem.dtype)
    if BIASED > 1:
        bias_rows = in_rows(bias, stem.dtype)

    top = tl.full([4 * QUARTER], float("-inf"), tl.float32)
    mass = tl.zeros([4 * QUARTER], tl.float32)
    out = tl.zeros([WIDTH, 4 * QUARTER], tl.float32)
    for at in range(0, mine, BLOCK):
        if not AHEAD:
            token = locate(slot + at, mine_listed, mine, first_listed, first_anchor, sinks, start, tail, begin, end,
                           shift, own, anchors, whole, table, PROBES=PROBES, PAGE=PAGE)
        valid = token >= 0
        listed = valid & (slot + at < mine_listed)
        if WEIGHTED:
            added = tl.load(weights + first_listed + slot + at, mask=listed, other=0.0).to(tl.float32)
        mask = valid[:, None] & wide[None, :]
        place = tl.maximum(token, 0).to(tl.int64)[:, None]
        now = tl.load(keys + place * k.token + width[None, :], mask=mask, other=0.0).to(query.dtype)
        held = tl.load(values + place * v.token + width[None, :], mask=mask, other=0.0).to(query.dtype)
        if AHEAD:
            token = locate(slot + at + BLOCK, mine_listed, mine, first_listed, first_anchor, sinks, start, tail, begin,
                           end, shift, own, anchors, whole, table, PROBES=PROBES, PAGE=PAGE)
        score = tl.dot(now, query, input_precision="ieee") * scale
        if WEIGHTED:
            score += added[:, None]
        score = tl.where(valid[:, None], score, float("-inf"))
        higher = tl.where(estimates, 0.0, tl.maximum(top, tl.max(score, 0)))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        keep = tl.exp(top - safe)
        weight = tl.exp(score - safe[None, :])
        estimate = tl.zeros([BLOCK, 4 * QUARTER], tl.float32)
        if PHI:
            if at < mine_listed:
                if BIASED > 1:
                    hidden = tl.dot(now.to(stem.dtype), stem, tl.dot(ones, bias_rows, input_precision="ieee"),
                                    input_precision="ieee")
                else:
                    hidden = tl.dot(now.to(stem.dtype), stem, input_precision="ieee") + bias[None, :]
                hidden = tl.maximum(hidden, 0.0).to(stem.dtype)
                if BIASED > 0:
                    log = tl.dot(hidden, second, tl.dot(ones, outward_rows, input_precision="ieee"),
                                 input_precision="ieee")
                else:
                    log = tl.dot(hidden, second, input_precision="ieee") + outward[None, :]
                estimate = tl.dot(tl.exp2(log).to(stem.dtype), asked, input_precision="ieee")
        weight = tl.where(estimates[None, :], tl.where(listed[:, None], estimate, 0.0), weight)
        mass = mass * keep + tl.sum(weight, 0)
        rounded = weight.to(query.dtype)
        # what the estimates lose in rounding too: they are taken out of a sum they may nearly exhaust
        missing = (weight - rounded.to(tl.float32)).to(query.dtype)
        rounded = tl.where(lower[None, :], missing, rounded)
        out = tl.dot(tl.trans(held), rounded, out * keep[None, :], input_precision="ieee")
        top = higher
    if OVERLAP:
        gdc_launch_dependents()

    slot_out = (row * heads * GROUP + asking) * parts + split
    kept = column < GROUP
    tl.store(partial.lse + slot_out, tl.where(mass > 0, tl.log(mass) + top, float("-inf")), mask=kept)
    scaled = out / tl.where(mass > 0, mass, 1.0)[None, :]
    tl.store(partial.out + slot_out[None, :] * DIM + width[:, None], scaled, mask=kept[None, :] & wide[:, None])
    kept = estimates & (column < 2 * QUARTER + GROUP)
    tl.store(partial.taken_mass + slot_out, mass, mask=kept)
    quarter, one = tl.arange(0, 4), tl.arange(0, QUARTER)
    taken = tl.sum(tl.where((quarter >= 2)[None, :, None], tl.reshape(out, [WIDTH, 4, QUARTER]), 0.0), 1)
    slot_out = (row * heads * GROUP + head * GROUP + one) * parts + split
    tl.store(partial.taken + slot_out[None, :] * DIM + width[:, None], taken,
             mask=(one < GROUP)[None, :] & wide[:, None])
