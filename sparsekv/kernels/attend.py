"""Exact attention over the anchors and chosen tokens: split by keys, one merge, no bucket ever waited for.

A grid of `(queries · lists of tokens, splits)` programs cuts the anchors and the tokens to read into equal slices,
whatever bucket a key came from, so one oversized bucket does not set the time; all query heads of a group share every
key that is loaded. A second, small kernel merges the splits by log-sum-exp. With a completion every chosen key also
takes its own estimate out of that of the mid region, and the merge adds what is left of it under the same
normalisation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsekv.kernels.bucket_query import bucket_remainder
from sparsekv.kernels.completion import REST_EPS, remainder
from sparsekv.kernels.features import key_features_reference
from sparsekv.kernels.gather import anchor_indices, gather_rows, slots_at
from sparsekv.kernels.indexing import bucket_tokens
from sparsekv.kernels.launch import (
    NEG_INF,
    acc_dtype,
    as_heads,
    as_tokens,
    dense_last,
    finite,
    on_device,
    overlaps,
    padded,
    power_of_two,
    seats_or,
    shared_bytes,
)
from sparsekv.kernels.types import CompletionQuery, KeyBuckets, KeyFeatures

MAX_SPLITS = 256
PAGED_SPLITS = 8
"""Splits at least where a row may read all its tokens."""
MERGE_WIDTH, MERGE_WARPS = 32, 2
"""Columns and warps of a program of the merge."""


class Launch(NamedTuple):
    """The launch of the split kernel: keys at once, warps, programs wanted, and blocks of keys under way at once: with
    one the next block's places are looked up ahead."""

    block: int
    warps: int
    programs: int
    stages: int = 1


PLAIN, BY_BUCKETS, COMPLETED = Launch(32, 1, 1024), Launch(64, 2, 264), Launch(128, 8, 132)
ANCHOR_PROGRAMS, ANCHOR_SLICES = 528, 64
"""Programs wanted of the anchors alone, and slices at most."""
ANCHORED_LISTS = 16
"""Lists from which the anchors are attended to by themselves: with fewer it gains nothing (docs/log/decode.md)."""
COMPLETED_LESS = ((32, 4), (16, 4))
"""Keys at once and warps where the keys of `COMPLETED` have no room, in half precision. Never 64 keys at once: ptxas
12.8, which Triton 3.6 brings, assembles the product of their weights with the values wrongly for sm_90."""
COMPLETED_WIDE = 16
"""Keys at once in float32, whose products have no matrix units and want more registers."""
COMPLETED_DIM = 128
"""The largest head dimension of the completed kernel. For wider heads its twin attends in its place, because the kernel
was not checked at 256 dimensions on a GPU. So it does where a program's shared memory is too small: of 128 dimensions,
units and features it is for nine or more queries a list on sm_86 and sm_89."""


class Pages(NamedTuple):
    """A cache whose tokens lie in pages, slot `table[q, i // page] · page + i % page` for token i of a row, and what a
    row reads of it beside its list, by slots. anchors `[Q, A]`: the anchors, in place of sink and tail; the first
    lengths[q] count. whole `[Q]`: where it is not zero the row reads its first whole[q] tokens, and nothing else."""

    anchors: Tensor
    whole: Tensor
    table: Tensor
    page: int


class Edges(NamedTuple):
    """The borders of the anchors of queries `[Q]`, as the split kernel takes them."""

    starts: Tensor
    tail_starts: Tensor
    lengths: Tensor


class PageArguments(NamedTuple):
    """`Pages` as the split kernel takes them, with the strides of a row."""

    anchors: Tensor
    whole: Tensor
    table: Tensor
    anchors_row: int
    table_row: int


class Partial(NamedTuple):
    """The output of the split kernel, by slice, float32: out `[Q, Hq, splits, d]` and lse `[Q, Hq, splits]` of its
    tokens, and with a completion their estimates, taken and taken_mass of the same shapes."""

    out: Tensor
    lse: Tensor
    taken: Tensor
    taken_mass: Tensor


