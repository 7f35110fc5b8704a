"""The form of `completed_kernel` before the one that ships, timed by phi_tune.py: queries are rows of every product.
Shapes and arguments are those of `completed_kernel`."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from sparsekv.kernels.attend_triton import bucket_slots, edges_of, locate
from sparsekv.kernels.features_triton import every_row, log_features, map_of_keys
from sparsekv.kernels.routing_triton import kept_row


@triton.jit
def rows_kernel(
    q, k, v, tokens, offsets, buckets, log_weights, maps, features, seats, edges, pages, partial, scale, num_listed,
    sink_size, heads, per_row, units,
    PROBES: tl.constexpr, PADDED_PROBES: tl.constexpr, LISTS: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, FEATURES: tl.constexpr,
    PADDED_FEATURES: tl.constexpr, UNITS: tl.constexpr, WEIGHTED: tl.constexpr, SEATED: tl.constexpr,
    OVERLAP: tl.constexpr, PAGE: tl.constexpr,
):
    # of the rows the first HALF are the queries of the group, the others their features
    row = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    split = tl.program_id(1)
    cache_row, kv_head = row // per_row, head // LISTS
    request = kept_row(seats, row if SEATED else cache_row, True, SEATED=SEATED) * (heads // LISTS) + kv_head
    stem, bias, second, outward = map_of_keys(maps, kv_head, request, DIM, units, FEATURES, DIM=WIDTH, UNITS=UNITS,
                                              FEATURES=PADDED_FEATURES)
    feature = tl.arange(0, PADDED_FEATURES)
    shift_of_sums = tl.load(maps.shift + request * FEATURES + feature, mask=feature < FEATURES, other=0.0)
    shift_of_sums = tl.where(shift_of_sums == float("-inf"), 0.0, shift_of_sums)
    start, tail, length, sinks, anchored = edges_of(edges, row, sink_size)
    group = tl.arange(0, 2 * HALF)
    width = tl.arange(0, WIDTH)
    wide = (width < DIM)[None, :]
    estimates = group >= HALF
    member = head * GROUP + group
    query = tl.load(q.base + row * q.row + member[:, None] * q.head + width[None, :],
                    mask=(group < GROUP)[:, None] & wide, other=0.0)
    asked = tl.load(features + (row * heads * GROUP + member - HALF)[None, :] * FEATURES + feature[:, None],
                    mask=(estimates & (group < HALF + GROUP))[None, :] & (feature < FEATURES)[:, None], other=0.0)
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
    total = num_listed + anchored
    whole = 0
    if PAGE > 0:
        whole = tl.load(pages.whole + row).to(tl.int32)
        anchors += row * pages.anchors_row
        table += row * pages.table_row
        num_listed = tl.where(whole > 0, 0, num_listed)
        total = tl.where(whole > 0, whole, num_listed + length)
    parts = tl.num_programs(1)
    per_split = tl.cdiv(total, parts)
    last = tl.minimum(split * per_split + per_split, total)

    top = tl.full([2 * HALF], float("-inf"), tl.float32)
    mass = tl.zeros([2 * HALF], tl.float32)
    out = tl.zeros([2 * HALF, WIDTH], tl.float32)
    slot = split * per_split + tl.arange(0, BLOCK)
    token = locate(slot, last, num_listed, sinks, start, tail, begin, end, shift, own, anchors, whole, table,
                   PROBES=PROBES, PAGE=PAGE)
    for at in range(split * per_split, last, BLOCK):
        valid = token >= 0
        place = tl.maximum(token, 0).to(tl.int64)
        mask = valid[:, None] & wide
        listed = valid & (slot < num_listed)
        # everything a block needs is fetched at once, and the next block's tokens with it
        key = tl.load(keys + place[:, None] * k.token + width[None, :], mask=mask, other=0.0)
        value = tl.load(values + place[:, None] * v.token + width[None, :], mask=mask, other=0.0)
        if WEIGHTED:
            added = tl.load(weights + slot, mask=listed, other=0.0).to(tl.float32)
        slot = at + BLOCK + tl.arange(0, BLOCK)
        token = locate(slot, last, num_listed, sinks, start, tail, begin, end, shift, own, anchors, whole, table,
                       PROBES=PROBES, PAGE=PAGE)
        score = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee") * scale
        if WEIGHTED:
            score += added[None, :]
        score = tl.where(valid[None, :], score, float("-inf"))
        higher = tl.where(estimates, 0.0, tl.maximum(top, tl.max(score, 1)))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        keep = tl.exp(top - safe)
        weight = tl.exp(score - safe[:, None])
        estimate = tl.zeros([2 * HALF, BLOCK], tl.float32)
        if at < num_listed:
            log = log_features(key, stem, every_row(bias, BLOCK), second, every_row(outward, BLOCK))
            log -= shift_of_sums[None, :]
            estimate = tl.trans(tl.dot(tl.exp2(log).to(stem.dtype), asked.to(stem.dtype), input_precision="ieee"))
        weight = tl.where(estimates[:, None], tl.where(listed[None, :], estimate, 0.0), weight)
        mass = mass * keep + tl.sum(weight, 1)
        value = value.to(query.dtype)
        rounded = weight.to(value.dtype)
        out = out * keep[:, None] + tl.dot(rounded, value, input_precision="ieee")
        # what the estimates lose in rounding too: they are taken out of a sum they may nearly exhaust
        missing = (weight - rounded.to(tl.float32)).to(value.dtype)
        out += tl.dot(missing, value, input_precision="ieee")
        top = higher
    if OVERLAP:
        gdc_launch_dependents()

    slot_out = (row * heads * GROUP + member) * parts + split
    kept = group < GROUP
    scaled = out / tl.where(mass > 0, mass, 1.0)[:, None]
    tl.store(partial.lse + slot_out, tl.where(mass > 0, tl.log(mass) + top, float("-inf")), mask=kept)
    tl.store(partial.out + slot_out[:, None] * DIM + width[None, :], scaled, mask=kept[:, None] & wide)
    slot_out -= HALF * parts
    kept = estimates & (group < HALF + GROUP)
    tl.store(partial.taken_mass + slot_out, mass, mask=kept)
    tl.store(partial.taken + slot_out[:, None] * DIM + width[None, :], out, mask=kept[:, None] & wide)
