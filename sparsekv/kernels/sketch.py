"""The best tokens by the sketches of their keys: the second stage of the selector `sketch` (docs/concepts.md).

The scores of a group of query heads are normalised over the candidates and summed, and the best tokens are those of the
largest sum, found by the bins of a histogram (`histogram.py`). Nothing waits for the host, and no shape depends on
what is in the tensors.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sparsekv.kernels.codes import TWIN_KEYS, Sketch, lower_channels, row_stride
from sparsekv.kernels.gather import gather_rows
from sparsekv.kernels.histogram import BINS, HEADER, best_tokens_reference, bins_of
from sparsekv.kernels.launch import NEG_INF, acc_dtype, as_heads, dense_last, on_device, overlaps, padded, power_of_two
from sparsekv.kernels.routing import (
    RunArguments,
    empty_runs,
    launch_logits,
    padded_buckets,
    rank_warps,
    routable,
    route_tokens_reference,
    seats_or,
)
from sparsekv.kernels.types import RouterScores

SCORED_AT_ONCE, SCORE_WARPS = 256, 4
"""Candidates of a block of `score_kernel`."""
ALL_AT_ONCE, ALL_WARPS, ALL_PROGRAMS, ALL_STAGES = 512, 4, 528, 3
"""Tokens of a block of `score_all_kernel`, its warps, the programs wanted, and blocks of codes on their way to one."""
FEW_LISTS = 16
"""KV heads of all rows up to which so many programs are wanted; more of them get a quarter, each with more blocks."""
ALL_BYTES, SIDE_BYTES = 64 * 1024, 8 * 1024
"""Bytes of codes that are on their way to a program of it at most, and of a sketch that it holds at once."""
BINNED_AT_ONCE, BINNED_PARTS, BINNED_WARPS = 512, 256, 1
"""Candidates that a program of `histogram_kernel` counts, and blocks whose masses it adds at once."""
SELECTED_AT_ONCE, LOOK_BACK, SELECT_WARPS = 1024, 128, 4
"""Candidates of a block of `select_kernel`, and blocks ahead of its own that a program looks at together."""
ALIGNED = 16
"""What the lengths of rows of candidates, and of histograms, are multiples of: whole vectors are loaded."""


class Candidates(NamedTuple):
    """The tokens of the best buckets by the budget rule (`route_tokens`): q in the space of the scores, the scores, the
    index, the budget `[Q]` and the largest of it, and seats, by which then the sketch and its budget are kept too."""

    q: Tensor
    scores: RouterScores
    order: Tensor
    offsets: Tensor
    budget: Tensor
    widest: int
    seats: Tensor | None = None


def sketch_tokens(
    q: Tensor, sketch: Sketch, codes: Tensor, scale: float, budget: Tensor, widest: int,
    candidates: Candidates | None = None, first: Tensor | None = None, last: Tensor | None = None,
) -> Tensor:
    """List the candidates whose sketches promise the largest share of the group's attention (this project's own).

    Args:
        q: `[Q, Hq, d]`, with RoPE.
        codes: `[B, Hkv, M, w]`.
        budget: `[Q]` [tokens], exactly as many are listed, or all where there are fewer; widest: the largest of it.
        candidates: the tokens of the best buckets; None: all tokens `first[q] <= i < last[q]`.

    Returns:
        `[Q, Hkv, widest]` int32 in the order of the candidates, padded with -1; of one bin those that stand first.
    """
    if on_device(q) and (candidates is None or routable(candidates.q, candidates.scores)):
        return launch_tokens(q, sketch, codes, scale, budget, widest, candidates, first, last)
    return sketch_tokens_reference(q, sketch, codes, scale, budget, widest, candidates, first, last)


def sketch_tokens_reference(
    q: Tensor, sketch: Sketch, codes: Tensor, scale: float, budget: Tensor, widest: int,
    candidates: Candidates | None = None, first: Tensor | None = None, last: Tensor | None = None,
) -> Tensor:
    """`sketch_tokens` in plain torch."""
    tokens = None if candidates is None else route_tokens_reference(*candidates)
    if candidates is not None and candidates.seats is not None:
        sketch, budget = sketch._replace(queries=sketch.queries[candidates.seats]), budget[candidates.seats]
    bins = bins_of(sketch_scores_reference(q, sketch, codes, scale, tokens, first, last))
    return best_tokens_reference(bins, tokens, budget, widest)


def query_side_reference(q: Tensor, sketch: Sketch, scale: float) -> Tensor:
    """What codes are multiplied by, `[Q, Hq, r]` float32 at least: q `[Q, Hq, d]` with RoPE, the softmax scale."""
    count, heads_q, dim = q.shape
    acc = acc_dtype(q)
    maps = sketch.queries.to(acc)
    rows, heads = (maps.shape[0] if maps.dim() == 4 else 1), maps.shape[-3]
    grouped = q.to(acc).reshape(rows, count // rows, heads, heads_q // heads, dim).transpose(1, 2)
    side = grouped.flatten(2, 3) @ maps.reshape(rows, heads, dim, -1) * scale
    return side.unflatten(2, (count // rows, -1)).transpose(1, 2).reshape(count, heads_q, -1)


def sketch_scores_reference(
    q: Tensor, sketch: Sketch, codes: Tensor, scale: float, tokens: Tensor | None = None, first: Tensor | None = None,
    last: Tensor | None = None,
) -> Tensor:
    """Scores of the candidates, the softmax over them summed over the group: `[Q, Hkv, K]` float32 at least, -1 where
    there is none.

    q `[Q, Hq, d]` with RoPE, codes `[B, Hkv, M, w]`, tokens `[Q, Hkv, K]` padded with -1. Without tokens the
    candidates are `first[q] <= i < last[q]` and K = M.
    """
    side = query_side_reference(q, sketch, scale)
    side = side.unflatten(1, (codes.shape[1], -1))
    if tokens is None:
        assert first is not None and last is not None
        side = side.unflatten(0, (codes.shape[0], -1))
        logits = torch.cat([_products(side, part[:, None]) for part in codes.split(TWIN_KEYS, dim=2)],
                           dim=-1).flatten(0, 1)
        place = torch.arange(codes.shape[2], device=q.device)
        used = ((place >= first[:, None]) & (place < last[:, None]))[:, None]
    else:
        logits, used = _products(side, gather_rows(codes, tokens.clamp(min=0))), tokens >= 0
    weights = logits.masked_fill(~used[:, :, None], NEG_INF).softmax(-1).nan_to_num(0.0).sum(2)
    return torch.where(used, weights, -1.0)


def _products(side: Tensor, codes: Tensor) -> Tensor:
    """Sums of products `[..., G, n]` of sides `[..., G, r]` with codes `[..., n, w]`, taken apart no further than they
    must be: a byte of two channels is 16 times the upper one and the lower one."""
    width = codes.shape[-1]
    alone, low, high = side.split([2 * width - side.shape[-1], *[side.shape[-1] - width] * 2], dim=-1)
    found = torch.cat([alone, high / 16], dim=-1) @ codes.to(side.dtype).mT
    if low.shape[-1]:
        found += (low - high / 16) @ lower_channels(codes[..., alone.shape[-1]:]).to(side.dtype).mT
    return found


def launch_tokens(
    q: Tensor, sketch: Sketch, codes: Tensor, scale: float, budget: Tensor, widest: int,
    candidates: Candidates | None, first: Tensor | None, last: Tensor | None,
) -> Tensor:
    """`sketch_tokens` through Triton: the scores of the candidates, or of all tokens; their histogram; the selection.
    Each launch is prepared while the one before it ends."""
    if candidates is None:
        assert first is not None and last is not None
        scored = launch_all(q, sketch, codes, scale, widest, first, last)
    else:
        scored = launch_scores(q, sketch, codes, scale, widest, candidates)
    binned = launch_histogram(scored, budget, widest, None if candidates is None else candidates.seats)
    return launch_select(binned, widest)


class Prepared(NamedTuple):
    """What codes are multiplied by, in whole numbers: four planes `[Q, Hq, 4, w]` int8 and their step `[Q, Hq]`;
    histogram `[Q, Hkv, histogram_size]` int32 of zeros; the runs of candidates in the buckets' order and how many
    candidates these are (`empty_runs`).

    A score is the step times `256 p₀ + p₁` by the bytes of a code, and `256 p₂ + p₃` by 16 times the lower channels of
    bytes that hold two. That is the side of `query_side_reference` to 2⁻¹⁶ of its largest."""

    planes: Tensor
    steps: Tensor
    histogram: Tensor
    runs: Tensor
    counts: Tensor


def launch_prepare(
    q: Tensor, sketch: Sketch, width: int, scale: float, size: int, candidates: Candidates,
) -> Prepared:
    """What scoring candidates by codes of `width` bytes needs, through Triton, with histograms of `size` numbers: the
    buckets' scores; the candidates' runs, and beside them the queries' planes."""
    from sparsekv.kernels.sketch_triton import prepare_kernel

    q, maps = dense_last(q), sketch.queries.contiguous()
    count, heads_q, dim = q.shape
    heads, device, overlap = maps.shape[-3], q.device, overlaps(q.device)
    planes = torch.empty(count, heads_q, 4, width, dtype=torch.int8, device=device)
    steps = torch.empty(count, heads_q, dtype=torch.float32, device=device)
    histogram = torch.empty(count, heads, size, dtype=torch.int32, device=device)
    offsets, seats = candidates.offsets.contiguous(), candidates.seats
    logits = launch_logits(candidates.q, candidates.scores, offsets, offsets=True, seats=seats)
    lists, buckets = count * heads, offsets.shape[2] - 1
    runs, counts = empty_runs(count, heads, buckets, device)
    table = RunArguments(logits, offsets, candidates.budget.contiguous(), seats_or(seats, offsets), runs, counts)
    most, wide = power_of_two(heads_q // heads), padded_buckets(buckets)
    prepare_kernel[(lists + count * heads_q,)](
        table, as_heads(q), maps, planes, steps, histogram, scale, lists, heads,
        count // offsets.shape[0] if seats is None else 1, buckets, candidates.widest, dim, row_stride(maps, 4), size,
        GROUP=heads_q // heads, ROWS=most, PADDED=wide, RANK=sketch.rank, BYTES=width, WIDTH=power_of_two(width),
        DIM=power_of_two(dim), SEATED=seats is not None, OVERLAP=overlap, num_warps=rank_warps(most * wide),
        **({"launch_pdl": True} if overlap else {}))
    return Prepared(planes, steps, histogram, runs, counts)


class Scored(NamedTuple):
    """The scores of the candidates `[Q, Hkv, G, K]` float16, logarithms to the base 2, -inf where there is no
    candidate; K is a multiple of ALIGNED. tops `[Q, Hkv, G, parts]`, the largest scores of some candidates together,
    and masses, the sums of the powers of what theirs are less than it; the tokens (None where candidate i is token i)
    and how many are listed (`[Q, Hkv]`; behind them nothing is written); a histogram of zeros."""

    scores: Tensor
    tops: Tensor
    masses: Tensor
    tokens: Tensor | None
    counts: Tensor | None
    histogram: Tensor


def empty_scores(q: Tensor, heads: int, width: int, parts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Room for scores, tops and masses."""
    shape = q.shape[0], heads, q.shape[1] // heads
    scores = torch.empty(*shape, width, dtype=torch.float16, device=q.device)
    tops, masses = (torch.empty(*shape, parts, dtype=torch.float32, device=q.device) for _ in range(2))
    return scores, tops, masses


def dense_codes(codes: Tensor) -> Tensor:
    """Codes of a head one behind the other, and heads and rows by whole codes."""
    width = codes.shape[-1]
    if codes.stride()[2:] != (width, 1) or codes.stride(0) % width or codes.stride(1) % width:
        return codes.contiguous()
    return codes


def launch_scores(
    q: Tensor, sketch: Sketch, codes: Tensor, scale: float, widest: int, candidates: Candidates,
) -> Scored:
    """The scores of the buckets' candidates through Triton, of which at most `widest` will be chosen."""
    from sparsekv.kernels.sketch_triton import score_kernel

    count, heads_q, _ = q.shape
    heads, _, bytes_ = codes.shape[1:]
    codes, order = dense_codes(codes), dense_last(candidates.order)
    width = ALIGNED * -(-candidates.widest // ALIGNED)
    prepared = launch_prepare(q, sketch, bytes_, scale, histogram_size(width, widest), candidates)
    blocks, group, overlap = -(-width // SCORED_AT_ONCE), heads_q // heads, overlaps(q.device)
    tokens = torch.empty(count, heads, width, dtype=torch.int32, device=q.device)
    scores, tops, masses = empty_scores(q, heads, width, blocks)
    if width:
        score_kernel[(count * heads, blocks)](
            prepared.planes, prepared.steps, codes, order, prepared.runs, prepared.counts, tokens, scores, tops, masses,
            heads, count // codes.shape[0], width, *codes.stride()[:2], *order.stride()[:2],
            PADDED=prepared.runs.shape[3], RANK=sketch.rank, BYTES=bytes_, ALIGNED=math.gcd(bytes_, 16),
            WIDTH=max(32, power_of_two(bytes_)), GROUP=group, HEADS=power_of_two(group), BLOCK=SCORED_AT_ONCE,
            PACKED=codes.is_cuda, OVERLAP=overlap, num_warps=SCORE_WARPS, **({"launch_pdl": True} if overlap else {}))
    return Scored(scores, tops, masses, tokens, prepared.counts, prepared.histogram)


def all_at_once(width: int) -> int:
    """Tokens of a block of `score_all_kernel`: fewer of codes of many bytes, `width`."""
    return min(ALL_AT_ONCE, ALL_BYTES // max(32, power_of_two(width)))


def slices_of(width: int, lists: int, block: int) -> tuple[int, int]:
    """Slices that `width` tokens of every list are cut into, and blocks of a slice."""
    blocks = -(-width // block)
    programs = ALL_PROGRAMS if lists <= FEW_LISTS else ALL_PROGRAMS // 4
    each = max(1, -(-blocks // max(1, programs // max(1, lists))))
    return -(-blocks // each), each


def side_depth(dim: int, width: int) -> int:
    """How much of the head dimension a program of `score_all_kernel` holds at once of the sketch of codes of `width`
    bytes."""
    return max(16, min(padded(dim), SIDE_BYTES // (4 * max(32, power_of_two(width)))))


def all_stages(width: int) -> int:
    """Blocks of codes of `width` bytes that are loaded ahead."""
    return max(1, min(ALL_STAGES, ALL_BYTES // (all_at_once(width) * max(32, power_of_two(width)))))


def launch_all(
    q: Tensor, sketch: Sketch, codes: Tensor, scale: float, widest: int, first: Tensor, last: Tensor,
) -> Scored:
    """The scores of all tokens `first[q] <= i < last[q]` through Triton, of which at most `widest` will be chosen."""
    from sparsekv.kernels.sketch_triton import score_all_kernel

    q, maps, codes = dense_last(q), sketch.queries.contiguous(), dense_codes(codes)
    count, heads_q, dim = q.shape
    heads, length, bytes_ = codes.shape[1:]
    rows, group, overlap = (maps.shape[0] if maps.dim() == 4 else 1), heads_q // heads, overlaps(q.device)
    width = ALIGNED * -(-length // ALIGNED)
    block = all_at_once(bytes_)
    slices, each = slices_of(width, count * heads, block)
    histogram = torch.empty(count, heads, histogram_size(width, widest), dtype=torch.int32, device=q.device)
    scores, tops, masses = empty_scores(q, heads, width, slices)
    if width and count:
        score_all_kernel[(count * heads, slices)](
            as_heads(q), maps, codes, first.contiguous(), last.contiguous(), scores, tops,
             masses, histogram, scale, heads, count // codes.shape[0], max(1, count // rows), length, width,
            each * block, dim, *codes.stride()[:2], row_stride(maps, 4), histogram.shape[2], RANK=sketch.rank,
            BYTES=bytes_, ALIGNED=math.gcd(bytes_, 16), WIDTH=max(32, power_of_two(bytes_)),
            DEPTH=side_depth(dim, bytes_), GROUP=group, HEADS=power_of_two(group), BLOCK=block,
            STAGES=all_stages(bytes_), PACKED=codes.is_cuda, OVERLAP=overlap, num_warps=ALL_WARPS)
    return Scored(scores, tops, masses, None, None, histogram)


class Binned(NamedTuple):
    """The bins of the candidates `[Q, Hkv, K]` uint8, tokens and counts of `Scored`, and histogram
    `[Q, Hkv, histogram_size]` int32: how many candidates are in each bin above 1, in the place of bin 0 how many there
    are; then the header (`histogram.py`), and a zero at least for every block of `select_kernel`."""

    bins: Tensor
    tokens: Tensor | None
    counts: Tensor | None
    histogram: Tensor


def coarse(count: int, most: int) -> int:
    """How many numbers a program looks at together where there are `count`: `most`, or a quarter of it where that is
    all of them. A kernel is compiled twice, not for every power of two."""
    return most // 4 if count <= most // 4 else most


def select_blocks(width: int, widest: int) -> int:
    """Blocks of `select_kernel` for `width` candidates of which at most `widest` are chosen."""
    return -(-max(width, widest) // SELECTED_AT_ONCE)


def histogram_size(width: int, widest: int) -> int:
    """Numbers in the histogram of a query and head, those behind the bins included."""
    return BINS + ALIGNED * -(-(HEADER + select_blocks(width, widest)) // ALIGNED)


def launch_histogram(scored: Scored, budget: Tensor, widest: int, seats: Tensor | None = None) -> Binned:
    """The bins of the candidates through Triton, and the threshold down to which `budget[q]` of them are chosen, at
    most `widest`; the zeros of the histogram are used up."""
    from sparsekv.kernels.sketch_triton import histogram_kernel

    scores, tops, masses, tokens, counts, histogram = scored
    count, heads, group, width = scores.shape
    parts, device = tops.shape[3], scores.device
    bins = torch.empty(count, heads, width, dtype=torch.uint8, device=device)
    overlap = overlaps(device)
    if width:
        histogram_kernel[(count * heads, -(-width // BINNED_AT_ONCE))](
            scores, tops, masses, histogram if counts is None else counts, budget.contiguous(),
            seats_or(seats, histogram), bins, histogram, heads, width, parts, widest, histogram.shape[2], GROUP=group,
            HEADS=power_of_two(group), PARTS=coarse(parts, BINNED_PARTS), SCORED=SCORED_AT_ONCE,
            BLOCK=BINNED_AT_ONCE, LISTED=counts is not None, SEATED=seats is not None, OVERLAP=overlap,
            num_warps=BINNED_WARPS, **({"launch_pdl": True} if overlap else {}))
    return Binned(bins, tokens, counts, histogram)


def launch_select(binned: Binned, widest: int) -> Tensor:
    """`best_tokens_reference` through Triton; what is left of the histogram's zeros is used up."""
    from sparsekv.kernels.sketch_triton import select_kernel

    bins, tokens, counts, histogram = binned
    count, heads, width = bins.shape
    # lists begin at aligned places whatever their length, so that what reads them is compiled once
    room = ALIGNED * -(-widest // ALIGNED)
    out = torch.empty(count, heads, room, dtype=torch.int32, device=bins.device)[..., :widest]
    if not width or not widest:
        return out.fill_(-1)
    overlap = overlaps(bins.device)
    blocks = select_blocks(width, widest)
    select_kernel[(count * heads, blocks)](
        bins, bins if tokens is None else tokens, histogram, histogram if counts is None else counts, out, width,
        widest, room, histogram.shape[2], LISTED=tokens is not None, BLOCK=SELECTED_AT_ONCE,
        LOOK_BACK=coarse(blocks, LOOK_BACK), OVERLAP=overlap, num_warps=SELECT_WARPS,
        **({"launch_pdl": True} if overlap else {}))
    return out