class Anchored(NamedTuple):
    """Attention over the anchors alone, made before a list is known: out `[Q, Hq, slots, d]` and lse `[Q, Hq, slots]`
    float32 of all slices of a step, of which the first `slices` are written."""

    out: Tensor
    lse: Tensor
    slices: int


def attend_tokens(
    q: Tensor, k: Tensor, v: Tensor, tokens: Tensor, *, scale: float, starts: Tensor, sink_size: int,
    tail_starts: Tensor, lengths: Tensor, log_weights: Tensor | None = None, completion: CompletionQuery | None = None,
    pages: Pages | None = None, out: Tensor | None = None, anchored: Anchored | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend exactly to the anchors and to a list of tokens, completed by an estimate of the rest if asked for
    (completion paper §4.4).

    Args:
        q: `[Q, Hq, d]`, with RoPE.
        k, v: `[B, Hkv, N, d]`.
        tokens: `[Q, H, K]`, H = Hkv (shared by the group), Hq, or 1 (shared by all heads); no token twice, none an
            anchor.
        starts, tail_starts, lengths: `[Q]` int64 [tokens]; where all three are equal there are no anchors.
        log_weights: `[Q, H, K]`, added to the scores of `tokens`.
        completion: the estimate of the mid tokens; what is read is taken out of it.
        pages: the cache lies in pages, and all tokens are slots.
        out: `[Q, Hq, d]`, written in place of a new tensor.
        anchored: of `attend_anchors` with the same arguments, which is used up.

    Returns:
        `(out [Q, Hq, d], lse [Q, Hq])`, of all that is read and estimated, normalised once.
    """
    given: dict[str, Any] = {"scale": scale, "starts": starts, "sink_size": sink_size, "tail_starts": tail_starts,
                             "lengths": lengths, "log_weights": log_weights, "completion": completion, "pages": pages,
                             "out": out}
    if on_device(q):
        return launch_attend(q, k, v, tokens, **given, anchored=anchored)
    return attend_tokens_reference(q, k, v, tokens, **given)


def attend_tokens_reference(
    q: Tensor, k: Tensor, v: Tensor, tokens: Tensor, *, scale: float, starts: Tensor, sink_size: int,
    tail_starts: Tensor, lengths: Tensor, log_weights: Tensor | None = None, completion: CompletionQuery | None = None,
    pages: Pages | None = None, out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`attend_tokens` in plain torch, the CPU's path: what is read is gathered once, the cache is never copied."""
    count, heads_kv, listed = q.shape[0], k.shape[1], tokens.shape[2]
    if tokens.shape[1] == 1:
        tokens = tokens.expand(-1, heads_kv, -1)
        log_weights = None if log_weights is None else log_weights.expand(-1, heads_kv, -1)
    if pages is None:
        anchors = anchor_indices(starts, sink_size, tail_starts, lengths)
    else:
        anchors = pages.anchors.where(torch.arange(pages.anchors.shape[1], device=q.device) < lengths[:, None], -1)
    index = torch.cat([tokens, anchors[:, None].expand(-1, tokens.shape[1], -1).to(tokens.dtype)], dim=-1)
    heads, width = index.shape[1:]

    def gathered(x: Tensor, at: Tensor) -> Tensor:
        flat = at.clamp(min=0).reshape(count, heads_kv, heads // heads_kv * at.shape[-1])
        return gather_rows(x, flat).view(*at.shape, x.shape[-1])

    keys, values = gathered(k, index), gathered(v, index)
    if log_weights is not None:
        log_weights = torch.nn.functional.pad(log_weights, (0, width - listed))
    found, lse = attend_gathered(q, keys, values, index >= 0, scale, log_weights)
    if completion is not None:
        own = values[:, :, :listed]
        if isinstance(completion.keys, KeyBuckets):
            rest = bucket_remainder(completion, tokens, own)
        else:
            read = keys[:, :, :listed].reshape(count, heads_kv, heads // heads_kv * listed, keys.shape[-1])
            features = key_features_reference(read, _own_maps(completion))
            features = features.reshape(count, heads, listed, features.shape[-1])
            rest = remainder(completion, features, own, tokens >= 0)
        found, lse = merge(torch.stack([found, rest[0].to(found.dtype)]), torch.stack([lse, rest[1].to(lse.dtype)]))
    if pages is not None:
        for row in pages.whole.nonzero()[:, 0].tolist():
            places = torch.arange(int(pages.whole[row]), device=q.device)
            slots = slots_at(pages.table[row:row + 1], places[None], pages.page)[0]
            keys, values = (x[row * k.shape[0] // count, :, slots][None] for x in (k, v))
            used = torch.ones(1, heads_kv, len(slots), dtype=torch.bool, device=q.device)
            found[row:row + 1], lse[row:row + 1] = attend_gathered(q[row:row + 1], keys, values, used, scale)
    return (found if out is None else out.copy_(found)), lse


def attend_buckets(
    q: Tensor, k: Tensor, v: Tensor, order: Tensor, offsets: Tensor, buckets: Tensor, *, scale: float, starts: Tensor,
    sink_size: int, tail_starts: Tensor, lengths: Tensor, completion: CompletionQuery | None = None,
    anchored: Anchored | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend to every token of the chosen buckets (Saap §5), otherwise as `attend_tokens`.

    Args:
        order, offsets: the index, `[B, Hkv, M]` and `[B, Hkv, C + 1]`.
        buckets: `[Q, Hkv, L]`, -1 = none, no bucket twice.

    Returns:
        `(out [Q, Hq, d], lse [Q, Hq])`. On CUDA the kernel reads the index itself: nothing waits for the host.
    """
    regions: dict[str, Any] = {"scale": scale, "starts": starts, "sink_size": sink_size, "tail_starts": tail_starts,
                               "lengths": lengths, "completion": completion}
    if on_device(q):
        return launch_attend(q, k, v, order, offsets, buckets, **regions, anchored=anchored)
    return attend_buckets_reference(q, k, v, order, offsets, buckets, **regions)


def attend_buckets_reference(
    q: Tensor, k: Tensor, v: Tensor, order: Tensor, offsets: Tensor, buckets: Tensor, **regions: Any,
) -> tuple[Tensor, Tensor]:
    """`attend_buckets` in plain torch."""
    return attend_tokens_reference(q, k, v, bucket_tokens(order, offsets, buckets), **regions)


def attend_anchors(
    q: Tensor, k: Tensor, v: Tensor, *, sizes: tuple[int, int] | None, scale: float, starts: Tensor, sink_size: int,
    tail_starts: Tensor, lengths: Tensor,
) -> Anchored | None:
    """Attend to the anchors of an `attend_tokens` that a map of keys will complete. They need no list, so that this
    may run beside the selection.

    Args:
        sizes: units and features of the map, None without one; the others as for `attend_tokens`.

    Returns:
        What `attend_tokens` takes as `anchored`; None where it reads the anchors itself: off the GPU, without a map,
        and with fewer lists than `ANCHORED_LISTS`.
    """
    if not on_device(q) or sizes is None or q.shape[0] * k.shape[1] < ANCHORED_LISTS:
        return None
    return launch_anchors(q, k, v, sizes=sizes, scale=scale, starts=starts, sink_size=sink_size,
                          tail_starts=tail_starts, lengths=lengths)


def attend_gathered(
    q: Tensor, keys: Tensor, values: Tensor, used: Tensor, scale: float, log_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend to rows that were gathered.

    Args:
        q: `[Q, Hq, d]`.
        keys, values: `[Q, H, n, d]`, `H` dividing `Hq`.
        used: `[Q, H, n]` bool, false = padding.
        log_weights: `[Q, H, n]`, added to the scores.

    Returns:
        `(out [Q, Hq, d], lse [Q, Hq])`.
    """
    count, heads_q, dim = q.shape
    lists, width = keys.shape[1], keys.shape[2]
    acc = acc_dtype(q)
    keys, values = (x.to(acc).reshape(count * lists, width, dim) for x in (keys, values))
    query = q.to(acc).reshape(count * lists, heads_q // lists, dim)
    scores = torch.bmm(query, keys.mT).mul_(scale)
    if log_weights is not None:
        scores += log_weights.to(acc).reshape(count * lists, 1, width)
    scores.masked_fill_(~used.reshape(count * lists, 1, width), NEG_INF)
    if width == 0:
        return q.new_zeros(count, heads_q, dim), scores.new_full((count, heads_q), NEG_INF)
    # weights over their own sum, not over exp(lse): large scores round the logarithm
    top = finite(scores.amax(-1, keepdim=True))
    weights = scores.sub_(top).exp_()
    mass = weights.sum(-1, keepdim=True)
    out = torch.bmm(weights, values) / torch.where(mass > 0, mass, 1.0)
    return out.reshape(count, heads_q, dim).to(q.dtype), (top + mass.log()).reshape(count, heads_q)


def merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merge partial attentions over disjoint sets: outs `[S, ..., d]`, lses `[S, ...]` -> `([..., d], [...])`."""
    lse = torch.logsumexp(lses, dim=0)
    weights = torch.exp(lses - finite(lses.amax(0)))
    mass = weights.sum(0)
    total = (weights[..., None] * outs.to(weights.dtype)).sum(0)
    return (total / torch.where(mass > 0, mass, 1.0)[..., None]).to(outs.dtype), lse


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Let learned sinks join the normalisation of a partial attention (gpt-oss).

    Args:
        out: `[..., H, d]`, overwritten.
        lse: `[..., H]`.
        sinks: `[H]`, a logit a query head that has no value.

    Returns:
        `(out, lse)` with the sinks.
    """
    return out.mul_(torch.sigmoid(lse - sinks)[..., None]), torch.logaddexp(lse, sinks.to(lse.dtype))


def _maps(completion: CompletionQuery) -> KeyFeatures:
    if not isinstance(completion.keys, KeyFeatures):
        raise ValueError("a completion of attention makes the features of the keys, found no map of them: give keys")
    return completion.keys


def _own_maps(completion: CompletionQuery) -> KeyFeatures:
    """The same with a row a query where they are kept by seat."""
    maps, seats = _maps(completion), completion.seats
    return maps if seats is None else maps._replace(bias=maps.bias[seats], shift=maps.shift[seats])


def completed_launch(dim: int, units: int, features: int, group: int, size: int, room: int) -> Launch | None:
    """Choose the launch of the completed kernel for numbers of `size` bytes, a map of keys of `units` units and `group`
    queries a list in `room` bytes of shared memory: with the most keys at once that fit. None where it does not run:
    the head dimension is above `COMPLETED_DIM`, or 16 keys do not fit."""
    if dim > COMPLETED_DIM:
        return None
    less = [COMPLETED._replace(block=block, warps=warps) for block, warps in COMPLETED_LESS]
    launches = [COMPLETED, *less] if size == 2 else [COMPLETED._replace(block=COMPLETED_WIDE)]
    return next((how for how in launches if completed_bytes(how, dim, units, features, group, size) <= room), None)


def _completed_how(q: Tensor, sizes: Sequence[int], group: int) -> Launch | None:
    """`completed_launch` on the queries' device, of a map of keys of these units and features."""
    units, features = sizes
    room = shared_bytes(q.device) if q.is_cuda else 1 << 30
    return completed_launch(q.shape[-1], units, features, group, q.element_size(), room)


def _slices(how: Launch, lists: int) -> int:
    """Programs that share each of the lists."""
    return max(1, min(MAX_SPLITS, how.programs // lists))


def completed_bytes(how: Launch, dim: int, units: int, features: int, group: int, size: int) -> int:
    """The most shared memory that the completed kernel takes [bytes], as Triton 3.6 and 3.9 compile it for sm_80, sm_89
    and sm_90, where the kernel holds everything but its sums: the map of keys, the queries' features, biases as rows of
    products, and a block of keys and values."""
    width, units, features = padded(dim), padded(units), padded(features)
    columns = 4 * quarter(group)
    held = width if size == 2 else max(width, units, features)
    whole = (units + columns) * (width + features) + 16 * (units + features) + how.block * (16 + width + held)
    # weights change their layout where the values lay, sums over warps have places of their own
    moved = max(4 * how.warps * columns, 2048 if how.warps < 8 else 0, how.block * (4 * columns - size * held))
    return size * whole + moved


def quarter(group: int) -> int:
    """A quarter of the completed kernel's columns, for `group` queries a list: a matrix product has 16 at least."""
    return max(4, power_of_two(group))


def launch_attend(
    q: Tensor, k: Tensor, v: Tensor, tokens: Tensor, offsets: Tensor | None = None, buckets: Tensor | None = None, *,
    scale: float, starts: Tensor, sink_size: int, tail_starts: Tensor, lengths: Tensor,
    log_weights: Tensor | None = None, completion: CompletionQuery | None = None, pages: Pages | None = None,
    out: Tensor | None = None, anchored: Anchored | None = None,
) -> tuple[Tensor, Tensor]:
    """Both doors through Triton: `tokens` is the list itself, or, with `offsets` and `buckets`, the index's order. The
    launch is prepared while the kernel ahead of it ends, unless a completion comes from another stream."""
    from sparsekv.kernels.attend_triton import completed_kernel, merge_kernel, split_kernel

    count, heads_q, dim = q.shape
    heads = k.shape[1] if tokens.shape[1] == 1 else tokens.shape[1]
    group, width = heads_q // heads, padded(dim)
    how: Launch | None = PLAIN
    if completion is not None:
        by_buckets = isinstance(completion.keys, KeyBuckets)
        how = BY_BUCKETS if by_buckets else _completed_how(q, _maps(completion).w_out.shape[-2:], group)
    if how is None:
        listed = tokens if offsets is None or buckets is None else bucket_tokens(tokens, offsets, buckets)
        return attend_tokens_reference(
            q, k, v, listed, scale=scale, starts=starts, sink_size=sink_size, tail_starts=tail_starts, lengths=lengths,
            log_weights=log_weights, completion=completion, pages=pages, out=out)
    heads_kv, device = k.shape[1], q.device
    q, k, v, tokens = (dense_last(x) for x in (q, k, v, tokens))
    if tokens.shape[1] == 1:
        tokens = tokens.expand(-1, heads_kv, -1)
    weights = tokens if log_weights is None else log_weights.expand_as(tokens).contiguous()
    index = (tokens, tokens) if offsets is None or buckets is None else (offsets, buckets)
    probes = 0 if buckets is None else buckets.shape[2]
    splits = max(1 if pages is None else PAGED_SPLITS, _slices(how, count * heads))
    ahead = 0
    if anchored is not None:  # the list alone is left, in as many slices as there is room for beside the anchors'
        ahead, sink_size, starts, tail_starts = anchored.slices, 0, lengths, lengths
        splits = anchored.out.shape[2] - ahead

    def fresh(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.float32, device=device)

    out = torch.empty(count, heads_q, dim, dtype=q.dtype, device=device) if out is None else out
    slots, lse = ahead + splits, fresh(count, heads_q)
    partial, partial_lse = (fresh(count, heads_q, slots, dim), fresh(count, heads_q, slots)) if anchored is None else (
        anchored.out, anchored.lse)
    edges = Edges(*(x.contiguous() for x in (starts, tail_starts, lengths)))
    pdl: dict[str, Any] = {"launch_pdl": True} if overlaps(device) and anchored is None else {}
    # without pages the kernels do not look at theirs
    anchors, whole, table = (tokens,) * 3 if pages is None else (pages.anchors, pages.whole, dense_last(pages.table))
    paged = PageArguments(anchors, whole, table, anchors.stride(0), table.stride(0))
    lists = (as_heads(q), as_tokens(k), as_tokens(v), as_heads(tokens), *(as_heads(x) for x in index),
             as_heads(weights))
    sizes = (scale, tokens.shape[2], sink_size, heads, count // k.shape[0], slots, ahead)
    constants: dict[str, Any] = {
        "PROBES": probes, "PADDED_PROBES": power_of_two(probes), "LISTS": heads // heads_kv, "GROUP": group, "DIM": dim,
        "WIDTH": width, "WEIGHTED": log_weights is not None, "OVERLAP": bool(pdl), "BLOCK": how.block,
        "AHEAD": how.stages == 1, "PAGE": 0 if pages is None else pages.page, "num_warps": how.warps,
        "num_stages": how.stages}
    rest: tuple[Tensor, ...] = (lse, lse, partial)
    cap = None
    sums = Partial(partial, partial_lse, partial, partial_lse)
    if completion is not None:
        sums = sums._replace(taken=fresh(count, heads_q, splits, dim), taken_mass=fresh(count, heads_q, splits))
    if completion is None or isinstance(completion.keys, KeyBuckets):
        estimates: tuple[Any, ...] = (weights, as_heads(weights))
        if completion is not None and isinstance(completion.keys, KeyBuckets):
            features, *rest = (x.contiguous() for x in completion[:4])  # type: ignore[assignment]
            estimates = features, as_heads(completion.keys.number)
            constants["LISTED"] = completion.keys.listed
        split_kernel[(count * heads, splits)](
            *lists, *estimates, edges, paged, sums, *sizes, ROWS=max(16, power_of_two(group)),
            FEATURES=0 if completion is None else completion.features.shape[-1], **constants,
            **(pdl if completion is None else {}))
    else:
        maps, cap = KeyFeatures(*(x.contiguous() for x in _maps(completion))), completion.cap
        features, *rest = (x.contiguous() for x in completion[:4])  # type: ignore[assignment]
        completed_kernel[(count * heads, splits)](
            *lists, maps, features, seats_or(completion.seats, lengths), edges, paged, sums, *sizes,
            maps.w_in.shape[-1], QUARTER=quarter(group), FEATURES=features.shape[-1],
            PADDED_FEATURES=padded(features.shape[-1]), UNITS=padded(maps.w_in.shape[-1]),
            SEATED=completion.seats is not None, **constants)
    columns = min(width, MERGE_WIDTH)
    merge_kernel[(count * heads_q, width // columns)](
        *sums, *rest, lse if cap is None else cap.contiguous(),
        out, lse, REST_EPS, *out.stride()[:2], heads_q, slots, splits, PADDED=power_of_two(slots), DIM=dim,
        WIDTH=columns, PHI=completion is not None, CAPPED=cap is not None, OVERLAP=bool(pdl), num_warps=MERGE_WARPS,
        **pdl)
    return out, lse


def launch_anchors(
    q: Tensor, k: Tensor, v: Tensor, *, sizes: tuple[int, int], scale: float, starts: Tensor, sink_size: int,
    tail_starts: Tensor, lengths: Tensor,
) -> Anchored | None:
    """`attend_anchors` through Triton, of one list a KV head."""
    from sparsekv.kernels.attend_triton import split_kernel

    count, heads_q, dim = q.shape
    heads, device = k.shape[1], q.device
    group = heads_q // heads
    how = _completed_how(q, sizes, group)
    if how is None:
        return None
    slices = max(1, min(ANCHOR_SLICES, ANCHOR_PROGRAMS // (count * heads)))
    slots = slices + _slices(how, count * heads)
    out = torch.empty(count, heads_q, slots, dim, dtype=torch.float32, device=device)
    lse = torch.empty(count, heads_q, slots, dtype=torch.float32, device=device)
    q, k, v = (dense_last(x) for x in (q, k, v))
    none = q.new_empty(0, dtype=torch.int32).expand(count, heads, 0)
    edges = Edges(*(x.contiguous() for x in (starts, tail_starts, lengths)))
    lists = (as_heads(q), as_tokens(k), as_tokens(v), *[as_heads(none)] * 4)
    split_kernel[(count * heads, slices)](
        *lists, none, as_heads(none), edges, PageArguments(none, none, none, 0, 0), Partial(out, lse, out, lse), scale,
        0, sink_size, heads, count // k.shape[0], slots, 0, ROWS=max(16, power_of_two(group)), PROBES=0,
        PADDED_PROBES=1, LISTS=1, GROUP=group, DIM=dim, WIDTH=padded(dim), WEIGHTED=False, FEATURES=0, OVERLAP=False,
        BLOCK=PLAIN.block, AHEAD=True, PAGE=0, num_warps=PLAIN.warps, num_stages=PLAIN.stages)
    return Anchored(out, lse, slices)
