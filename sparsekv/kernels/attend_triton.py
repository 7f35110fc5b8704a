"""The Triton kernels of `attend.py`; importing this module imports Triton.

Shapes: Q queries of B rows, Hq query heads, Hkv KV heads, H lists of tokens (LISTS a KV head, GROUP query heads a
list), d the head dimension, N tokens, r features of a completion, u units of the map of keys. Structs are those of
`launch.py`, `types.py` and `attend.py`: `base` is a pointer, `row`, `head` and `token` are strides.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sparsekv.kernels.features_triton import log_features, map_of_keys
from sparsekv.kernels.routing_triton import kept_row


@triton.jit
def locate(
    slot, last, num_listed, sinks, start, tail, begin, end, shift, tokens, anchors, whole, table, PROBES: tl.constexpr,
    PAGE: tl.constexpr,
):
    """The tokens of a block of slots, -1 where there is none: first the list, then the anchors, sink and tail or with
    PAGE listed themselves; or, where `whole` is not zero, all tokens in their pages."""
    listed = slot < tl.minimum(num_listed, last)
    place = slot
    if PROBES > 0:
        inside = (begin[None, :] <= slot[:, None]) & (slot[:, None] < end[None, :])
        place += tl.sum(tl.where(inside, shift[None, :], 0), 1)
    token = tl.load(tokens + place, mask=listed, other=-1).to(tl.int32)
    anchor = slot - num_listed
    if PAGE > 0:
        anchor = tl.load(anchors + anchor, mask=(anchor >= 0) & (slot < last), other=-1).to(tl.int32)
        page = tl.load(table + slot // PAGE, mask=slot < tl.minimum(whole, last), other=0).to(tl.int32)
        anchor = tl.where(whole > 0, page * PAGE + slot % PAGE, anchor)
    else:
        anchor = tl.where(anchor < sinks, start + anchor, tail + anchor - sinks)
    return tl.where(listed, token, tl.where((slot >= num_listed) & (slot < last), anchor, -1))


@triton.jit
def edges_of(edges, row, sink_size):
    """Where the anchors of a query's row begin, where its tail begins and ends, how many sinks there are and how many
    anchors."""
    start = tl.load(edges.starts + row).to(tl.int32)
    tail = tl.load(edges.tail_starts + row).to(tl.int32)
    length = tl.load(edges.lengths + row).to(tl.int32)
    sinks = tl.minimum(sink_size, tl.maximum(tl.minimum(tail, length) - start, 0))
    return start, tail, length, sinks, sinks + tl.maximum(length - tail, 0)


@triton.jit
def bucket_slots(offsets, buckets, row, head, cache_row, PROBES: tl.constexpr, PADDED_PROBES: tl.constexpr):
    """The chosen buckets end to end: slots begin..end of the list are tokens begin + shift.. of the index; and how many
    slots there are."""
    probe = tl.arange(0, PADDED_PROBES)
    bucket = tl.load(buckets.base + row * buckets.row + head * buckets.head + probe, mask=probe < PROBES, other=-1)
    at_bucket = offsets.base + cache_row * offsets.row + head * offsets.head + tl.maximum(bucket, 0)
    from_token = tl.load(at_bucket, mask=bucket >= 0, other=0)
    size = tl.load(at_bucket + 1, mask=bucket >= 0, other=0) - from_token
    end = tl.cumsum(size, 0)
    begin = end - size
    return begin, end, from_token - begin, tl.sum(size, 0)


@triton.jit(do_not_specialize=["num_listed", "slots", "ahead"])
def split_kernel(
    q, k, v, tokens, offsets, buckets, log_weights, features, number, edges, pages, partial, scale, num_listed,
    sink_size, heads, per_row, slots, ahead,
    PROBES: tl.constexpr, PADDED_PROBES: tl.constexpr, LISTS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, WEIGHTED: tl.constexpr, FEATURES: tl.constexpr,
    OVERLAP: tl.constexpr, AHEAD: tl.constexpr, PAGE: tl.constexpr, LISTED: tl.constexpr = False,
):
    """One slice of the listed tokens and the anchors, for one of LISTS lists of a KV head and its GROUP query heads.
    With FEATURES the listed tokens also take the estimate of their bucket out of that of the mid region."""
    # grid: (Q·H, splits)
    # q             Heads   [Q, Hq, d]            with RoPE; DIM = d
    # k, v          Tokens  [B, Hkv, N, d]        with RoPE; may be fp8
    # tokens        Heads   [Q, H, num_listed]    places, -1 = none; with PROBES the index's order [B, Hkv, M]
    # offsets       Heads   [B, Hkv, C + 1] int32 where buckets begin in the order, with PROBES
    # buckets       Heads   [Q, Hkv, PROBES]      -1 = none
    # log_weights   Heads   [Q, H, num_listed]    added to scores, natural logarithm, if WEIGHTED
    # features      [Q, Hq, C]                    weights of the buckets, with FEATURES = C
    # number        Heads   [B, Hkv, N] int16     the bucket of every token, with FEATURES; [Q, H, num_listed] if LISTED
    # edges         starts, tail_starts, lengths [Q]: places of the anchors; without PAGE
    # pages         anchors [Q, A], whole [Q], table [Q, blocks]: see `Pages`, with PAGE tokens a page
    # partial.out   [Q, Hq, slots, d] fp32        written from `ahead` on: the slice's attention, normalised over itself
    # partial.lse   [Q, Hq, slots] fp32           written there: natural logarithm of its mass
    # partial.taken, taken_mass                   as `completed_kernel` writes them, with FEATURES
    row = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    split = tl.program_id(1)
    cache_row, kv_head = row // per_row, head // LISTS
    if OVERLAP:
        gdc_wait()
    start, tail, length, sinks, anchored = edges_of(edges, row, sink_size)
    group = tl.arange(0, ROWS)
    width = tl.arange(0, WIDTH)
    wide = (width < DIM)[None, :]
    query = tl.load(q.base + row * q.row + (head * GROUP + group)[:, None] * q.head + width[None, :],
                    mask=(group < GROUP)[:, None] & wide, other=0.0)
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

    top = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, WIDTH], tl.float32)
    if FEATURES > 0:
        if LISTED:
            number_base = number.base + row * number.row + head * number.head
        else:
            number_base = number.base + cache_row * number.row + kv_head * number.head
        own_features = features + (row * heads * GROUP + head * GROUP + group)[:, None] * FEATURES
        taken, taken_mass = tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS], tl.float32)
    if AHEAD:
        slot = split * per_split + tl.arange(0, BLOCK)
        token = locate(slot, last, num_listed, sinks, start, tail, begin, end, shift, own, anchors, whole,
                       table, PROBES=PROBES, PAGE=PAGE)
    for at in range(split * per_split, last, BLOCK):
        if not AHEAD:
            slot = at + tl.arange(0, BLOCK)
            token = locate(slot, last, num_listed, sinks, start, tail, begin, end, shift, own, anchors, whole,
                           table, PROBES=PROBES, PAGE=PAGE)
        valid = token >= 0
        place = tl.maximum(token, 0).to(tl.int64)
        mask = valid[:, None] & wide
        # everything a block needs is fetched at once, and the next block's tokens with it
        key = tl.load(keys + place[:, None] * k.token + width[None, :], mask=mask, other=0.0)
        value = tl.load(values + place[:, None] * v.token + width[None, :], mask=mask, other=0.0)
        if WEIGHTED:
            added = tl.load(weights + slot, mask=valid & (slot < num_listed), other=0.0).to(tl.float32)
        if FEATURES > 0:
            listed = valid & (slot < num_listed)
            bucket = tl.load(number_base + (slot.to(tl.int64) if LISTED else place), mask=listed, other=0).to(tl.int32)
            estimate = tl.load(own_features + bucket[None, :], mask=(group < GROUP)[:, None] & listed[None, :],
                               other=0.0)
        if AHEAD:
            slot = at + BLOCK + tl.arange(0, BLOCK)
            token = locate(slot, last, num_listed, sinks, start, tail, begin, end, shift, own, anchors, whole,
                           table, PROBES=PROBES, PAGE=PAGE)
        score = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee") * scale
        if WEIGHTED:
            score += added[None, :]
        score = tl.where(valid[None, :], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        keep = tl.exp(top - safe)
        weight = tl.exp(score - safe[:, None])
        mass = mass * keep + tl.sum(weight, 1)
        value = value.to(query.dtype)
        out = out * keep[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        if FEATURES > 0:
            taken_mass += tl.sum(estimate.to(tl.float32), 1)
            taken += tl.dot(estimate.to(value.dtype), value, input_precision="ieee")
        top = higher
    if OVERLAP:
        gdc_launch_dependents()

    slot_out = ((row * heads + head) * GROUP + group) * slots + ahead + split
    kept = group < GROUP
    if FEATURES > 0:
        slot_taken = ((row * heads + head) * GROUP + group) * parts + split
        tl.store(partial.taken_mass + slot_taken, taken_mass, mask=kept)
        tl.store(partial.taken + slot_taken[:, None] * DIM + width[None, :], taken, mask=kept[:, None] & wide)
    scaled = out / tl.where(mass > 0, mass, 1.0)[:, None]
    tl.store(partial.lse + slot_out, tl.where(mass > 0, tl.log(mass) + top, float("-inf")), mask=kept)
    tl.store(partial.out + slot_out[:, None] * DIM + width[None, :], scaled, mask=kept[:, None] & wide)


@triton.jit
def locate_share(
    at, here_listed, here, first_listed, first_anchor, sinks, start, tail, begin, end, shift, tokens, anchors, whole,
    table, PROBES: tl.constexpr, PAGE: tl.constexpr,
):
    """The tokens at places `at` of a slice of `here` tokens, -1 where there is none. First come `here_listed` tokens of
    the list, from its place `first_listed` on, then anchors, from the `first_anchor`-th on: sink and tail, or with PAGE
    listed themselves. Where `whole` is not zero all tokens in their pages are the anchors."""
    listed = at < here_listed
    place = first_listed + at
    if PROBES > 0:
        inside = (begin[None, :] <= place[:, None]) & (place[:, None] < end[None, :])
        place += tl.sum(tl.where(inside, shift[None, :], 0), 1)
    token = tl.load(tokens + place, mask=listed, other=-1).to(tl.int32)
    beside = (at >= here_listed) & (at < here)
    anchor = first_anchor + at - here_listed
    if PAGE > 0:
        paged = (at >= here_listed) & (at < tl.where(whole > 0, here, 0))
        page = tl.load(table + anchor // PAGE, mask=paged, other=0).to(tl.int32)
        named = (at >= here_listed) & (at < tl.where(whole > 0, 0, here))
        one = tl.load(anchors + anchor, mask=named, other=-1).to(tl.int32)
        anchor = tl.where(whole > 0, page * PAGE + anchor % PAGE, one)
    else:
        anchor = tl.where(anchor < sinks, start + anchor, tail + anchor - sinks)
    return tl.where(listed, token, tl.where(beside, anchor, -1))


@triton.jit
def bias_rows(bias, dtype: tl.constexpr):
    """A bias `[N]` fp32 as rows `[16, N]` of numbers of `dtype`, whose sum it is: three are enough, the others are
    zero."""
    part = tl.arange(0, 16)[:, None]
    high = bias.to(dtype)
    left = bias - high.to(tl.float32)
    middle = left.to(dtype)
    low = (left - middle.to(tl.float32)).to(dtype)
    rows = tl.where(part == 0, high[None, :], tl.where(part == 1, middle[None, :], low[None, :]))
    return tl.where(part < 3, rows, 0.0).to(dtype)


@triton.jit(do_not_specialize=["num_listed", "slots", "ahead"])
def completed_kernel(
    q, k, v, tokens, offsets, buckets, log_weights, maps, features, seats, edges, pages, partial, scale, num_listed,
    sink_size, heads, per_row, slots, ahead, units,
    PROBES: tl.constexpr, PADDED_PROBES: tl.constexpr, LISTS: tl.constexpr, GROUP: tl.constexpr, QUARTER: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, FEATURES: tl.constexpr,
    PADDED_FEATURES: tl.constexpr, UNITS: tl.constexpr, WEIGHTED: tl.constexpr, SEATED: tl.constexpr,
    OVERLAP: tl.constexpr, AHEAD: tl.constexpr, PAGE: tl.constexpr,
):
    """What `split_kernel` does, for a slice whose listed tokens also take their own estimates out of that of the mid
    region (completion paper §4.4). Keys are the rows of every product. Of the 4 · QUARTER columns the first quarter are
    the queries of the group, the second is empty, the third are the queries' features, whose products with a key's
    features are its estimates, and the fourth are these again: their rounding error multiplies the values there."""
    # grid and arguments as `split_kernel`, but a slice is a share of the list and a share of the anchors; and
    # maps                `KeyFeatures`; FEATURES = r, UNITS = u padded
    # features            [Q, Hq, r]               of the queries
    # seats               [Q] int64                if SEATED: the queries' rows of bias and shift of the maps
    # partial.taken       [Q, Hq, splits, d] fp32  written: the estimates of the slice's tokens times their values
    # partial.taken_mass  [Q, Hq, splits] fp32     written: their sum
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
    parts = tl.num_programs(1)
    share, share_anchors = tl.cdiv(num_listed, parts), tl.cdiv(anchored, parts)
    first_listed, first_anchor = split * share, split * share_anchors
    here_listed = tl.maximum(tl.minimum(share, num_listed - first_listed), 0)
    here = here_listed + tl.maximum(tl.minimum(share_anchors, anchored - first_anchor), 0)
    slot = tl.arange(0, BLOCK)
    token = locate_share(slot, here_listed, here, first_listed, first_anchor, sinks, start, tail, begin, end, shift,
                         own, anchors, whole, table, PROBES=PROBES, PAGE=PAGE)

    request = kept_row(seats, row if SEATED else cache_row, True, SEATED=SEATED) * (heads // LISTS) + kv_head
    stem, bias, second, outward = map_of_keys(maps, kv_head, request, DIM, units, FEATURES, DIM=WIDTH, UNITS=UNITS,
                                              FEATURES=PADDED_FEATURES)
    width, feature = tl.arange(0, WIDTH), tl.arange(0, PADDED_FEATURES)
    wide = width < DIM
    shift_of_sums = tl.load(maps.shift + request * FEATURES + feature, mask=feature < FEATURES, other=0.0)
    column = tl.arange(0, 4 * QUARTER)
    estimates, lower = column >= 2 * QUARTER, column >= 3 * QUARTER
    member = column % QUARTER
    query_head = head * GROUP + member
    query = tl.load(q.base + row * q.row + query_head[None, :] * q.head + width[:, None],
                    mask=(column < GROUP)[None, :] & wide[:, None], other=0.0)
    own_features = tl.load(features + (row * heads * GROUP + query_head)[None, :] * FEATURES + feature[:, None],
                    mask=(estimates & (member < GROUP))[None, :] & (feature < FEATURES)[:, None], other=0.0)
    # True wherever there is a token, which the compiler cannot know: all loads are issued before any is waited for
    stem, second = tl.where(here > 0, stem, 0.0), tl.where(here > 0, second, 0.0)
    query, own_features = tl.where(here > 0, query, 0.0), tl.where(here > 0, own_features, 0.0)
    own_features = own_features.to(stem.dtype)
    shift_of_sums = tl.where(shift_of_sums == float("-inf"), 0.0, shift_of_sums)
    # biases come into the products as three more rows; -inf has no such rows, and 2^-30000 is zero
    outward = tl.maximum(outward, -30000.0)
    ones = tl.where((tl.arange(0, 16) < 3)[None, :] & (slot >= 0)[:, None], 1.0, 0.0).to(stem.dtype)
    outward_rows, hidden_rows = bias_rows(outward, stem.dtype), bias_rows(bias, stem.dtype)

    top = tl.full([4 * QUARTER], float("-inf"), tl.float32)
    mass = tl.zeros([4 * QUARTER], tl.float32)
    out = tl.zeros([WIDTH, 4 * QUARTER], tl.float32)
    for at in range(0, here, BLOCK):
        if not AHEAD:
            token = locate_share(slot + at, here_listed, here, first_listed, first_anchor, sinks, start, tail, begin,
                                 end, shift, own, anchors, whole, table, PROBES=PROBES, PAGE=PAGE)
        valid = token >= 0
        listed = valid & (slot + at < here_listed)
        if WEIGHTED:
            # with `listed` for a mask Triton 3.6 does not compile
            added = tl.load(weights + first_listed + slot + at, mask=slot + at < here_listed, other=0.0).to(tl.float32)
        mask = valid[:, None] & wide[None, :]
        place = tl.maximum(token, 0).to(tl.int64)[:, None]
        # everything a block needs is fetched at once, and the next block's tokens with it
        key = tl.load(keys + place * k.token + width[None, :], mask=mask, other=0.0).to(query.dtype)
        value = tl.load(values + place * v.token + width[None, :], mask=mask, other=0.0).to(query.dtype)
        if AHEAD:
            token = locate_share(slot + at + BLOCK, here_listed, here, first_listed, first_anchor, sinks, start, tail,
                                 begin, end, shift, own, anchors, whole, table, PROBES=PROBES, PAGE=PAGE)
        score = tl.dot(key, query, input_precision="ieee") * scale
        if WEIGHTED:
            score += added[:, None]
        score = tl.where(valid[:, None], score, float("-inf"))
        higher = tl.where(estimates, 0.0, tl.maximum(top, tl.max(score, 0)))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        keep = tl.exp(top - safe)
        weight = tl.exp(score - safe[None, :])
        estimate = tl.zeros([BLOCK, 4 * QUARTER], tl.float32)
        if at < here_listed:
            log = log_features(key, stem, tl.dot(ones, hidden_rows, input_precision="ieee"), second,
                               tl.dot(ones, outward_rows, input_precision="ieee"))
            log -= shift_of_sums[None, :]
            estimate = tl.dot(tl.exp2(log).to(stem.dtype), own_features, input_precision="ieee")
        weight = tl.where(estimates[None, :], tl.where(listed[:, None], estimate, 0.0), weight)
        mass = mass * keep + tl.sum(weight, 0)
        rounded = weight.to(query.dtype)
        # what the estimates lose in rounding too: they are taken out of a sum they may nearly exhaust
        missing = (weight - rounded.to(tl.float32)).to(query.dtype)
        rounded = tl.where(lower[None, :], missing, rounded)
        out = tl.dot(tl.trans(value), rounded, out * keep[None, :], input_precision="ieee")
        top = higher
    if OVERLAP:
        gdc_launch_dependents()

    slot_out = (row * heads * GROUP + query_head) * slots + ahead + split
    kept = column < GROUP
    tl.store(partial.lse + slot_out, tl.where(mass > 0, tl.log(mass) + top, float("-inf")), mask=kept)
    scaled = out / tl.where(mass > 0, mass, 1.0)[None, :]
    tl.store(partial.out + slot_out[None, :] * DIM + width[:, None], scaled, mask=kept[None, :] & wide[:, None])
    kept = estimates & (column < 2 * QUARTER + GROUP)
    tl.store(partial.taken_mass + (row * heads * GROUP + query_head) * parts + split, mass, mask=kept)
    quarter, one = tl.arange(0, 4), tl.arange(0, QUARTER)
    taken = tl.sum(tl.where((quarter >= 2)[None, :, None], tl.reshape(out, [WIDTH, 4, QUARTER]), 0.0), 1)
    slot_out = (row * heads * GROUP + head * GROUP + one) * parts + split
    tl.store(partial.taken + slot_out[None, :] * DIM + width[:, None], taken,
             mask=(one < GROUP)[None, :] & wide[:, None])


@triton.jit
def merge_kernel(
    partial, partial_lse, taken, taken_mass, log_scale, mass, numerator, cap, out, out_lse, eps, o_row, o_head, heads_q,
    parts, taken_parts,
    PADDED: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, PHI: tl.constexpr, CAPPED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The slices put together, and with PHI what is left of the estimate of the mid region: one program a query head
    and WIDTH of its columns."""
    # grid: (Q·Hq, blocks of columns)
    # partial, partial_lse  [Q, Hq, parts, d], [Q, Hq, parts] fp32    as `split_kernel` writes them; DIM = d
    # taken, taken_mass     the same of taken_parts slices, with PHI
    # log_scale, mass, cap  [Q, Hq] fp32        `CompletionQuery`, with PHI; cap if CAPPED
    # numerator             [Q, Hq, d] fp32     the same
    # out                   [Q, Hq, d]          written; strides o_row, o_head
    # out_lse               [Q, Hq] fp32        written: natural logarithm
    row = (tl.program_id(0) // heads_q).to(tl.int64)
    head = (tl.program_id(0) % heads_q).to(tl.int64)
    at = row * heads_q + head
    part = tl.arange(0, PADDED)
    width = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    wide = width < DIM
    if OVERLAP:
        gdc_wait()
    lse = tl.load(partial_lse + at * parts + part, mask=part < parts, other=float("-inf"))
    place = (at * parts + part)[:, None] * DIM + width[None, :]
    kept = (part < parts)[:, None] & wide[None, :]
    values = tl.load(partial + place, mask=kept, other=0.0)
    top = tl.max(lse, 0)
    if PHI:
        read = tl.load(taken + (at * taken_parts + part)[:, None] * DIM + width[None, :],
                       mask=(part < taken_parts)[:, None] & wide[None, :], other=0.0)
        read_mass = tl.load(taken_mass + at * taken_parts + part, mask=part < taken_parts, other=0.0)
        all_mass = tl.load(mass + at)
        left = all_mass - tl.sum(read_mass, 0)
        estimate = tl.load(numerator + at * DIM + width, mask=wide, other=0.0) - tl.sum(read, 0)
        live = left > eps * all_mass
        left = tl.where(live, left, 0.0)
        estimate = tl.where(live, estimate, 0.0)
        log = tl.load(log_scale + at)
        if CAPPED:
            log = tl.minimum(log, tl.load(cap + at) - tl.log(tl.where(live, left, 1.0)))
        log = tl.where(live, log, float("-inf"))
        top = tl.maximum(top, log)
    safe = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp(lse - safe)
    total = tl.sum(weight, 0)
    result = tl.sum(values * weight[:, None], 0)
    if PHI:
        total += left * tl.exp(log - safe)
        result += estimate * tl.exp(log - safe)
    result = result / tl.where(total > 0, total, 1.0)
    tl.store(out + row * o_row + head * o_head + width, result.to(out.dtype.element_ty), mask=wide)
    if tl.program_id(1) == 0:
        tl.store(out_lse + at, tl.where(total > 0, tl.log(tl.maximum(total, 1e-38)) + safe, float("-inf")))
